"""When operations run: each lane in order, each operation after what it waits for, at the rate that sharing leaves it.

[Note: Shared bandwidth] Copies in both directions share the link, and copies and updates on HOST share its memory.
Rates change only when an operation starts or ends. In between,

1. if copies in both directions ask for more than `duplex_Bps` together, they are slowed down alike;
2. if copies and updates ask for more than `host_memory_Bps` together, they get max-min fair shares: nobody more than it
   asks for, and what small ones leave is divided among the others.

    HOST_UPDATE   |=== all of it ===|== what H2D leaves ==|=== all of it ===|
    H2D                             |======= copy ========|

So HOST never reads and writes more bytes a second than its memory can.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from chunkmem.plan.model import Lane

_LINKS = frozenset(index for index, lane in enumerate(Lane) if lane in (Lane.H2D, Lane.D2H))
"""Links that share `duplex_Bps`."""


@dataclass(frozen=True)
class Bandwidth:
    """What copies and updates on HOST share, in bytes a second; see [Note: Shared bandwidth]."""

    host_memory_Bps: float = inf
    duplex_Bps: float = inf

    @property
    def is_shared(self) -> bool:
        """Tell whether either is limited."""
        return min(self.host_memory_Bps, self.duplex_Bps) < inf

    def share(self, asked_Bps: Mapping[int, float]) -> Mapping[int, float]:
        """Return what each lane's operation gets of what it asks for, which alone it would get."""
        total_Bps = sum(asked_Bps.values())
        if len(asked_Bps) == 1 or total_Bps <= min(self.host_memory_Bps, self.duplex_Bps):
            return asked_Bps
        given_Bps = dict(asked_Bps)
        if given_Bps.keys() >= _LINKS:
            copied_Bps = sum(given_Bps[lane] for lane in _LINKS)
            if copied_Bps > self.duplex_Bps:
                for lane in _LINKS:
                    given_Bps[lane] *= self.duplex_Bps / copied_Bps
                total_Bps = sum(given_Bps.values())
        if total_Bps > self.host_memory_Bps:
            left_Bps, num_left = self.host_memory_Bps, len(given_Bps)
            for lane, Bps in sorted(given_Bps.items(), key=lambda each: each[1]):
                given_Bps[lane] = min(Bps, left_Bps / num_left)
                left_Bps -= given_Bps[lane]
                num_left -= 1
        return given_Bps


@dataclass
class Queue:
    """The operations of a lane. Numbers of operations begin with 1; number 0 has always ended."""

    durations_s: list[float] = field(default_factory=list)
    """Seconds of each operation without contention."""
    asked_Bps: list[float] = field(default_factory=list)
    """Bytes per second that each operation asks of HOST's memory; 0: it shares no bandwidth."""
    after: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """By position, from 0, of operations that start after some of other lanes: those lanes and numbers."""

    def add(self, duration_s: float, host_nbytes: int, bandwidth: Bandwidth) -> None:
        """Add an operation that reads and writes so many bytes on HOST."""
        asked_Bps = 0.0
        if host_nbytes and bandwidth.is_shared:
            duration_s = max(duration_s, host_nbytes / bandwidth.host_memory_Bps)
            asked_Bps = host_nbytes / duration_s if duration_s else 0.0
        self.durations_s.append(duration_s)
        self.asked_Bps.append(asked_Bps)

    def repeated(self, lane: int, lengths: Sequence[int], iterations: int) -> Queue:
        """Return the queue of so many iterations, given that of one, with `after` of two.

        Args:
            lane: whose queue it is.
            lengths: of each lane's queue.
            iterations: all but the first are like the second.
        """
        after = dict(self.after)
        for again in range(1, iterations - 1):
            for position, others in self.after.items():
                if position >= lengths[lane]:
                    shifted = [(other, number + again * lengths[other]) for other, number in others]
                    after[position + again * lengths[lane]] = shifted
        return Queue(self.durations_s * iterations, self.asked_Bps * iterations, after)


class _Sharing:
    """An operation that asks for a share of bandwidth, and has not ended."""

    __slots__ = ("asked_Bps", "end_s", "left_s", "since_s", "speed")

    def __init__(self, asked_Bps: float, start_s: float, duration_s: float) -> None:
        self.asked_Bps = asked_Bps
        self.since_s = start_s
        """Time in seconds at which the operation started or last changed its speed."""
        self.left_s = duration_s
        """Seconds of uncontended work that were left at `since_s`."""
        self.speed = 1.0
        self.end_s = start_s + duration_s

    def change_speed(self, now_s: float, speed: float) -> None:
        self.left_s = max(0.0, self.left_s - (now_s - self.since_s) * self.speed)
        self.since_s, self.speed = now_s, speed
        self.end_s = now_s + self.left_s / speed


def end_times(queues: Sequence[Queue], bandwidth: Bandwidth) -> list[list[float]]:
    """Return, by lane, when each operation ends, by its number; number 0 ends at 0.0."""
    ends = [[0.0] for _ in queues]
    sharing: dict[int, _Sharing] = {}
    now_s = 0.0
    while True:
        while any(_follow(lane, queue, ends, sharing) for lane, queue in enumerate(queues) if lane not in sharing):
            pass
        if not sharing:
            return ends
        lane, now_s = _first_end(sharing, now_s, bandwidth)
        ends[lane].append(now_s)
        del sharing[lane]


def _follow(lane: int, queue: Queue, ends: Sequence[list[float]], sharing: dict[int, _Sharing]) -> bool:
    """Add the ends that follow from those known, up to an operation that shares; tell whether there were any."""
    known, after = ends[lane], queue.after
    first, end_s = len(known) - 1, known[-1]
    for position in range(first, len(queue.durations_s)):
        if position in after:
            for other, number in after[position]:
                if number >= len(ends[other]):
                    return position > first
                if ends[other][number] > end_s:
                    end_s = ends[other][number]
        if queue.asked_Bps[position]:
            sharing[lane] = _Sharing(queue.asked_Bps[position], end_s, queue.durations_s[position])
            return position > first
        end_s += queue.durations_s[position]
        known.append(end_s)
    return len(known) - 1 > first


def _first_end(sharing: Mapping[int, _Sharing], now_s: float, bandwidth: Bandwidth) -> tuple[int, float]:
    """Continue from `now_s` until one of the operations ends; return its lane, and that time."""
    while True:
        asked_Bps = {}
        next_s = inf
        for lane, each in sharing.items():
            if each.since_s <= now_s:
                asked_Bps[lane] = each.asked_Bps
            elif each.since_s < next_s:
                next_s = each.since_s
        first = -1
        for lane, Bps in bandwidth.share(asked_Bps).items():
            each = sharing[lane]
            speed = Bps / each.asked_Bps
            if speed != each.speed:
                each.change_speed(now_s, speed)
            if each.end_s <= next_s:
                first, next_s = lane, each.end_s
        now_s = next_s
        if first >= 0:
            return first, now_s
