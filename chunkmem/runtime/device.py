"""What parts an accelerator from a CPU, so that everything above runs alike on both."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from chunkmem.data.errors import ConfigError
from chunkmem.runtime.populate import num_cores, populate
from chunkmem.runtime.timestamps import Clock, HostClock, StreamClock

_LARGE_PAGE_NBYTES = 2 << 20
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_WITHOUT_STREAMS = frozenset({"mps"})
"""Types of accelerators that compute from the host's own memory, in one queue: there is nothing to move."""


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
        if is_inferring := torch.is_inference_mode_enabled():
            self._guards.append(torch._C._InferenceMode(False))  # which enables gradients
        if torch._C._len_torch_dispatch_stack() > 0:
            self._guards.append(torch._C._DisableTorchDispatch())
        if torch._C._functorch.peek_interpreter_stack() is not None:  # else grad refuses to write to what it captures
            self._guards.append(temporarily_clear_interpreter_stack())
        for guard in self._guards:
            guard.__enter__()
        if self._records_gradients or is_inferring:
            torch._C._set_grad_enabled(False)

    def __exit__(self, *_: object) -> None:
        try:
            for guard in reversed(self._guards):
                guard.__exit__(None, None, None)
        finally:
            if self._records_gradients:
                torch._C._set_grad_enabled(True)


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


def prefer_large_pages(region: mmap.mmap) -> None:
    """Ask the system to back a mapping with large pages: fewer faults when it is first touched, and fewer misses.

    A wish: where the system has no such pages, nothing happens.
    """
    if len(region) >= _LARGE_PAGE_NBYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            region.madvise(mmap.MADV_HUGEPAGE)


def _cuda_register(address: int, nbytes: int) -> int:
    """Pin host memory; return CUDA's error, 0 if there is none."""
    return int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))


def _cuda_launch(device: torch.device) -> None:
    """Launch a small kernel, and raise what the calling thread's last CUDA call has left behind."""
    torch.ones((), device=device)


def _clear_cuda_error(device: torch.device) -> None:
    """Take away the error that a refused call of CUDA's has left for the calling thread.

    CUDA keeps it, and torch asks for it after each launch: the next kernel, of whomever, would be what has failed. To
    ask takes it away. torch has no function for that alone, but a launch does it.

    Raises:
        RuntimeError: it stays, as the device itself has failed.
    """
    with contextlib.suppress(RuntimeError):
        _cuda_launch(device)
    _cuda_launch(device)


def _read_ram(target: torch.Tensor, source: torch.Tensor) -> None:
    # Not `copy_`, which would start as many threads as torch may have, for each thread that calls it.
    ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)


