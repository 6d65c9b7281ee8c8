"""What every kind of lane has in common: events, and the rules for a copy.

A copy works on the addresses that its tensors have when it is issued. Their storages may be emptied before it runs:
that is how a slab is taken from one chunk for the next while it is still being read. Holding the tensors keeps the
memory of all others alive, but not of those. So the issuer of a copy keeps the memory allocated until its event is
done, and has whatever touches that memory in conflict with it wait for the event.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch

from chunkmem.data.errors import StateError, TierIOError
from chunkmem.data.types import Tier
from chunkmem.plan.model import LANE_LINKS, Lane
from chunkmem.runtime.device import runtime_mode
from chunkmem.runtime.timestamps import Clock, HostTimestamp, Interval

COPY_LANES = tuple(LANE_LINKS)
"""The lanes that copy between tiers."""


Piece = tuple[torch.Tensor, torch.Tensor]
"""Target and source of one copy: 1-D, contiguous, of equal nbytes."""


class Event(Protocol):
    """Something issued on a lane. Times are of `time.perf_counter()`, and valid once it is done."""

    @property
    def started_s(self) -> float: ...

    @property
    def ended_s(self) -> float: ...

    @property
    def failure(self) -> BaseException | None:
        """Why it has failed, once it is over; None if it is done."""
        ...

    def done(self) -> bool:
        """Tell, without waiting, whether it is over: done or failed."""
        ...

    def wait(self) -> None:
        """Block the calling thread until it is over; raise its failure."""
        ...


def require_copyable(lane: Lane, pieces: Sequence[Piece], label: str) -> None:
    """Refuse what would overwrite other memory than the targets', and a lane that does not copy.

    Raises:
        StateError: the tensors are not 1-D, contiguous and of equal nbytes, or `lane` is none of `COPY_LANES`.
    """
    if lane not in COPY_LANES:
        raise StateError(f"{label}: lane {lane.value} does not copy between tiers")
    for piece in pieces:
        for tensor in piece:
            if tensor.dim() != 1 or not tensor.is_contiguous():
                shape = list(tensor.shape)
                raise StateError(f"{label}: only 1-D contiguous tensors are copied, not one of shape {shape}")
        target, source = piece
        if target.nbytes != source.nbytes:
            raise StateError(f"{label}: {source.nbytes} bytes cannot be copied to {target.nbytes}")


def copy_error(label: str, source: Tier, target: Tier, cause: Exception) -> TierIOError:
    """Return the error of a failed copy, for those who wait for it."""
    return TierIOError(f"{label}: the copy from {source.name} to {target.name} failed: {cause}")


@contextlib.contextmanager
def _profiled(lane: Lane, label: str) -> Iterator[None]:
    with runtime_mode(), torch.profiler.record_function(f"chunkmem {lane.value} {label}"):
        yield


def named_range(lane: Lane, label: str) -> contextlib.AbstractContextManager[None]:
    """Return the range that a profile shows for a copy; without a profiler, one that does nothing."""
    return _profiled(lane, label) if torch.autograd.profiler._is_profiler_enabled else contextlib.nullcontext()


@dataclass(eq=False, slots=True)
class DoneEvent(Interval):
    """What was over before it could be waited for."""

    failure: None = None

    @classmethod
    def now(cls) -> Self:
        """Return the event of something that the host has just done."""
        end = HostTimestamp.now()
        return cls(end, end)

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


def host_waits(event: Event, clock: Clock) -> Interval | None:
    """Block the calling thread until `event` is over; return what `Lanes.compute_waits` does.

    Raises:
        BaseException: the event's failure.
    """
    if event.done():
        event.wait()
        return None
    ready = clock.timestamp()
    event.wait()
    return Interval(ready, clock.timestamp())
