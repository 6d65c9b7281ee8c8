"""Measure how fast a disk is, and keep what was found for the next run."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path

import torch

from chunkmem.errors import ConfigError
from chunkmem.runtime.device import runtime_mode
from chunkmem.runtime.disk_calls import SYSTEM_CALLS, DiskCalls
from chunkmem.runtime.disk_file import AlignedBuffer, DiskFile, folder_at
from chunkmem.runtime.disk_transfer import DiskTransfers
from chunkmem.runtime.free_room import Extent
from chunkmem.runtime.populate import num_cores
from chunkmem.runtime.speed_file import kept_speeds, processor
from chunkmem.sizes import format_nbytes

_CANDIDATES = ((16 << 20, 4), (8 << 20, 8), (32 << 20, 2), (4 << 20, 8), (16 << 20, 8))
"""Bytes of a block, and how many are moved at once. The likeliest first: on a slow disk, the others are left out.
Smaller blocks are not tried: here nothing computes in Python meanwhile; see `runtime/disk_threads.py`."""
_CLEARLY = 0.95
"""The share of the time at most that a later one has to take: what is measured varies."""
_MIN_NBYTES, _MAX_NBYTES = 16 << 20, 128 << 20
"""Read and written at a time; more where the disk is fast, so that what is under way at the ends does not count."""
_SMALL_NBYTES = 4 << 10
_NUM_SMALL = 8
_MIN_REPEATS, _MAX_REPEATS = 2, 16
_PATTERN_NBYTES = 1 << 20
"""Random bytes: some disks are faster with others."""
_MOST = 1e18
"""No disk is that fast, and no such number is read from a file."""
_MOUNTS = Path("/proc/self/mountinfo")


@dataclass(frozen=True)
class DiskSpeed:
    """How fast slabs are read from a disk and written to it, and by which blocks."""

    read_Bps: float
    write_Bps: float
    latency_s: float
    """Seconds to read a few bytes, including the hand-over to a thread."""
    block_nbytes: int
    depth: int
    """Number of blocks that are moved at once."""

    @property
    def is_sound(self) -> bool:
        """All are positive numbers, and the last two whole ones."""
        kinds = [type(value) for value in astuple(self)]
        return (
            {*kinds} <= {int, float} and kinds[3:] == [int, int] and all(0 < value < _MOST for value in astuple(self))
        )


def measure_disk(
    directory: str | Path, *, capacity_nbytes: int = 0, budget_s: float = 3.0, calls: DiskCalls = SYSTEM_CALLS
) -> DiskSpeed:
    """Measure the speeds of the disk under `directory`, by a file without a name of at most 128 MiB.

    A few sizes of blocks are tried, each with several blocks at once, and a pair is kept that writes and reads the
    same bytes in the least time, or about that. `budget_s` bounds that: what it has no time for is not tried.

    Args:
        directory: on the disk.
        capacity_nbytes: what will be asked of it then, for which there has to be room.
        budget_s: see above.
        calls: the system calls.

    Raises:
        ConfigError: `directory` cannot be used, or its file system has less room.
        TierIOError: the disk failed, or is full.
    """
    file = DiskFile(folder_at(directory), nbytes=capacity_nbytes, calls=calls)
    try:
        _require_room(file)
        return _measure(file, time.perf_counter() + budget_s, budget_s / (len(_CANDIDATES) + 1))
    finally:
        file.close()


def cached_disk_speed(directory: str | Path, *, capacity_nbytes: int = 0, path: Path | None = None) -> DiskSpeed:
    """Return the speeds kept at `path`, or measure them, see `measure_disk`, and keep them there.

    The default is a file of the user's cache folder, another one for each file system (its device and type), processor
    and number of cores. A file that cannot be used is replaced; where none can be written, nothing is kept.

    Raises:
        ConfigError: `directory` cannot be used.
        TierIOError: the disk failed, or is full.
    """
    measure = partial(measure_disk, directory, capacity_nbytes=capacity_nbytes)
    return kept_speeds(DiskSpeed, measure, name="disk", made_of=_identity(folder_at(directory)), path=path)


# Measuring.


def _measure(file: DiskFile, end_s: float, slice_s: float) -> DiskSpeed:
    nbytes = _reserve(file)
    buffer = AlignedBuffer(nbytes, file.alignment)
    buffer.view[:] = os.urandom(_PATTERN_NBYTES) * (nbytes // _PATTERN_NBYTES)
    with runtime_mode():
        memory = torch.frombuffer(buffer.view, dtype=torch.uint8)
        nbytes = _suitable_nbytes(file, memory, slice_s)
        best: DiskSpeed | None = None
        for block_nbytes, depth in _CANDIDATES:
            if best is not None and time.perf_counter() + slice_s > end_s:
                break
            found = _measure_one(file, memory[:nbytes], block_nbytes, depth, slice_s)
            if best is None or _round_trip_s(found) < _CLEARLY * _round_trip_s(best):
                best = found
    assert best is not None
    return best


def _require_room(file: DiskFile) -> None:
    free_nbytes = file.free_nbytes()
    if free_nbytes is not None and free_nbytes < _MIN_NBYTES:
        raise ConfigError(
            f"memory.disk.path: {file.directory} cannot be used: its disk is measured with {format_nbytes(_MIN_NBYTES)}"
            f", and its file system has {format_nbytes(free_nbytes)} left; make room there, or name another directory"
        )


def _reserve(file: DiskFile) -> int:
    """Return how many bytes there is room for."""
    free_nbytes = file.free_nbytes()
    nbytes = _MAX_NBYTES if free_nbytes is None else min(_MAX_NBYTES, free_nbytes // 2)
    nbytes = max(_MIN_NBYTES, nbytes // _PATTERN_NBYTES * _PATTERN_NBYTES)
    file.reserve(0, nbytes)
    return nbytes


def _suitable_nbytes(file: DiskFile, memory: torch.Tensor, slice_s: float) -> int:
    """Write everything once, or the first part of it on a slow disk; return how many bytes to measure with."""
    with _moving(file, *_CANDIDATES[0]) as transfers:
        nbytes = _MIN_NBYTES
        while True:
            stored = transfers.stored(nbytes, [Extent(0, nbytes)])
            taken_s = _time_s(partial(transfers.write, stored, memory[:nbytes]))
            # Twice as many bytes, written and read, twice: if there is time for that.
            if 2 * nbytes > len(memory) or 8 * taken_s > slice_s:
                return nbytes
            nbytes *= 2


def _measure_one(file: DiskFile, memory: torch.Tensor, block_nbytes: int, depth: int, slice_s: float) -> DiskSpeed:
    """Write and read `memory`, in turn, for `slice_s`."""
    with _moving(file, block_nbytes, depth) as transfers:
        stored = transfers.stored(memory.nbytes, [Extent(0, memory.nbytes)])
        small = torch.empty(_SMALL_NBYTES, dtype=torch.uint8)
        small_s = [_time_s(partial(transfers.read, stored, small)) for _ in range(_NUM_SMALL)]
        write_s: list[float] = []
        read_s: list[float] = []
        end_s = time.perf_counter() + slice_s
        while len(read_s) < _MIN_REPEATS or (len(read_s) < _MAX_REPEATS and time.perf_counter() < end_s):
            write_s.append(_time_s(partial(transfers.write, stored, memory)))
            read_s.append(_time_s(partial(transfers.read, stored, memory)))
    nbytes = memory.nbytes
    return DiskSpeed(
        read_Bps=nbytes / statistics.median(read_s),
        write_Bps=nbytes / statistics.median(write_s),
        latency_s=statistics.median(small_s[1:]),
        block_nbytes=block_nbytes,
        depth=depth,
    )


@contextlib.contextmanager
def _moving(file: DiskFile, block_nbytes: int, depth: int) -> Iterator[DiskTransfers]:
    transfers = DiskTransfers(file, block_nbytes=block_nbytes, depth=depth, checks=False)
    try:
        yield transfers
    finally:
        transfers.threads.stop()
        transfers.threads.join()


def _time_s(work: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    work()
    # A clock too coarse for what it measures may say 0.
    return max(time.perf_counter() - begin_s, 1e-9)


def _round_trip_s(speed: DiskSpeed) -> float:
    """Return the seconds a byte takes to the disk and back."""
    return 1 / speed.read_Bps + 1 / speed.write_Bps


# Keeping.


def _identity(directory: Path) -> list[str]:
    """Return what the speeds depend on."""
    return [f"device {_device(directory)}", file_system(directory), processor(), f"{num_cores()} cores"]


def file_system(directory: Path) -> str:
    """Return the type of a directory's file system, and its source; nothing where the system does not say."""
    device = _device(directory)
    with contextlib.suppress(OSError):
        for line in _MOUNTS.read_text(errors="replace").splitlines():
            words = line.split()
            if len(words) > 2 and words[2] == device and "-" in words:
                return " ".join(words[words.index("-") + 1 :][:2])
    return ""


def _device(directory: Path) -> str:
    """Return the number of the device that a directory is on, or will be when it is made."""
    for each in (directory.absolute(), *directory.absolute().parents):
        with contextlib.suppress(OSError):
            number = os.stat(each).st_dev
            return f"{os.major(number)}:{os.minor(number)}"
    return ""
