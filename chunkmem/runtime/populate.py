"""First touch of RAM by several threads: the system finds a page, and zeroes it, when that is first written to."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_MADV_POPULATE_WRITE = 23
"""Linux 5.14; `mmap` has no name for it."""
_SPAN_NBYTES = 64 << 20
"""What a thread does at a time: whole large pages, and long enough that starting a thread does not count."""


def populate(address: int, nbytes: int) -> None:
    """Have the system back a new mapping, all 0, with memory now, by as many threads as there are cores.

    A driver that pins memory would do so with one thread. Where the system does not know how, all is set to the 0 that
    it is; where it refuses, as it lacks memory, the mapping stays as it is and its first use fails.
    """
    spans = [(address + at, min(_SPAN_NBYTES, nbytes - at)) for at in range(0, nbytes, _SPAN_NBYTES)]
    touch = _toucher()
    with ThreadPoolExecutor(min(len(spans), num_cores())) as threads:
        for _ in threads.map(lambda span: touch(*span), spans):
            pass


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _toucher() -> Callable[[int, int], object]:
    """Return what touches so many bytes from an address on. Functions of `ctypes` run without Python's lock."""
    madvise = getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)

    def touch(address: int, nbytes: int) -> None:
        lacks = madvise is None
        if madvise is not None and madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _MADV_POPULATE_WRITE):
            lacks = ctypes.get_errno() == errno.EINVAL
        if lacks:
            ctypes.memset(address, 0, nbytes)

    return touch
