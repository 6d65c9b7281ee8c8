"""Put into a program the waits it needs, and no others. Pure.

Operations on one lane run in order; everything else that has to come after something gets a `Wait`: what reads a slab
comes after its last write, what writes one comes after its last write and all reads since. Memory of activations on
DEVICE is given back for good, and COMPUTE waits before that for the copies that read it. A wait that others imply is
left out; vector clocks (for each lane, how far it knows the others to be) tell.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from chunkmem.plan.model import Action, Alloc, Copy, Free, Lane, Placed, Round, Update, Wait, is_reused
from chunkmem.trace.model import Kind, Moment, Trace
from chunkmem.types import TIERS, ChunkId, Role, Tier

_LANES = tuple(lane for lane in Lane if lane is not Lane.COLLECTIVE)
_INDEX: dict[Lane, int] = {lane: at for at, lane in enumerate(_LANES)}
_COMPUTE, _HOST_UPDATE = _INDEX[Lane.COMPUTE], _INDEX[Lane.HOST_UPDATE]
_MAX_LAPS = 5

Clock = tuple[int, ...]
"""By lane: the number of its operations that are known to be over."""


class _SlabUses:
    """The operations that may still be at work on a slab."""

    __slots__ = ("reads", "writer", "written")

    def __init__(self) -> None:
        self.writer = _COMPUTE
        """The lane of the last write."""
        self.written = 0
        """Number of the last write on the lane `writer`; 0: there was none."""
        self.reads: dict[int, int] = {}
        """By lane: the number of its last read since that write."""


_Idle = list[_SlabUses]


class _Take(NamedTuple):
    """A replica gets the idle slab that was given last, or a new one."""

    replica: int
    idle: _Idle | None


class _Give(NamedTuple):
    """A replica's slab becomes idle; None: its memory goes back to the system at once."""

    replica: int
    idle: _Idle | None


class _Held(NamedTuple):
    """A replica was in use until the moment before."""

    replica: int


class _Operate(NamedTuple):
    """An operation on a lane, and the replicas that it touches."""

    lane: int
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()


_PASS = _Operate(_COMPUTE)
"""A moment that touches nothing."""
_Step = _Take | _Give | _Held | _Operate | Action
"""One entry of a moment's program; an action is only written down."""


def add_waits(
    trace: Trace, start: Iterable[Placed], program: Sequence[Sequence[Action]]
) -> tuple[tuple[Action, ...], ...]:
    """Return the program with its waits.

    It is followed iteration after iteration until two iterations wait for the same: from then on all do.
    """
    reader = _Reader(trace, start)
    steps = [reader.steps(moment, actions) for moment, actions in zip(trace.moments, program, strict=True)]
    follower = _Follower(steps, len(reader.numbers))
    iteration = follower.iteration()
    for _ in range(_MAX_LAPS):
        following = follower.iteration()
        if following == iteration:
            break
        iteration = following
    return iteration


