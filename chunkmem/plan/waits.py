"""Put into a program the waits it needs, and no others. Pure.

Operations on one lane run in order; everything else that has to come after something gets a `Wait`: what reads a slab
comes after its last write, what writes one comes after its last write and all reads since. Memory of activations on
DEVICE is given back for good, and COMPUTE waits before that for the copies that read it. A wait that others imply is
left out; vector clocks (for each lane, how far it knows the others to be) tell.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from chunkmem.plan.model import Action, Alloc, Copy, Free, Lane, Placed, Update, Wait, is_reused
from chunkmem.trace.model import Kind, Moment, Trace
from chunkmem.types import TIERS, ChunkId, Role, Tier

_LANES = tuple(lane for lane in Lane if lane is not Lane.COLLECTIVE)
_INDEX: dict[Lane, int] = {lane: at for at, lane in enumerate(_LANES)}
_COMPUTE, _HOST_UPDATE = _INDEX[Lane.COMPUTE], _INDEX[Lane.HOST_UPDATE]
_MAX_LAPS = 5

Clock = tuple[int, ...]
"""How many operations of each lane are known to be over."""


class _SlabUses:
    """The operations that may still be at work on a slab."""

    __slots__ = ("reads", "written")

    def __init__(self) -> None:
        self.written: tuple[int, int] | None = None
        """(lane, its count)"""
        self.reads: dict[int, int] = {}
        """By lane, the count of the last read since."""


def add_waits(
    trace: Trace, start: Iterable[Placed], program: Sequence[Sequence[Action]]
) -> tuple[tuple[Action, ...], ...]:
    """Return the program with its waits.

    It is followed iteration after iteration until two iterations wait for the same: from then on all do.
    """
    follower = _Follower(trace, start)
    iteration = follower.iteration(program)
    for _ in range(_MAX_LAPS):
        following = follower.iteration(program)
        if following == iteration:
            break
        iteration = following
    return iteration


class _Follower:
    def __init__(self, trace: Trace, start: Iterable[Placed]) -> None:
        self.trace = trace
        self.slabs = {(placed.chunk, placed.tier): _SlabUses() for placed in start}
        self.idle: dict[tuple[Tier, int], list[_SlabUses]] = defaultdict(list)
        self.done = [0] * len(_LANES)
        """Operations issued on each lane, since the first iteration began."""
        self.iteration_start = list(self.done)
        self.known: list[Clock] = [tuple(self.done)] * len(_LANES)
        """By lane: how far it knows the others to be."""
        self.knew: list[list[Clock]] = [[] for _ in _LANES]
        """By lane: the same at each of its operations."""
        self.out: list[Action] = []
        self.ahead: set[int] = set()
        """Groups that are being updated speculatively of their moment."""
        self.sizes = trace.chunk_nbytes

    def iteration(self, program: Sequence[Sequence[Action]]) -> tuple[tuple[Action, ...], ...]:
        self.iteration_start = list(self.done)
        lists = []
        for moment, actions in zip(self.trace.moments, program, strict=True):
            self.out = []
            update = None
            if (
                moment.kind is Kind.RELEASE
            ):  # it was in use until the moment before, and may be freed in this one's list
                self.slabs[moment.chunk, Tier.DEVICE].reads[_COMPUTE] = self.done[_COMPUTE]
            for action in actions:
                if isinstance(action, Update) and (moment.kind, moment.chunk.group) == (Kind.UPDATE, action.group):
                    update = action
                elif isinstance(action, Update):
                    self._update_ahead(action)
                else:
                    self._act(action)
            self._moment(moment, update)
            lists.append(tuple(self.out))
        return tuple(lists)

    def _act(self, action: Action) -> None:
        if isinstance(action, Alloc):
            idle = self.idle[action.tier, self.sizes[action.chunk]]
            is_idle = bool(idle) and is_reused(action.chunk, action.tier)
            self.slabs[action.chunk, action.tier] = idle.pop() if is_idle else _SlabUses()
        elif isinstance(action, Free):
            if not is_reused(action.chunk, action.tier):  # its memory goes back to the system at once
                self._compute_waits(self.slabs[action.chunk, action.tier])
            self._free(action.chunk, action.tier)
        elif isinstance(action, Copy):
            lane = _INDEX[action.lane]
            source = self.slabs[action.chunk, action.source]
            target = self.slabs[action.chunk, action.target]
            self._operate(lane, reads=(source,), writes=(target,))
        self.out.append(action)

    def _update_ahead(self, update: Update) -> None:
        """Read what is on HOST, and write elsewhere; the chunks take that over at the group's moment."""
        reads = [self.slabs[chunk, Tier.HOST] for chunk in self.trace.update(update.group).reads]
        self._operate(_HOST_UPDATE, reads, ())
        self.ahead.add(update.group)
        self.out.append(update)

    def _free(self, chunk: ChunkId, tier: Tier) -> None:
        slab = self.slabs.pop((chunk, tier))
        if is_reused(chunk, tier):
            self.idle[tier, self.sizes[chunk]].append(slab)

    def _moment(self, moment: Moment, update: Update | None) -> None:
        device = Tier.DEVICE
        key = (moment.chunk, device)
        reads: tuple[_SlabUses, ...] = ()
        writes: tuple[_SlabUses, ...] = ()
        if moment.kind in (Kind.CREATE, Kind.WRITE) or self._is_exchanged(moment):
            writes = (self.slabs[key],)
        elif moment.kind is Kind.HOLD:
            reads = (self.slabs[key],)
        if moment.kind is Kind.UPDATE and moment.chunk.group in self.ahead:
            self.ahead.remove(moment.chunk.group)
            written = self.trace.update(moment.chunk.group).writes
            self._operate(_HOST_UPDATE, (), [self.slabs[chunk, Tier.HOST] for chunk in written])
        elif update is not None:
            touched, tier = self.trace.update(update.group), update.tier
            reads = tuple(self.slabs[chunk, tier] for chunk in touched.chunks if chunk not in touched.writes)
            writes = tuple(self.slabs[chunk, tier] for chunk in touched.writes)
            if tier is Tier.HOST:
                self._operate(_HOST_UPDATE, reads, writes)
                reads = writes = ()
        self._operate(_COMPUTE, reads, writes)
        if update is not None:
            self.out.append(update)
        for tier in TIERS:
            if moment.kind is Kind.CONSUME and tier is not Tier.DEVICE and (moment.chunk, tier) in self.slabs:
                self._free(moment.chunk, tier)

    def _is_exchanged(self, moment: Moment) -> bool:
        """Tell whether COMPUTE has to come after all that touched a chunk, or all others after it, for an exchange.

        That writes weights of other ranks after their HOLD, and means of own gradients before their ARRIVE. In between
        nothing else is done with a held chunk, so COLLECTIVE itself needs no waits.
        """
        is_remote = self.trace.is_remote(moment.chunk)
        if moment.chunk.role is Role.PARAM:
            return moment.kind is Kind.HOLD and is_remote
        return moment.kind is Kind.ARRIVE and not is_remote

    def _operate(self, lane: int, reads: Sequence[_SlabUses], writes: Sequence[_SlabUses]) -> None:
        known = self.known[lane]
        needs: dict[int, int] = {}
        for slabs in (reads, writes):
            for slab in slabs:
                if slab.written is not None:
                    other, count = slab.written
                    if count > known[other] and count > needs.get(other, 0):
                        needs[other] = count
        for slab in writes:
            for other, count in slab.reads.items():
                if count > known[other] and count > needs.get(other, 0):
                    needs[other] = count
        needs.pop(lane, None)
        if needs:
            self._wait(lane, needs)
        self.done[lane] += 1
        count = self.done[lane]
        self.knew[lane].append(self.known[lane])
        for slab in reads:
            slab.reads[lane] = count
        for slab in writes:
            slab.written = (lane, count)
            slab.reads.clear()

    def _compute_waits(self, slab: _SlabUses) -> None:
        """Have COMPUTE wait for the copies that read a slab."""
        known = self.known[_COMPUTE]
        needs = {lane: count for lane, count in slab.reads.items() if lane != _COMPUTE and count > known[lane]}
        if needs:
            self._wait(_COMPUTE, needs)

    def _wait(self, lane: int, open_needs: dict[int, int]) -> None:
        """Add the waits of an operation for what its lane does not know to be over: a count of each other lane."""
        known = self.known[lane]
        for other in list(open_needs) if len(open_needs) > 1 else ():
            if any(
                self.knew[third][count - 1][other] >= open_needs[other]
                for third, count in open_needs.items()
                if third != other
            ):
                del open_needs[other]
        for other, count in sorted(open_needs.items()):
            self.out.append(Wait(_LANES[lane], _LANES[other], count - self.iteration_start[other]))
            merged = [a if a > b else b for a, b in zip(known, self.knew[other][count - 1], strict=True)]
            merged[other] = max(merged[other], count)
            known = tuple(merged)
        self.known[lane] = known
