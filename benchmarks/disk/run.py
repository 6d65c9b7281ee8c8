"""How fast are slabs of DISK written and read, next to fio? The README beside this file tells the method."""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.program import BenchmarkError, carry_out, command, parse, surroundings
from benchmarks.stats import median_interval, paired_ratios
from chunkmem.data.sizes import format_nbytes, parse_nbytes
from chunkmem.data.types import Tier
from chunkmem.runtime.arena import HostArena
from chunkmem.runtime.device import ComputeDevice
from chunkmem.runtime.disk_pool import BLOCK_NBYTES, DEPTH, DiskPool
from chunkmem.runtime.disk_speed import file_system
from chunkmem.runtime.ledger import Ledger

HERE = Path(__file__).parent
WAYS = ("write", "read")
OURS, AGAIN, SMALL, CHECKS, BUSY = "chunkmem", "again", "small", "checks", "busy"
TITLES = {
    OURS: "chunkmem",
    AGAIN: "chunkmem, again (A/A)",
    SMALL: "chunkmem, memory in small pages",
    CHECKS: "chunkmem with `checks`",
    BUSY: "chunkmem while a thread computes in Python",
}
ENGINES = ("libaio", "io_uring", "psync")
AIM = 0.9


@dataclass(frozen=True)
class Setting:
    """What all variants have in common."""

    folder: Path
    total_nbytes: int
    slab_nbytes: int
    block_nbytes: int
    depth: int


