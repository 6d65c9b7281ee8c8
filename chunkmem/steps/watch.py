"""The probes of one recorded step, begun and ended together."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import psutil
import torch

from chunkmem.runtime.tiers import Tiers
from chunkmem.steps.probe import LiveStorageProbe

if TYPE_CHECKING:
    from chunkmem.runtime.device import ComputeDevice

_STATM = "/proc/self/statm"
_PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")


class ResidentMemory:
    """Call it for the bytes of RAM that the process which made it holds; 3 µs, where psutil takes ten times that."""

    def __init__(self, statm: str = _STATM) -> None:
        """Keep `statm` open; where there is none, ask psutil."""
        self._psutil = psutil.Process()
        self._fd: int | None = None
        with contextlib.suppress(OSError):
            self._fd = os.open(statm, os.O_RDONLY)
            self._close = weakref.finalize(self, os.close, self._fd)

    def __call__(self) -> int:
        if self._fd is None:
            return int(self._psutil.memory_info().rss)
        return int(os.pread(self._fd, 128, 0).split(None, 2)[1]) * _PAGE_NBYTES

    def close(self) -> None:
        """Close the file, which also happens when the object goes; later calls ask psutil."""
        if self._fd is not None:
            self._fd = None
            self._close()


def reader_for(compute: ComputeDevice) -> Callable[[], int]:
    """Return what tells the bytes in use where `compute` computes: allocated on the accelerator, or resident in RAM."""
    return compute.used_nbytes if compute.is_accelerator else ResidentMemory()


class SamplingThread:
    """Keeps the highest of the samples that a thread takes, until `stop`.

    An error of `read_nbytes` ends the thread, and comes out of the next `take_peak_nbytes` or `stop`, once. In a child
    process there is no thread, and what was inherited neither waits nor samples by itself.
    """

    def __init__(self, read_nbytes: Callable[[], int], period_s: float = 0.001) -> None:
        """Call `read_nbytes` every `period_s` seconds from now on; an interval begins."""
        self._read_nbytes = read_nbytes
        self._samples = _Samples(read_nbytes)
        self._samples.take_peak_nbytes()
        # The thread does not know `self`: a sampler that is dropped without stop() ends it.
        self._end = weakref.finalize(self, self._samples.end)
        self._thread = threading.Thread(
            target=self._samples.run, args=(period_s,), name="chunkmem memory sampler", daemon=True
        )
        self._thread.start()

    def take_peak_nbytes(self) -> int:
        """Return the highest sample since the last call, one taken now included; the next interval begins with it."""
        if not self._samples.is_mine():
            return self._read_nbytes()
        self._samples.raise_error()
        return self._samples.take_peak_nbytes()

    @property
    def longest_interval_s(self) -> float:
        """Longest time without a sample so far, in seconds; 0 before there are two samples.

        It is the shortest lifetime that is sure to be seen: whatever was there for as long was there in some sample.
        """
        return self._samples.longest_interval_s

    def stop(self) -> None:
        """End the thread and wait for it. May be called again."""
        self._end()
        # The garbage collector may call this in the thread itself. In a child process it counts as ended.
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._samples.raise_error()


class _Samples:
    """What the thread and its owner share."""

    def __init__(self, read_nbytes: Callable[[], int]) -> None:
        self._read_nbytes = read_nbytes
        self._pid = os.getpid()
        # Reentrant: the garbage collector may run anyone's code in the middle of a sample.
        self._lock = threading.RLock()
        self._running = threading.Lock()
        self._running.acquire()
        self._peak_nbytes = 0
        self._last_began_s: float | None = None
        self.longest_interval_s = 0.0
        self._error: BaseException | None = None

    def is_mine(self) -> bool:
        """This is not an inherited copy in a child process."""
        return self._pid == os.getpid()

    def run(self, period_s: float) -> None:
        """Take samples until `end`."""
        try:
            while not self._running.acquire(timeout=period_s):
                with self._lock:
                    self._peak_nbytes = max(self._peak_nbytes, self._read())
        except BaseException as error:
            self._error = error

    def end(self) -> None:
        """Have `run` return. Never blocks, so that the garbage collector may call it; again is no harm."""
        with contextlib.suppress(RuntimeError):
            self._running.release()

    def take_peak_nbytes(self) -> int:
        # Reading under the lock: else a sample read before this one could be stored after it, in the next interval.
        with self._lock:
            now = self._read()
            peak, self._peak_nbytes = max(self._peak_nbytes, now), now
        return peak

    def _read(self) -> int:
        """Take a sample, under the lock."""
        began_s = time.perf_counter()
        nbytes = self._read_nbytes()
        # A sample is of some instant while it is read, so from one to the next it is at most from begin to end.
        if self._last_began_s is not None:
            self.longest_interval_s = max(self.longest_interval_s, time.perf_counter() - self._last_began_s)
        self._last_began_s = began_s
        return nbytes

    def raise_error(self) -> None:
        """Raise what ended the thread, if something did and nobody was told."""
        error, self._error = self._error, None
        if error is not None:
            raise error


class Watch:
    """Bytes of non-model data on DEVICE: at operator boundaries, and by a sampling thread if one is wanted."""

    def __init__(self, tiers: Tiers, *, is_chunk: Callable[[int], bool], sample: bool) -> None:
        """Begin to watch.

        Args:
            tiers: whose chunks do not count.
            is_chunk: tells whether a storage, by its `_cdata`, is chunk memory.
            sample: run a thread, too.
        """
        self._meter = tiers.meter
        """The allocator counts; None: operators are watched."""
        self._probe = LiveStorageProbe(is_chunk) if self._meter is None else None
        self._begin_nbytes = 0
        if self._meter is not None:
            self._meter.take_peak_nbytes()
            self._begin_nbytes = self._meter.now_nbytes
        self._sampler: SamplingThread | None = None
        self._base_nbytes = 0
        self._sampled_nbytes = 0
        """What the thread had seen last when it was ended."""
        self._sampling_interval_s = 0.0
        """The longest interval that it had by then."""
        if sample:
            read_nbytes = reader_for(tiers.compute)
            self._base_nbytes = read_nbytes()
            self._sampler = SamplingThread(read_nbytes)

    @property
    def run_operator(self) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] | None:
        """Calls an operator and counts its memory; None where the allocator counts by itself."""
        return None if self._probe is None else self._probe.run

    def leave_out(self, storage: torch.UntypedStorage) -> None:
        """Count a storage no more that becomes part of a chunk; the allocator's count is less what chunks have."""
        if self._probe is not None:
            self._probe.leave_out(storage)

    def count_again(self, storage: torch.UntypedStorage) -> None:
        """Count a storage that is no part of a chunk any more; the allocator's count has it already."""
        if self._probe is not None:
            self._probe.count_again(storage)

    @property
    def sampling_interval_s(self) -> float:
        """Longest time between two looks of the sampling thread, in seconds; 0 if none ran. Stays after `stop`."""
        return self._sampling_interval_s if self._sampler is None else self._sampler.longest_interval_s

    def take_peaks(self) -> tuple[int, int]:
        """Return the highest bytes since the last call: at operator boundaries, and as sampled above the start."""
        sampled, self._sampled_nbytes = self._sampled_nbytes, 0
        if self._sampler is not None:
            sampled = max(0, self._sampler.take_peak_nbytes() - self._base_nbytes)
        counter = self._meter if self._probe is None else self._probe
        return 0 if counter is None else counter.take_peak_nbytes(), sampled

    def left_nbytes(self) -> int:
        """Return the non-model bytes on an accelerator that were not there at the start: what each later step finds."""
        return 0 if self._meter is None else max(0, self._meter.now_nbytes - self._begin_nbytes)

    def end_sampling(self) -> None:
        """End the thread, if there is one; what it has seen is in the next `take_peaks`."""
        sampler, self._sampler = self._sampler, None
        if sampler is not None:
            self._sampled_nbytes = max(0, sampler.take_peak_nbytes() - self._base_nbytes)
            self._sampling_interval_s = sampler.longest_interval_s
            sampler.stop()

    def stop(self) -> None:
        """End the thread, if there is one, and count no more. May be called again."""
        self._meter = None
        if self._probe is not None:
            self._probe.stop()
        self.end_sampling()
