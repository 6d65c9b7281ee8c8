"""Run a program's operations on lanes, iteration after iteration: what comes before what, and when each one runs.

[Note: What comes before what] Every operation has a number on its lane, counted from the first iteration on. A lane
*has seen* operation n of another if a Wait, or a Wait of an operation waited for, makes whatever is issued on it next
start after that one's end. A slab remembers its last write and, lane by lane, its last read. A read has to have seen
the write, a write the write and all those reads; who has seen a write has seen what came before it, too. Neither the
order in which a host issues operations nor the times computed here count: a plan must be right at any speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from chunkmem.errors import PlanError
from chunkmem.plan.model import FETCH, LANE_LINKS, Lane
from chunkmem.plan.timeline import Span
from chunkmem.trace.model import Moment
from chunkmem.types import ChunkId, Tier

LANES = tuple(Lane)
"""In a program a lane is an index into these."""
INDEX = {lane: at for at, lane in enumerate(LANES)}
COMPUTE, HOST_UPDATE, COLLECTIVE = INDEX[Lane.COMPUTE], INDEX[Lane.HOST_UPDATE], INDEX[Lane.COLLECTIVE]
FETCHES = INDEX[FETCH]
_ALL = 2**63
"""More operations than there will ever be."""


class Take(NamedTuple):
    """A replica gets the slab of its size that was given last on its tier, or a new one."""

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
    settles: bool = False
    """The moment of a group that was updated speculatively: the host waits for that update alone, and what waits for
    this for all that was issued on the lane before."""


Entry = Take | Give | Unhold | Await | LaneOperation


@dataclass(frozen=True)
class LaneProgram:
    """An iteration with all choices spelled out. A replica is an index into `replicas`, whether it has a slab or
    not."""

    entries: Sequence[Entry]
    replicas: Sequence[tuple[ChunkId, Tier]]
    nbytes: Sequence[int]
    """Of each replica's slab."""
    start: Sequence[int]
    """The replicas that have a slab when an iteration begins, and again when it ends."""
    moments: Sequence[Moment]


@dataclass
class IterationTimes:
    """The times of one iteration. An iteration begins when all computing of the one before has ended."""

    began_s: float
    """Since the first iteration began."""
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
        self.reads = [0] * len(LANES)


