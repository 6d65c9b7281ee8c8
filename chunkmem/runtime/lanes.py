"""What copies between tiers, overlapped with computing: by lane, a thread on a CPU, a stream on an accelerator.

[Note: A failed copy] Operations of a lane are in order, so to wait for one is to rely on all before it, and on all they
came after. A copy that fails in a thread therefore fails everything issued behind it on its lane, or `after` it on
another, until `drain` has raised its error. What that leaves of chunks is said in [Note: After a failed copy].
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch

from chunkmem.plan.model import LANE_LINKS, Lane
from chunkmem.runtime.device import ComputeDevice, runtime_mode
from chunkmem.runtime.events import (
    DoneEvent,
    Event,
    Lanes,
    Piece,
    closed_error,
    copy_error,
    host_waits,
    named_range,
    require_copyable,
)
from chunkmem.runtime.queues import HostCopy, HostWork, Move, Workers
from chunkmem.runtime.streams import StreamLanes, computed
from chunkmem.runtime.timestamps import HostClock, HostTimestamp, Interval, StreamClock

__all__ = ["BlockingLanes", "Event", "Lanes", "StreamLanes", "ThreadLanes", "open_lanes"]


def open_lanes(compute: ComputeDevice, *, blocking: bool) -> Lanes:
    """Return the lanes for `compute`; with `blocking`, a copy is done when `copy` returns."""
    if blocking:
        return BlockingLanes(compute)
    return StreamLanes(compute) if compute.is_accelerator else ThreadLanes()


class BlockingLanes:
    """Copies run in the calling thread (on an accelerator, on its current stream) and are done when `copy` returns."""

    def __init__(self, compute: ComputeDevice) -> None:
        self._clock = compute.clock
        self._closed = False

    def copy(
        self, lane: Lane, target: torch.Tensor, source: torch.Tensor, *, after: Sequence[Event], label: str
    ) -> Event:
        if self._closed:
            raise closed_error(label)
        for event in after:
            event.wait()
        start = self._clock.timestamp()
        with runtime_mode(), named_range(lane, label):
            require_copyable(lane, target, source, label)
            try:
                target.view(torch.uint8).copy_(source.view(torch.uint8))
            except Exception as error:
                raise copy_error(label, *LANE_LINKS[lane], error) from error
        return DoneEvent(start, self._clock.timestamp())

    def copy_pieces(self, lane: Lane, pieces: Sequence[Piece], *, after: Sequence[Event], label: str) -> Event:
        issued = [self.copy(lane, target, source, after=after, label=label) for target, source in pieces]
        first, last = issued[0], issued[-1]
        if isinstance(first, DoneEvent) and isinstance(last, DoneEvent):
            return DoneEvent(first.start, last.end)
        return last

    def work(
        self,
        work: Callable[[], object],
        *,
        after: Sequence[Event],
        label: str,
        lane: Lane = Lane.HOST_UPDATE,
        target: torch.Tensor | None = None,
    ) -> Event:
        if self._closed:
            raise closed_error(label)
        for event in after:
            event.wait()
        task = HostWork(label, work, (), lane)
        task.run(ctypes.memmove)
        return DoneEvent(HostTimestamp(task.started_s), HostTimestamp(task.ended_s))

    def compute_event(self) -> Event:
        return computed(self._clock) if isinstance(self._clock, StreamClock) else DoneEvent.now()

    def compute_waits(self, event: Event) -> Interval | None:
        return host_waits(event, self._clock)

    def drain(self) -> None:
        return None

    def close(self) -> None:
        self._closed = True


class ThreadLanes:
    """One thread a lane, started by what it does first. Each copies with one core, and without Python's lock."""

    def __init__(self, move: Move = ctypes.memmove) -> None:
        self._clock = HostClock()
        self._workers = Workers(move)
        self._closed = False

    def copy(
        self, lane: Lane, target: torch.Tensor, source: torch.Tensor, *, after: Sequence[Event], label: str
    ) -> Event:
        return self.copy_pieces(lane, [(target, source)], after=after, label=label)

    def copy_pieces(self, lane: Lane, pieces: Sequence[Piece], *, after: Sequence[Event], label: str) -> Event:
        if self._closed:
            raise closed_error(label)
        return self._workers.issue(HostCopy.of(lane, pieces, after=after, label=label))

    def work(
        self,
        work: Callable[[], object],
        *,
        after: Sequence[Event],
        label: str,
        lane: Lane = Lane.HOST_UPDATE,
        target: torch.Tensor | None = None,
    ) -> Event:
        if self._closed:
            raise closed_error(label)
        return self._workers.issue(HostWork(label, work, tuple(after), lane, target))

    def compute_event(self) -> Event:
        return DoneEvent.now()

    def compute_waits(self, event: Event) -> Interval | None:
        return host_waits(event, self._clock)

    def drain(self) -> None:
        self._workers.drain()

    def close(self) -> None:
        self._closed = True
        self._workers.stop()
