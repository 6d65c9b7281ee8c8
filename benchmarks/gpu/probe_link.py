"""What the link between host and device gives; each function is one row of the probe."""

from __future__ import annotations

import ctypes
import mmap
import resource
import time
from typing import Any

import psutil
import torch
from torch import Tensor

from benchmarks.gpu.rows import NotHereError
from benchmarks.gpu.timing import device_median_s

MIB = 2**20
BUDGET_S = 0.15
"""Of one size and direction."""
PIECE_NBYTES = 4 << 30
"""What pinning is tried with, again and again."""


def copies(*, sizes_mib: list[int], pinned: bool) -> dict[str, Any]:
    """Copy in, out, and both at once on two streams; bytes a second by MiB. Both at once: bytes in plus bytes out."""
    found: dict[str, Any] = {"h2d_Bps": {}, "d2h_Bps": {}, "both_Bps": {}}
    for size in sizes_mib:
        nbytes = size * MIB
        host_in, host_out = (_host(nbytes, pinned=pinned) for _ in range(2))
        device_in, device_out = (torch.ones(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2))
        key = str(size)
        found["h2d_Bps"][key] = nbytes / _copy_s(device_in, host_in)
        found["d2h_Bps"][key] = nbytes / _copy_s(host_out, device_out)
        if pinned:  # Otherwise a copy holds the host up, and there are no two at once.
            found["both_Bps"][key] = 2 * nbytes / _both_s(device_in, host_in, host_out, device_out)
    return found


def _host(nbytes: int, *, pinned: bool) -> Tensor:
    return torch.ones(nbytes, dtype=torch.uint8, pin_memory=pinned)


def _copy_s(target: Tensor, source: Tensor) -> float:
    return device_median_s(lambda: target.copy_(source, non_blocking=True), budget_s=BUDGET_S)


def _both_s(device_in: Tensor, host_in: Tensor, host_out: Tensor, device_out: Tensor) -> float:
    into, out = torch.cuda.Stream(), torch.cuda.Stream()

    def work() -> None:
        main = torch.cuda.current_stream()
        for stream, target, source in ((into, device_in, host_in), (out, host_out, device_out)):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
        main.wait_stream(into)
        main.wait_stream(out)

    return device_median_s(work, budget_s=BUDGET_S)


def pinning(*, sizes_mib: list[int], share_of_ram: float, budget_s: float) -> dict[str, Any]:
    """Register host memory with the driver: bytes a second by MiB, and how much is taken in all.

    The limit is looked for up to a share of the RAM that is free, or until the time is over; which of these, is told.
    """
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found: dict[str, Any] = {
        "locked_limit_nbytes": None if soft == resource.RLIM_INFINITY else soft,
        "register_Bps": {},
        "unregister_Bps": {},
    }
    for size in sizes_mib:
        region = _Region(size * MIB)
        region.touch()
        register_s = region.register()
        found["register_Bps"][str(size)] = size * MIB / register_s
        found["unregister_Bps"][str(size)] = size * MIB / region.unregister()
        region.close()
    found |= _pinned_in_all(int(share_of_ram * psutil.virtual_memory().available), budget_s)
    return found


def _pinned_in_all(most_nbytes: int, budget_s: float) -> dict[str, Any]:
    regions: list[_Region] = []
    end_s = time.perf_counter() + budget_s
    stopped = "asked for no more"
    try:
        while (len(regions) + 1) * PIECE_NBYTES <= most_nbytes:
            if time.perf_counter() > end_s:
                stopped = "out of time"
                break
            region = _Region(PIECE_NBYTES)
            try:
                region.register()  # It touches the pages itself.
            except NotHereError as error:
                stopped = str(error)
                region.close()
                break
            regions.append(region)
        return {"pinned_nbytes": len(regions) * PIECE_NBYTES, "pinned_until": stopped}
    finally:
        for region in regions:
            region.unregister()
            region.close()


class _Region:
    """Anonymous memory, page-aligned."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._map = mmap.mmap(-1, nbytes)
        self._buffer: Any = ctypes.c_char.from_buffer(self._map)
        self._address = ctypes.addressof(self._buffer)

    def touch(self) -> None:
        ctypes.memset(self._address, 1, self.nbytes)

    def register(self) -> float:
        """Return the seconds it took; NotHereError if the driver refuses."""
        torch.cuda.init()
        begin_s = time.perf_counter()
        status = int(torch.cuda.cudart().cudaHostRegister(self._address, self.nbytes, 0))
        if status != 0:
            raise NotHereError(f"the driver refused to pin {self.nbytes} bytes (error {status})")
        return time.perf_counter() - begin_s

    def unregister(self) -> float:
        begin_s = time.perf_counter()
        torch.cuda.cudart().cudaHostUnregister(self._address)
        return time.perf_counter() - begin_s

    def close(self) -> None:
        self._buffer = None  # A map with a view on it cannot be closed.
        self._map.close()