def cuda_capability() -> tuple[int, int] | None:
    """Return the compute capability of the current CUDA device; None: there is none."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


class ComputeDevice:
    """The device that models compute on, and what it can tell and do about memory.

    Any accelerator of torch's that has streams, through `torch.accelerator`. What CUDA alone has is asked for only
    where `is_cuda`; torch calls ROCm's devices cuda too.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_accelerator = device.type != "cpu"
        self.is_cuda = device.type == "cuda"
        """CUDA, or ROCm: host memory can be registered for direct copies, and events can block."""
        self.runs_cuda_kernels = self.is_cuda and torch.version.hip is None
        self._streams: list[torch.Stream] = []
        """Streams that something was computed on, the most recent one last."""
        self._own_streams: dict[str, torch.Stream] = {}

    @classmethod
    def default(cls, index: int | None = None) -> ComputeDevice:
        """Return the accelerator `index` (the current one if None), or the CPU where there is none.

        Raises:
            ConfigError: there is no device `index`.
        """
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is not None and found.type in _WITHOUT_STREAMS:
            found = None
        count = 0 if found is None else torch.accelerator.device_count()
        if index is not None and index >= max(1, count):
            raise ConfigError(f"there is no accelerator {index}: {count} are visible to this process")
        if found is None:
            return cls(torch.device("cpu"))
        current = torch.accelerator.current_device_index()  # this starts torch's allocator, too
        return cls(torch.device(found.type, current if index is None else index))

    def name(self) -> str:
        """Return what the accelerator calls itself, or else its type, such as ``cpu``."""
        find = getattr(torch.get_device_module(self.device), "get_device_name", None) if self.is_accelerator else None
        return self.device.type if find is None else str(find(self.device))

    def generators(self) -> list[torch.Generator]:
        """Return what `torch.manual_seed` seeds: the generator of the CPU, and that of the accelerator."""
        found = [torch.default_generator]
        if self.is_accelerator:
            found.append(torch.get_device_module(self.device).default_generators[self.device.index])
        return found

    def stream(self) -> torch.Stream:
        """Return a new stream of the accelerator."""
        return torch.Stream(self.device)

    def current_stream(self) -> torch.Stream:
        """Return the calling thread's current stream, behind all that others were given.

        For plans, one lane computes. A program may compute on several streams, such as two
        towers that it joins by `wait_stream`. It orders what it makes itself, but knows nothing of chunks: of weights
        that are on their way to a slab, or leave it, as a module on one stream has returned while another computes. So
        each access to a chunk asks for the stream, and if that is not the one of the access before, it waits for that
        one. The streams take turns, and an event on the current one is the end of all.
        """
        stream = self._current_stream()
        if not self._streams or self._streams[-1] != stream:
            if self._streams:
                stream.wait_stream(self._streams[-1])
            self._streams = [*(each for each in self._streams if each != stream), stream]
        return stream

    def _current_stream(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device.index)  # of a device, torch asks more at each access

    def computing_streams(self) -> Sequence[torch.Stream]:
        """Return the streams that something was computed on: each may be given freed memory, the current one last."""
        self.current_stream()
        return self._streams

    def free_in_order(self) -> None:
        """Memory goes back to torch's allocator: whichever stream that gives it to comes after what is computed now."""
        if len(self._streams) > 1:
            current = self.current_stream()
            for other in self._streams[:-1]:
                other.wait_stream(current)

    def give_back_freed(self) -> None:
        """Have torch's allocator give the accelerator's memory that nobody uses back to it, for other processes."""
        if self.is_accelerator:
            torch.accelerator.empty_cache()

    def timing_event(self) -> torch.Event:
        """Return a new event that has a time once it was recorded.

        Have streams wait by `event.wait(stream)`: torch's `stream.wait_event` does not take an event of CUDA's. Those
        block a thread that waits for them, which would else keep a core busy that computing needs; other accelerators
        decide for themselves.
        """
        if self.is_cuda:
            event: torch.Event = torch.cuda.Event(enable_timing=True, blocking=True)
            return event
        return torch.Event(self.device, enable_timing=True)

    @cached_property
    def clock(self) -> Clock:
        """Times what is computed here; one for all, so that its events are used again."""
        return StreamClock(self) if self.is_accelerator else HostClock()

    def time_s(self, work: Callable[[], object]) -> float:
        """Return the seconds that `work` takes; on an accelerator, those of what it starts, on a stream of its own."""
        if not self.is_accelerator:
            begin_s = time.perf_counter()
            work()
            return time.perf_counter() - begin_s
        stream = self._stream_of("timed")
        stream.wait_stream(self.current_stream())
        with stream:
            begin, end = self.timing_event(), self.timing_event()
            begin.record(stream)
            work()
            end.record(stream)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def _stream_of(self, work: str) -> torch.Stream:
        """Return the stream of one kind of work.

        torch has 32, and gives the first out again after the last, which may be a lane's by then.
        """
        if work not in self._own_streams:
            self._own_streams[work] = self.stream()
        return self._own_streams[work]

    @cached_property
    def _thread_of_overlapped(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "chunkmem overlapped")

    def overlap(self, work: Callable[[], None]) -> Callable[[], None]:
        """Do something after all that was passed before, overlapped with computing; return what waits for it.

        In RAM a thread does it, and what waits raises what it raises. On an accelerator `work` is called at once, and
        what it issues is in order on a stream of its own, which computing waits for.
        """
        if not self.is_accelerator:
            return self._thread_of_overlapped.submit(work).result
        stream, over = self._stream_of("overlapped"), self.timing_event()
        stream.wait_stream(self.current_stream())
        with stream:
            work()
            over.record(stream)
        return lambda: over.wait(self.current_stream())

    def reader(self) -> Callable[[torch.Tensor, torch.Tensor], object]:
        """Return what copies to RAM in any thread, in one core's time: `read(target, source)`, both 1-D and alike.

        From the accelerator it copies on a stream of its own, what is there once all is done that was issued so far.
        """
        if not self.is_accelerator:
            return _read_ram
        stream, begun = self._stream_of("readers"), self.timing_event()
        begun.record(self.current_stream())

        def read(target: torch.Tensor, source: torch.Tensor) -> None:
            if source.is_cpu:
                _read_ram(target, source)
                return
            with stream:
                begun.wait(stream)
                target.copy_(source)
            stream.synchronize()

        return read

    def pci_address(self) -> str | None:
        """Return the address on the bus, such as ``0000:3b:00.0``; None without CUDA, or where torch cannot tell."""
        if not self.is_cuda:
            return None
        found = torch.cuda.get_device_properties(self.device)
        domain, bus, device = (getattr(found, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
        return None if domain is None or bus is None or device is None else f"{domain:04x}:{bus:02x}:{device:02x}.0"

    def num_update_threads(self) -> int:
        """Return how many threads update on HOST while the device computes.

        With an accelerator, all cores but two: one for the thread that launches the model's operators, one for
        autograd's, which would else be descheduled for milliseconds.
        """
        if not self.is_accelerator:
            return torch.get_num_threads()
        return max(1, num_cores() - 2)

    def capacity_nbytes(self) -> int:
        """Return the bytes of memory on the device; without an accelerator, RAM.

        Raises:
            ConfigError: torch cannot tell.
        """
        if not self.is_accelerator:
            return ram_nbytes()
        try:
            return int(torch.accelerator.get_memory_info(self.device)[1])
        except RuntimeError as error:  # that a backend does not have it is one, too
            reason = str(error).strip().partition("\n")[0]
            raise ConfigError(
                f"torch cannot tell how much memory {self.device} has ({reason}); set memory.device"
            ) from error

    def used_nbytes(self) -> int:
        """Return the bytes torch has allocated on the accelerator, or that this process holds in RAM."""
        if not self.is_accelerator:
            return int(psutil.Process().memory_info().rss)
        return int(torch.accelerator.memory_allocated(self.device))

    def take_peak_nbytes(self) -> int:
        """Return the peak of everything torch allocated on the accelerator since the last call."""
        peak = torch.accelerator.max_memory_allocated(self.device)
        torch.accelerator.reset_peak_memory_stats(self.device)
        return int(peak)

    def has_expandable_segments(self) -> bool:
        """Tell whether torch's allocator maps pages of freed slabs to tensors of any size; True where it cannot tell.

        CUDA alone: elsewhere torch has no such setting, or does not say.
        """
        if not self.is_cuda:
            return True
        with contextlib.suppress(Exception):  # not part of torch's public interface
            return bool(torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"])
        return True

    def pin(self, region: mmap.mmap, address: int) -> bool:
        """Register host memory with CUDA for direct copies; False where there is no CUDA or, with one warning, refused.

        Copies of memory that is not registered are right all the same, but may hold up the thread that issues them.
        """
        if not self.is_cuda:
            return False
        populate(address, len(region))
        status = _cuda_register(address, len(region))
        if status != 0:
            _clear_cuda_error(self.device)
            warnings.warn(
                f"the CUDA driver refused to pin {len(region)} bytes of host memory (error {status}); copies to and "
                "from there will be slower. Raise the locked-memory limit (ulimit -l) or lower memory.host; "
                "manager.memory() says how much is pinned",
                stacklevel=2,
            )
        return status == 0

    def unpin(self, address: int) -> None:
        """Undo `pin`."""
        torch.cuda.cudart().cudaHostUnregister(address)
