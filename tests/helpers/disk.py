"""Pools of DISK for tests, and what is left of them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from chunkmem.data.types import Tier
from chunkmem.runtime.disk_pool import DiskPool
from chunkmem.runtime.ledger import Ledger

ROLE = "param"
BLOCK = 16 << 10
"""Small blocks, so that a slab has several."""
CAP = 64 << 20


def new_pool(directory: Path, *, cap_nbytes: int = CAP, **options: Any) -> DiskPool:
    """Return a pool in `directory`, by default of small blocks, which two threads move."""
    ledger = Ledger(Tier.DISK, cap_nbytes, cap_nbytes)
    return DiskPool(ledger, directory, **{"block_nbytes": BLOCK, "depth": 2, **options})


@contextmanager
def opened(directory: Path, **options: Any) -> Iterator[DiskPool]:
    """Yield such a pool, and close it."""
    pool = new_pool(directory, **options)
    try:
        yield pool
    finally:
        pool.close()


def numbers(nbytes: int, *, seed: int = 0, shift: int = 0) -> torch.Tensor:
    """Return `nbytes` random bytes, at an address that is `shift` past a multiple of 4096."""
    memory = torch.empty(nbytes + 2 * 4096, dtype=torch.uint8)
    start = -memory.data_ptr() % 4096 + shift
    memory = memory[start : start + nbytes]
    memory.random_(generator=torch.Generator().manual_seed(seed))
    assert memory.data_ptr() % 4096 == shift % 4096
    return memory


def disk_threads() -> list[threading.Thread]:
    """Return the threads of all pools."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("chunkmem transfer")]


def wait_until(is_so: Callable[[], bool]) -> None:
    """Wait for what other threads do."""
    end_s = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.002)


def open_files(directory: Path) -> list[str]:
    """Return the files in a directory that this process has open, with a name or without."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except FileNotFoundError:  # the one that lists them
            continue
        if target.startswith(f"{directory}/"):
            found.append(target)
    return found
