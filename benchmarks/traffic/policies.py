"""Demand paging: what a trace moves if chunks come when they are used, and a policy picks who leaves for lack of room.

One account for all policies, so that they differ by their victims alone: content begun again is not fetched, consumed
content is gone at once, a replica that HOST has too leaves without a copy, and a chunk that HOST updates leaves DEVICE.
Nothing is fetched early. Only PatrickStar as it moves misses its plan from this account, and says so.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from benchmarks.traffic.uses import chunks_in_use, chunks_written, rooms_beside
from chunkmem.data.trace import Kind, Trace
from chunkmem.data.types import ChunkId, Role, Tier


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes moved in an iteration; means over the iterations after which paging repeats itself."""

    h2d_nbytes: float
    d2h_nbytes: float

    @property
    def nbytes(self) -> float:
        return self.h2d_nbytes + self.d2h_nbytes


@dataclass(slots=True)
class Resident:
    """A replica on DEVICE."""

    is_dirty: bool
    """HOST lacks its content."""
    arrived: int
    """Moment since the first iteration's start."""
    last_used: int


Rank = Callable[[ChunkId, Resident, int], int]
"""From a chunk, its replica and the moment of the trace to a number: who has the highest leaves first."""


@dataclass(frozen=True)
class Policy:
    """Who leaves."""

    make_rank: Callable[[Trace, Sequence[frozenset[ChunkId]]], Rank]
    """From a trace and the chunks in use in each of its moments. Equal ranks leave in order of group and role."""
    copies_clean: bool = False
    """Every replica that leaves is copied, as where a chunk is in one place only."""


def least_recently_used(trace: Trace, in_use: Sequence[frozenset[ChunkId]]) -> Rank:
    """Rank by the time since the last moment in use."""
    return lambda chunk, resident, at: -resident.last_used


def first_in_first_out(trace: Trace, in_use: Sequence[frozenset[ChunkId]]) -> Rank:
    """Rank by the time on DEVICE."""
    return lambda chunk, resident, at: -resident.arrived


def belady(trace: Trace, in_use: Sequence[frozenset[ChunkId]]) -> Rank:
    """Rank by the next moment in use, cyclically. Blind to what leaving costs.

    Source: Belady, IBM Systems Journal 5(2), 1966.
    """
    used_at: dict[ChunkId, list[int]] = defaultdict(list)
    for index, chunks in enumerate(in_use):
        for chunk in chunks:
            used_at[chunk].append(index)
    return lambda chunk, resident, at: _next(used_at[chunk], at, period=len(in_use))


def patrickstar(trace: Trace, in_use: Sequence[frozenset[ChunkId]]) -> Rank:
    """Rank by the next moment of access as PatrickStar's tracer counts moments.

    As there: its clock ticks when a module is entered, forward or backward, and once for all updates together, which
    leaves their order to the ids of the chunks; only accesses after the current tick count, wrapping around the step; a
    gradient lies in the memory of its weights, so both have the accesses of both, and it leaves last while they are in
    use; neither sizes nor write-backs count.
    Approximated: every HOLD is a tick, as a trace does not tell which of them are one module's; PARAM and GRAD are two
    chunks that leave one by one; the room beside them is that of our moments, not PatrickStar's quota.
    """
    is_update = [moment.kind is Kind.UPDATE for moment in trace.moments]
    first_update = is_update.index(True) if any(is_update) else None
    ticks = list(
        accumulate(moment.kind is Kind.HOLD or index == first_update for index, moment in enumerate(trace.moments))
    )
    accessed_at: dict[tuple[int, Role], list[int]] = defaultdict(list)

    def shared(chunk: ChunkId) -> tuple[int, Role]:
        return (chunk.group, Role.PARAM if chunk.role is Role.GRAD else chunk.role)

    for index, chunks in enumerate(in_use):
        moment = trace.moments[index]
        begins = chunks if moment.kind is Kind.UPDATE else chunks & {moment.chunk}
        for chunk in begins:
            accessed_at[shared(chunk)].append(ticks[index])
    in_use_shared = [frozenset(shared(chunk) for chunk in chunks) for chunks in in_use]
    period = max(ticks, default=0) + 1

    def rank(chunk: ChunkId, resident: Resident, at: int) -> int:
        if shared(chunk) in in_use_shared[at]:
            return -1
        return _next(accessed_at[shared(chunk)], ticks[at], period=period)

    return rank


