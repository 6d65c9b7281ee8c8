"""The same training in plain PyTorch or in chunks: what both sides do, and what it leaves."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from chunkmem.data.errors import ConfigError
from chunkmem.estimate.models import loss_of
from chunkmem.estimate.optimizers import BUILT_IN, Trained, trained_by
from chunkmem.estimate.rehearse import shape_of
from chunkmem.manager import ChunkManager
from chunkmem.modules.guard import AccessGuard
from chunkmem.optim.adam import Adam, AdamW
from chunkmem.optim.any_class import Optimizer


@dataclass(frozen=True)
class Workload:
    """What is trained, and how."""

    build: Callable[[], nn.Module]
    step: Callable[[nn.Module, int], Any]
    """Makes the batch of a step, which is counted from 0, and returns the loss."""
    seed: int
    """Of torch's, Python's and NumPy's generators, while the model is built; each step has one of its own after it."""
    lr: float
    optimizer: str
    """Of `BUILT_IN`, or a name of `class_named`."""
    device: torch.device
    """Where the model computes."""
    on_step: Callable[[int], object]
    """Called with the number of steps that are over, 0 at the beginning."""


@dataclass(frozen=True)
class TrainingResult:
    """What training left. All tensors are copies on the CPU."""

    losses: tuple[torch.Tensor, ...]
    """One a step; 0-dim."""
    buffers: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    """In bf16 and fp16, the fp32 master weights."""
    states: dict[str, torch.Tensor]
    """The optimizer's: ``exp_avg of blocks.0.weight``."""

    @property
    def num_tensors(self) -> int:
        """How many tensors there are to compare after the last step."""
        return len(self.buffers) + len(self.weights) + len(self.states)


class Stepped(Protocol):
    """An optimizer, or several."""

    def step(self) -> object:
        """Update the weights."""
        ...

    def zero_grad(self) -> object:
        """Forget the gradients."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the states by the numbers of parameters."""
        ...


class Side(Protocol):
    """What differs between training in plain PyTorch and in chunks."""

    def building(self) -> AbstractContextManager[object]:
        """Surround the building of the model."""
        return nullcontext()

    def fit(self, model: nn.Module) -> None:
        """Make a model that was built ready to be trained."""
        return

    def optimizer(self, name: str, trained: list[Trained]) -> Stepped:
        """Return the optimizer of a name, which numbers parameters as `trained` does."""
        ...

    def watching(self, index: int) -> AbstractContextManager[object]:
        """Surround forward and backward of step `index`."""
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward."""
        ...

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return buffers, and weights as the optimizer has them."""
        ...


class Chunked(Side):
    """Training in the chunks of a manager. Freed slabs are filled with NaN, so that a late read of one shows."""

    def __init__(self, manager: ChunkManager, *, is_guarded: bool) -> None:
        """`is_guarded`: every use of chunk memory that nobody declared is an error, outside of modules too."""
        self.manager = manager
        self._is_guarded = is_guarded
        for pool in manager.runtime.memory.store.pools.values():
            pool.poison = True

    def building(self) -> AbstractContextManager[object]:
        return self.manager.init()

    def optimizer(self, name: str, trained: list[Trained]) -> Stepped:
        if name not in BUILT_IN:
            return Optimizer(trained, manager=self.manager)
        ((_, params, options),) = trained
        return {"adamw": AdamW, "adam": Adam}[name](params, manager=self.manager, **options)

    def watching(self, index: int) -> AbstractContextManager[object]:
        if not self._is_guarded:
            return super().watching(index)
        return AccessGuard(
            self.manager.runtime.modules.declared.undeclared,
            lambda: f"step {index}, {self.manager.runtime.entry_points.phase or 'outside of any module'}",
        )

    def backward(self, loss: torch.Tensor) -> None:
        self.manager.backward(loss)

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        return self.manager.state_dict(model)


def train(workload: Workload, side: Side, *, steps: int) -> TrainingResult:
    """Train a model that is built for it; what is raised on the way is the caller's to tell apart.

    Raises:
        ConfigError: the step returned something else than a loss.
    """
    with generators_kept(workload.device):
        _seed(workload.seed)
        with side.building():
            model = workload.build()
        side.fit(model)
        model.train()
        if workload.device.type != "cpu":
            model.register_forward_pre_hook(_moving_inputs(workload.device), prepend=True, with_kwargs=True)
        trained = trained_by(workload.optimizer, model, lr=workload.lr)
        named = {id(param): name for name, param in model.named_parameters()}
        names = [named[id(param)] for _, params, _ in trained for param in params]
        optimizer = side.optimizer(workload.optimizer, trained)
        losses = []
        workload.on_step(0)
        for index in range(steps):
            _seed(workload.seed + 1 + index)
            with side.watching(index):
                loss = _checked_loss(workload.step(model, index))
                side.backward(loss)
            losses.append(_copied(loss).reshape(()))
            del loss  # with its graph, before the update needs room
            optimizer.step()
            optimizer.zero_grad()
            workload.on_step(index + 1)
        return _outcome(tuple(losses), model, names, optimizer.state_dict()["state"], side.state_dict(model))


def _checked_loss(result: Any) -> torch.Tensor:
    loss: object = loss_of(result)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise ConfigError(f"the step returned {shape_of(loss)} instead of a loss of one element")
    return loss


def _outcome(
    losses: tuple[torch.Tensor, ...],
    model: nn.Module,
    names: list[str],
    found: dict[int, dict[str, Any]],
    values: dict[str, Any],
) -> TrainingResult:
    all_buffers = dict(model.named_buffers())
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    buffers = {name: tensors.get(name, value) for name, value in all_buffers.items()}
    states = {f"{key} of {names[index]}": value for index in sorted(found) for key, value in found[index].items()}
    return TrainingResult(
        losses,
        buffers=_copied(buffers),
        weights=_copied({name: value for name, value in tensors.items() if name not in all_buffers}),
        states=_copied({name: value for name, value in states.items() if isinstance(value, torch.Tensor)}),
    )


def _copied(tree: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda t: t.detach().to("cpu", copy=True), tree)


def _moving_inputs(device: torch.device) -> Callable[[nn.Module, Any, Any], Any]:
    def move(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda t: t.to(device), (args, kwargs))

    return move


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """Leave the generators of torch, Python and NumPy as they were: the CPU's, and those of all devices like `device`.

    They are named, as a seed is set on all of them: torch warns of several, and before 2.13 it kept CUDA's only.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    num_devices = 0 if device.type == "cpu" else torch.get_device_module(device).device_count()
    with torch.random.fork_rng(range(num_devices), device_type=device.type):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
