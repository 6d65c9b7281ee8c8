"""Do copies too early where a plan does not forbid it: what lanes that hold copies back cannot show.

[Note: Copies that come too early] On a CPU the thread that issues copies has computed everything before, so a copy is
never early, whatever it fails to wait for. Here a plan is read ahead: which copies are not ordered after which
computing that touches the same memory? When such computing is about to begin, the copy, and every copy that has to
come before it, is done there and then, on the memory that the rules for slabs give it. When it is issued, nothing is
left to do. Every order that is made real this way is one that the plan allows; a sound plan allows none of them.

A copy gets ahead of another copy in the same way, once that has been issued. That it is late does not show where
something computed waits for it: on a CPU that is before the next copy is issued, though the plan does not say so.

    D2H      ─ gradients to HOST ─┐
    COMPUTE                       └ writes their slab of DEVICE ...
    H2D         ─ the same gradients from HOST     too early, for want of a wait; issued behind that computing
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch

from chunkmem.data.trace import Kind
from chunkmem.data.types import Tier
from chunkmem.plan.model import Copy, Lane
from chunkmem.runtime.chunk import Chunk
from chunkmem.runtime.events import COPY_LANES, DoneEvent, Event, Piece
from chunkmem.runtime.plan_executor import PlanExecutor
from chunkmem.runtime.pool import Slab
from chunkmem.testing import AdversarialLanes
from tests.helpers.orders import Operation, Reading, SlabNumber


@dataclass(frozen=True)
class Haste:
    """Copies that get ahead of some operation, though they are issued later; in the order they have to come."""

    before: Operation
    copies: tuple[Operation, ...]
    in_reading: bool = False
    """They only read ahead of it, and write in their turn: it is the computing that is late."""


def hastes(reading: Reading) -> Iterator[Haste]:
    """Yield every way in which copies can get ahead: one for each race that they may lose on an ordinary CPU."""
    for race in reading.races:
        first, last = race.first, race.second
        if last.lane not in COPY_LANES:
            continue
        span = reading.operations[first.order + 1 : last.order]
        needed = [operation for operation in span if last.comes_after(operation)] + [last]
        copies = tuple(operation for operation in needed if operation.lane in COPY_LANES)
        touched = first.reads | first.writes
        # Computing cannot be early: it is done by the thread that waits. But an update on HOST can be late, if all that
        # is to be seen of that is what copies read before it.
        if len(copies) == len(needed):
            yield Haste(first, copies)
        elif first.lane is Lane.HOST_UPDATE and not any(copy.writes & touched for copy in copies):
            yield Haste(first, tuple(copy for copy in copies if copy.reads & first.writes), in_reading=True)


class HastyLanes(AdversarialLanes):
    """Copies are late unless they were early."""

    is_done = False
    """The next copy has been done."""
    instead: torch.Tensor | None = None
    """The bytes that the next copy has read, if it read them early."""

    def copy(self, lane: Lane, pieces: Sequence[Piece], *, after: Sequence[Event], label: str) -> Event:
        if self.is_done:
            return DoneEvent.now()
        if self.instead is not None:
            ((target, _),) = pieces
            pieces = [(target, self.instead)]
        return super().copy(lane, pieces, after=after, label=label)


@dataclass
class _Laps:
    """What is known of the iterations since the plan was last taken up at its start."""

    iteration: int = 0
    addresses: dict[SlabNumber, int] = field(default_factory=dict)
    issued: dict[tuple[int, Lane, int], Event | None] = field(default_factory=dict)
    done: set[Operation] = field(default_factory=set)
    """Copies that were early."""
    read: dict[Operation, torch.Tensor] = field(default_factory=dict)
    """Copies that were early in reading, and the bytes they read."""


class HastyPerformer(PlanExecutor):
    """Follows a plan; once in each iteration, if the plan lets them, copies come too early."""

    def __init__(self, *args: Any, reading: Reading, seed: int) -> None:
        """Prepare to follow a plan.

        Args:
            args: of a `PlanExecutor`; the lanes are `HastyLanes`.
            reading: of the same plan.
            seed: decides which copies come too early.
        """
        super().__init__(*args)
        self._reading = reading
        self._iterations: _Laps | None = None
        self._discarded: list[torch.Tensor] = []
        """Kept, as a copy that nothing waits for may still be at work on it: it should show in results, not crash."""
        pool = self._tiers.device_pool
        self._pool_discard, pool._discard = pool._discard, self._discard
        by_iteration = defaultdict(list)
        for haste in hastes(reading):
            by_iteration[haste.before.iteration].append(haste)
        random = Random(seed)
        chosen = [random.choice(by_iteration[iteration]) for iteration in sorted(by_iteration)]
        self._due = {(haste.before.iteration, haste.before.moment): haste for haste in chosen}

    def begin_iteration(self, *, times_moments: bool = True) -> None:
        goes_on = self.is_at_end
        super().begin_iteration(times_moments=times_moments)
        if goes_on and self._iterations is not None:
            self._iterations.iteration += 1
            return
        chunks = self._store.chunks
        # Before the first update there are no states yet: what has no content is not where the plan says.
        is_whole = all(tier in chunks[chunk].replicas for chunk, tier in self._reading.start)
        self._iterations = None
        if self.is_planned and is_whole:
            start = self._reading.start.items()
            self._iterations = _Laps(addresses={slab: chunks[c].replicas[t].flat.data_ptr() for (c, t), slab in start})

    def event(self, kind: Kind, chunk: Chunk, reader: object) -> None:
        super().event(kind, chunk, reader)
        if self.step_log.plan_misses:
            self._iterations = None
        if (
            self._iterations is not None
            and (haste := self._due.get((self._iterations.iteration, self._cursor - 1))) is not None
        ):
            self._get_ahead(haste, self._iterations)

    def _get_ahead(self, haste: Haste, iterations: _Laps) -> None:
        """The copies of this moment have been issued, and its computing is about to begin; be faster."""
        for key, event in iterations.issued.items():
            if event is not None and haste.copies[-1].comes_after(self._reading.copies[key]):
                self._order.lanes.run_until(event)
        for copy in haste.copies:
            (source,), (target,) = copy.reads, copy.writes
            if copy in iterations.done or copy in iterations.read or source not in iterations.addresses:
                return
            nbytes = self.trace.chunk_nbytes[copy.chunk]
            if haste.in_reading or target not in iterations.addresses:
                iterations.read[copy] = torch.empty(nbytes, dtype=torch.uint8)
                ctypes.memmove(iterations.read[copy].data_ptr(), iterations.addresses[source], nbytes)
            else:
                ctypes.memmove(iterations.addresses[target], iterations.addresses[source], nbytes)
                iterations.done.add(copy)

    def _discard(self, slab: Slab) -> None:
        """An idle slab goes back to the system, to make room for one of another size."""
        address = slab.bytes.data_ptr()
        if self._iterations is not None:
            self._iterations.addresses = {
                number: at for number, at in self._iterations.addresses.items() if at != address
            }
        self._discarded.append(slab.bytes)
        self._pool_discard(slab)

    def _alloc(self, chunk: Chunk, tier: Tier) -> None:
        super()._alloc(chunk, tier)
        if (iterations := self._iterations) is not None and self.is_planned:
            slab = self._reading.taken[iterations.iteration, self._cursor - 1, chunk.id, tier]
            address = chunk.replicas[tier].flat.data_ptr()
            assert iterations.addresses.setdefault(slab, address) == address, (
                "another slab than the plan means was taken"
            )

    def _copy(self, chunk: Chunk, copy: Copy, *, is_vain: bool) -> None:
        if (iterations := self._iterations) is None:
            super()._copy(chunk, copy, is_vain=is_vain)
            return
        key = iterations.iteration, copy.lane, len(self._order.events[copy.lane])
        planned = self._reading.copies[key]
        lanes = self._order.lanes
        lanes.is_done, lanes.instead = planned in iterations.done, iterations.read.get(planned)
        super()._copy(chunk, copy, is_vain=is_vain)
        lanes.is_done, lanes.instead = False, None
        iterations.issued[key] = self._order.events[copy.lane][-1]
