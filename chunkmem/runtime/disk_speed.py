"""Measure how fast a disk is, and keep what was found for the next run."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path

import torch

from chunkmem.data.codec import Positive, Rate
from chunkmem.data.errors import ConfigError
from chunkmem.data.json_files import Saved
from chunkmem.data.sizes import format_nbytes
from chunkmem.runtime.device import runtime_mode
from chunkmem.runtime.disk_file import SYSTEM_CALLS, AlignedBuffer, DiskFile, SystemCalls, folder_at
from chunkmem.runtime.disk_pool import DiskSlab, DiskTransfers
from chunkmem.runtime.free_room import Extent
from chunkmem.runtime.populate import num_cores
from chunkmem.runtime.speeds import kept_speeds, median_s, processor, time_s

_CANDIDATES = ((16 << 20, 4), (8 << 20, 8), (32 << 20, 2), (4 << 20, 8), (16 << 20, 8))
"""Bytes of a block, and how many are moved at once. The likeliest first: on a slow disk, the others are left out.
Smaller blocks are not tried: here nothing computes in Python meanwhile; see `runtime/transfer_threads.py`."""
_CLEARLY = 0.95
"""The share of the time at most that a later one has to take: what is measured varies."""
_MIN_NBYTES, _MAX_NBYTES = 16 << 20, 128 << 20
"""Read and written at a time; more where the disk is fast, so that what is under way at the ends does not count."""
_SMALL_NBYTES = 4 << 10
_NUM_SMALL = 7
_PATTERN_NBYTES = 1 << 20
"""Random bytes: some disks are faster with others."""
_MOUNTS = Path("/proc/self/mountinfo")


@dataclass(frozen=True)
class DiskSpeed(Saved, name="chunkmem disk speed", error=ConfigError, again="measure it again"):
    """How fast slabs are read from a disk and written to it, and by which blocks."""

    read_Bps: Rate
    write_Bps: Rate
    latency_s: Rate
    """Seconds to read a few bytes, including the hand-over to a thread."""
    block_nbytes: Positive
    depth: Positive
    """Number of blocks that are moved at once."""


def measure_disk(
    directory: str | Path, *, capacity_nbytes: int = 0, budget_s: float = 3.0, calls: SystemCalls = SYSTEM_CALLS
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
    slice_s, end_s = budget_s / (len(_CANDIDATES) + 1), time.perf_counter() + budget_s
    best, best_s = None, inf
    with contextlib.closing(DiskFile(directory, nbytes=capacity_nbytes, calls=calls)) as file, runtime_mode():
        memory = _memory_for(file)
        for block_nbytes, depth in _CANDIDATES:
            if best is not None and time.perf_counter() + slice_s > end_s:
                break
            transfers = DiskTransfers(file, block_nbytes=block_nbytes, depth=depth)
            with contextlib.closing(transfers.threads):
                if best is None:
                    memory = _suitable(transfers, memory, slice_s)
                slab = _slab(transfers, memory.nbytes)
                write_s, read_s = (
                    median_s(partial(time_s, partial(move, memory)), slice_s / 2, least=2, most=16, warms_up=False)
                    for move in (slab.write, slab.read)
                )
                small = partial(slab.read, torch.empty(_SMALL_NBYTES, dtype=torch.uint8))
                latency_s = median_s(partial(time_s, small), 0.0, least=_NUM_SMALL)
            if write_s + read_s < _CLEARLY * best_s:
                best_s = write_s + read_s
                best = DiskSpeed(memory.nbytes / read_s, memory.nbytes / write_s, latency_s, block_nbytes, depth)
    assert best is not None
    return best


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


def _memory_for(file: DiskFile) -> torch.Tensor:
    """Return what to write, in RAM, as much as there is room for in the file, which is reserved."""
    needed = f"its disk is measured with {format_nbytes(_MIN_NBYTES)}"
    file.require_room(_MIN_NBYTES, f"memory.disk.path: {file.directory} cannot be used: {needed}")
    free_nbytes = file.free_nbytes() or 2 * _MAX_NBYTES
    num_patterns = max(_MIN_NBYTES, min(_MAX_NBYTES, free_nbytes // 2)) // _PATTERN_NBYTES
    buffer = AlignedBuffer(num_patterns * _PATTERN_NBYTES, file.alignment).view
    file.reserve(0, len(buffer))
    buffer[:] = os.urandom(_PATTERN_NBYTES) * num_patterns
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _slab(transfers: DiskTransfers, nbytes: int) -> DiskSlab:
    return DiskSlab(transfers, nbytes, [Extent(0, nbytes)])


def _suitable(transfers: DiskTransfers, memory: torch.Tensor, slice_s: float) -> torch.Tensor:
    """Write everything once, or the first part of it on a slow disk; return what to measure with."""
    nbytes = _MIN_NBYTES
    # Twice as many bytes, written and read, twice: if there is time for that.
    while 8 * time_s(partial(_slab(transfers, nbytes).write, memory[:nbytes])) <= slice_s and 2 * nbytes <= len(memory):
        nbytes *= 2
    return memory[:nbytes]


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
    folder = directory.absolute()
    number = next(os.stat(each).st_dev for each in (folder, *folder.parents) if os.path.exists(each))
    return f"{os.major(number)}:{os.minor(number)}"
