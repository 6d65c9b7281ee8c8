"""One call of a region: what it has saved, and when it did what."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from chunkmem.nn.saved_storages import SavedStorage
from chunkmem.runtime.chunk import Chunk
from chunkmem.trace.model import Region
from chunkmem.types import ActivationPolicy


@dataclass(slots=True)
class CallRecord:
    """When a call of a region did what, in moments of the step; None: it has not yet, or nobody records."""

    name: str
    policy: ActivationPolicy
    number: int
    """Of the call, among those of the step."""
    is_recomputed: bool
    forward: list[int] = field(default_factory=list)
    again: list[int] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)
    chunk: Chunk | None = None
    inputs: Chunk | None = None

    def region(self) -> Region | None:
        """Return it for a trace; None if its backward has not run, or it saved nothing."""
        if self.chunk is None or not (len(self.forward) == len(self.backward) == 2):
            return None
        return Region(
            self.name,
            self.chunk.id,
            self.chunk.nbytes,
            (self.forward[0], self.forward[1]),
            (self.backward[0], self.backward[1]),
            (self.again[0], self.again[-1]) if self.is_recomputed else None,
            None if self.inputs is None else self.inputs.id,
            self.number,
        )


@dataclass(eq=False, slots=True, weakref_slot=True)
class RegionCall:
    """One call of a region. Lives as long as autograd keeps something that it saved in it."""

    name: str
    record: CallRecord
    module: weakref.ref[Callable[..., object]]
    come_to: Callable[[], None] | None = None
    """Over ranks, called before it is recomputed; see `RegionActivations.enter`."""
    storages: dict[int, SavedStorage] = field(default_factory=dict)
    """What was saved in it, by identity, until it is looked over."""
    given: frozenset[int] = frozenset()
    """The same afterwards: of a call that is recomputed, its inputs."""
    chunk: Chunk | None = None
    """That has its content; None if there is none, or not yet."""
    around: Generator[None, None, None] | None = None
    """Surrounds it while it runs, if it is going to be recomputed."""
    handled: BaseException | None = None
    """What the caller was handling when it began, while it runs."""

    def __str__(self) -> str:
        return f"{self.name} backward"
