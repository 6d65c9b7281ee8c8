"""Which weights the backward of a stage with a delay runs on: `versions=` of an asynchronous pipeline.

    stash     backward of a batch has the weights of its forward: a copy for each update in between is kept on HOST
    predict   forward and backward have what the weights are predicted to be when the backward of the batch comes that
              forward runs for: one copy on HOST, of the weights as they are
    predict+gap   the same, and gradients are divided by how far the weights are from what forward had predicted, which
              is kept on HOST until then

One step of a stage with a delay of 2 under "stash", weights by the number of updates that they have seen:

    round          forward   backward   kept on HOST
    F4 B2          on 2      on 0       0 1                 backward of batch 2 fetches 0 in place of 2; then 0 goes
    update 2 to 3                       1 2                 and 2 is kept before the update overwrites it
    F5 B3          on 3      on 1       1 2
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from chunkmem.assembly.runtime import Runtime
from chunkmem.contrib.async_pipeline.gap_aware import expected_step, note_step_, reduced
from chunkmem.contrib.async_pipeline.other_weights import OtherWeights, Slabs
from chunkmem.contrib.async_pipeline.prediction import learning_rates, predict_
from chunkmem.modules.binding import ManagedParameter
from chunkmem.optim.optimizer import RuleOptimizer
from chunkmem.pipeline.modules import StageModule
from chunkmem.runtime.device import runtime_mode

STASH = "stash"
"""The role under which ledgers count weights of earlier updates."""


PREDICTED = "predicted"
"""The role of weights as they are while predicted ones are in their place, and of predictions that are kept."""

GAP_AWARE = "predict+gap"
VERSIONS = (STASH, "predict", GAP_AWARE)
"""Which weights stages run backward on."""
STEPS = "squared steps"
"""The role of running averages of what updates change."""

_Found = tuple[ManagedParameter, int, torch.Tensor, torch.Tensor]
"""A parameter with a gradient, its parameter group, what forward took for its weight, the average of its steps."""


@dataclass(frozen=True)
class Updates:
    """What updates the weights, once a batch."""

    optimizer: RuleOptimizer
    scheduler: Any = None
    """Of learning rates; None: they stay as they are."""

    def step(self) -> None:
        """Make one."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()


class Versions:
    """Weights of one stage over the rounds of its pipeline.

    These are those of the last stage: no update comes between its forward and its backward.
    """

    is_grouped = False
    """All forwards of a round come before its backwards."""

    def in_round(self, updates: Updates) -> AbstractContextManager[None]:
        """Surround the calls of a round."""
        return contextlib.nullcontext()

    def in_backward(self) -> AbstractContextManager[None]:
        """Surround the backwards of a round."""
        return contextlib.nullcontext()

    def update(self, updates: Updates) -> None:
        """Have the weights updated."""
        updates.step()

    def end(self) -> None:
        """The pipeline has drained: keep nothing."""


class Stash(Versions):
    """Weights of the last updates, as many as the delay of the stage."""

    is_grouped = True

    def __init__(self, runtime: Runtime, module: StageModule, *, delay: int) -> None:
        """Keep those of `module`. HOST is charged from the first update on, for all of them."""
        self._weights = OtherWeights(runtime, module, role=STASH)
        self._delay = delay
        self._kept: deque[Slabs] = deque()
        """The oldest first."""
        self._free: list[Slabs] | None = None

    @contextlib.contextmanager
    def in_backward(self) -> Iterator[None]:
        """Until the pipeline is full, the oldest weights are those before the first update, also of later batches."""
        with self._weights.exchanged(self._kept[0]) if self._kept else contextlib.nullcontext():
            yield

    def update(self, updates: Updates) -> None:
        if self._free is None:
            self._free = self._weights.alloc(self._delay)
        slabs = self._free.pop() if self._free else self._kept.popleft()
        self._weights.copy_to(slabs)
        self._kept.append(slabs)
        updates.step()

    def end(self) -> None:
        for slabs in (*self._kept, *(self._free or ())):
            self._weights.free(slabs)
        self._kept.clear()
        self._free = None


