"""Which weights the backward of a stage with a delay runs on: `versions=` of an asynchronous pipeline.

    stash     backward of a batch has the weights of its forward: a copy for each update in between is kept on HOST
    predict   forward and backward have what the weights are predicted to be when the backward of the batch comes that
              forward runs for: one copy on HOST, of the weights as they are

One step of a stage with a delay of 2 under "stash", weights by the number of updates that they have seen:

    round          forward   backward   kept on HOST
    F4 B2          on 2      on 0       0 1                 backward of batch 2 fetches 0 in place of 2; then 0 goes
    update 2 to 3                       1 2                 and 2 is kept before the update overwrites it
    F5 B3          on 3      on 1       1 2
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from chunkmem.assembly import Runtime
from chunkmem.optim.optimizer import RuleOptimizer
from chunkmem.optim.prediction import learning_rates, predict_, require_predictable
from chunkmem.pipeline.modules import StageModule
from chunkmem.pipeline.other_weights import OtherWeights, Slabs
from chunkmem.runtime.device import runtime_mode

STASH = "stash"
"""The role under which ledgers count weights of earlier updates."""


PREDICTED = "predicted"
"""The role of weights as they are while predicted ones are in their place."""


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


class Versions(Protocol):
    """Weights of one stage over the rounds of its pipeline."""

    is_grouped: bool
    """All forwards of a round come before its backwards."""

    def in_round(self, updates: Updates) -> AbstractContextManager[None]:
        """Surround the calls of a round."""
        ...

    def in_backward(self) -> AbstractContextManager[None]:
        """Surround the backwards of a round."""
        ...

    def update(self, updates: Updates) -> None:
        """Have the weights updated."""
        ...

    def end(self) -> None:
        """The pipeline has drained: keep nothing."""
        ...


class NoVersions:
    """Of the last stage: no update comes between its forward and its backward."""

    is_grouped = False

    def in_round(self, updates: Updates) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def in_backward(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def update(self, updates: Updates) -> None:
        updates.step()

    def end(self) -> None:
        return


class Stash:
    """Weights of the last updates, as many as the delay of the stage."""

    is_grouped = True

    def __init__(self, runtime: Runtime, module: StageModule, *, delay: int) -> None:
        """Keep those of `module`. HOST is charged from the first update on, for all of them."""
        self._weights = OtherWeights(runtime, module, role=STASH)
        self._delay = delay
        self._kept: deque[Slabs] = deque()
        """The oldest first."""
        self._free: list[Slabs] | None = None

    def in_round(self, updates: Updates) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

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


class Predicted:
    """Weights as they are predicted to be, as many updates from now as the delay of the stage."""

    is_grouped = False

    def __init__(self, runtime: Runtime, module: StageModule, *, delay: int) -> None:
        """Predict those of `module`. HOST is charged from the first round on."""
        self._weights = OtherWeights(runtime, module, role=PREDICTED)
        self._updater = runtime.updater
        self._delay = delay
        self._slabs: Slabs | None = None

    @contextlib.contextmanager
    def in_round(self, updates: Updates) -> Iterator[None]:
        """Surround the calls of a round.

        Raises:
            ConfigError: it is not known where the optimizer goes.
        """
        if self._slabs is None:
            require_predictable(updates.optimizer)
            (self._slabs,) = self._weights.alloc(1)
        self._weights.copy_to(self._slabs)
        rates = learning_rates(updates.optimizer, updates.scheduler, self._delay)
        groups = updates.optimizer.param_groups
        places = {id(param): at for at, group in enumerate(groups) for param in group["params"]}
        for managed, slot in self._weights.slots(self._slabs):
            at = places.get(id(managed.param))
            state = None if at is None else updates.optimizer.state.get(managed.param)
            if at is None or not state:
                continue
            with torch.no_grad(), runtime_mode():
                weight = self._updater.read_weight(managed).float()
                predict_(weight, {key: value.clone() for key, value in state.items()}, groups[at], rates[at])
                slot.copy_(weight)
        with self._weights.exchanged(self._slabs):
            yield

    def in_backward(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def update(self, updates: Updates) -> None:
        updates.step()

    def end(self) -> None:
        if self._slabs is not None:
            self._weights.free(self._slabs)
        self._slabs = None


def make_versions(runtime: Runtime, module: StageModule, *, kind: str, delay: int) -> Versions:
    """Return the weights of a stage with a delay of so many updates, of a `kind` of `VERSIONS`."""
    if delay == 0:
        return NoVersions()
    return (Stash if kind == STASH else Predicted)(runtime, module, delay=delay)