class _Reader:
    """Spells out what the moments of a program do, once for all iterations. Replicas are numbered as they come."""

    def __init__(self, trace: Trace, start: Iterable[Placed]) -> None:
        self.trace = trace
        self.numbers: dict[tuple[ChunkId, Tier], int] = {}
        self.idle: dict[tuple[Tier, int], _Idle] = defaultdict(list)
        self.present = {(placed.chunk, placed.tier) for placed in start}
        self.ahead: set[int] = set()
        """Groups that are being updated speculatively."""

    def steps(self, moment: Moment, actions: Sequence[Action]) -> list[_Step]:
        """Return what is done in the next moment."""
        found: list[_Step] = []
        update = None
        if moment.kind is Kind.RELEASE:  # it may be freed in this one's list
            found.append(_Held(self._replica(moment.chunk, Tier.DEVICE)))
        if moment.kind is Kind.HOLD and not actions and not self.trace.remote_groups:  # most moments are like this
            return [_Operate(_COMPUTE, (self._replica(moment.chunk, Tier.DEVICE),))]
        for action in actions:
            if isinstance(action, Update):
                if (moment.kind, moment.chunk.group) == (Kind.UPDATE, action.group):
                    update = action
                    continue
                # It reads what is on HOST, and writes elsewhere; the chunks take that over at the group's moment.
                found.append(_Operate(_HOST_UPDATE, self._replicas(self.trace.update(action.group).reads, Tier.HOST)))
                self.ahead.add(action.group)
            elif isinstance(action, Alloc):
                self.present.add((action.chunk, action.tier))
                found.append(_Take(self._replica(action.chunk, action.tier), self._idle(action.chunk, action.tier)))
            elif isinstance(action, Free):
                found.append(self._give(action.chunk, action.tier))
            elif isinstance(action, Round):
                master, param = ChunkId(Role.MASTER, action.chunk.group), action.chunk
                reads, writes = (self._replica(chunk, Tier.HOST) for chunk in (master, param))
                found.append(_Operate(_HOST_UPDATE, (reads,), (writes,)))
            elif isinstance(action, Copy):
                reads, writes = (self._replica(action.chunk, tier) for tier in (action.source, action.target))
                found.append(_Operate(_INDEX[action.lane], (reads,), (writes,)))
            found.append(action)
        if moment.kind is Kind.RELEASE:
            found.append(_PASS)
        else:
            found += self._moment(moment, update)
        return found

    def _moment(self, moment: Moment, update: Update | None) -> Iterator[_Step]:
        chunk, kind = moment.chunk, moment.kind
        reads: tuple[int, ...] = ()
        writes: tuple[int, ...] = ()
        if kind in (Kind.CREATE, Kind.WRITE) or self._is_exchanged(moment):
            writes = (self._replica(chunk, Tier.DEVICE),)
        elif kind is Kind.HOLD:
            reads = (self._replica(chunk, Tier.DEVICE),)
        if kind is Kind.UPDATE and chunk.group in self.ahead:
            self.ahead.remove(chunk.group)
            yield _Operate(_HOST_UPDATE, (), self._replicas(self.trace.update(chunk.group).writes, Tier.HOST))
        elif update is not None:
            touched = self.trace.update(update.group)
            reads = self._replicas([each for each in touched.chunks if each not in touched.writes], update.tier)
            writes = self._replicas(touched.writes, update.tier)
            if update.tier is Tier.HOST:
                yield _Operate(_HOST_UPDATE, reads, writes)
                reads = writes = ()
        yield _Operate(_COMPUTE, reads, writes)
        if update is not None:
            yield update
        if kind is Kind.CONSUME:
            for tier in TIERS:
                if tier is not Tier.DEVICE and (chunk, tier) in self.present:
                    yield self._give(chunk, tier)

    def _is_exchanged(self, moment: Moment) -> bool:
        """Tell whether COMPUTE has to come after all that touched a chunk, or all others after it, for an exchange.

        That writes weights of other ranks after their HOLD, and means of own gradients before their ARRIVE. In between
        nothing else is done with a held chunk, so COLLECTIVE itself needs no waits.
        """
        is_remote = self.trace.is_remote(moment.chunk)
        if moment.chunk.role.kind.is_weights:
            return moment.kind is Kind.HOLD and is_remote
        return moment.kind is Kind.ARRIVE and not is_remote

    def _give(self, chunk: ChunkId, tier: Tier) -> _Give:
        self.present.remove((chunk, tier))
        return _Give(self._replica(chunk, tier), self._idle(chunk, tier))

    def _idle(self, chunk: ChunkId, tier: Tier) -> _Idle | None:
        return self.idle[tier, self.trace.chunk_nbytes[chunk]] if is_reused(chunk, tier) else None

    def _replica(self, chunk: ChunkId, tier: Tier) -> int:
        return self.numbers.setdefault((chunk, tier), len(self.numbers))

    def _replicas(self, chunks: Iterable[ChunkId], tier: Tier) -> tuple[int, ...]:
        return tuple(self._replica(chunk, tier) for chunk in chunks)


