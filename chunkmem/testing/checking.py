"""Prove chunkmem on a model: train it in plain PyTorch and in chunks, and compare every bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from chunkmem.assembly.parts import DTYPES
from chunkmem.config import Config
from chunkmem.data.errors import CapacityError, ChunkmemError, ConfigError
from chunkmem.data.layout_pack import search_slab_nbytes
from chunkmem.data.memory import MemoryReport
from chunkmem.estimate.models import model_and_loss
from chunkmem.estimate.optimizers import class_named
from chunkmem.estimate.rehearse import place_of
from chunkmem.manager import ChunkManager
from chunkmem.runtime.device import ComputeDevice
from chunkmem.runtime.queues import Lanes
from chunkmem.testing.comparison import AGAIN, FIRST, SMALLEST, CheckReport, Comparison
from chunkmem.testing.difference import Train, first_difference, located
from chunkmem.testing.lanes import AdversarialLanes
from chunkmem.testing.plain import Plain
from chunkmem.testing.reasons import Observed, observing, reason_not_repeated, reason_of_difference, reason_of_error
from chunkmem.testing.training import Chunked, Side, TrainingResult, Workload, train

_MODEL_DATA_NBYTES = 16
"""Of one parameter, over all roles, in every precision."""
_SLACK_NBYTES = 64 << 20
_ATTEMPTS = 16
"""How often the smallest cap is raised to what a step turned out to need."""

OnStep = Callable[[str, int], object]
"""Called with the name of a training and the number of its steps that are over, 0 at its beginning."""


def check(
    make: Callable[[], Any],
    step: Callable[[nn.Module, int], Any] | None = None,
    *,
    steps: int = 4,
    device_nbytes: int | None = None,
    host_nbytes: int | None = None,
    disk: str | None = None,
    chunk_numel: int | None = None,
    precision: str = "fp32",
    optimizer: str = "adamw",
    lr: float = 1e-3,
    seed: int = 0,
    num_orders: int = 3,
    on_step: OnStep | None = None,
) -> CheckReport:
    """Train a model in plain PyTorch and in chunks, and say whether every bit is equal, or what differs first.

    It is trained in plain PyTorch, twice, in chunks with ample room, under the smallest cap that fits, and
    there once more for each of several orders of the copies, which are as late as the plan allows. It ends at the first
    training that is not equal. It takes about 60 bytes of RAM a parameter.

    Args:
        make: builds the model and returns it. Without `step` it returns ``(model, step)``, as for `chunkmem estimate`:
            ``step(model)`` is the loss, or `step` is what the model is called with to return it.
        step: takes the model and the number of the step, from 0, makes a batch and returns the loss.
        steps: how many; the first is recorded, the second planned.
        device_nbytes: cap on DEVICE to train under in the place of ample room, in bytes.
        host_nbytes: cap on HOST; None is as much as it takes.
        disk: a folder for a file of what HOST has no room for, as `memory.disk.path`; with `host_nbytes`.
        chunk_numel: `default_chunk_size`; None: so that the model takes some dozens.
        precision: fp32, bf16 or fp16; the last two are compared with a plain loop that has fp32 master weights.
        optimizer: adamw, adam, another class of torch.optim in lower case, sgd-momentum, or ``module:Class``, which
            `chunkmem.Optimizer` then trains with in chunks. Muon takes the matrices of blocks, AdamW the rest.
        lr: its learning rate; other options are those that its class has by default.
        seed: of the generators of torch, Python and NumPy, on both sides, and of the orders of the copies.
        num_orders: orders of the copies; there are none on an accelerator, as such copies work in RAM.
        on_step: called with the name of a training and the number of its steps that are over, 0 at its beginning.

    Raises:
        ConfigError: an argument is out of range, the model cannot be trained in plain PyTorch either, or its numbers
            would prove nothing: they are NaN, or nothing was updated.
    """
    if steps < 2:
        raise ConfigError(f"steps is {steps}; give at least 2: the first step is recorded, and no plan is followed yet")
    if precision not in DTYPES:
        raise ConfigError(f"precision is {precision!r}; allowed: {', '.join(DTYPES)}")
    if num_orders < 0:
        raise ConfigError(f"num_orders is {num_orders}; give at least 0")
    if disk is not None and host_nbytes is None:
        raise ConfigError("disk is for what HOST has no room for; give host_nbytes, too, a cap on that")
    class_named(optimizer)
    build, run = _model_and_step(make, step)
    compute = ComputeDevice.default()
    workload = Workload(
        build, run, seed=seed, lr=lr, optimizer=optimizer, device=compute.device, on_step=lambda _: None
    )
    return _Check(
        workload, compute, on_step, steps, precision, num_orders, device_nbytes, host_nbytes, disk, chunk_numel
    ).report()


def _model_and_step(
    make: Callable[[], Any], step: Callable[[nn.Module, int], Any] | None
) -> tuple[Callable[[], nn.Module], Callable[[nn.Module, int], Any]]:
    if step is None:
        build, loss = model_and_loss(make, name="make()")
        return build, lambda model, _: loss(model)

    def build_only() -> nn.Module:
        made = make()
        if not isinstance(made, nn.Module):
            raise ConfigError(f"make() returned a {type(made).__name__}; with a step of its own, return the model")
        return made

    return build_only, step


@dataclass(eq=False)
class _Check:
    """One check under way; see the arguments of `check`."""

    workload: Workload
    compute: ComputeDevice
    on_step: OnStep | None
    steps: int
    precision: str
    num_orders: int
    device_nbytes: int | None
    host_nbytes: int | None
    disk: str | None
    chunk_numel: int | None
    seen: Observed = field(default_factory=Observed)
    num_threads: int = field(default_factory=torch.get_num_threads)
    memory: MemoryReport | None = None
    """Of the training in chunks that was last."""
    usual_warnings: tuple[str, ...] = ()
    num_plain_updates: int = 0
    """Of parameters, in the training in plain PyTorch that was last."""

    def report(self) -> CheckReport:
        """Train until one training is not equal."""
        self._plain = self._plain_outcome()
        comparisons: list[Comparison] = []
        for comparison in self._comparisons():
            comparisons.append(comparison)
            if not comparison.is_equal:
                break
        return CheckReport(
            steps=self.steps,
            precision=self.precision,
            seed=self.workload.seed,
            num_params=self.seen.num_params,
            num_tensors=self._plain.num_tensors,
            chunk_numel=self.chunk_numel,
            comparisons=tuple(comparisons),
        )

    def _comparisons(self) -> Iterator[Comparison]:
        yield self._again()
        yield self._with_room()
        smallest = self._smallest()
        yield smallest
        for index in range(0 if self.compute.is_accelerator else self.num_orders):
            yield self._late(smallest, seed=self.workload.seed + index)

    def _plain_outcome(self) -> TrainingResult:
        workload = observing(self.workload, self.seen, dtype=DTYPES[self.precision])
        try:
            outcome = self._in_plain(FIRST, self.steps, workload)
        except ConfigError:
            raise
        except Exception as error:  # the user's code may raise anything
            raise ConfigError(
                f"plain PyTorch, in {self.precision}, raised {type(error).__name__}: {error} "
                f"({place_of(error)}); take a model that plain PyTorch trains"
            ) from error
        for step, loss in enumerate(outcome.losses):
            if not bool(loss.isfinite()):
                raise ConfigError(
                    f"in plain PyTorch the loss of step {step} is {loss.item()}, and what follows would be equal for "
                    f"that reason alone; lower lr, which is {self.workload.lr}, or take fewer steps"
                )
        if not self.num_plain_updates:
            raise ConfigError(
                f"in plain PyTorch no parameter was updated in {self.steps} steps, so equal bits would prove "
                "nothing; take more steps: in fp16 the first ones only lower the loss scale"
            )
        return outcome

    def _again(self) -> Comparison:
        comparison, _ = self._compared(AGAIN, partial(self._in_plain, AGAIN), sides=("a run", "the next"))
        self.usual_warnings = comparison.warnings
        reason = "" if comparison.is_equal else reason_not_repeated()
        return replace(comparison, reason=reason, warnings=())

    def _with_room(self) -> Comparison:
        device_nbytes, name = self.device_nbytes, "the given cap"
        if device_nbytes is None:
            name = "ample room"
            if not self.compute.is_accelerator:
                device_nbytes = 2 * _MODEL_DATA_NBYTES * self.seen.num_params + _SLACK_NBYTES
        return self._in_chunks(name, device_nbytes, is_guarded=True)[0]

    def _smallest(self) -> Comparison:
        assert self.memory is not None
        device_nbytes = self.memory.device.required_nbytes
        for _ in range(_ATTEMPTS):
            comparison, error = self._in_chunks(SMALLEST, device_nbytes, was_equal_with_room=True)
            # Steps that read other parameters each time need more than what was seen; on an accelerator, activations.
            is_short = isinstance(error, CapacityError) and error.cap_nbytes == device_nbytes < error.needed_nbytes
            if not is_short:
                break
            assert isinstance(error, CapacityError)
            device_nbytes = error.needed_nbytes
        return comparison

    def _late(self, smallest: Comparison, *, seed: int) -> Comparison:
        return self._in_chunks(
            f"{SMALLEST}, late copies, seed {seed}",
            smallest.device_nbytes,
            make_lanes=lambda _: AdversarialLanes(seed),
            was_equal_with_room=True,
        )[0]

    def _in_chunks(
        self,
        name: str,
        device_nbytes: int | None,
        *,
        is_guarded: bool = False,
        make_lanes: Callable[[ComputeDevice], Lanes] | None = None,
        was_equal_with_room: bool = False,
    ) -> tuple[Comparison, Exception | None]:
        def train_in_chunks(steps: int) -> TrainingResult:
            with ChunkManager(self._config(device_nbytes), make_lanes=make_lanes) as manager:
                outcome = self._train(name, Chunked(manager, is_guarded=is_guarded), steps)
                self.memory = manager.memory()
            return outcome

        comparison, error = self._compared(name, train_in_chunks, sides=("plain PyTorch", "chunks"))
        moved = None if self.memory is None or error is not None else self.memory.moved
        reason = "" if error is None else reason_of_error(error)
        if comparison.difference is not None:
            reason = reason_of_difference(
                comparison.difference,
                self.seen,
                was_equal_with_room=was_equal_with_room,
                is_late=make_lanes is not None,
                precision=self.precision,
            )
        moved_nbytes = 0 if moved is None else moved.h2d_nbytes + moved.d2h_nbytes
        return replace(comparison, device_nbytes=device_nbytes, moved_nbytes=moved_nbytes, reason=reason), error

    def _compared(
        self, name: str, train_steps: Train, *, sides: tuple[str, str]
    ) -> tuple[Comparison, Exception | None]:
        """Compare one training with the first one in plain PyTorch; what it raised comes back too."""
        steps = self.steps
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                difference = first_difference(self._plain, train_steps(steps), names=sides)
                if difference is not None:
                    first = partial(self._in_plain, name)
                    difference = located(difference, first, train_steps, steps=steps, names=sides)
            except Exception as error:  # reported: chunkmem's own as they are, and the user's code may raise anything
                own = isinstance(error, ChunkmemError)
                said = f"{type(error).__name__}: {error}" + ("" if own else f" ({place_of(error)})")
                return Comparison(name, error=said, warnings=self._new(caught)), error
        return Comparison(name, difference=difference, warnings=self._new(caught)), None

    def _in_plain(self, name: str, steps: int, workload: Workload | None = None) -> TrainingResult:
        side = Plain(self.compute.device, Config.from_dict({"precision": self.precision}))
        outcome = self._train(name, side, steps, workload)
        self.num_plain_updates = side.num_updates
        return outcome

    def _train(self, name: str, side: Side, steps: int, workload: Workload | None = None) -> TrainingResult:
        # The order of sums depends on it, and a model may have changed it.
        torch.set_num_threads(self.num_threads)
        workload = replace(workload or self.workload, on_step=partial(self.on_step or (lambda *_: None), name))
        return train(workload, side, steps=steps)

    def _config(self, device_nbytes: int | None) -> Config:
        if self.chunk_numel is None:
            self.chunk_numel = self._searched_chunk_numel()
        memory: dict[str, Any] = {"device": device_nbytes, "host": self.host_nbytes}
        if self.disk is not None:
            capacity = 2 * _MODEL_DATA_NBYTES * self.seen.num_params + _SLACK_NBYTES
            memory["disk"] = {"path": self.disk, "capacity": capacity}
        values = {"memory": memory, "default_chunk_size": self.chunk_numel, "precision": self.precision}
        return Config.from_dict(values)

    def _searched_chunk_numel(self) -> int:
        """Return what "auto" would choose under the given cap, or under one as large as the weights.

        Ample room has room for large chunks, of which a small model would have one, and nothing would move.
        """
        specs = self.seen.specs
        cap_nbytes = self.device_nbytes or sum(spec.nbytes for spec in specs)
        slab_nbytes = search_slab_nbytes(specs, device_cap_nbytes=cap_nbytes)
        return max(1, slab_nbytes // DTYPES[self.precision].itemsize)

    def _new(self, caught: list[warnings.WarningMessage]) -> tuple[str, ...]:
        """Return the messages that plain PyTorch does not bring forth too."""
        messages = dict.fromkeys(str(warning.message) for warning in caught)
        return tuple(message for message in messages if message not in self.usual_warnings)