class Predicted(Versions):
    """Weights as they are predicted to be, as many updates from now as the delay of the stage."""

    def __init__(self, runtime: Runtime, module: StageModule, *, delay: int) -> None:
        """Predict those of `module`. HOST is charged from the first round on."""
        self._weights = OtherWeights(runtime, module, role=PREDICTED)
        self._updater = runtime.updater
        self._delay = delay
        self._free: list[Slabs] | None = None
        self._used: deque[Slabs] = deque()
        """What was predicted, the oldest first; in a round the last one has the weights as they are."""

    @contextlib.contextmanager
    def in_round(self, updates: Updates) -> Iterator[None]:
        """Surround the calls of a round."""
        if self._free is None:
            self._free = self._begin()
        slabs = self._free.pop()
        self._used.append(slabs)
        self._weights.copy_to(slabs)
        rates = learning_rates(updates.optimizer, updates.scheduler, self._delay)
        groups = updates.optimizer.param_groups
        places = {id(param): at for at, group in enumerate(groups) for param in group["params"]}
        for managed, slot in self._weights.slots(slabs):
            at = places.get(id(managed.param))
            state = None if at is None else updates.optimizer.state.get(managed.param)
            if at is None or not state or not managed.requires_grad:
                continue
            with torch.no_grad(), runtime_mode():
                weight = self._updater.read_weight(managed).float()
                predict_(weight, {key: value.clone() for key, value in state.items()}, groups[at], rates[at])
                slot.copy_(weight)
        with self._weights.exchanged(slabs):
            yield
        self._round_is_over()

    def _begin(self) -> list[Slabs]:
        """Return memory for all predictions that are kept at a time, and the weights meanwhile."""
        return self._weights.alloc(1)

    def _round_is_over(self) -> None:
        self._give_back()

    def _give_back(self) -> None:
        assert self._free is not None
        self._free.append(self._used.popleft())

    def end(self) -> None:
        for slabs in (*self._used, *(self._free or ())):
            self._weights.free(slabs)
        self._used.clear()
        self._free = None


class GapAware(Predicted):
    """The same, and each gradient is divided by how far its weights are from those of its forward.

    Averages of steps begin when the pipeline fills, so a checkpoint, made after a flush, has nothing of them.
    """

    def __init__(self, runtime: Runtime, module: StageModule, *, delay: int) -> None:
        super().__init__(runtime, module, delay=delay)
        self._runtime = runtime
        self._averages: Slabs | None = None
        self._counts: dict[ManagedParameter, int] = {}
        """Updates that are part of an average."""
        self._max_rates: list[float] = []

    def update(self, updates: Updates) -> None:
        """Have the weights updated, with smaller gradients.

        The oldest prediction is that of the forward of this batch: there is one a round, and rounds with a forward
        come first.
        """
        assert self._averages is not None
        groups = updates.optimizer.param_groups
        options = [dict(group) for group in groups]  # of this update: a scheduler sets those of the next one
        rates = [float(group["lr"]) for group in options]
        self._max_rates = list(map(max, rates, self._max_rates or rates))
        places = {id(param): at for at, group in enumerate(groups) for param in group["params"]}
        averages = dict(self._weights.slots(self._averages, torch.float32))
        landed = self._updater.gradients.slots.landed
        found = [
            (managed, places[id(managed.param)], seen, averages[managed])
            for managed, seen in self._weights.slots(self._used[0])
            if managed in landed.get(managed.group, ()) and id(managed.param) in places
        ]
        self._updater.ahead.roll_back()
        with torch.no_grad(), runtime_mode():
            for managed, at, seen, average in found:
                if num := self._counts.get(managed, 0):
                    expected = expected_step(average, options[at], num=num, max_rate=self._max_rates[at])
                    self._reduce(managed, seen, expected, options[at])
        self._give_back()
        num_skipped = self._num_skipped()
        updates.step()
        if self._num_skipped() == num_skipped:  # an update that overflowed is no step
            self._note(updates.optimizer, found, options)

    def _num_skipped(self) -> int:
        return 0 if self._runtime.scaler is None else self._runtime.scaler.num_skipped

    def _reduce(
        self, managed: ManagedParameter, seen: torch.Tensor, expected: torch.Tensor, options: dict[str, Any]
    ) -> None:
        scaler = self._runtime.scaler
        weight = self._updater.read_weight(managed).to(seen.dtype)  # as it is rounded for forward
        for replica in self._updater.gradient_replicas(managed):
            scale = 1.0 if scaler is None else scaler.loss_scale
            replica.copy_(reduced(replica, weight, seen, expected, options=options, scale=scale))

    def _note(self, optimizer: RuleOptimizer, found: Sequence[_Found], options: Sequence[dict[str, Any]]) -> None:
        with torch.no_grad(), runtime_mode():
            for managed, at, _, average in found:
                if state := optimizer.state.get(managed.param):
                    values = {key: value.clone() for key, value in state.items()}
                    note_step_(average, values, options[at], float(options[at]["lr"]))
                    self._counts[managed] = self._counts.get(managed, 0) + 1

    def _begin(self) -> list[Slabs]:
        self._averages = self._weights.alloc_zeros(STEPS)
        return self._weights.alloc(self._delay + 1)

    def _round_is_over(self) -> None:
        """The prediction is kept until the backward of its batch."""

    def end(self) -> None:
        super().end()
        if self._averages is not None:
            self._weights.free(self._averages, STEPS)
        self._averages = None
        self._counts.clear()
        self._max_rates = []


_KINDS: dict[str, type[Stash] | type[Predicted]] = {STASH: Stash, "predict": Predicted, GAP_AWARE: GapAware}


def make_versions(runtime: Runtime, module: StageModule, *, kind: str, delay: int) -> Versions:
    """Return the weights of a stage with a delay of so many updates, of a `kind` of `VERSIONS`."""
    if delay == 0:
        return Versions()
    return _KINDS[kind](runtime, module, delay=delay)
