"""Which policy for activations makes a step fastest under which cap? The README beside this file tells the method."""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from benchmarks.activations.models import FULL, QUICK, Workload
from benchmarks.activations.pictures import draw_all
from benchmarks.activations.table import tables
from benchmarks.activations.variants import (
    AMPLE_NBYTES,
    KEEP,
    PLAIN,
    RECOMPUTE,
    VARIANTS,
    Start,
    Step,
    Summary,
    Trainee,
    Variant,
)
from benchmarks.program import BenchmarkError, carry_out, command, parse, surroundings
from benchmarks.worker import Worker

HERE = Path(__file__).parent
IMAGES = HERE.parents[1] / "docs" / "images"
NUM_PROBED_STEPS = 5


class TraineeWorker(Worker):
    """A `Trainee` in a process of its own."""

    def __init__(self, variant: Variant, work: Workload, stack: ExitStack) -> None:
        super().__init__(variant.name, Trainee, variant, work, stack=stack)

    def start(self, device_nbytes: int, link_Bps: float | None) -> Start | None:
        """Begin to train under a cap; return None if that does not fit."""
        found: Start | None = self.ask("start", device_nbytes, link_Bps)
        return found

    def step(self) -> Step:
        """Train one step."""
        found: Step = self.ask("step")
        return found

    def summary(self) -> Summary:
        """Return what the plan promises, and how training ended."""
        found: Summary = self.ask("summary")
        return found


def measure(work: Workload, links: Sequence[str], *, num_caps: int, steps: int, load: float) -> dict[str, Any]:
    """Train a model by all variants, under all caps, over each kind of link.

    Raises:
        BenchmarkError: a process failed, or two variants have not computed the same bits.
    """
    with ExitStack() as stack:
        workers = {variant.name: TraineeWorker(variant, work, stack) for variant in VARIANTS}
        ample = {name: workers[name].start(AMPLE_NBYTES, None) for name in (KEEP.name, RECOMPUTE.name)}
        kept, recomputed = ample[KEEP.name], ample[RECOMPUTE.name]
        assert kept is not None
        assert recomputed is not None
        workers[PLAIN.name].start(AMPLE_NBYTES, None)
        forward_s = min(workers[PLAIN.name].step().forward_s for _ in range(NUM_PROBED_STEPS))
        least = smallest_cap(workers[RECOMPUTE.name], recomputed.required_nbytes)
        most = kept.peak_nbytes
        caps = [least + (most - least) * at // (num_caps - 1) for at in range(num_caps)]
        speeds = {"memory": None, "throttled": kept.activations_nbytes / (load * forward_s)}
        return {
            **asdict(work),
            "activations_nbytes": kept.activations_nbytes,
            "forward_s": forward_s,
            "links": {
                link: {
                    "link_Bps": speeds[link],
                    "caps": [
                        under_cap(list(workers.values()), cap, speeds[link], steps=steps)
                        for cap in tqdm(caps, desc=f"{work.name} over {link}", unit="cap", disable=None)
                    ],
                }
                for link in links
            },
        }


def smallest_cap(recomputing: TraineeWorker, nbytes: int) -> int:
    """Return the smallest cap from `nbytes` on, in steps of 2 %, under which all regions can be recomputed."""
    while recomputing.start(nbytes, None) is None:
        nbytes += nbytes // 50
    return nbytes


def under_cap(
    workers: Sequence[TraineeWorker], cap_nbytes: int, link_Bps: float | None, *, steps: int
) -> dict[str, Any]:
    """Let all variants that fit take turns, one step each, in an order drawn again every time."""
    draw = random.Random(0)
    starts = {worker.name: worker.start(cap_nbytes, link_Bps) for worker in workers}
    fitting = [worker for worker in workers if starts[worker.name] is not None]
    measured: dict[str, list[Step]] = {worker.name: [] for worker in fitting}
    for _ in range(steps):
        for worker in draw.sample(fitting, len(fitting)):
            measured[worker.name].append(worker.step())
    summaries = {worker.name: worker.summary() for worker in fitting}
    for name, found in measured.items():
        same = [step.loss for step in found] == [step.loss for step in measured[PLAIN.name]]
        if not same or summaries[name].weights != summaries[PLAIN.name].weights:
            raise BenchmarkError(f"{name}: losses or weights are not plain PyTorch's at a cap of {cap_nbytes} bytes")
    rows = {}
    for name, found in measured.items():
        start = starts[name]
        assert start is not None
        summary = asdict(summaries[name])
        del summary["weights"]  # Compared above.
        rows[name] = {
            "second_s": start.first_s[1],
            "step_s": [step.step_s for step in found],
            "cpu_s": [step.cpu_s for step in found],
            **summary,
        }
    return {"cap_nbytes": cap_nbytes, "load_average": os.getloadavg()[0], "variants": rows}


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Step time of the policies for activations under caps, on a CPU.")
    parser.add_argument("--steps", type=int, default=16, help="timed steps of each variant (default: %(default)s)")
    parser.add_argument("--caps", type=int, default=6, help="caps from the smallest to ample (default: %(default)s)")
    parser.add_argument("--models", nargs="+", choices=("gpt", "cnn"), default=("gpt", "cnn"))
    kinds: tuple[Literal["memory", "throttled"], ...] = ("memory", "throttled")
    parser.add_argument("--links", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--load", type=float, default=2.0, help="how many times as long as forward a throttled link "
                        "takes to copy all activations one way (default: %(default)s)")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="small models: tries the harness, measures nothing")
    parser.add_argument("--pictures", type=Path, nargs="?", const=IMAGES, metavar="FOLDER",
                        help="draw the pictures (default: into docs/images)")  # fmt: skip
    arguments = parse(parser)
    if arguments.steps < 1 or arguments.caps < 2 or not arguments.load > 0:
        parser.error("--steps must be at least 1, --caps at least 2, and --load above 0")
    return arguments


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure what the command line asks for and return it with all that is needed to repeat it."""
    works = [work for work in (QUICK if arguments.quick else FULL) if work.name in arguments.models]
    return {
        "command": command("activations"),
        **surroundings(),
        "load": arguments.load,
        "models": {
            work.name: measure(
                work, arguments.links, num_caps=arguments.caps, steps=arguments.steps, load=arguments.load
            )
            for work in works
        },
    }


def main() -> int:
    """Run, save and show; return the exit status."""
    arguments = parse_arguments()

    def draw(results: dict[str, Any]) -> None:
        if arguments.pictures is not None:
            draw_all(results, arguments.pictures)

    return carry_out(arguments, run, tables, readme=HERE / "README.md", then=draw)


if __name__ == "__main__":
    sys.exit(main())
