"""Run a program's operations on lanes, iteration after iteration: what comes before what, and when each one runs.

Where a program has no waits yet, those that it needs are found in the same way: what is refused in a finished one is
waited for.

Every operation has a number on its lane, counted from the first iteration on. A lane *has seen* operation n of another
if a Wait, or a Wait of an operation waited for, makes whatever is issued on it next start after that one's end. A slab
remembers its last write and, lane by lane, its last read. A read has to have seen the write, a write the write and all
those reads; who has seen a write has seen what came before it, too. Neither the order in which a host issues operations
nor the times computed here count: a plan must be right at any speed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from chunkmem.data.errors import PlanError
from chunkmem.data.trace import Moment
from chunkmem.data.types import DEVICE_LINKS, LINKS, ChunkId, Role, Tier
from chunkmem.plan.lane_times import Bandwidth, Queue, end_times
from chunkmem.plan.model import DIRECTIONS, FETCH, LINK_LANES, Lane, is_reused, rounding_of
from chunkmem.plan.timeline import Span

LANES = tuple(Lane)
"""All lanes; a program names a lane by its index here."""
INDEX = {lane: at for at, lane in enumerate(LANES)}
COMPUTE, HOST_UPDATE, COLLECTIVE = INDEX[Lane.COMPUTE], INDEX[Lane.HOST_UPDATE], INDEX[Lane.COLLECTIVE]
FETCHES = INDEX[FETCH]
_THREADS = {INDEX[LINK_LANES[link]] for link in LINKS if link not in DEVICE_LINKS}
"""Lanes that are threads of the host, on any machine."""
_ALL = 2**63
"""More operations than there will ever be."""
_MAX_LAPS = 6
"""Iterations in which waits are looked for."""


class Take(NamedTuple):
    """A replica gets the slab of its size that was given last on its tier, or a new one; see `is_reused`."""

    replica: int


class Give(NamedTuple):
    """A replica's slab becomes idle."""

    replica: int


class Unhold(NamedTuple):
    """Every operation on COMPUTE until now has read the replica: it was held."""

    replica: int


class Await(NamedTuple):
    """What is issued on `lane` from now on starts after operation `number` of this iteration on `on`."""

    lane: int
    on: int
    number: int


class LaneOperation(NamedTuple):
    """What takes time on a lane, and the replicas it touches; one that is read and written is among the writes."""

    lane: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    duration_s: float
    moment: int
    chunk: ChunkId
    nbytes: int
    """Moved by it."""
    is_ahead: bool = False
    """An update that the host does not wait for: a speculative one, or one that `step()` leaves to its lane."""
    commits: bool = False
    """The moment of a group that was updated speculatively: the host waits for that update alone, and what waits for
    this for all that was issued on the lane before."""
    host_nbytes: int = 0
    """Read and written on HOST by it."""


Entry = Take | Give | Unhold | Await | LaneOperation

_Operations = tuple[tuple[int, int], ...]
"""Pairs of a lane and the number of an operation on it."""


@dataclass(frozen=True)
class LaneProgram:
    """An iteration with all choices spelled out. A replica is an index into `replicas`, whether it has a slab or
    not."""

    entries: Sequence[Entry]
    replicas: Sequence[tuple[ChunkId, Tier]]
    nbytes: Sequence[int]
    """By replica: bytes of its slab."""
    start: Sequence[int]
    """The replicas that have a slab when an iteration begins, and again when it ends."""
    moments: Sequence[Moment]


@dataclass
class IterationTimes:
    """The times of one iteration. An iteration begins when all computing of the one before has ended."""

    began_s: float
    """Seconds from the begin of the first iteration to the begin of this one."""
    spans: list[Span] = field(default_factory=list)
    """Relative to the iteration's begin; a host that runs ahead issues copies before it."""
    step_s: float = 0.0
    late: int = 0
    """Copies to DEVICE that were still under way when COMPUTE was ready for what needs them."""


class _SlabHistory:
    """Memory, and the operations that touched it last."""

    __slots__ = ("reads", "writer", "written")

    def __init__(self) -> None:
        self.writer = COMPUTE
        self.written = 0
        self.reads: dict[int, int] = {}


