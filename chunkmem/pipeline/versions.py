"""Which weights the backward of a stage with a delay runs on: `versions=` of an asynchronous pipeline.

    stash    backward of a batch has the weights of its forward: a copy for each update in between is kept on HOST

One step of a stage with a delay of 2, weights by the number of updates that they have seen:

    round          forward   backward   kept on HOST
    F4 B2          on 2      on 0       0 1                 backward of batch 2 fetches 0 in place of 2; then 0 goes
    update 2 to 3                       1 2                 and 2 is kept before the update overwrites it
    F5 B3          on 3      on 1       1 2
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from chunkmem.assembly import Runtime
from chunkmem.pipeline.modules import StageModule
from chunkmem.pipeline.other_weights import OtherWeights, Slabs

STASH = "stash"
"""The role under which ledgers count weights of earlier updates."""


class Versions(Protocol):
    """Weights of one stage over the rounds of its pipeline."""

    is_grouped: bool
    """All forwards of a round come before its backwards."""

    def in_round(self) -> AbstractContextManager[None]:
        """Surround the calls of a round."""
        ...

    def in_backward(self) -> AbstractContextManager[None]:
        """Surround the backwards of a round."""
        ...

    def update(self, step: Callable[[], None]) -> None:
        """Have `step` update the weights."""
        ...

    def end(self) -> None:
        """The pipeline has drained: keep nothing."""
        ...


class NoVersions:
    """Of the last stage: no update comes between its forward and its backward."""

    is_grouped = False

    def in_round(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def in_backward(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def update(self, step: Callable[[], None]) -> None:
        step()

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

    def in_round(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def in_backward(self) -> Iterator[None]:
        """Until the pipeline is full, the oldest weights are those before the first update, also of later batches."""
        with self._weights.exchanged(self._kept[0]) if self._kept else contextlib.nullcontext():
            yield

    def update(self, step: Callable[[], None]) -> None:
        if self._free is None:
            self._free = self._weights.alloc(self._delay)
        slabs = self._free.pop() if self._free else self._kept.popleft()
        self._weights.copy_to(slabs)
        self._kept.append(slabs)
        step()

    def end(self) -> None:
        for slabs in (*self._kept, *(self._free or ())):
            self._weights.free(slabs)
        self._kept.clear()
        self._free = None


def make_versions(runtime: Runtime, module: StageModule, *, kind: str, delay: int) -> Versions:
    """Return the weights of a stage with a delay of so many updates, of a `kind` of `VERSIONS`."""
    if delay == 0:
        return NoVersions()
    assert kind == STASH
    return Stash(runtime, module, delay=delay)
