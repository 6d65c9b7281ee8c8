"""What every benchmark's command line does: measure or show, write the numbers down, print the table."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.results import rounded, write
from chunkmem.data.errors import ChunkmemError

BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
"""What stands around the table in a README."""

Results = dict[str, Any]


class BenchmarkError(Exception):
    """What was measured failed or computed something wrong, so its numbers mean nothing."""


def parse(parser: argparse.ArgumentParser, *, has_table: bool = True) -> argparse.Namespace:
    """Add the options that all have in common, and read the command line; `has_table`: there is one in the README."""
    parser.add_argument("--out", type=Path, metavar="JSON", help="write all numbers and the surroundings here")
    parser.add_argument("--show", type=Path, metavar="JSON", help="measure nothing, show an earlier --out")
    if has_table:
        parser.add_argument("--readme", action="store_true", help="put the table into the README of this benchmark")
    arguments = parser.parse_args()
    if arguments.out and not arguments.out.parent.is_dir():
        parser.error(f"--out: there is no folder {arguments.out.parent}")
    return arguments


def carry_out(
    arguments: argparse.Namespace,
    measure: Callable[[argparse.Namespace], Results],
    table: Callable[[Results], str],
    *,
    readme: Path,
    then: Callable[[Results], None] = lambda results: None,
) -> int:
    """Measure or show, save and print; return the exit status. `then` gets the results at the end."""
    try:
        # The table is that of the numbers that are kept.
        results = rounded(json.loads(arguments.show.read_text()) if arguments.show else measure(arguments))
    except (BenchmarkError, ChunkmemError, OSError, json.JSONDecodeError) as error:
        print(error, file=sys.stderr)
        return 1
    if arguments.out:
        write(arguments.out, results)
    print(table(results))
    if getattr(arguments, "readme", False):
        write_readme(readme, table(results))
    then(results)
    return 0


def command(name: str) -> str:
    """Return the command line that this run of ``benchmarks.<name>`` can be repeated by."""
    return shlex.join(["python", "-m", f"benchmarks.{name}.run", *sys.argv[1:]])


def heading(results: Mapping[str, Any], *, num_steps: int) -> list[str]:
    """Return what stands above a table of steps of the GPT of `benchmarks.overhead`: the command, and where it ran."""
    hardware, shape = results["hardware"], results["shape"]
    return [
        f"`{results['command']}`",
        "",
        f"{hardware['cpu']}, {hardware['num_cpus']} cores; torch {results['versions']['torch']}; "
        f"{shape['num_params'] / 1e6:.1f} M parameters, {shape['num_sequences']} × {shape['num_tokens']} tokens a "
        f"step; {num_steps} steps; load average at the end: {results['load_average'][0]:.1f}.",
        "",
    ]


def write_readme(path: Path, text: str) -> None:
    """Replace what stands between the table's two marks in the file at `path`."""
    before, rest = path.read_text().split(BEGIN)
    after = rest.split(END)[1]
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def surroundings() -> Results:
    """Return the machine, the versions and the settings that times depend on."""
    prefixes = ("OMP_", "GOMP_", "KMP_", "MKL_", "MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")
    return {
        "hardware": {
            "cpu": _cpu_name(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "num_cpus": os.cpu_count(),
            "memory_nbytes": psutil.virtual_memory().total,
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "os": " ".join((platform.system(), *platform.libc_ver())),
        },
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)},
    }


def _cpu_name() -> str:
    """Return the processor's model where the system tells it, else its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
