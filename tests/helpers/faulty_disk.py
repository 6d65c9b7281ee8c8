"""System calls for DISK in tests: with faults where they are asked for, or as slow as a given disk.

A pool takes them as ``DiskPool(ledger, directory, calls=FaultyDisk(Fault(FaultKind.TORN, "pwritev", at=3)))``. Calls
are counted by name from 1. What is tried when the file is opened, to find out about alignment, does not count.
"""

from __future__ import annotations

import enum
import errno
import math
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from chunkmem.data.errors import StateError
from chunkmem.runtime.disk_file import SYSTEM_CALLS, AlignedBuffer, SystemCalls

_POISON = 0xFF
_ALIGNMENT = 4096


class FaultKind(enum.Enum):
    """What goes wrong."""

    ERROR = "error"
    """Nothing is done, and an `OSError` is raised."""
    DELAY = "delay"
    """It takes longer."""
    SHORT = "short"
    """Half of the bytes are moved, which is legal; where the others belong is something else."""
    EMPTY = "empty"
    """A read finds the end of the file."""
    FLIP = "flip"
    """A read finds one bit changed."""
    TORN = "torn"
    """A write puts half of the bytes and something else into the file, and an `OSError` is raised."""
    LOST = "lost"
    """A write succeeds, and the file is what it was."""


