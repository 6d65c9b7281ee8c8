"""Lanes on an accelerator: a stream each, ordered by events alone. Nothing here waits for the device as a whole.

[Note: Device time] A device measures between two of its events, by its own clock; CUDA, in single precision. So every
event is measured from an anchor: an event whose host time is known, as it was recorded on a stream with nothing else on
it. Anchors are renewed, because within an hour the rounding is a quarter of a millisecond and the clocks drift by more.

Source of the rules: CUDA Runtime API, "Event Management" (cudaEventElapsedTime) and "Stream synchronization behavior".
"""

from __future__ import annotations

import ctypes
import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from chunkmem.plan.model import Lane
from chunkmem.runtime.device import ComputeDevice, runtime_mode
from chunkmem.runtime.events import COPY_LANES, Event, closed_error, named_range, require_copyable
from chunkmem.runtime.queues import HostWork, Worker

_ANCHOR_LIFE_S = 30.0
"""At this distance the rounding is 2 microseconds."""


class _Anchor:
    """A point in the time of the device whose time on the host is known."""

    def __init__(self, compute: ComputeDevice, idle: torch.Stream) -> None:
        self._event = compute.record(idle)
        self._event.synchronize()
        self.host_s = time.perf_counter()

    def host_time_s(self, event: torch.Event) -> float:
        """Return when `event`, which is over and was recorded later, came to pass."""
        return self.host_s + 1e-3 * float(self._event.elapsed_time(event))


@dataclass(eq=False, slots=True)
class StreamEvent:
    """What a stream does between two of its events."""

    anchor: _Anchor
    start: torch.Event
    end: torch.Event

    @property
    def started_s(self) -> float:
        return self.anchor.host_time_s(self.start)

    @property
    def ended_s(self) -> float:
        return self.anchor.host_time_s(self.end)

    @property
    def failure(self) -> None:
        return None  # what fails on a stream ends the process's use of the device

    def done(self) -> bool:
        return bool(self.end.query())

    def wait(self) -> None:
        self.end.synchronize()


class StreamClock:
    """Makes events of a device that know their time on the host."""

    def __init__(self, compute: ComputeDevice) -> None:
        self._compute = compute
        self._idle = compute.stream()
        self._anchor = _Anchor(compute, self._idle)

    def anchor(self) -> _Anchor:
        """Return an anchor for what is issued next; a new one holds the host up for the time of one event."""
        if time.perf_counter() - self._anchor.host_s > _ANCHOR_LIFE_S:
            self._anchor = _Anchor(self._compute, self._idle)
        return self._anchor

    def computed(self) -> StreamEvent:
        """Return the end of what is on the calling thread's current stream."""
        anchor = self.anchor()
        end = self._compute.record(self._compute.current_stream())
        return StreamEvent(anchor, end, end)


class StreamLanes:
    """A stream for each lane that copies, while the lanes are open. Copies overlap if host memory is pinned."""

    def __init__(self, compute: ComputeDevice) -> None:
        self._compute = compute
        self._clock = StreamClock(compute)
        self._streams = {lane: compute.stream() for lane in COPY_LANES}
        self._last: dict[Lane, StreamEvent] = {}
        self._worker: Worker | None = None
        """The thread of HOST_UPDATE, once there is something to do."""
        self._pid = os.getpid()
        self._closed = False

    def copy(
        self, lane: Lane, target: torch.Tensor, source: torch.Tensor, *, after: Sequence[Event], label: str
    ) -> Event:
        if self._closed:
            raise closed_error(label)
        stream, anchor = self._streams[lane], self._clock.anchor()
        with runtime_mode(), stream, named_range(lane, label):
            require_copyable(lane, target, source, label)
            for event in after:
                _hold_back(stream, event)
            start = self._compute.record(stream, is_awaited=False)
            target.view(torch.uint8).copy_(source.view(torch.uint8), non_blocking=True)
            copied = self._last[lane] = StreamEvent(anchor, start, self._compute.record(stream))
        return copied

    def work(self, work: Callable[[], object], *, after: Sequence[Event], label: str) -> Event:
        if self._closed:
            raise closed_error(label)
        if self._worker is None:
            self._worker = Worker(Lane.HOST_UPDATE, ctypes.memmove)
            weakref.finalize(self, self._worker.stop)
        return self._worker.issue(HostWork(label, work, tuple(after)))

    def compute_event(self) -> Event:
        return self._clock.computed()

    def compute_waits(self, event: Event) -> float:
        _hold_back(self._compute.current_stream(), event)
        return 0.0

    def drain(self) -> None:
        for event in self._last.values():
            event.wait()
        self._last.clear()
        if self._worker is not None and os.getpid() == self._pid:
            self._worker.wait()
            if (failure := self._worker.take_failure()) is not None:
                raise failure

    def close(self) -> None:
        self._closed = True
        if os.getpid() != self._pid:  # streams do not survive a fork, nor do threads
            return
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.stop()
            worker.thread.join()
        self.drain()


def _hold_back(stream: torch.Stream, event: Event) -> None:
    if isinstance(event, StreamEvent):
        event.end.wait(stream)
    else:
        event.wait()
