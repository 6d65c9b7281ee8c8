"""The GPU suite: ``python -m benchmarks.gpu PART --out DIR``. The README beside this file tells the method."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from benchmarks.gpu import correct, monotone, probe, profile, scale, soak, speed
from benchmarks.gpu.harness import NO_GPU, Choice, carry_out
from benchmarks.gpu.machine import described, find_setting, identity
from benchmarks.gpu.rows import Reason, Store, StoreError, read
from benchmarks.gpu.setting import Setting

PARTS: Mapping[str, ModuleType] = {part.NAME: part for part in (probe, correct, scale, speed, monotone, soak, profile)}
ALL = "all"
FAILED, BAD_INPUT, LEFT, STOPPED = 1, 2, 3, 130
"""Exit statuses: a row failed; the arguments or a file are wrong; rows are left, run it again; Ctrl-C."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    told = "\n".join(f"  {name:<10}{part.SUMMARY}" for name, part in PARTS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=f"What a GPU gives, what chunkmem reaches on it, what the others reach.\n\n{told}",
        epilog="Rows that are there are kept: run it again, and it goes on. Exit status 3: rows are left.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("part", metavar="PART", choices=[*PARTS, ALL], help="one of these, or all")
    parser.add_argument("--out", type=Path, metavar="DIR", required=True, help="where PART.json and PART.md go")
    parser.add_argument("--budget", type=float, metavar="S", help="seconds a part (default: 600; probe: 180)")
    parser.add_argument(
        "--rows", default="*", metavar="PATTERN", help="only rows whose key matches, such as 'chunkmem*'"
    )
    parser.add_argument("--retry", action="store_true", help="try rows again that have no figures")
    parser.add_argument("--show", action="store_true", help="measure nothing, print the tables of what is there")
    options = parser.parse_args(arguments)
    if options.budget is not None and not options.budget > 0:
        parser.error("--budget must be above 0")
    return options


def run_part(part: ModuleType, setting: Setting, options: argparse.Namespace) -> int:
    """Measure one part and print its table; return the exit status."""
    told = {"part": part.NAME, "command": f"python -m benchmarks.gpu {shlex.join(sys.argv[1:])}", **described(setting)}
    store = Store(options.out / f"{part.NAME}.json", machine=identity(setting), told={**told, "left": []})
    choice = Choice(options.budget or part.BUDGET_S, only=options.rows, retry=options.retry)
    left: list[str] = []
    status = 0
    try:
        left = carry_out(part.tasks(setting, store), store, setting, choice)
    except KeyboardInterrupt:
        status = STOPPED
        print(f"stopped; what was measured is in {store.path}", file=sys.stderr)
    store.leave(left)
    text = part.table(store.to_dict())
    (options.out / f"{part.NAME}.md").write_text(text + "\n", encoding="utf-8")
    print(f"## {part.NAME}\n\n{text}\n")
    if status:
        return status
    if left:
        print(f"{len(left)} rows are left, run it again to go on: {'; '.join(left)}", file=sys.stderr)
        return LEFT
    return FAILED if any(row.reason is Reason.FAILED for row in store) else 0


def show(parts: list[ModuleType], folder: Path) -> int:
    """Print the tables of what is there."""
    there = [part for part in parts if (folder / f"{part.NAME}.json").exists()]
    for part in there:
        print(f"## {part.NAME}\n\n{part.table(read(folder / f'{part.NAME}.json'))}\n")
    if not there:
        print(f"{folder} has none of {', '.join(f'{part.NAME}.json' for part in parts)}", file=sys.stderr)
    return 0 if there else BAD_INPUT


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line asks for; return the exit status, that of the first part that has one but 0."""
    options = parse_arguments(arguments)
    parts = list(PARTS.values()) if options.part == ALL else [PARTS[options.part]]
    try:
        if options.show:
            return show(parts, options.out)
        options.out.mkdir(parents=True, exist_ok=True)
        setting = find_setting(options.out.resolve())
        if setting.dry:
            print(f"{NO_GPU}: a dry run at toy sizes, no figure of it says anything about a GPU", file=sys.stderr)
        statuses = []
        for part in parts:
            statuses.append(run_part(part, setting, options))
            if statuses[-1] == STOPPED:
                break
    except (StoreError, OSError) as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return STOPPED
    return next((status for status in statuses if status), 0)


if __name__ == "__main__":
    sys.exit(main())