class SimulatedLanes:
    """The lanes of one machine, over any number of iterations of one program.

    With `one_processor` the host that issues operations is the one that computes, so both go at one pace. Otherwise
    the host runs ahead of COMPUTE, and only updates on it hold it up.
    """

    def __init__(self, program: LaneProgram, *, one_processor: bool, bandwidth: Bandwidth) -> None:
        self._program = program
        self._one_processor = one_processor
        self._host_lanes = {HOST_UPDATE, COMPUTE} if one_processor else {HOST_UPDATE}
        self._bandwidth = bandwidth
        idle: dict[tuple[Tier, int], list[_SlabHistory]] = {}
        self._idle = [
            idle.setdefault((tier, n), []) if is_reused(chunk, tier) else None
            for (chunk, tier), n in zip(program.replicas, program.nbytes, strict=True)
        ]
        self._slabs = [_SlabHistory() for _ in program.replicas]
        """By replica: the history of its slab; unused while the replica has none."""
        # Of each lane: how far it has seen every lane (itself: all the way), and the same at each of its operations.
        # Operations count from 1.
        self._seen: list[tuple[int, ...]] = [
            tuple(_ALL if a == b else 0 for b in range(len(LANES))) for a in range(len(LANES))
        ]
        self._seen_at: list[list[tuple[int, ...]]] = [[seen] for seen in self._seen]
        self._base = [0] * len(LANES)
        self._operations = [entry for entry in program.entries if isinstance(entry, LaneOperation)]
        self._queues = [Queue() for _ in LANES]
        for operation in self._operations:
            self._queues[operation.lane].add(operation.duration_s, operation.host_nbytes, bandwidth)
        self._waits: list[list[tuple[int, int]]] = [[] for _ in LANES]
        """By lane: operations, as (lane, number), that its next operation starts after."""
        self._host: _Operations = ()
        """What has held the host up, one of each lane at most: nothing is issued before the last of their ends."""
        self._host_known: list[_Operations] = [()] * len(LANES)
        """By lane: the operations that had held the host up when the lane's last operation was issued."""
        self._hosts: list[_Operations] = []
        """By operation of this iteration, in order: the operations that had held the host up when it was issued."""
        self._updated: dict[ChunkId, int] = {}
        """By PARAM chunk, the number of its group's last update that the host does not wait for."""
        self._needs: dict[int, int] | None = None
        """By lane, the number of the operation that the next one has to see, and has not; None: that is an error."""
        self._found: list[tuple[int, Await]] = []

    def run(self, iterations: int) -> IterationTimes:
        """Run the program so many times in succession, and return the times of the last.

        Raises:
            PlanError: two operations touch a slab, one of them writes it, and nothing orders them.
        """
        # The first iteration has none before it; the second is like all that follow.
        for _ in range(min(iterations, 2)):
            host = self._host
            self._issue_all()
        lengths = [len(queue.durations_s) for queue in self._queues]
        queues = [queue.repeated(lane, lengths, iterations) for lane, queue in enumerate(self._queues)]
        ends = end_times(queues, self._bandwidth)
        skipped = [max(0, iterations - 2) * length for length in lengths]
        return self._times([found[first:] for found, first in zip(ends, skipped, strict=True)], host)

    def needed_waits(self) -> list[tuple[int, Await]]:
        """Return the waits that the program lacks, each with the index of the entry that it has to come before.

        The program is followed iteration after iteration until two iterations wait for the same: from then on all do.
        What other waits imply is left out. Memory that is given back for good has COMPUTE wait for what reads it.
        """
        self._needs, before = {}, None
        for _ in range(_MAX_LAPS):
            self._found = []
            self._issue_all()
            if self._found == before:
                break
            before = self._found
        return self._found

    def _issue_all(self) -> None:
        self._base, self._hosts = [len(seen) - 1 for seen in self._seen_at], []
        slabs, idle, is_finished = self._slabs, self._idle, self._needs is None
        for at, entry in enumerate(self._program.entries):
            if isinstance(entry, LaneOperation):
                self._check(entry, at)
                if is_finished:
                    self._order(entry)
            elif isinstance(entry, Await):
                self._await(entry)
            elif isinstance(entry, Take):
                stack = idle[entry.replica]
                slabs[entry.replica] = stack.pop() if stack else _SlabHistory()
            elif isinstance(entry, Give):
                slab = slabs[entry.replica]
                if (stack := idle[entry.replica]) is not None:
                    stack.append(slab)
                elif not is_finished:
                    seen = self._seen[COMPUTE]
                    self._wait(COMPUTE, {lane: read for lane, read in slab.reads.items() if read > seen[lane]}, at)
            else:
                slabs[entry.replica].reads[COMPUTE] = len(self._seen_at[COMPUTE]) - 1

    def _await(self, wait: Await) -> None:
        lane, on, number = wait
        number += self._base[on]
        seen = self._seen[lane]
        # What a lane has seen has ended before what it runs next: a Wait implied by others changes nothing.
        if number <= seen[on]:
            return
        if on == HOST_UPDATE and not self._one_processor and lane not in _THREADS:
            # The host issues to an accelerator's queues, which cannot wait for what a thread of the host does.
            self._hold_host([(on, number)])
        merged = [a if a > b else b for a, b in zip(seen, self._seen_at[on][number], strict=True)]
        merged[on] = number
        merged[lane] = _ALL
        self._seen[lane] = tuple(merged)
        self._waits[lane].append((on, number))

    def _hold_host(self, operations: Iterable[tuple[int, int]]) -> None:
        """The host waits for operations, of which these are the lanes and numbers."""
        host = dict(self._host)
        for lane, number in operations:
            host[lane] = max(host.get(lane, 0), number)
        self._host = tuple(host.items())

    def _order(self, operation: LaneOperation) -> None:
        """Note what the operation starts after, and what the host waits for."""
        lane, host, waits = operation.lane, self._host, self._waits[operation.lane]
        number = len(self._seen_at[lane]) - 1
        self._hosts.append(host)
        own = tuple(waits)
        known = self._host_known[lane]
        if host is not known:
            self._host_known[lane] = host
            waits += [(other, now) for other, now in host if other != lane and (other, now) not in known]
        if waits:
            self._queues[lane].after[number - 1] = waits
            self._waits[lane] = []
        if operation.is_ahead:
            self._updated[operation.chunk] = number
        elif operation.commits:
            self._hold_host([*own, (lane, self._updated[operation.chunk])])
        elif lane in self._host_lanes:  # it starts after all that the host has waited for
            self._host = ((lane, number),)

    def _check(self, operation: LaneOperation, at: int) -> None:
        """See to it that the operation has seen what it must (see the module's docstring), then remember it."""
        lane, slabs = operation.lane, self._slabs
        seen, seen_at = self._seen[lane], self._seen_at[lane]
        number = len(seen_at)
        for replica in operation.reads:
            slab = slabs[replica]
            if slab.written > seen[slab.writer]:
                self._lacks(operation, "reads", replica, slab.writer, slab.written, "write")
            slab.reads[lane] = number
        for replica in operation.writes:
            slab = slabs[replica]
            if slab.written > seen[slab.writer]:
                self._lacks(operation, "writes", replica, slab.writer, slab.written, "write")
            for reader, read in slab.reads.items():
                if read > seen[reader]:
                    self._lacks(operation, "writes", replica, reader, read, "read")
            slab.reads.clear()
            slab.writer = lane
            slab.written = number
        if self._needs:
            needs, self._needs = self._needs, {}
            self._wait(lane, needs, at)
            seen = self._seen[lane]
        seen_at.append(seen)

    def _wait(self, lane: int, needs: Mapping[int, int], at: int) -> None:
        """Have a lane see operations of others, by their lanes, from the entry `at` on."""
        for on, number in sorted(needs.items()):
            # What one of the others has seen needs no wait of its own.
            if all(self._seen_at[other][then][on] < number for other, then in needs.items() if other != on):
                wait = Await(lane, on, number - self._base[on])
                self._found.append((at, wait))
                self._await(wait)

    def _times(self, ends: Sequence[Sequence[float]], host: _Operations) -> IterationTimes:
        """Return the times of the last iteration.

        Args:
            ends: of its operations and those before it, by lane and number.
            host: what had held the host up before it.
        """

        def free_s(host: _Operations) -> float:
            return max((ends[lane][number] for lane, number in host), default=0.0)

        number, host_s = list(self._base), free_s(host)
        computed, seen_at, after = ends[COMPUTE], self._seen_at[COMPUTE], [queue.after for queue in self._queues]
        iteration = IterationTimes(max(computed[number[COMPUTE]], host_s))
        arrived = seen_at[number[COMPUTE]][FETCHES]
        for operation, (host_before, host_after) in zip(
            self._operations, pairwise([*self._hosts, self._host]), strict=True
        ):
            lane = operation.lane
            if host_before is not host:
                host, host_s = host_before, free_s(host_before)
            position = number[lane]
            before_s = start_s = ends[lane][position]
            for other, awaited in after[lane].get(position, ()):
                start_s = max(start_s, ends[other][awaited])
            number[lane] = position + 1
            end_s = ends[lane][position + 1]
            ready_s = computed[number[COMPUTE]] if operation.commits else before_s
            if host_s > ready_s:
                ready_s = host_s
            if operation.commits:  # the host continues when its own update is over
                start_s = end_s = free_s(host_after)
            if lane == COMPUTE and (seen := seen_at[position + 1][FETCHES]) > arrived:
                iteration.late += sum(arrival_s > ready_s for arrival_s in ends[FETCHES][arrived + 1 : seen + 1])
                arrived = seen
            if end_s != ready_s or operation.nbytes:
                self._record(operation, iteration, ready_s, start_s, end_s)
        iteration.step_s = max(computed[-1], free_s(self._host)) - iteration.began_s
        return iteration

    def _record(
        self, operation: LaneOperation, iteration: IterationTimes, ready_s: float, start_s: float, end_s: float
    ) -> None:
        lane, moment, chunk, began_s = operation.lane, operation.moment, operation.chunk, iteration.began_s
        ready_s, start_s, end_s = ready_s - began_s, start_s - began_s, end_s - began_s
        label = str(chunk) if operation.nbytes else str(self._program.moments[moment])
        if lane == HOST_UPDATE and chunk.role is Role.MASTER:
            label = rounding_of(chunk)
        # On one processor an update on the host that waits keeps COMPUTE waiting.
        stands_still = lane == HOST_UPDATE and (self._one_processor or operation.commits) and not operation.is_ahead
        if start_s > ready_s and (lane == COMPUTE or stands_still):
            iteration.spans.append(Span(Lane.COMPUTE, label, ready_s, start_s, moment, chunk, is_stall=True))
        if (end_s > start_s or operation.nbytes) and not operation.commits:
            iteration.spans.append(Span(LANES[lane], label, start_s, end_s, moment, chunk, operation.nbytes))

    def _lacks(self, operation: LaneOperation, does: str, replica: int, lane: int, number: int, did: str) -> None:
        if self._needs is not None:
            self._needs[lane] = max(number, self._needs.get(lane, 0))
            return
        moments = self._program.moments
        chunk, tier = self._program.replicas[replica]
        doing = {
            COMPUTE: f"computing the {moments[operation.moment].kind.value}",
            **{INDEX[each]: f"Copy {operation.chunk} {where}" for each, where in DIRECTIONS.items()},
            HOST_UPDATE: f"{'Round' if operation.chunk.role is Role.MASTER else 'Update'} group "
            f"{operation.chunk.group} on HOST",
            COLLECTIVE: f"exchanging {operation.chunk}",
        }[operation.lane]
        # Counts reach one iteration back; to wait for something older, the first operation of the iteration before will
        # do.
        count = max(number - self._base[lane], 1 - len(self._queues[lane].durations_s))
        raise PlanError(
            f"moment {operation.moment} ({moments[operation.moment]}): {doing}: it {does} the slab of {chunk} on "
            f"{tier.name}, which an operation on {LANES[lane].name} may still {did}; a Wait of "
            f"{LANES[operation.lane].name} on {LANES[lane].name}, count {count} or more, is missing"
        )
