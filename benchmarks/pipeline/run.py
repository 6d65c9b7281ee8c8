"""How long is a step by micro-batches, one block after the other? The README in this folder tells the method."""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.pipeline.models import COUNTED, FULL, QUICK, Workload
from benchmarks.pipeline.table import tables
from benchmarks.pipeline.variants import (
    ACCUMULATING,
    ALWAYS,
    NEVER,
    PLAIN,
    VARIANTS,
    Setting,
    Step,
    Summary,
    Trainee,
    is_installed,
)
from benchmarks.program import BenchmarkError, carry_out, command, parse, surroundings
from benchmarks.worker import Worker

HERE = Path(__file__).parent
SETTINGS = ("memory", "memory-resident", "throttled", "throttled-resident", "ample")
"""Two caps, of which the second has room for the activations of all micro-batches, over fast and slow links."""
SHARE = 0.35
LOSS_TOLERANCE = 1e-4


def measure(work: Workload, names: Sequence[str], *, num: int, steps: int, load: float) -> dict[str, Any]:
    """Train by all variants, with little of DEVICE over fast and slow links, and with more than enough.

    Raises:
        BenchmarkError: a process failed, or two variants have not computed the same.
    """
    with ExitStack() as stack:
        workers = [
            Worker(variant.name, Trainee, variant, work, stack=stack) for variant in VARIANTS if is_installed(variant)
        ]
        plain = workers[0]
        plain.ask("start", Setting(num))
        forward_s, activation_nbytes = plain.ask("forward_s"), plain.ask("activation_nbytes")
        link_Bps = work.param_nbytes / (load * forward_s)
        resident_nbytes = num * (activation_nbytes + activation_nbytes // 8)  # autograd saves some of it elsewhere
        settings = {
            "memory": Setting(num, SHARE, activation_nbytes, 1),
            "memory-resident": Setting(num, SHARE, resident_nbytes, num),
            "throttled": Setting(num, SHARE, activation_nbytes, 1, link_Bps),
            "throttled-resident": Setting(num, SHARE, resident_nbytes, num, link_Bps),
            "ample": Setting(num),
        }
        return {
            **asdict(work),
            "param_nbytes": work.param_nbytes,
            "activation_nbytes": activation_nbytes,
            "num_micro_batches": num,
            "forward_s": forward_s,
            "settings": {name: in_turns(workers, settings[name], name, steps=steps) for name in names},
        }


def in_turns(workers: Sequence[Worker], setting: Setting, name: str, *, steps: int) -> dict[str, Any]:
    """Let all variants that fit take turns, one step each, in an order drawn again every time."""
    draw = random.Random(0)
    fitting = [
        worker for worker in tqdm(workers, desc=f"{name}: first steps", disable=None) if worker.ask("start", setting)
    ]
    measured: dict[str, list[Step]] = {worker.name: [] for worker in fitting}
    loads = []
    for _ in tqdm(range(steps), desc=f"{name}: steps", disable=None):
        for worker in draw.sample(fitting, len(fitting)):
            measured[worker.name].append(worker.ask("step"))
        loads.append(os.getloadavg()[0])
    summaries: dict[str, Summary] = {worker.name: worker.ask("summary") for worker in fitting}
    rows = {}
    for worker in fitting:
        found, summary = measured[worker.name], summaries[worker.name]
        rows[worker.name] = {
            "step_s": [step.step_s for step in found],
            "cpu_s": [step.cpu_s for step in found],
            "loss": found[-1].loss,
            **asdict(summary),
        }
        check(worker.name, rows)
    return {
        "command": command("pipeline"),
        "link_Bps": setting.link_Bps,
        "param_share": setting.param_share,
        "num_resident": setting.num_resident,
        "load_averages": loads,
        "variants": rows,
    }


def check(name: str, rows: dict[str, Any]) -> None:
    """Raise BenchmarkError if a chunkmem variant has not the bits of the first one, or another one another loss.

    Plain PyTorch trains fewer steps before those that are measured, so its bits are those of other steps.
    """
    row = rows[name]
    first = next(other for other in rows.values() if len(other["first_s"]) == len(row["first_s"]))
    is_close = abs(row["loss"] - first["loss"]) <= LOSS_TOLERANCE
    is_exact = next(variant.is_exact for variant in VARIANTS if variant.name == name)
    if not is_close or (is_exact and row["weights"] != first["weights"]):
        raise BenchmarkError(f"{name}: loss or weights are not those of the others")


def count(work: Workload) -> list[dict[str, Any]]:
    """Count what a step moves for several numbers of micro-batches, all under one cap.

    Raises:
        BenchmarkError: a variant does not fit.
    """
    trainee = Trainee(PLAIN, work)
    trainee.start(Setting(2))
    activation_nbytes = trainee.activation_nbytes()
    rows = []
    for num in tqdm((2, 4, 8, 16, 32), desc="counting", disable=None):
        for variant in (ALWAYS, NEVER, ACCUMULATING):
            trainee = Trainee(variant, work)
            if not trainee.start(Setting(num, SHARE, activation_nbytes)):
                raise BenchmarkError(f"{variant.name} does not fit for {num} micro-batches")
            summary = trainee.summary()
            trainee.close()
            rows.append({"variant": variant.name, "num_micro_batches": num, **asdict(summary)})
    return rows


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Step time by micro-batches, by layer and accumulating, on a CPU.")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each variant (default: %(default)s)")
    parser.add_argument("--micro-batches", type=int, default=8, help="(default: %(default)s)")
    told = "how many times as long as forward of a micro-batch a throttled link takes to copy all weights"
    parser.add_argument("--load", type=float, default=4.0, help=f"{told} (default: %(default)s)")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=SETTINGS, help="(default: all)")
    parser.add_argument("--no-copies", action="store_true", help="count no copies")
    parser.add_argument("--keep", action="store_true", help="settings in --out that are not measured again stay there")
    parser.add_argument("--quick", action="store_true", help="a small model: tries the harness, measures nothing")
    arguments = parse(parser)
    if arguments.steps < 1 or arguments.micro_batches < 1 or not arguments.load > 0:
        parser.error("--steps and --micro-batches must be at least 1, and --load above 0")
    if arguments.keep and not (arguments.out and arguments.out.exists()):
        parser.error("--keep: there is no --out yet")
    return arguments


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure what the command line asks for and return it with all that is needed to repeat it."""
    work = QUICK if arguments.quick else FULL
    kept = json.loads(arguments.out.read_text()) if arguments.keep else {"settings": {}, "counted": []}
    measured = {
        **surroundings(),
        "load": arguments.load,
        **measure(work, arguments.settings, num=arguments.micro_batches, steps=arguments.steps, load=arguments.load),
        "counted": kept["counted"] if arguments.no_copies else count(COUNTED),
    }
    differing = [key for key in asdict(work) if key in kept and kept[key] != measured[key]]
    if differing:
        raise BenchmarkError(f"--keep: {arguments.out} is of a model with another {differing[0]}")
    return measured | {"settings": kept["settings"] | measured["settings"]}


def main() -> int:
    """Run, save and show; return the exit status."""
    return carry_out(parse_arguments(), run, tables, readme=HERE / "README.md")


if __name__ == "__main__":
    sys.exit(main())
