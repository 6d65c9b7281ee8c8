"""One training loop that runs in plain PyTorch or in chunkmem, and the exact comparison of what came out."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import set_checkpoint_early_stop

import chunkmem
from tests.helpers.zoo import WIDTH, ZooModel

SEED = 7
STEPS = 4
AMPLE_NBYTES = 32 << 20
HOST_NBYTES = 64 << 20
"""HOST cap, far more than the zoo needs; explicit, so that without an accelerator too DEVICE and HOST are two tiers."""


@dataclass(frozen=True)
class Variant:
    """One way to train any model."""

    name: str
    micro_batches: int = 1
    freeze_half: bool = False
    unused_branch: bool = False
    scheduler: bool = False
    """Two parameter groups of different learning rate and weight decay, each with its own schedule."""
    evaluate: bool = False
    """An evaluation pass in the middle."""
    early_stop: bool | None = None
    """None: no checkpointing; else blocks run under torch's non-reentrant checkpoint, with this early stop."""


VARIANTS = (
    Variant("plain"),
    Variant("micro_batches", micro_batches=4),
    Variant("half_frozen", freeze_half=True),
    Variant("unused_branch", unused_branch=True),
    Variant("scheduler", scheduler=True),
    Variant("evaluation", evaluate=True),
    Variant("checkpoint", early_stop=True),
    Variant("checkpoint_to_the_end", early_stop=False),
)


def variants_of(case: ZooModel) -> tuple[Variant, ...]:
    """The variants that make sense for a model: nothing to checkpoint without blocks."""
    return tuple(variant for variant in VARIANTS if case.has_blocks or variant.early_stop is None)


@dataclass(frozen=True)
class Outcome:
    """What training left behind; every tensor a copy on the CPU."""

    losses: tuple[float, ...]
    """One a micro-batch and one an evaluation, in order."""
    weights: dict[str, Tensor]
    """`state_dict`: parameters and persistent buffers, in the model's order."""
    buffers: dict[str, Tensor]
    optimizer: dict[str, Any]


class Side(Protocol):
    """The calls that differ between training in plain PyTorch and in chunkmem."""

    def building(self) -> AbstractContextManager[Any]: ...
    def ready(self, model: nn.Module) -> nn.Module: ...
    def optimizer(self, params: Iterable[Any], **options: Any) -> torch.optim.Optimizer: ...
    def backward(self, loss: Tensor, *, last: bool, by_manager: bool) -> None: ...
    def state_dict(self, model: nn.Module) -> dict[str, Tensor]: ...
    def after_step(self) -> None: ...


