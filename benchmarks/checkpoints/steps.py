"""How much longer are steps while a checkpoint is written by a thread? The README tells the method."""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

import chunkmem
from benchmarks.checkpoints.run import HERE
from benchmarks.program import carry_out, parse, surroundings
from benchmarks.stats import median_interval
from benchmarks.worker import Worker

NUM_LAYERS = 24
NUM_WARMUP_STEPS = 8
NUM_STEPS = 3
"""Without a checkpoint, before one and after it."""
AIM = 1.03


@dataclass(frozen=True)
class Turn:
    """One checkpoint, and the steps around it."""

    before_s: list[float]
    call_s: float
    """Until `manager.save` returns."""
    during_s: list[float]
    """Of the steps that began while it was written."""
    saved_s: float
    """From the call to the end of the checkpoint."""
    after_s: list[float]


class Trainee:
    """A training whose checkpoints are written while it continues."""

    def __init__(self, width: int, num_rows: int, folder: str) -> None:
        self._path = Path(folder) / "checkpoint"
        self._x = torch.ones(num_rows, width)
        nbytes = 4 * NUM_LAYERS * width**2
        config = {"memory": {"device": nbytes // 2, "host": 5 * nbytes}}
        self._manager = chunkmem.ChunkManager(chunkmem.Config.from_dict(config))
        torch.manual_seed(0)
        with self._manager.init():
            self._model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(NUM_LAYERS)))
        self._optimizer = chunkmem.AdamW(self._model.parameters(), manager=self._manager)
        for _ in range(NUM_WARMUP_STEPS):
            self._step_s()

    def _step_s(self) -> float:
        began_s = time.perf_counter()
        self._manager.backward(self._model(self._x).square().mean())
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.perf_counter() - began_s

    def turn(self) -> Turn:
        """Save once, and time the steps before, during and after that."""
        before_s = [self._step_s() for _ in range(NUM_STEPS)]
        began_s = time.perf_counter()
        saving = self._manager.save(self._path, self._optimizer, asynchronous=True)
        call_s = time.perf_counter() - began_s
        during_s = []
        while not saving.done():
            during_s.append(self._step_s())
        saving.wait()
        saved_s = time.perf_counter() - began_s
        return Turn(before_s, call_s, during_s, saved_s, [self._step_s() for _ in range(NUM_STEPS)])

    def save_s(self) -> float:
        """Return how long it takes to save while training waits."""
        began_s = time.perf_counter()
        self._manager.save(self._path, self._optimizer)
        return time.perf_counter() - began_s


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Save so often, and once more while training waits.

    Raises:
        BenchmarkError: the process failed.
    """
    width = 256 if arguments.quick else 2048
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=arguments.folder))
        worker = Worker("training", Trainee, width, arguments.rows, folder, stack=stack)
        worker.ask("turn")  # the first two checkpoints get their places on the disk
        worker.ask("turn")
        turns = [worker.ask("turn") for _ in tqdm(range(arguments.turns), unit="checkpoint", disable=None)]
        waiting_s = [worker.ask("save_s") for _ in range(3)]
    return {
        "command": shlex.join(["python", "-m", "benchmarks.checkpoints.steps", *sys.argv[1:]]),
        **surroundings(),
        "num_params": NUM_LAYERS * width**2,
        "num_rows": arguments.rows,
        "load_average": os.getloadavg(),
        "turns": [asdict(turn) for turn in turns],
        "waiting_s": waiting_s,
    }


def table(results: dict[str, Any]) -> str:
    """Return the table of the README."""
    hardware, versions, turns = results["hardware"], results["versions"], results["turns"]

    def ratios(of: str) -> str:
        found = median_interval(
            [statistics.median(turn[of]) / statistics.median(turn["before_s"]) for turn in turns if turn[of]]
        )
        return f"{found.median:.2f} ({found.low:.2f} – {found.high:.2f})"

    def median(of: str) -> float:
        return statistics.median(turn[of] for turn in turns)

    step_s = statistics.median(s for turn in turns for s in turn["before_s"])
    num = statistics.median(len(turn["during_s"]) for turn in turns)
    lost_s = statistics.median(
        turn["call_s"] + sum(s - statistics.median(turn["before_s"]) for s in turn["during_s"]) for turn in turns
    )
    return "\n".join(
        [
            f"`{results['command']}`",
            "",
            f"{hardware['cpu']}, {hardware['num_cpus']} cores; torch {versions['torch']}; "
            f"{results['num_params'] / 1e6:.0f} M parameters in fp32, {results['num_rows']} rows a batch, steps of "
            f"{step_s:.2f} s; {len(turns)} checkpoints; load average at the end: {results['load_average'][0]:.1f}.",
            "",
            "| | median | aim |",
            "|---|---|---|",
            f"| steps after a checkpoint / before it (A/A) | {ratios('after_s')} | |",
            f"| steps while one is written / before it | {ratios('during_s')} | ≤ {AIM} |",
            f"| steps that begin while one is written | {num:.0f} | |",
            f"| seconds until it is complete | {median('saved_s'):.2f} | |",
            f"| seconds until `manager.save` returns | {median('call_s'):.3f} | |",
            f"| seconds that training loses in all | {lost_s:.2f} | |",
            f"| seconds that it loses if it waits | {statistics.median(results['waiting_s']):.2f} | |",
        ]
    )


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Length of steps while a checkpoint is written, on a CPU.")
    parser.add_argument("--turns", type=int, default=6, help="checkpoints (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=1024, help="of a batch: how long a step is (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=HERE.parents[1], help="on the disk to write to (default: here)")
    parser.add_argument("--quick", action="store_true", help="a narrow model, to try the harness")
    return parse(parser, has_table=False)


if __name__ == "__main__":
    sys.exit(carry_out(parse_arguments(), measure, table, readme=HERE / "README.md"))
