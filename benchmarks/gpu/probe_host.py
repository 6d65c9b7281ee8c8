"""What the host's memory, cores and disk give; each function is one row of the probe."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.rows import NotHereError
from benchmarks.gpu.timing import host_median_s

MIB = 2**20
UPDATE_NBYTES = 28
"""fp32 AdamW: reads weight, gradient and two states, writes weight and states."""
BLOCK_NBYTES = 8 * MIB


def host_memory(*, threads: list[int], mib: int, budget_s: float, under_dma: bool) -> dict[str, Any]:
    """Copy and triad (a = b + s*c) over arrays of `mib`, by number of threads; bytes a second.

    Counted are 2 and 3 times the array: what is fetched only to be overwritten is not. With `under_dma`, copies to and
    from the device run meanwhile, and their rate is told too.
    """
    a, b, c = (torch.ones(mib * MIB // 4) for _ in range(3))
    found: dict[str, Any] = {"copy_Bps": {}, "triad_Bps": {}}
    kinds: tuple[tuple[str, int, Callable[[], object]], ...] = (
        ("copy_Bps", 2, lambda: a.copy_(b)),
        ("triad_Bps", 3, lambda: torch.add(b, c, alpha=0.5, out=a)),
    )
    if under_dma:
        found |= {"dma_beside_copy_Bps": {}, "dma_beside_triad_Bps": {}}
    for count in threads:
        torch.set_num_threads(count)
        for name, factor, work in kinds:
            with _dma() if under_dma else contextlib.nullcontext() as dma:
                took_s = host_median_s(work, budget_s=budget_s)
            found[name][str(count)] = factor * a.nbytes / took_s
            if dma is not None:
                found[f"dma_beside_{name}"][str(count)] = dma.Bps
    return found


class _Dma:
    """Copies in both directions, all the time, until it is told to stop."""

    def __init__(self) -> None:
        nbytes = 64 * MIB
        self._hosts = [torch.ones(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._devices = [torch.ones(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
        self._streams = [torch.cuda.Stream() for _ in range(2)]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.Bps = 0.0

    def start(self) -> None:
        torch.cuda.synchronize()
        self._thread.start()

    def _run(self) -> None:
        begin_s, nbytes = time.perf_counter(), 0
        while not self._stop.is_set():
            pairs = ((self._devices[0], self._hosts[0]), (self._hosts[1], self._devices[1]))
            for stream, (target, source) in zip(self._streams, pairs, strict=True):
                with torch.cuda.stream(stream):
                    for _ in range(4):
                        target.copy_(source, non_blocking=True)
                        nbytes += target.nbytes
            for stream in self._streams:
                stream.synchronize()
        self.Bps = nbytes / (time.perf_counter() - begin_s)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        if not self.Bps:
            raise RuntimeError("the copies beside did not run; the log has their error")


@contextlib.contextmanager
def _dma() -> Iterator[_Dma]:
    dma = _Dma()
    dma.start()
    try:
        yield dma
    finally:
        dma.stop()


def adam_on_host(*, threads: list[int], numel: int, budget_s: float) -> dict[str, Any]:
    """AdamW of one flat chunk: torch's fused kernel and ours in fp32, by number of threads, and ours of each form.

    Nanoseconds a parameter.
    """
    from chunkmem.optim.kernels import load_kernels
    from chunkmem.optim.segments import HyperParameters, SegmentPass, Segments

    kernels = load_kernels()
    tensors = [torch.ones(numel) * value for value in (0.5, 1e-3, 0.0, 1.0)]
    param, grad, exp_avg, exp_avg_sq = tensors
    hyper = HyperParameters([1e-4], [0.9], [0.95], [1e-8], [0.1], [10])
    step = torch.tensor(10.0)

    def by_torch() -> None:
        torch._fused_adamw_(
            [param], [grad], [exp_avg], [exp_avg_sq], [], [step], lr=1e-4, beta1=0.9, beta2=0.95, weight_decay=0.1,
            eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip

    segments = Segments([param], [grad], [exp_avg], [exp_avg_sq])
    ours_is_native = "cpu" in kernels.native_devices
    found: dict[str, Any] = {"torch_ns": {}, "chunkmem_ns": {}, "chunkmem_is_native": ours_is_native}
    for count in threads:
        torch.set_num_threads(count)
        found["torch_ns"][str(count)] = 1e9 * host_median_s(by_torch, budget_s=budget_s) / numel
        if ours_is_native:
            took_s = host_median_s(lambda: kernels.adamw_(segments, hyper, SegmentPass()), budget_s=budget_s)
            found["chunkmem_ns"][str(count)] = 1e9 * took_s / numel
    best_ns = min([*found["torch_ns"].values(), *found["chunkmem_ns"].values()])
    return found | {"best_Bps": UPDATE_NBYTES / (best_ns * 1e-9), "by_form_ns": _by_form_ns(numel, budget_s)}


def _by_form_ns(numel: int, budget_s: float) -> dict[str, float]:
    """Return the nanoseconds a parameter of each form of an update, with the most threads asked for."""
    from chunkmem.optim.by_form import updates_by_form
    from chunkmem.optim.kernels import load_kernels

    return {
        form.value: 1e9 * host_median_s(update, budget_s=budget_s) / numel
        for form, _, update in updates_by_form(load_kernels(), numel)
    }


def disk(*, folder: str, mib: int, depths: list[int]) -> dict[str, Any]:
    """Write a file past the page cache and read it back, with so many threads at once; bytes a second by their number.

    Raises:
        NotHereError: there is too little room, or the file system takes no O_DIRECT.
    """
    nbytes = mib * MIB // BLOCK_NBYTES * BLOCK_NBYTES
    free_nbytes = shutil.disk_usage(folder).free
    if free_nbytes < 2 * nbytes:
        raise NotHereError(f"{folder} has {free_nbytes / MIB:.0f} MiB free; the probe wants {2 * nbytes / MIB:.0f}")
    direct = getattr(os, "O_DIRECT", None)
    if direct is None:
        raise NotHereError("this system has no O_DIRECT")
    path = Path(folder) / "probe.bin"
    found: dict[str, Any] = {"nbytes": nbytes, "write_Bps": {}, "read_Bps": {}}
    try:
        try:
            file = os.open(path, os.O_CREAT | os.O_RDWR | direct, 0o600)
        except OSError as error:
            raise NotHereError(f"the file system of {folder} takes no O_DIRECT: {error.strerror}") from None
        try:
            os.truncate(file, nbytes)
            for depth in depths:
                found["write_Bps"][str(depth)] = nbytes / _through(file, nbytes, depth, os.pwritev)
                found["read_Bps"][str(depth)] = nbytes / _through(file, nbytes, depth, os.preadv)
        finally:
            os.close(file)
    finally:
        path.unlink(missing_ok=True)
    return found


def _through(file: int, nbytes: int, depth: int, move: Callable[[int, list[Any], int], int]) -> float:
    """Return the seconds that all blocks take; every thread has a page-aligned block of its own, full of noise."""
    blocks = [mmap.mmap(-1, BLOCK_NBYTES) for _ in range(depth)]
    for block in blocks:
        block[:] = os.urandom(MIB) * (BLOCK_NBYTES // MIB)

    def run(which: int) -> None:
        for offset in range(which * BLOCK_NBYTES, nbytes, depth * BLOCK_NBYTES):
            if move(file, [blocks[which]], offset) != BLOCK_NBYTES:
                raise OSError(f"a block at {offset} was not moved as a whole")

    begin_s = time.perf_counter()
    with ThreadPoolExecutor(depth) as pool:
        list(pool.map(run, range(depth)))
    os.fsync(file)
    return time.perf_counter() - begin_s