_READS = {FaultKind.SHORT, FaultKind.EMPTY, FaultKind.FLIP}
_WRITES = {FaultKind.SHORT, FaultKind.TORN, FaultKind.LOST}
_BY_CALL: dict[str, set[FaultKind]] = {
    "open": set(),
    "preadv": _READS,
    "pwritev": _WRITES,
    "fallocate": set(),
    "close": set(),
}


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and when: from the `at`-th call on, `times` times, or at random.

    Raises:
        StateError: that does not happen to this call, or it is not said when.
    """

    kind: FaultKind
    call: str
    """A method of `SystemCalls`."""
    at: int | None = None
    times: float = 1
    """`math.inf`: from then on."""
    probability: float = 0.0
    """Of each call; what happens to which call follows from the seed."""
    number: int = errno.EIO
    """The errno of ERROR and TORN."""
    delay_s: float = 0.02

    def __post_init__(self) -> None:
        possible = {FaultKind.ERROR, FaultKind.DELAY, *_BY_CALL.get(self.call, set())}
        if self.call not in _BY_CALL or self.kind not in possible:
            raise StateError(f"fault {self.kind.value} does not happen to {self.call!r}; calls: {', '.join(_BY_CALL)}")
        if (self.at is None) == (self.probability == 0):
            raise StateError(f"fault {self.kind.value} of {self.call}: give either `at` or `probability`")

    def strikes(self, number: int, chance: float) -> bool:
        """Tell whether it happens to the call of that number, given a random number in [0, 1)."""
        if self.at is None:
            return chance < self.probability
        return self.at <= number < self.at + self.times


class FaultyDisk(SystemCalls):
    """The system's calls, with faults. They may be replaced between steps, by setting `faults`."""

    def __init__(
        self,
        *faults: Fault,
        seed: int = 0,
        direct: bool = True,
        unnamed: bool = True,
        calls: SystemCalls = SYSTEM_CALLS,
    ) -> None:
        """Make them.

        Args:
            faults: several may happen to one call.
            seed: what is random follows from it, and from the number of the call.
            direct: the file system takes ``O_DIRECT``, if it does.
            unnamed: the file system takes ``O_TMPFILE``, if it does.
            calls: what is called in the end.
        """
        super().__init__()
        self.faults = faults
        self.num_calls: Counter[str] = Counter()
        self.struck: list[tuple[str, int, FaultKind]] = []
        """What has happened: call, its number, and the fault."""
        self._seed = seed
        self._direct = direct
        self._unnamed = unnamed
        self._calls = calls
        self._lock = threading.Lock()

    def open(self, path: str, flags: int, mode: int) -> int:
        if flags & os.O_DIRECT and not self._direct:
            raise _error(errno.EINVAL)
        if flags & os.O_TMPFILE == os.O_TMPFILE and not self._unnamed:
            raise _error(errno.EOPNOTSUPP)
        self._strike("open")
        return self._calls.open(path, flags, mode)

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        kinds = self._strike("preadv")
        if FaultKind.EMPTY in kinds:
            return 0
        moved = self._calls.preadv(descriptor, buffers, offset)
        if FaultKind.SHORT in kinds:
            moved = _half(moved)
            _spoil(buffers, moved)
        if FaultKind.FLIP in kinds and moved:
            first = next(buffer for buffer in buffers if len(buffer))
            first[min(moved, len(first)) // 2] ^= 1
        return moved

    def pwritev(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        kinds = self._strike("pwritev")
        nbytes = sum(map(len, buffers))
        if FaultKind.LOST in kinds:
            return nbytes
        if {FaultKind.SHORT, FaultKind.TORN}.isdisjoint(kinds):
            return self._calls.pwritev(descriptor, buffers, offset)
        spoiled = AlignedBuffer(nbytes, _ALIGNMENT)
        spoiled.view[:] = b"".join(buffers)
        _spoil([spoiled.view], _half(nbytes))
        moved = self._calls.pwritev(descriptor, [spoiled.view], offset)
        if FaultKind.TORN in kinds:
            raise _error(kinds[FaultKind.TORN].number)
        return min(moved, _half(nbytes))

    def fallocate(self, descriptor: int, offset: int, nbytes: int) -> None:
        self._strike("fallocate")
        self._calls.fallocate(descriptor, offset, nbytes)

    def close(self, descriptor: int) -> None:
        # As Linux does: whatever it says, the descriptor is gone.
        self._calls.close(descriptor)
        self._strike("close")

    def _strike(self, call: str) -> dict[FaultKind, Fault]:
        """Count a call, wait and fail as it is due; return what else is."""
        with self._lock:
            self.num_calls[call] += 1
            number = self.num_calls[call]
            found: dict[FaultKind, Fault] = {}
            for place, fault in enumerate(self.faults):
                chance = random.Random(f"{self._seed} {place} {call} {number}").random()
                if fault.call == call and fault.strikes(number, chance):
                    found[fault.kind] = fault
                    self.struck.append((call, number, fault.kind))
        if FaultKind.DELAY in found:
            time.sleep(found[FaultKind.DELAY].delay_s)
        if FaultKind.ERROR in found:
            raise _error(found[FaultKind.ERROR].number)
        return found


class ThrottledDisk(FaultyDisk):
    """One without faults, no faster than a disk that reads and writes so many bytes a second, each on its own.

    Raises:
        StateError: a speed is not positive, or `latency_s` negative.
    """

    def __init__(
        self, read_Bps: float, write_Bps: float, *, latency_s: float = 0.0, calls: SystemCalls = SYSTEM_CALLS
    ) -> None:
        if not (read_Bps > 0 and write_Bps > 0 and latency_s >= 0):
            raise StateError(
                f"nothing would end on a disk of {read_Bps} and {write_Bps} bytes/s and {latency_s} s latency"
            )
        super().__init__(calls=calls)
        self._reading, self._writing = _Rate(read_Bps, latency_s), _Rate(write_Bps, latency_s)

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        end_s = self._reading.end_s(sum(map(len, buffers)))
        moved = super().preadv(descriptor, buffers, offset)
        _sleep_until(end_s)
        return moved

    def pwritev(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        end_s = self._writing.end_s(sum(map(len, buffers)))
        moved = super().pwritev(descriptor, buffers, offset)
        _sleep_until(end_s)
        return moved


class _Rate:
    """Calls of several threads share it."""

    def __init__(self, Bps: float, latency_s: float) -> None:
        self._Bps = Bps
        self._latency_s = latency_s
        self._free_s = -math.inf
        """When all that was asked for is over."""
        self._lock = threading.Lock()

    def end_s(self, nbytes: int) -> float:
        """Return when a call that begins now may end, latency included: that passes for many calls at once."""
        with self._lock:
            self._free_s = max(self._free_s, time.perf_counter()) + nbytes / self._Bps
            return self._free_s + self._latency_s


def _sleep_until(end_s: float) -> None:
    time.sleep(max(0.0, end_s - time.perf_counter()))


def _half(nbytes: int) -> int:
    return max(1, nbytes // 2)


def _spoil(buffers: Sequence[memoryview], start: int) -> None:
    """Overwrite all bytes from `start` on."""
    for buffer in buffers:
        first = min(start, len(buffer))
        buffer[first:] = bytes([_POISON]) * (len(buffer) - first)
        start -= first


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))
