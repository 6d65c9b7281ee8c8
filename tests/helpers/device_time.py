"""An accelerator in simulated time: the host issues in microseconds what streams take milliseconds for.

Streams and events are the real ones' in what they promise, and deterministic. Whatever is issued is done at once in
RAM; what it would take is added to the time of its stream.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from chunkmem.optim.kernels import load_kernels
from chunkmem.plan.machine import Machine, host_links
from chunkmem.plan.model import Lane
from chunkmem.runtime.device import ComputeDevice
from chunkmem.runtime.events import Event, Piece
from chunkmem.runtime.store import ChunkStore
from chunkmem.runtime.streams import StreamLanes
from chunkmem.runtime.timestamps import StreamClock
from tests.helpers.simulated import SimulatedAccelerator

TICK_S = 1e-7
"""Of the host, each time it looks at its clock."""
LAUNCH_S = 1e-6
"""Of the host, for each thing it issues."""
LINK_Bps = 1e6
_OTHER_ZERO_S = 5e4
"""A device counts from another moment than the host."""


class Stream:
    """What runs in order on the device."""

    def __init__(self, device: TimedDevice) -> None:
        self._device = device
        self.end_s = 0.0
        self.queued_s = 0.0
        """Of a copy that begins at the next event."""
        self._before: list[Stream] = []

    def __enter__(self) -> Stream:
        self._before.append(self._device.current)
        self._device.current = self
        return self

    def __exit__(self, *_: object) -> None:
        self._device.current = self._before.pop()

    def wait_stream(self, other: Stream) -> None:
        self.end_s = max(self.end_s, other.end_s)

    def run(self, duration_s: float) -> None:
        """Append what takes so long."""
        self.end_s = max(self.end_s, self._device.host_s) + duration_s


class TimingEvent:
    """A point on a stream, which can be recorded again."""

    def __init__(self, device: TimedDevice) -> None:
        self._device = device
        self.at_s = -1.0

    def record(self, stream: Stream) -> None:
        assert self._is_over, "ROCm does not define what it is to record an event again that is not over"
        self._device.host_s += LAUNCH_S
        self._device.num_records += 1
        self.at_s = max(stream.end_s, self._device.host_s)
        stream.end_s, stream.queued_s = self.at_s + stream.queued_s, 0.0

    @property
    def _is_over(self) -> bool:
        return self._device.host_s >= self.at_s

    def query(self) -> bool:
        self._device.num_queries += 1
        return self._is_over

    def synchronize(self) -> None:
        self._device.host_s = max(self._device.host_s, self.at_s)

    def wait(self, stream: Stream) -> None:
        stream.end_s = max(stream.end_s, self.at_s)

    def elapsed_time(self, end: TimingEvent) -> float:
        assert self._is_over, "CUDA refuses to measure from an event that is not over"
        assert end._is_over, "CUDA refuses to measure up to an event that is not over"
        return 1e3 * ((end.at_s + _OTHER_ZERO_S) - (self.at_s + _OTHER_ZERO_S))


class TimedDevice(SimulatedAccelerator):
    """A host and a device with a clock of their own, which only what is issued and waited for moves on."""

    def __init__(self) -> None:
        super().__init__()
        self.host_s = 100.0
        self.num_records = 0
        self.num_queries = 0
        self.num_events = 0
        """How many were made."""
        self.computing = self.current = Stream(self)

    def now_s(self) -> float:
        """Stand in for `time.perf_counter`."""
        self.host_s += TICK_S
        return self.host_s

    def launch(self, duration_s: float) -> None:
        """Issue something that computes for so long."""
        self.host_s += LAUNCH_S
        self.computing.run(duration_s)

    @cached_property
    def clock(self) -> Any:
        return StreamClock(self)

    def stream(self) -> Any:
        return Stream(self)

    def _current_stream(self) -> Any:
        return self.current

    def timing_event(self) -> Any:
        self.num_events += 1
        return TimingEvent(self)


class TimedLanes(StreamLanes):
    """The real lanes of an accelerator, with copies that take the time of a link."""

    def copy(self, lane: Lane, pieces: Sequence[Piece], *, after: Sequence[Event], label: str) -> Event:
        stream: Any = self._streams[lane]
        stream.queued_s = sum(target.nbytes for target, _ in pieces) / LINK_Bps
        return super().copy(lane, pieces, after=after, label=label)


MACHINE = Machine(
    0, 0, links=host_links(h2d_Bps=LINK_Bps, d2h_Bps=LINK_Bps), charges_non_model=True, one_processor=False
)
"""What plans are made for: the device as it is, where updates take no time. Caps are a manager's own."""


@contextlib.contextmanager
def timed_device() -> Iterator[TimedDevice]:
    """Make managers for a device in simulated time; they take `TimedLanes` as `make_lanes`."""
    device = TimedDevice()

    def blocking(store: ChunkStore, target: Tensor, source: Tensor) -> None:
        target.copy_(source)
        device.launch(target.nbytes / LINK_Bps)
        device.host_s = device.computing.end_s

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", device.now_s)
        patch.setattr(ComputeDevice, "default", lambda index=None: device)
        patch.setattr("chunkmem.assembly.parts.load_kernels", lambda **_: load_kernels())
        patch.setattr("chunkmem.assembly.speeds.cached_machine", lambda compute, caps, by_form: MACHINE)
        patch.setattr(ChunkStore, "transfer", blocking)
        yield device


class _Takes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, device: TimedDevice, duration_s: float) -> Tensor:
        ctx.device, ctx.duration_s = device, duration_s
        device.launch(duration_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.device.launch(2 * ctx.duration_s)
        return grads[0], None, None


class TimedLinear(nn.Linear):
    """Takes `duration_s` on the device, and twice that in backward."""

    def __init__(self, width: int, device: TimedDevice, duration_s: float) -> None:
        super().__init__(width, width)
        self._timed, self.duration_s = device, duration_s

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = _Takes.apply(super().forward(x), self._timed, self.duration_s)  # type: ignore[no-untyped-call]
        return found
