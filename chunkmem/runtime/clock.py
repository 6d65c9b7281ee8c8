"""When something happened: marks, and the clocks that set them.

[Note: Device time] An accelerator computes long after the host has issued it, so what COMPUTE does is not timed by the
host's clock: that shows when it was issued, and books whatever the device has still to compute as the time of the next
call that waits. Instead, marks are events on streams, among the operators, and are read when the step is over.

host      m1 op m2 wait op m3                        <- when issued
COMPUTE   ...m1-- op --m2 ~~ waits ~~ -- op --m3     <- what is measured

A device measures between two of its events, by its own clock; CUDA, in single precision. So every event is measured
from an anchor: an event whose host time is known, as it was recorded on a stream with nothing else on it. Anchors are
renewed, because within an hour the rounding is a quarter of a millisecond and the clocks drift by more.

What the host does by itself, such as updates on HOST, is timed by its own clock. Where it holds COMPUTE up, since it
waits for other ranks or issues too slowly, that is part of the moment, as COMPUTE has nothing to do then.

Source of the rules: CUDA Runtime API, "Event Management" (cudaEventRecord: "overwrite[s] any existing state";
cudaEventElapsedTime) and "Stream Management" (cudaStreamWaitEvent waits for what was captured when it was called).
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol, Self

_ANCHOR_LIFE_S = 30.0
"""At this distance the rounding is 2 microseconds."""


class Mark(Protocol):
    """A point in time."""

    @property
    def at_s(self) -> float:
        """By `time.perf_counter()`. If a device has not come to it yet, wait until then."""
        ...


class HostMark(float):
    """By the host's clock: a number of seconds."""

    __slots__ = ()

    @classmethod
    def now(cls) -> Self:
        """Return this moment."""
        return cls(time.perf_counter())

    @property
    def at_s(self) -> float:
        return self


@dataclass(eq=False, slots=True)
class Interval:
    """From one mark to another, by `time.perf_counter()`."""

    start: Mark
    end: Mark

    @property
    def started_s(self) -> float:
        return self.start.at_s

    @property
    def ended_s(self) -> float:
        return self.end.at_s

    @property
    def duration_s(self) -> float:
        """0 if the end came first: what was waited for was there."""
        return max(0.0, self.ended_s - self.started_s)


class Clock(Protocol):
    """Sets marks in what COMPUTE does."""

    is_free: bool
    """A mark costs next to nothing, so that every moment of every step can have one."""

    def mark(self) -> Mark:
        """Mark the end of everything issued on COMPUTE so far: by this thread, or on its current stream."""
        ...


class HostClock:
    """Where the calling thread computes: what was issued is over."""

    is_free = True

    def mark(self) -> Mark:
        return HostMark.now()


class TimingEvent(Protocol):
    """What clocks need of `torch.Event`."""

    def record(self, stream: Any) -> None: ...

    def wait(self, stream: Any) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Any) -> float: ...


class Streams(Protocol):
    """What clocks need of an accelerator."""

    def stream(self) -> Any: ...

    def current_stream(self) -> Any: ...

    def timing_event(self) -> TimingEvent: ...


class _Anchor:
    """A point in the time of the device whose time on the host is known."""

    def __init__(self, streams: Streams, idle: Any) -> None:
        self._event = streams.timing_event()
        self._event.record(idle)
        self._event.synchronize()
        self.host_s = time.perf_counter()

    def host_time_s(self, event: TimingEvent) -> float:
        """Return when `event`, which is over and was recorded later, came to pass."""
        return self.host_s + 1e-3 * float(self._event.elapsed_time(event))


class StreamMark:
    """A point on a stream. Its event goes back to the pool with the last reference to it."""

    __slots__ = ("_anchor", "_pool", "event")

    def __init__(self, event: TimingEvent, anchor: _Anchor, pool: deque[TimingEvent]) -> None:
        self.event = event
        self._anchor = anchor
        self._pool = pool

    def __del__(self) -> None:
        self._pool.append(self.event)

    @property
    def at_s(self) -> float:
        self.event.synchronize()
        return self._anchor.host_time_s(self.event)


class StreamClock:
    """Marks on the streams of an accelerator, made of events that are used again and again.

    A mark costs the host some 2 microseconds, of which half is CUDA's, and the device about as much. The host needs 25
    for a moment without any computing (`benchmarks/planning`): to mark each moment would cost several percent of what
    it does. So that is done in steps that durations are taken from. In the others only what COMPUTE waits for is
    marked, one moment in ten of a large model.
    """

    is_free = False

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._idle = streams.stream()
        self._anchor = _Anchor(streams, self._idle)
        self._pool: deque[TimingEvent] = deque()

    @property
    def num_idle(self) -> int:
        """Events that belong to no mark."""
        return len(self._pool)

    def mark(self) -> StreamMark:
        return self.mark_on(self._streams.current_stream())

    def mark_on(self, stream: Any) -> StreamMark:
        """Mark the end of what is on a stream. Once in a while, this holds the host up for the time of one event."""
        if time.perf_counter() - self._anchor.host_s > _ANCHOR_LIFE_S:
            self._anchor = _Anchor(self._streams, self._idle)
        event = self._idle_event()
        event.record(stream)
        return StreamMark(event, self._anchor, self._pool)

    def _idle_event(self) -> TimingEvent:
        """Return an event that no mark has, and that is over: ROCm leaves open what else recording it would mean."""
        try:
            event = self._pool.popleft()
        except IndexError:
            return self._streams.timing_event()
        if event.query():
            return event
        self._pool.append(event)
        return self._streams.timing_event()