class _Follower:
    """Follows what a program does, iteration after iteration, and waits where it has to."""

    def __init__(self, steps: Sequence[Sequence[_Step]], num_replicas: int) -> None:
        self.steps = steps
        self.slabs = [_SlabUses() for _ in range(num_replicas)]
        self.done = [0] * len(_LANES)
        """Operations issued on each lane, since the first iteration began."""
        self.iteration_start = list(self.done)
        self.known: list[Clock] = [tuple(self.done)] * len(_LANES)
        """By lane: how many operations of each lane it knows to be over."""
        self.knew: list[list[Clock]] = [[] for _ in _LANES]
        """By lane, and by operation on it: the value of `known` when the operation was issued."""
        self.waits: dict[tuple[int, int, int], Wait] = {}
        """Waits made so far, by (waiting lane, lane waited for, count)."""
        self.out: list[Action] = []

    def iteration(self) -> tuple[tuple[Action, ...], ...]:
        """Follow the next iteration; return its actions."""
        self.iteration_start = list(self.done)
        slabs = self.slabs
        lists = []
        for steps in self.steps:
            self.out = []
            for step in steps:
                if step is _PASS:
                    self.done[_COMPUTE] += 1
                    self.knew[_COMPUTE].append(self.known[_COMPUTE])
                elif isinstance(step, _Operate):
                    self._operate(step)
                elif isinstance(step, _Take):
                    slabs[step.replica] = step.idle.pop() if step.idle else _SlabUses()
                elif isinstance(step, _Give):
                    if step.idle is None:
                        self._compute_waits(slabs[step.replica])
                    else:
                        step.idle.append(slabs[step.replica])
                elif isinstance(step, _Held):
                    slabs[step.replica].reads[_COMPUTE] = self.done[_COMPUTE]
                else:
                    self.out.append(step)
            lists.append(tuple(self.out))
        return tuple(lists)

    def _operate(self, operation: _Operate) -> None:
        lane, reads, writes = operation
        slabs, known = self.slabs, self.known[lane]
        needs: dict[int, int] = {}
        for replica in reads:
            slab = slabs[replica]
            other, count = slab.writer, slab.written
            if count > known[other] and other != lane and count > needs.get(other, 0):
                needs[other] = count
        for replica in writes:
            slab = slabs[replica]
            other, count = slab.writer, slab.written
            if count > known[other] and other != lane and count > needs.get(other, 0):
                needs[other] = count
            for other, count in slab.reads.items():
                if count > known[other] and other != lane and count > needs.get(other, 0):
                    needs[other] = count
        if needs:
            self._wait(lane, needs)
        count = self.done[lane] = self.done[lane] + 1
        self.knew[lane].append(self.known[lane])
        for replica in reads:
            slabs[replica].reads[lane] = count
        for replica in writes:
            slab = slabs[replica]
            slab.writer, slab.written = lane, count
            slab.reads.clear()

    def _compute_waits(self, slab: _SlabUses) -> None:
        """Have COMPUTE wait for the copies that read a slab."""
        known = self.known[_COMPUTE]
        needs = {lane: count for lane, count in slab.reads.items() if lane != _COMPUTE and count > known[lane]}
        if needs:
            self._wait(_COMPUTE, needs)

    def _wait(self, lane: int, open_needs: dict[int, int]) -> None:
        """Add the waits of an operation for what its lane does not know to be over: a count of each other lane."""
        known, knew = self.known[lane], self.knew
        if len(open_needs) > 1:
            for other, count in list(open_needs.items()):
                for third, seen in open_needs.items():
                    if third != other and knew[third][seen - 1][other] >= count:
                        del open_needs[other]
                        break
        for other, count in sorted(open_needs.items()):
            key = lane, other, count - self.iteration_start[other]
            wait = self.waits.get(key)
            if wait is None:
                wait = self.waits[key] = Wait(_LANES[lane], _LANES[other], key[2])
            self.out.append(wait)
            merged = [a if a > b else b for a, b in zip(known, knew[other][count - 1], strict=True)]
            merged[other] = max(merged[other], count)
            known = tuple(merged)
        self.known[lane] = known
