"""What parts an accelerator from a CPU, so that everything above runs alike on both."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from chunkmem.errors import ConfigError
from chunkmem.runtime.populate import num_cores, populate

_LARGE_PAGE_NBYTES = 2 << 20
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


class runtime_mode:  # it reads as torch.no_grad does
    """Run allocations and copies outside of every mode the user may be in. For a ``with`` block, once.

    A slab first allocated under `inference_mode` cannot be refilled later; a dispatch or function mode (a profiler,
    a default device, our own access guard) and a transform of `torch.func` must not see or redirect the runtime's own
    operators. It is entered around every copy and allocation, so it only takes the guards it needs, and those without
    torch's wrappers around them.
    """

    __slots__ = ("_guards", "_records_gradients")

    def __enter__(self) -> None:
        self._records_gradients = torch.is_grad_enabled()
        self._guards: list[Any] = [torch._C.DisableTorchFunction()]
        if torch.is_inference_mode_enabled():
            self._guards.append(torch._C._InferenceMode(False))
        if torch._C._len_torch_dispatch_stack() > 0:
            self._guards.append(torch._C._DisableTorchDispatch())
        if torch._C._functorch.peek_interpreter_stack() is not None:  # else grad refuses to write to what it captures
            self._guards.append(temporarily_clear_interpreter_stack())
        for guard in self._guards:
            guard.__enter__()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *_: object) -> None:
        for guard in reversed(self._guards):
            guard.__exit__(None, None, None)
        torch._C._set_grad_enabled(self._records_gradients)


def ram_nbytes() -> int:
    """Return the RAM this process may use: the machine's, or less where one of its control groups says so."""
    limit = psutil.virtual_memory().total
    for path in _cgroup_limits():
        with contextlib.suppress(OSError, ValueError):  # no such control group, or "max": no limit
            limit = min(limit, int(path.read_text()))
    return int(limit)


def _cgroup_limits() -> Iterator[Path]:
    """Yield the files that may limit this process: of its control groups and all above them, of both versions.

    A container often sees its own group as the root. Source: Linux, admin-guide, cgroup-v1 and cgroup-v2.
    """
    own = {(_CGROUPS, "memory.max"): "", (_CGROUPS / "memory", "memory.limit_in_bytes"): ""}
    with contextlib.suppress(OSError, ValueError):
        for line in _OWN_CGROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                own |= {(_CGROUPS, "memory.max"): path, (_CGROUPS, "memory.high"): path}
            elif "memory" in controllers.split(","):
                own[_CGROUPS / "memory", "memory.limit_in_bytes"] = path
    for (root, name), path in own.items():
        group = root / path.lstrip("/")
        yield from (each / name for each in (group, *group.parents) if each.is_relative_to(root))


def give_back_freed_ram() -> None:
    """Have the C library return what has been freed to the system.

    Once a program has freed a large block, glibc takes blocks of that size from its heap, and keeps them when freed.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def prefer_large_pages(address: int, nbytes: int) -> None:
    """Ask the system to back a piece of RAM with large pages: fewer faults when it is first touched, and fewer misses.

    A wish: where the system has no such pages, nothing happens.
    """
    if nbytes < _LARGE_PAGE_NBYTES:
        return
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if madvise is not None and advice is not None:
        start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        inside = (address + nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
        if inside >= _LARGE_PAGE_NBYTES:
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(inside), advice)


def _cuda_register(address: int, nbytes: int) -> int:
    """Pin host memory; return CUDA's error, 0 if there is none."""
    return int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))


class ComputeDevice:
    """The device that models compute on, and what it can tell and do about memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_accelerator = device.type != "cpu"

    @classmethod
    def default(cls, index: int | None = None) -> ComputeDevice:
        """Return the CUDA device `index` (the current one if None), or the CPU where there is none.

        Raises:
            ConfigError: there is no device `index`.
        """
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if index is not None and index >= max(1, count):
            raise ConfigError(f"there is no accelerator {index}: {count} are visible to this process")
        if count == 0:
            return cls(torch.device("cpu"))
        return cls(torch.device("cuda", torch.cuda.current_device() if index is None else index))

    def name(self) -> str:
        """Return what the accelerator calls itself, or ``cpu``."""
        return torch.cuda.get_device_name(self.device) if self.is_accelerator else self.device.type

    def time_s(self, work: Callable[[], object]) -> float:
        """Return the seconds that `work` takes; on an accelerator, those of what it starts, on a stream of its own."""
        if not self.is_accelerator:
            begin_s = time.perf_counter()
            work()
            return time.perf_counter() - begin_s
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            begin.record(stream)
            work()
            end.record(stream)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def num_update_threads(self) -> int:
        """Return how many threads update on HOST while the device computes: all cores where that happens elsewhere."""
        if not self.is_accelerator:
            return torch.get_num_threads()
        return num_cores()

    def capacity_nbytes(self) -> int:
        """Return the bytes of memory on the device; without an accelerator, RAM."""
        if not self.is_accelerator:
            return ram_nbytes()
        return int(torch.cuda.get_device_properties(self.device).total_memory)

    def used_nbytes(self) -> int:
        """Return the bytes torch has allocated on the accelerator, or that this process holds in RAM."""
        if not self.is_accelerator:
            return int(psutil.Process().memory_info().rss)
        return int(torch.cuda.memory_allocated(self.device))

    def take_peak_nbytes(self) -> int:
        """Return the peak of everything torch allocated on the accelerator since the last call."""
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return int(peak)

    def has_expandable_segments(self) -> bool:
        """Tell whether torch's allocator maps pages of freed slabs to tensors of any size; True where it cannot tell.

        CUDA alone: elsewhere torch has no such setting, or does not say.
        """
        if self.device.type != "cuda":
            return True
        with contextlib.suppress(Exception):  # not part of torch's public interface
            return bool(torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"])
        return True

    def pin(self, region: mmap.mmap, address: int) -> bool:
        """Register host memory with the device for direct copies; False, with one warning, where that is refused."""
        if not self.is_accelerator:
            return False
        populate(address, len(region))
        status = _cuda_register(address, len(region))
        if status != 0:
            warnings.warn(
                f"the CUDA driver refused to pin {len(region)} bytes of host memory (error {status}); copies will be "
                "slower. Raise the locked-memory limit (ulimit -l) or lower memory.host",
                stacklevel=2,
            )
        return status == 0

    def unpin(self, address: int) -> None:
        """Undo `pin`."""
        torch.cuda.cudart().cudaHostUnregister(address)