class Slabs:
    """A pool of as many slabs as are written and read, one after the other, and memory of HOST for one of them."""

    def __init__(self, setting: Setting, stack: ExitStack, *, checks: bool = False, small: bool = False) -> None:
        ledger = Ledger(Tier.DISK, setting.total_nbytes, setting.total_nbytes)
        self.pool = DiskPool(
            ledger, setting.folder, block_nbytes=setting.block_nbytes, depth=setting.depth, checks=checks
        )
        stack.callback(self.pool.close)
        if small:
            region = mmap.mmap(-1, setting.slab_nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            region.madvise(mmap.MADV_NOHUGEPAGE)
            self._memory = torch.frombuffer(region, dtype=torch.uint8)
        else:
            host = Ledger(Tier.HOST, setting.slab_nbytes, setting.slab_nbytes)
            arena = HostArena(host, ComputeDevice(torch.device("cpu")))
            stack.callback(arena.close)
            self._memory = arena.alloc("param", setting.slab_nbytes).bytes
        self._memory.random_(generator=torch.Generator().manual_seed(0))
        self._expected = self._memory.clone()
        self._slabs = [
            self.pool.alloc("param", setting.slab_nbytes) for _ in range(setting.total_nbytes // setting.slab_nbytes)
        ]

    def write(self) -> float:
        """Write all slabs; return bytes a second."""
        return self._time(lambda: [slab.write(self._memory) for slab in self._slabs])

    def read(self) -> float:
        """Read all slabs; return bytes a second.

        Raises:
            BenchmarkError: the last one is not what was written.
        """
        self._memory.zero_()
        found_Bps = self._time(lambda: [slab.read(self._memory) for slab in self._slabs])
        if not torch.equal(self._memory, self._expected):
            raise BenchmarkError("what was read is not what was written")
        return found_Bps

    def _time(self, work: Callable[[], object]) -> float:
        begin_s = time.perf_counter()
        work()
        return self.pool.ledger.total_nbytes / (time.perf_counter() - begin_s)


@contextmanager
def computing(active: bool) -> Iterator[None]:
    """Have a thread compute in Python meanwhile, and never let go of its lock of its own accord."""
    stopped = threading.Event()

    def compute() -> None:
        while not stopped.is_set():
            sum(number * number for number in range(1000))

    thread = threading.Thread(target=compute)
    if active:
        thread.start()
    try:
        yield
    finally:
        stopped.set()
        if active:
            thread.join()


def fio_Bps(setting: Setting, engine: str, way: str, *, direct: bool) -> float:
    """Let fio write or read as many bytes, as many blocks at once; return bytes a second.

    Raises:
        BenchmarkError: it failed.
    """
    # The engine of plain system calls has one under way in each thread, as chunkmem's threads.
    threads = setting.depth if engine == "psync" else 1
    options = {
        "name": "chunkmem",
        "filename": setting.folder / "fio",
        "rw": way,
        "bs": setting.block_nbytes,
        "ioengine": engine,
        "iodepth": setting.depth // threads,
        "numjobs": threads,
        "size": setting.total_nbytes // threads,
        "offset_increment": setting.total_nbytes // threads if threads > 1 else 0,
        "direct": int(direct),
        "sync": "none" if direct or way == "read" else "dsync",
        "overwrite": 1,
        "output-format": "json",
    }
    line = ["fio", "--thread", "--group_reporting", *(f"--{name}={value}" for name, value in options.items())]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchmarkError(f"fio with {engine} failed: {done.stderr.strip() or done.stdout.strip()}")
    (job,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    return float(job[way]["bw_bytes"])


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Let all variants take turns, in an order drawn again every time.

    Raises:
        BenchmarkError: fio failed, or something else was read than was written.
    """
    slab_nbytes = min(arguments.slab, arguments.total)
    total_nbytes = arguments.total // slab_nbytes * slab_nbytes
    if total_nbytes < arguments.block * arguments.depth:
        raise BenchmarkError("each of fio's threads needs a block: raise --total, or lower --block or --depth")
    draw = random.Random(0)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=arguments.folder)))
        setting = Setting(folder, total_nbytes, slab_nbytes, arguments.block, arguments.depth)
        plain, checked, small = (
            Slabs(setting, stack),
            Slabs(setting, stack, checks=True),
            Slabs(setting, stack, small=True),
        )
        direct = plain.pool.is_direct
        variants: dict[str, Callable[[str], float]] = {
            name: (lambda way, slabs=slabs: getattr(slabs, way)())
            for name, slabs in ((OURS, plain), (AGAIN, plain), (SMALL, small), (CHECKS, checked), (BUSY, plain))
        }
        if shutil.which("fio"):
            for engine in ENGINES:
                variants[engine] = lambda way, engine=engine: fio_Bps(setting, engine, way, direct=direct)
        found: dict[str, dict[str, list[float]]] = {name: {way: [] for way in WAYS} for name in variants}
        # The first turn has the system give the files their place on the disk.
        for turn in tqdm(range(arguments.turns + 1), unit="turn", disable=None):
            for name in draw.sample(list(variants), len(variants)):
                for way in WAYS:
                    with computing(name == BUSY):
                        speed_Bps = variants[name](way)
                    if turn:
                        found[name][way].append(speed_Bps)
        system = file_system(folder)
    return {
        "command": command("disk"),
        **surroundings(),
        "file_system": system,
        "direct": direct,
        "total_nbytes": total_nbytes,
        "slab_nbytes": slab_nbytes,
        "block_nbytes": arguments.block,
        "depth": arguments.depth,
        "fio": _fio_version(),
        "load_average": os.getloadavg(),
        "variants": found,
    }


def _fio_version() -> str | None:
    if shutil.which("fio") is None:
        return None
    return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()


def table(results: dict[str, Any]) -> str:
    """Return the table of the README."""
    hardware, found = results["hardware"], results["variants"]
    lines = [
        f"`{results['command']}`",
        "",
        f"{hardware['cpu']}, {hardware['num_cpus']} cores; {results['file_system']}, "
        f"{'O_DIRECT' if results['direct'] else 'through the page cache'}; {results['fio'] or 'no fio'}. "
        f"{format_nbytes(results['total_nbytes'])} in slabs of {format_nbytes(results['slab_nbytes'])}, blocks of "
        f"{format_nbytes(results['block_nbytes'])}, {results['depth']} at once. Load average at the end: "
        f"{results['load_average'][0]:.1f}.",
        "",
        "| | write, GB/s, median (range) | read, GB/s, median (range) |",
        "|---|---|---|",
    ]
    titles = TITLES | {engine: f"fio, {engine}" for engine in ENGINES}
    for name, title in titles.items():
        if name in found:
            cells = [
                f"{statistics.median(speeds) / 1e9:.2f} ({min(speeds) / 1e9:.2f} – {max(speeds) / 1e9:.2f})"
                for speeds in (found[name][way] for way in WAYS)
            ]
        else:
            cells = ["fio is not installed"] * 2
        lines.append(f"| {title} | {' | '.join(cells)} |")
    lines += ["", "| ratio of speeds, in each turn | | median | 95 % interval | aim |", "|---|---|---|---|---|"]
    for way in WAYS:
        lines += [_ratio(found, way, AGAIN, OURS, "A/A")]
        engines = [engine for engine in ENGINES if engine in found]
        if engines:
            best = max(engines, key=lambda engine, way=way: statistics.median(found[engine][way]))
            lines += [_ratio(found, way, name, best, f"≥ {AIM}") for name in (OURS, SMALL)]
        lines += [_ratio(found, way, name, OURS, "") for name in (CHECKS, BUSY)]
    return "\n".join(lines)


def _ratio(found: dict[str, Any], way: str, name: str, base: str, aim: str) -> str:
    interval = median_interval(paired_ratios(found[name][way], found[base][way]))
    base_title = TITLES.get(base, f"fio, {base}")
    cells = [f"{interval.median:.2f}", f"{interval.low:.2f} – {interval.high:.2f}", aim]
    return f"| {TITLES[name]} / {base_title} | {way} | {' | '.join(cells)} |"


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Bytes a second to a disk and back, by DiskPool and by fio.")
    parser.add_argument("--turns", type=int, default=9, help="times that each variant runs (default: %(default)s)")
    parser.add_argument("--total", type=parse_nbytes, default=4 << 30, help="bytes written and read (default: 4GiB)")
    parser.add_argument("--slab", type=parse_nbytes, default=64 << 20, help="bytes of a slab (default: 64MiB)")
    parser.add_argument(
        "--block", type=parse_nbytes, default=BLOCK_NBYTES, help="bytes of a block (default: the pool's)"
    )
    parser.add_argument("--depth", type=int, default=DEPTH, help="blocks at once (default: the pool's)")
    parser.add_argument("--folder", type=Path, default=HERE.parents[1], help="on the disk to measure (default: here)")
    parser.add_argument("--quick", action="store_true", help="256 MiB in two turns, to try the harness")
    arguments = parse(parser)
    if arguments.quick:
        arguments.turns, arguments.total = 2, 256 << 20
    return arguments


if __name__ == "__main__":
    sys.exit(carry_out(parse_arguments(), measure, table, readme=HERE / "README.md"))