class Plain:
    """Plain PyTorch on the compute device, its model built on the CPU as chunkmem's is."""

    def __init__(self, *, updates_on_host: bool = False) -> None:
        """`updates_on_host`: the optimizer's operators are those of the CPU; its states stay there."""
        self._updates_on_host = updates_on_host

    def building(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def ready(self, model: nn.Module) -> nn.Module:
        return model.to(compute_device())

    def optimizer(self, params: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
        made = torch.optim.AdamW(params, fused=True, **options)
        if self._updates_on_host:
            update_on_host(made)
        return made

    def backward(self, loss: Tensor, *, last: bool, by_manager: bool) -> None:
        loss.backward()

    def state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        return model.state_dict()

    def after_step(self) -> None:
        pass


def update_on_host(optimizer: torch.optim.Optimizer) -> None:
    """Have an optimizer take weights and gradients to the CPU for each step, and back to the compute device."""

    def move(device: torch.device) -> None:
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            param.data = param.data.to(device)
            if param.grad is not None:
                param.grad.data = param.grad.data.to(device)

    optimizer.register_step_pre_hook(lambda *_: move(torch.device("cpu")))
    optimizer.register_step_post_hook(lambda *_: move(compute_device()))


class Chunked:
    """chunkmem; every step ends with an audit."""

    def __init__(self, manager: chunkmem.ChunkManager, *, follows: bool = False, **options: Any) -> None:
        """`follows`: as soon as there is a plan, every step has to follow it to the end; `options` of the optimizer."""
        self.manager = manager
        self.follows = follows
        self.options = options

    def building(self) -> AbstractContextManager[Any]:
        return self.manager.init()

    def ready(self, model: nn.Module) -> nn.Module:
        return model

    def optimizer(self, params: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
        return chunkmem.AdamW(params, manager=self.manager, **options, **self.options)

    def backward(self, loss: Tensor, *, last: bool, by_manager: bool) -> None:
        if by_manager:
            self.manager.backward(loss, last=last)
        else:
            loss.backward()

    def state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        return self.manager.state_dict(model)

    def after_step(self) -> None:
        from tests.helpers.audit import assert_as_predicted, audit

        if self.follows and self.manager.plan is not None:
            assert_as_predicted(self.manager)
        audit(self.manager)


def freeze_half(model: nn.Module) -> None:
    """Freeze pairs, as weight and bias follow each other: half of the layers, not the weight of every layer."""
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 4 >= 2)


class Trainer:
    """A model, its optimizer and an ordinary training loop, one step at a time."""

    def __init__(self, case: ZooModel, variant: Variant, side: Side, *, freezes_first: bool = False) -> None:
        """Build; half of the model is frozen when it has been packed, and `freezes_first` before."""
        self.case, self.variant, self.side = case, variant, side
        torch.manual_seed(SEED)
        with side.building():
            model = case.build()
            if variant.unused_branch:
                model.unused_branch = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.LayerNorm(2 * WIDTH))
            if variant.freeze_half and freezes_first:
                freeze_half(model)
        self.model = side.ready(model)
        self.model.checkpointing = variant.early_stop is not None
        if variant.freeze_half:
            freeze_half(self.model)
        self.optimizer = side.optimizer(self._groups(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
        decays = [lambda epoch: 0.5**epoch, lambda epoch: 1 / (1 + epoch)]
        self.scheduler = LambdaLR(self.optimizer, decays) if variant.scheduler else None
        # Half of the cases: both ways of starting a backward pass meet every model and every variant.
        self.by_manager = len(case.name + variant.name) % 2 == 0
        self.losses: list[float] = []
        self.num_batches = 0

    def _groups(self) -> list[Any]:
        parameters = list(self.model.parameters())
        if not self.variant.scheduler:
            return parameters
        return [
            {"params": [p for p in parameters if p.dim() >= 2]},
            {"params": [p for p in parameters if p.dim() < 2], "lr": 3e-3, "weight_decay": 0.0},
        ]

    def loss(self) -> Tensor:
        """Forward over the next micro-batch; each has its own seed."""
        batch = tree_map_only(Tensor, lambda t: t.to(compute_device()), self.case.batch(self.num_batches))
        self.num_batches += 1
        with nullcontext() if self.variant.early_stop is None else set_checkpoint_early_stop(self.variant.early_stop):
            return self.case.loss(self.model, batch)

    def step(self) -> None:
        """One optimizer step; what it raises leaves the pending gradients as they are."""
        for index in range(self.variant.micro_batches):
            loss = self.loss() / self.variant.micro_batches
            last = index == self.variant.micro_batches - 1
            self.side.backward(loss, last=last, by_manager=self.by_manager)
            self.losses.append(loss.item())
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()
        self.side.after_step()

    def evaluate(self, no_grad: type[AbstractContextManager[Any]] = torch.no_grad) -> None:
        """One forward pass in evaluation mode."""
        self.model.eval()
        with no_grad():
            self.losses.append(self.loss().item())
        self.model.train()

    def run(self, steps: int = STEPS) -> Outcome:
        for index in range(steps):
            if self.variant.evaluate and index == steps // 2:
                self.evaluate()
            self.step()
        return self.outcome()

    def outcome(self) -> Outcome:
        return Outcome(
            losses=tuple(self.losses),
            weights=_copied(self.side.state_dict(self.model)),
            buffers=_copied(dict(self.model.named_buffers())),
            optimizer=_copied(self.optimizer.state_dict()),
        )


def repeats(case: ZooModel) -> bool:
    """Whether every step of the model touches the same memory in the same order."""
    return case.name != "moe"  # other experts each time


def compute_device() -> torch.device:
    """Where the operators run: the accelerator if there is one."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def capped(case: ZooModel, device_nbytes: int, **keys: Any) -> chunkmem.Config:
    """A cap on DEVICE; the same chunks whatever the cap."""
    memory = {"device": device_nbytes, "host": HOST_NBYTES}
    return chunkmem.Config.from_dict({"memory": memory, "default_chunk_size": case.chunk_numel, **keys})


@functools.cache
def train_plain(case: ZooModel, variant: Variant, steps: int = STEPS, *, updates_on_host: bool = False) -> Outcome:
    """Train in plain PyTorch, once for each set of arguments; `updates_on_host` as for `Plain`."""
    return Trainer(case, variant, Plain(updates_on_host=updates_on_host)).run(steps)


def train_chunked(case: ZooModel, variant: Variant, steps: int, config: chunkmem.Config) -> Outcome:
    """Train in a manager of its own; half of the cases by `manager.backward(loss)`, half by `loss.backward()`."""
    with chunkmem.ChunkManager(config) as manager:
        return Trainer(case, variant, Chunked(manager, follows=repeats(case))).run(steps)


@dataclass(frozen=True)
class Footprint:
    """What a training takes on DEVICE."""

    param_nbytes: int
    """Bytes of all PARAM chunks, pads included; model data is four times that in fp32."""
    required_nbytes: int
    """The smallest cap that fits: the largest sum of pinned and requested bytes, seen with all model data resident."""
    outcome: Outcome


@functools.cache
def footprint(case: ZooModel, variant: Variant, *, freezes_first: bool = False) -> Footprint:
    """Train with all model data resident, once, and see what was needed."""
    with chunkmem.ChunkManager(capped(case, AMPLE_NBYTES)) as manager:
        model = Trainer(case, variant, Chunked(manager), freezes_first=freezes_first).model
        param_nbytes = sum(p.nbytes for p in model.parameters()) + manager.memory().padding_nbytes
    with chunkmem.ChunkManager(capped(case, 4 * param_nbytes)) as manager:
        side = Chunked(manager, follows=repeats(case))
        outcome = Trainer(case, variant, side, freezes_first=freezes_first).run()
        return Footprint(param_nbytes, manager.memory().device.required_nbytes, outcome)


def assert_same(actual: Outcome, expected: Outcome) -> None:
    """Every loss, weight, buffer and optimizer state is the same bit for bit; none is NaN or infinite."""
    assert all(math.isfinite(loss) for loss in expected.losses)
    assert actual.losses == expected.losses
    _assert_equal(actual.weights, expected.weights)
    _assert_equal(actual.buffers, expected.buffers)
    options = ("params", "lr", "betas", "eps", "weight_decay")
    for left, right in zip(actual.optimizer["param_groups"], expected.optimizer["param_groups"], strict=True):
        assert {key: left[key] for key in options} == {key: right[key] for key in options}
    states, expected_states = (outcome.optimizer["state"] for outcome in (actual, expected))
    assert states.keys() == expected_states.keys(), "not the same parameters were updated"
    for index, state in expected_states.items():
        _assert_equal(states[index], state, f"state of parameter {index}: ")


def _assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor], what: str = "") -> None:
    assert list(actual) == list(expected), f"{what}other names, or another order"
    for name, right in expected.items():
        left = actual[name]
        assert (left.dtype, left.shape) == (right.dtype, right.shape), f"{what}{name}"
        assert torch.equal(left, right), f"{what}{name}: off by up to {(left - right).abs().max().item()}"


def _copied(tree: Any) -> Any:
    return tree_map_only(Tensor, lambda t: t.detach().cpu().clone(), tree)