class SimulatedLanes:
    """The lanes of one machine, over any number of iterations of one program.

    With `one_processor` the host that issues operations is the one that computes, so both go at one pace. Otherwise
    the host runs ahead of COMPUTE, and only updates on it hold it up.
    """

    def __init__(self, program: LaneProgram, *, one_processor: bool) -> None:
        self._program = program
        self._one_processor = one_processor
        idle: dict[tuple[Tier, int], list[_SlabHistory]] = {}
        self._idle = [
            idle.setdefault((tier, n), []) for (_, tier), n in zip(program.replicas, program.nbytes, strict=True)
        ]
        self._slabs: list[_SlabHistory | None] = [None] * len(program.replicas)
        for replica in program.start:
            self._slabs[replica] = _SlabHistory()
        # Of each lane: how far it has seen every lane (itself: all the way), the same at each of its operations, and
        # the ends of those. Operations count from 1.
        self._seen: list[tuple[int, ...]] = [
            tuple(_ALL if a == b else 0 for b in range(len(LANES))) for a in range(len(LANES))
        ]
        self._seen_at: list[list[tuple[int, ...]]] = [[seen] for seen in self._seen]
        self._ends: list[list[float]] = [[0.0] for _ in LANES]
        self._base = [0] * len(LANES)
        self._held_until = [0.0] * len(LANES)
        self._host_s = 0.0
        self._updated_s: dict[ChunkId, float] = {}
        """By PARAM chunk, the end of its group's last update on HOST_UPDATE."""
        self._arrived = 0

    def run_iteration(self, *, record: bool) -> IterationTimes:
        """Run the program once more, from where the last iteration left the lanes; spans are made only if asked for.

        Raises:
            PlanError: two operations touch a slab, one of them writes it, and nothing orders them.
        """
        began_s = self._now_s()
        iteration = IterationTimes(began_s)
        self._base = [len(ends) - 1 for ends in self._ends]
        slabs, idle = self._slabs, self._idle
        for entry in self._program.entries:
            if isinstance(entry, LaneOperation):
                self._check(entry)
                ready_s, start_s, end_s = self._time(entry, iteration)
                if record:
                    self._record(entry, iteration, ready_s, start_s, end_s)
            elif isinstance(entry, Await):
                self._await(entry)
            elif isinstance(entry, Take):
                stack = idle[entry.replica]
                slabs[entry.replica] = stack.pop() if stack else _SlabHistory()
            elif isinstance(entry, Give):
                idle[entry.replica].append(self._slab(entry.replica))
                slabs[entry.replica] = None
            else:
                self._slab(entry.replica).reads[COMPUTE] = len(self._ends[COMPUTE]) - 1
        iteration.step_s = self._now_s() - began_s
        return iteration

    def _now_s(self) -> float:
        return max(self._ends[COMPUTE][-1], self._host_s)

    def _slab(self, replica: int) -> _SlabHistory:
        slab = self._slabs[replica]
        assert slab is not None
        return slab

    def _await(self, wait: Await) -> None:
        lane, on, number = wait
        number += self._base[on]
        seen = self._seen[lane]
        # What a lane has seen has ended before what it runs next: a Wait implied by others changes nothing.
        if number <= seen[on]:
            return
        if on == HOST_UPDATE and not self._one_processor:
            # The host issues to an accelerator's queues, which cannot wait for what a thread of the host does.
            self._host_s = max(self._host_s, self._ends[on][number])
        merged = [a if a > b else b for a, b in zip(seen, self._seen_at[on][number], strict=True)]
        merged[on] = number
        merged[lane] = _ALL
        self._seen[lane] = tuple(merged)
        if self._ends[on][number] > self._held_until[lane]:
            self._held_until[lane] = self._ends[on][number]

    def _check(self, operation: LaneOperation) -> None:
        """Refuse the operation where [Note: What comes before what] does, then remember it."""
        lane = operation.lane
        seen = self._seen[lane]
        number = len(self._ends[lane])
        for replica in operation.reads:
            slab = self._slab(replica)
            if slab.written > seen[slab.writer]:
                raise self._conflict(operation, "reads", replica, slab.writer, slab.written, "write")
            slab.reads[lane] = number
        for replica in operation.writes:
            slab = self._slab(replica)
            if slab.written > seen[slab.writer]:
                raise self._conflict(operation, "writes", replica, slab.writer, slab.written, "write")
            for reader, read in enumerate(slab.reads):
                if read > seen[reader]:
                    raise self._conflict(operation, "writes", replica, reader, read, "read")
            slab.writer = lane
            slab.written = number
        self._seen_at[lane].append(seen)

    def _time(self, operation: LaneOperation, iteration: IterationTimes) -> tuple[float, float, float]:
        """Return when the operation could start but for Waits, when it starts, and when it ends."""
        lane = operation.lane
        ends = self._ends[lane]
        ready_s, held_s = ends[-1], self._held_until[lane]
        if operation.settles:
            settled_s = max(held_s, self._updated_s[operation.chunk], self._host_s)
            ends.append(max(ready_s, settled_s))
            ready_s = max(self._host_s, self._ends[COMPUTE][-1])
            self._host_s = settled_s
            return ready_s, settled_s, settled_s
        if self._host_s > ready_s:
            ready_s = self._host_s
        start_s = held_s if held_s > ready_s else ready_s
        end_s = start_s + operation.duration_s
        ends.append(end_s)
        if lane == COMPUTE:
            if (seen := self._seen[COMPUTE][FETCHES]) > self._arrived:
                iteration.late += sum(
                    arrival_s > ready_s for arrival_s in self._ends[FETCHES][self._arrived + 1 : seen + 1]
                )
                self._arrived = seen
            if self._one_processor:
                self._host_s = end_s
        elif lane == HOST_UPDATE and operation.is_ahead:
            self._updated_s[operation.chunk] = end_s
            if operation.writes:  # in `step()`, which waits for what the update comes after
                self._host_s = max(self._host_s, held_s)
        elif lane == HOST_UPDATE:
            self._host_s = end_s
        return ready_s, start_s, end_s

    def _record(
        self, operation: LaneOperation, iteration: IterationTimes, ready_s: float, start_s: float, end_s: float
    ) -> None:
        lane, moment, chunk = operation.lane, operation.moment, operation.chunk
        if end_s == ready_s and not operation.nbytes:
            return
        ready_s, start_s, end_s = ready_s - iteration.began_s, start_s - iteration.began_s, end_s - iteration.began_s
        label = str(chunk) if operation.nbytes else str(self._program.moments[moment])
        # On one processor an update on the host that waits keeps COMPUTE waiting.
        stands_still = lane == HOST_UPDATE and (self._one_processor or operation.settles) and not operation.is_ahead
        if start_s > ready_s and (lane == COMPUTE or stands_still):
            iteration.spans.append(Span(Lane.COMPUTE, label, ready_s, start_s, moment, chunk, is_stall=True))
        if (end_s > start_s or operation.nbytes) and not operation.settles:
            iteration.spans.append(Span(LANES[lane], label, start_s, end_s, moment, chunk, operation.nbytes))

    def _conflict(
        self, operation: LaneOperation, does: str, replica: int, lane: int, number: int, did: str
    ) -> PlanError:
        moments = self._program.moments
        chunk, tier = self._program.replicas[replica]
        doing = {
            COMPUTE: f"computing the {moments[operation.moment].kind.value}",
            **{INDEX[each]: f"Copy {operation.chunk} to {to.name}" for each, (_, to) in LANE_LINKS.items()},
            HOST_UPDATE: f"Update group {operation.chunk.group} on HOST",
            COLLECTIVE: f"exchanging {operation.chunk}",
        }[operation.lane]
        # Counts reach one iteration back; to wait for something older, the first operation of the iteration before will
        # do.
        count = max(number - self._base[lane], 1 - self._num_operations(lane))
        return PlanError(
            f"moment {operation.moment} ({moments[operation.moment]}): {doing}: it {does} the slab of {chunk} on "
            f"{tier.name}, which an operation on {LANES[lane].name} may still {did}; a Wait of "
            f"{LANES[operation.lane].name} on {LANES[lane].name}, count {count} or more, is missing"
        )

    def _num_operations(self, lane: int) -> int:
        return sum(isinstance(entry, LaneOperation) and entry.lane == lane for entry in self._program.entries)
