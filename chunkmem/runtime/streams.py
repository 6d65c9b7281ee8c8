"""Lanes on an accelerator: a stream each, ordered by events alone. Nothing here waits for the device as a whole.

Source of the rules: CUDA Runtime API, "Stream synchronization behavior". For times see [Note: Device time].
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from chunkmem.data.types import Tier
from chunkmem.plan.model import LANE_LINKS, Lane
from chunkmem.runtime.device import ComputeDevice, runtime_mode
from chunkmem.runtime.events import COPY_LANES, Event, Piece, named_range, require_copyable
from chunkmem.runtime.queues import Lanes
from chunkmem.runtime.timestamps import Interval, StreamClock, StreamTimestamp


@dataclass(eq=False, slots=True)
class StreamEvent(Interval):
    """What a stream does between two of its events."""

    start: StreamTimestamp
    end: StreamTimestamp

    @property
    def failure(self) -> None:
        return None  # what fails on a stream ends the process's use of the device

    def done(self) -> bool:
        return self.end.is_over()

    def wait(self) -> None:
        self.end.event.synchronize()


def cuda_handle(event: Event) -> int | None:
    """Return CUDA's own event at the end of what a stream does; None of other events."""
    return getattr(event.end.event, "cuda_event", None) if isinstance(event, StreamEvent) else None


def computed(clock: StreamClock) -> StreamEvent:
    """Return the end of what is on the calling thread's current stream."""
    end = clock.timestamp()
    return StreamEvent(end, end)


class StreamLanes(Lanes):
    """A stream for each lane that copies to or from DEVICE, while the lanes are open; a thread for the others.

    Copies overlap if host memory is pinned.
    """

    _clock: StreamClock

    def __init__(self, compute: ComputeDevice) -> None:
        assert isinstance(compute.clock, StreamClock)
        super().__init__(compute.clock)
        self._compute = compute
        self._streams = {lane: compute.stream() for lane in COPY_LANES if Tier.DEVICE in LANE_LINKS[lane]}
        self._last: dict[Lane, StreamEvent] = {}

    def copy(self, lane: Lane, pieces: Sequence[Piece], *, after: Sequence[Event], label: str) -> Event:
        if (stream := self._streams.get(lane)) is None:
            return super().copy(lane, pieces, after=after, label=label)
        self._require_open(label)
        with runtime_mode():
            require_copyable(lane, pieces, label)
            with stream, named_range(lane, label):
                for event in after:
                    _hold_back(stream, event)
                start = self._clock.timestamp_on(stream)
                for target, source in pieces:
                    target.view(torch.uint8).copy_(source.view(torch.uint8), non_blocking=True)
                copied = self._last[lane] = StreamEvent(start, self._clock.timestamp_on(stream))
        return copied

    def compute_event(self) -> Event:
        return computed(self._clock)

    def compute_waits(self, event: Event) -> Interval | None:
        if not isinstance(event, StreamEvent):
            return super().compute_waits(event)
        if event.done():
            return None
        ready = self._clock.timestamp()
        for stream in self._compute.computing_streams():
            _hold_back(stream, event)
        return Interval(ready, event.end)

    def drain(self) -> None:
        for event in self._last.values():
            event.wait()
        self._last.clear()
        super().drain()

    def close(self) -> None:
        super().close()
        if os.getpid() == self._pid:  # streams do not survive a fork
            self.drain()


def _hold_back(stream: torch.Stream, event: Event) -> None:
    if isinstance(event, StreamEvent):
        event.end.event.wait(stream)
    else:
        event.wait()