def _next(times: Sequence[int], now: int, *, period: int) -> int:
    """The first of the ascending `times` after `now`, or of the next iteration."""
    index = bisect_right(times, now)
    return times[index] if index < len(times) else times[0] + period


POLICIES: Mapping[str, Policy] = {
    "Belady": Policy(belady),
    "LRU": Policy(least_recently_used),
    "FIFO": Policy(first_in_first_out),
    "PatrickStar's choice": Policy(patrickstar),
    "PatrickStar": Policy(patrickstar, copies_clean=True),
}
"""The last one also moves as PatrickStar does: a chunk is in one place only, so a clean one is copied back as well."""


def page(trace: Trace, budgets: Sequence[int], update_tiers: Mapping[int, Tier], policy: Policy) -> Traffic:
    """Run iterations until one ends as an earlier one did; return the mean of those between.

    Raises:
        CapacityError: what a moment uses does not fit its budget.
    """
    pager = _Pager(trace, rooms_beside(trace, budgets, update_tiers), update_tiers, policy)
    seen: dict[Hashable, int] = {}
    moved = [(0, 0)]
    while (state := pager.state()) not in seen:
        seen[state] = len(moved) - 1
        for index in range(len(trace.moments)):
            pager.run(index)
        moved.append((pager.h2d_nbytes, pager.d2h_nbytes))
    first = seen[state]
    num_iterations = len(moved) - 1 - first
    h2d, d2h = (last - before for last, before in zip(moved[-1], moved[first], strict=True))
    return Traffic(h2d / num_iterations, d2h / num_iterations)


class _Pager:
    """DEVICE, moment after moment."""

    def __init__(self, trace: Trace, rooms: Sequence[int], update_tiers: Mapping[int, Tier], policy: Policy) -> None:
        self._trace, self._rooms, self._tiers, self._policy = trace, rooms, update_tiers, policy
        self._in_use = chunks_in_use(trace, update_tiers)
        self._rank = policy.make_rank(trace, self._in_use)
        self._residents: dict[ChunkId, Resident] = {}
        self._now = 0
        self.h2d_nbytes = 0
        self.d2h_nbytes = 0

    def state(self) -> Hashable:
        """All that the next iterations depend on: who is here, dirty or not, in both orders."""
        orders = (
            tuple(sorted(self._residents, key=lambda chunk: (getattr(self._residents[chunk], by), _order(chunk))))
            for by in ("arrived", "last_used")
        )
        return (*orders, frozenset(chunk for chunk, resident in self._residents.items() if resident.is_dirty))

    def run(self, index: int) -> None:
        """Serve one moment."""
        moment = self._trace.moments[index]
        self._make_room(index)
        for chunk in sorted(self._in_use[index], key=_order):
            if chunk not in self._residents:
                creates = moment.kind is Kind.CREATE and moment.chunk == chunk
                self.h2d_nbytes += 0 if creates else self._trace.chunk_nbytes[chunk]
                self._residents[chunk] = Resident(is_dirty=False, arrived=self._now, last_used=self._now)
            self._residents[chunk].last_used = self._now
        if moment.kind is Kind.UPDATE and self._tiers[moment.chunk.group] is Tier.HOST:
            self._update_on_host(moment.chunk.group)
        else:
            for chunk in chunks_written(self._trace, index):
                self._residents[chunk].is_dirty = True
        if moment.kind is Kind.CONSUME:
            self._residents.pop(moment.chunk, None)
        self._now += 1

    def _make_room(self, index: int) -> None:
        size = self._trace.chunk_nbytes
        idle = [chunk for chunk in self._residents if chunk not in self._in_use[index]]
        excess = sum(size[chunk] for chunk in idle) - self._rooms[index]
        if excess <= 0:
            return
        idle.sort(key=lambda chunk: (-self._rank(chunk, self._residents[chunk], index), _order(chunk)))
        for chunk in idle:
            if excess <= 0:
                break
            if self._residents.pop(chunk).is_dirty or self._policy.copies_clean:
                self.d2h_nbytes += size[chunk]
            excess -= size[chunk]

    def _update_on_host(self, group: int) -> None:
        for chunk in self._trace.update(group).chunks:
            if chunk in self._residents:
                self.d2h_nbytes += self._residents[chunk].is_dirty * self._trace.chunk_nbytes[chunk]
                self._residents[chunk].is_dirty = False
                if chunk.role is not Role.GRAD:
                    del self._residents[chunk]


def _order(chunk: ChunkId) -> tuple[int, str]:
    return (chunk.group, chunk.role.value)
