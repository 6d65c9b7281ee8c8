"""When something happened: timestamps, and the clocks that take them.

[Note: Device time] An accelerator computes long after the host has issued the work. The host's clock around a launch
shows when it was issued; around a call that waits, it shows all that the device had still to compute. So what COMPUTE
does is timed by events on its stream, which are recorded among the operators and read when the step is over.

host      t1 op t2 wait op t3                       <- when issued
COMPUTE   ....t1-- op --t2 ~ stalled ~ -- op --t3   <- what is measured

A device measures between two of its events, by its own clock; CUDA, in single precision. So every event is measured
from an anchor: an event whose host time is known, as it was recorded on a stream with nothing else on it. Anchors are
renewed, because within an hour the rounding is a quarter of a millisecond and the clocks drift by more.

What the host does by itself, such as updates on HOST, is timed by the host's clock. If it holds COMPUTE up, as it waits
for other ranks or issues too slowly, that counts as part of the moment: COMPUTE has nothing to do then.

Source of the rules: CUDA Runtime API, "Event Management" (cudaEventRecord, cudaEventElapsedTime): an event can be
recorded again, and who was told to wait for it before still waits for what it stood for then.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any, Protocol, Self

_ANCHOR_LIFE_S = 30.0
"""Seconds for which an anchor is used: at this distance its rounding is 2 microseconds."""


class Timestamp(Protocol):
    """A point in time."""

    @property
    def at_s(self) -> float:
        """By `time.perf_counter()`. If a device has not come to it yet, wait until then."""
        ...


class HostTimestamp(float):
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
    """From one timestamp to another, by `time.perf_counter()`."""

    start: Timestamp
    end: Timestamp

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
    """Takes timestamps of what COMPUTE does."""

    is_free: bool
    """A timestamp costs next to nothing, so that every moment of every step can have one."""

    def timestamp(self) -> Timestamp:
        """Return the end of everything issued on COMPUTE so far: by this thread, or on its current stream."""
        ...


class HostClock:
    """Where the calling thread computes: what was issued is over."""

    is_free = True

    def timestamp(self) -> Timestamp:
        return HostTimestamp.now()


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


class _Recorded:
    """What was recorded on a stream: it is over in this order, so one event that is over tells of all before."""

    __slots__ = ("_num_over", "num", "unused")

    def __init__(self) -> None:
        self.num = self._num_over = 0
        """Events so far, each with a number from 1; and of these, the last one that is known to be over."""
        self.unused = deque[tuple[int, TimingEvent]]()
        """Events that no timestamp has."""

    def is_over(self, number: int, event: TimingEvent) -> bool:
        """Tell, without waiting, whether the stream has come to the event with that number."""
        if number > self._num_over and event.query():
            self._num_over = number
        return number <= self._num_over


class StreamTimestamp:
    """A point on a stream. Its event is used again once the last reference to it is gone."""

    __slots__ = ("_anchor", "_number", "_recorded", "event")

    def __init__(self, event: TimingEvent, anchor: _Anchor, recorded: _Recorded) -> None:
        """Have the event that was `recorded` last on a stream."""
        self.event = event
        self._anchor = anchor
        self._recorded = recorded
        self._number = recorded.num

    def __del__(self) -> None:
        self._recorded.unused.append((self._number, self.event))

    def is_over(self) -> bool:
        """Tell, without waiting, whether the stream has come to it."""
        return self._recorded.is_over(self._number, self.event)

    @property
    def at_s(self) -> float:
        self.event.synchronize()
        return self._anchor.host_time_s(self.event)


class StreamClock:
    """Timestamps on the streams of an accelerator, with events that are used again and again.

    One costs the host some 2 microseconds, more than what following a plan does (`benchmarks/planning`), and a step of
    a large model has thousands of moments. So each has one only in steps that durations are taken from. In other steps
    only what may stall COMPUTE has, and what copies come after: one moment in ten or so.
    """

    is_free = False

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._idle = streams.stream()
        self._anchor = _Anchor(streams, self._idle)
        self._recorded: defaultdict[Any, _Recorded] = defaultdict(_Recorded)
        """By stream: the events that were recorded on it."""

    def timestamp(self) -> StreamTimestamp:
        return self.timestamp_on(self._streams.current_stream())

    def timestamp_on(self, stream: Any) -> StreamTimestamp:
        """Return the end of what is on a stream. Once in a while, this holds the host up for the time of one event."""
        if time.perf_counter() - self._anchor.host_s > _ANCHOR_LIFE_S:
            self._anchor = _Anchor(self._streams, self._idle)
        recorded = self._recorded[stream]
        event = self._idle_event(recorded)
        recorded.num += 1
        event.record(stream)
        return StreamTimestamp(event, self._anchor, recorded)

    def _idle_event(self, recorded: _Recorded) -> TimingEvent:
        """Return an event that no timestamp has, and that is over: ROCm leaves open what else recording it would do."""
        try:
            number, event = recorded.unused.popleft()
        except IndexError:
            return self._streams.timing_event()
        if recorded.is_over(number, event):
            return event
        recorded.unused.append((number, event))
        return self._streams.timing_event()
