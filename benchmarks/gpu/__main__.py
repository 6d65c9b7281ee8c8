"""The GPU suite: ``python -m benchmarks.gpu PART --out DIR``. The README beside this file tells the method."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from benchmarks.gpu import correct, monotone, probe, profile, scale, soak, speed
from benchmarks.gpu.archive import CACHE, Archive
from benchmarks.gpu.harness import NO_GPU, Choice
from benchmarks.gpu.machine import described, find_setting, identity
from benchmarks.gpu.rows import Store, StoreError, read
from benchmarks.gpu.setting import GIB
from benchmarks.gpu.stages import Pause, Progress, Stage, digest, run_stages

PARTS: Mapping[str, ModuleType] = {part.NAME: part for part in (probe, correct, scale, speed, monotone, soak, profile)}
ALL, HALF_HOUR = "all", "half-hour"
BUDGET_S = 500.0
CACHE_HOME = "XDG_CACHE_HOME"
"""The variable that names the folder of caches."""
WRONG_BITS = ("*/test_placement.py", "*/test_kernels.py")
"""Tests whose failure makes all figures worthless. What else fails is in the digest, and does not cost a machine."""
STAGES = (
    Stage(probe, 180, only=(probe.BACK_END,), pause=Pause.FAILED, in_each_call=True),
    Stage(probe, 130, only=("copies*", "host*", "matmul*", "device*", "Adam*", "pinning", "small*")),
    Stage(correct, 150, only=("tests/gpu*", "tests/unit*"), pause=Pause.FAILED, pauses_for=WRONG_BITS),
    Stage(speed, 520, only=("plain / *", "chunkmem*")),
    Stage(profile, 110, pause=Pause.MEASURED),
    Stage(scale, 300, only=("predicted / *", "chunkmem / *")),
    Stage(soak, 110),
)
"""Of `HALF_HOUR`: 25 minutes, which leaves some for machines to start. The peers and `monotone` take longer."""
FAILED, BAD_INPUT, LEFT, STOPPED = 1, 2, 3, 130
"""Exit statuses: a row failed; the arguments or a file are wrong; rows are left, run it again; Ctrl-C."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    told = "\n".join(f"  {name:<10}{part.SUMMARY}" for name, part in PARTS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=f"What a GPU gives, what chunkmem reaches on it, what the others reach.\n\n{told}\n"
        f"  {HALF_HOUR:<10}what matters most of all these, in stages, and a digest at the end of each call",
        epilog="Rows that are there are kept: run it again, and it goes on. Exit status 3: rows are left.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("part", metavar="PART", choices=[*PARTS, ALL, HALF_HOUR], help="one of these, or all")
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--out", type=Path, metavar="DIR", help="where PART.json and logs go")
    place.add_argument("--archive", type=Path, metavar="FILE", help="or one file, such as results.tgz, for all of it")
    parser.add_argument("--budget", type=float, metavar="S", default=BUDGET_S, help="seconds of this call (500)")
    parser.add_argument("--host", type=float, metavar="GIB", help="RAM for chunkmem (default: 0.8 of what is there)")
    parser.add_argument("--rows", metavar="PATTERN", help="only rows whose key matches, such as 'chunkmem*'")
    parser.add_argument("--retry", action="store_true", help="try rows again that have no figures")
    parser.add_argument("--again", action="store_true", help="measure rows again that have figures")
    parser.add_argument("--show", action="store_true", help="measure nothing, print the tables of what is there")
    options = parser.parse_args(arguments)
    for name in ("budget", "host"):
        if (value := getattr(options, name)) is not None and not value > 0:
            parser.error(f"--{name} must be above 0")
    return options


def stages_of(options: argparse.Namespace) -> Sequence[Stage]:
    """Return what the command line asks for."""
    if options.part == HALF_HOUR:
        return STAGES
    return [Stage(part) for part in (PARTS.values() if options.part == ALL else [PARTS[options.part]])]


def measure(options: argparse.Namespace, folder: Path, saved: Callable[[], object]) -> int:
    """Run stages, and print what was found; return the exit status."""
    host_nbytes = None if options.host is None else int(options.host * GIB)
    setting = find_setting(folder.resolve(), host_nbytes=host_nbytes)
    if setting.dry:
        print(f"{NO_GPU}: a dry run at toy sizes, no figure of it says anything about a GPU", file=sys.stderr)

    def open_store(part: ModuleType) -> Store:
        told = {"part": part.NAME, "command": f"python -m benchmarks.gpu {shlex.join(sys.argv[1:])}"}
        path = folder / f"{part.NAME}.json"
        return Store(path, machine=identity(setting), told={**told, **described(setting), "left": []}, saved=saved)

    only = ("*",) if options.rows is None else (options.rows,)
    choice = Choice(options.budget, only=only, retry=options.retry, again=options.again)
    progress, status = Progress(), 0
    try:
        run_stages(stages_of(options), setting, choice, open_store=open_store, progress=progress)
    except KeyboardInterrupt:
        status = STOPPED
        print("stopped; what was measured is kept", file=sys.stderr)
    if options.part == HALF_HOUR:
        print(digest(progress, setting))
    else:
        show(progress.begun, folder)
    if not (progress.is_over or status):
        status = LEFT
        print("rows are left, run it again to continue", file=sys.stderr)
    return status or (FAILED if progress.has_failed else 0)


def show(parts: Sequence[ModuleType], folder: Path) -> int:
    """Print the tables of what is there."""
    there = [part for part in parts if (folder / f"{part.NAME}.json").exists()]
    for part in there:
        print(f"## {part.NAME}\n\n{part.table(read(folder / f'{part.NAME}.json'))}\n")
    if not there:
        print(f"there is none of {', '.join(f'{part.NAME}.json' for part in parts)}", file=sys.stderr)
    return 0 if there else BAD_INPUT


@contextlib.contextmanager
def place_of(options: argparse.Namespace) -> Iterator[tuple[Path, Callable[[], object]]]:
    """Yield the folder to work in, and what to call whenever something in it has changed.

    Raises:
        StoreError: the archive is none.
    """
    if options.archive is None:
        if not options.show:
            options.out.mkdir(parents=True, exist_ok=True)
        yield options.out, lambda: None
        return
    with tempfile.TemporaryDirectory(prefix="chunkmem-gpu-") as name:
        archive = Archive(options.archive, Path(name))
        archive.open()
        before = os.environ.get(CACHE_HOME)
        os.environ[CACHE_HOME] = str(Path(name) / CACHE)
        try:
            yield Path(name), archive.save
        finally:
            os.environ.pop(CACHE_HOME)
            os.environ |= {} if before is None else {CACHE_HOME: before}
        if archive.left_out:
            print(f"too large for {archive.path}: {', '.join(archive.left_out)}", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line asks for; return the exit status."""
    options = parse_arguments(arguments)
    try:
        with place_of(options) as (folder, saved):
            if options.show:
                return show([stage.part for stage in stages_of(options)], folder)
            return measure(options, folder, saved)
    except (StoreError, OSError) as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return STOPPED


if __name__ == "__main__":
    sys.exit(main())
