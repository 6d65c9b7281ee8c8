"""How much faster is a batch where stages do not wait for each other? `asynchronous.md` tells the method."""

from __future__ import annotations

import argparse
import math
import os
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import chunkmem
from benchmarks.pipeline.models import NUM_BATCHES, Workload, loss_of
from benchmarks.pipeline.ranks import NUM_RANKS, QUICK, WORK, Pair
from benchmarks.pipeline.variants import ADAMW, AMPLE_NBYTES
from benchmarks.program import BenchmarkError, carry_out, parse, surroundings
from benchmarks.stats import median_interval, paired_ratios
from chunkmem.contrib.async_pipeline.pipeline import AsynchronousPipeline

DRAINED, AGAIN = "1f1b", "1f1b-again"
VERSIONS = {"async-stash": "stash", "async-predict": "predict", "async-gap": "predict+gap"}
"""By variant: the weights that backward runs on."""
TITLES = {
    DRAINED: "`1f1b`, drained after each batch",
    AGAIN: "the same again (A/A)",
    "async-stash": '`async-1f1b`, `versions="stash"`',
    "async-predict": '`async-1f1b`, `versions="predict"`',
    "async-gap": '`async-1f1b`, `versions="predict+gap"`',
}
CLOCKS = ("epoch_s", "full_s")
NUM_WARMUP_STEPS = 14
"""Of each variant at least: until plans of 1F1B get no better."""


@dataclass(frozen=True)
class Setup:
    """What both ranks of a variant are given."""

    name: str
    work: Workload
    num: int
    """Micro-batches of a batch."""


@dataclass(frozen=True)
class Epoch:
    """What an epoch took on one rank; times are of a batch."""

    epoch_s: float
    """With filling and draining."""
    full_s: float
    """While the pipeline is full; 1F1B fills and drains it in each batch."""
    idle: float
    """Share of the time of `full_s` in which no thread of the process computed."""
    loss: float
    """Of the last batch."""


class Stage:
    """A stage under training, in a process of its own."""

    def __init__(self, rank: int, setup: Setup, folder: str) -> None:
        meeting = f"file://{folder}/{setup.name}"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=NUM_RANKS)
        self._batches = setup.work.batches()
        mesh = init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("stage",))
        values = {"memory": {"device": AMPLE_NBYTES, "host": AMPLE_NBYTES}}
        self._manager = chunkmem.ChunkManager(chunkmem.Config.from_dict(values), mesh=mesh)
        with self._manager.init():
            model = setup.work.build()
        versions = VERSIONS.get(setup.name)
        self._pipe: Any = self._manager.pipeline(
            model.blocks,
            first=model.embeddings,
            last=model.head,
            loss_fn=loss_of,
            micro_batches=setup.num,
            checkpoint="never",
            schedule="1f1b" if versions is None else "async-1f1b",
            versions=versions,
        )
        self._optimizer = chunkmem.AdamW(model.parameters(), manager=self._manager, **ADAMW)

    def epoch(self, num: int) -> Epoch:
        """Train on so many batches, as many as stages at least; the pipeline is empty afterwards."""
        ends = [(time.perf_counter(), time.process_time())]
        losses = []
        for number in range(num):
            losses.append(self._step(self._batches[number % NUM_BATCHES]).item())
            ends.append((time.perf_counter(), time.process_time()))
        if isinstance(self._pipe, AsynchronousPipeline):
            losses += [loss.item() for loss in self._pipe.flush()]
        end_s = time.perf_counter()
        # The first calls fill the pipeline. 1F1B leaves them out too, so that both count the same batches.
        full_s, cpu_s = (b - a for a, b in zip(ends[NUM_RANKS - 1], ends[-1], strict=True))
        num_full = num + 1 - NUM_RANKS
        return Epoch((end_s - ends[0][0]) / num, full_s / num_full, 1 - cpu_s / full_s, losses[-1])

    def _step(self, batch: Tensor) -> Tensor:
        x, y = batch[:, :-1], batch[:, 1:]
        if isinstance(self._pipe, AsynchronousPipeline):
            return self._pipe.step(x, y, optimizer=self._optimizer)
        loss: Tensor = self._pipe.step(x, y)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss

    def peak_nbytes(self) -> tuple[int, int]:
        """Return the peaks of DEVICE and HOST."""
        memory = self._manager.memory()
        return memory.device.peak_nbytes, memory.host.peak_nbytes


def in_turns(pairs: Sequence[Pair], *, num_epochs: int, num_batches: int) -> dict[str, Any]:
    """Let all variants take turns, an epoch each, in an order drawn again every time.

    Raises:
        BenchmarkError: a process failed, or losses are wrong.
    """
    draw = random.Random(0)
    for pair in pairs:
        for _ in range(math.ceil(NUM_WARMUP_STEPS / num_batches)):
            pair.ask("epoch", num_batches)
    rows: dict[str, Any] = {pair.name: {"epoch_s": [], "full_s": [], "idle": [], "loss": []} for pair in pairs}
    for _ in range(num_epochs):
        for pair in draw.sample(pairs, len(pairs)):
            found: list[Epoch] = pair.ask("epoch", num_batches)
            row = rows[pair.name]
            for clock in CLOCKS:
                row[clock].append(max(getattr(epoch, clock) for epoch in found))
            row["idle"].append([epoch.idle for epoch in found])
            row["loss"].append(found[-1].loss)
    for pair in pairs:
        rows[pair.name]["peak_nbytes"] = pair.ask("peak_nbytes")
    if rows[AGAIN]["loss"] != rows[DRAINED]["loss"]:
        raise BenchmarkError("1f1b: the same training had other losses the second time")
    for name, row in rows.items():
        if not all(map(math.isfinite, row["loss"])):
            raise BenchmarkError(f"{name}: a loss is not finite")
    return rows


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure what the command line asks for and return it with all that is needed to repeat it."""
    work, num = (QUICK if arguments.quick else WORK), arguments.micro_batches
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        pairs = [Pair(name, Stage, Setup(name, work, num), folder, stack=stack) for name in TITLES]
        rows = in_turns(pairs, num_epochs=arguments.epochs, num_batches=arguments.batches)
    return {
        "command": shlex.join(["python", "-m", "benchmarks.pipeline.asynchronous", *sys.argv[1:]]),
        **surroundings(),
        **asdict(work),
        "param_nbytes": work.param_nbytes,
        "num_micro_batches": num,
        "num_batches": arguments.batches,
        "load_average": os.getloadavg()[0],
        "variants": rows,
    }


def table(results: dict[str, Any]) -> str:
    """Return the Markdown of `results`."""
    rows, num, mib = results["variants"], results["num_micro_batches"], 2**20
    hardware = results["hardware"]
    lines = [
        f"`{results['command']}`\n\n{hardware['cpu']}, {hardware['num_cpus']} cores, 1 thread a rank; torch "
        f"{results['versions']['torch']}; {results['param_nbytes'] / mib:.0f} MiB of weights over {NUM_RANKS} stages; "
        f"{results['num_sequences']} × {results['num_tokens']} tokens a batch in {num} micro-batches, epochs of "
        f"{results['num_batches']} batches. Load average {results['load_average']:.1f}. Without any bubble, 1F1B would "
        f"be ({num} + {NUM_RANKS} - 1) / {num} = {_bound(num):.2f} × as fast.\n",
        "| two ranks | seconds a batch | 1F1B's / it | of an epoch | 1F1B's / it | idle, by stage | DEVICE peak, MiB "
        "| HOST peak, MiB | loss at the end |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        title, cells = TITLES[name], []
        for clock in reversed(CLOCKS):
            found = median_interval(paired_ratios(rows[DRAINED][clock], row[clock]))
            cells.append(f"{statistics.median(row[clock]):.3f}")
            cells.append(f"{found.median:.2f} ({found.low:.2f} – {found.high:.2f})")
        cells.append(", ".join(f"{statistics.median(stage):.0%}" for stage in zip(*row["idle"], strict=True)))
        cells += [" + ".join(f"{each / mib:.0f}" for each in tier) for tier in zip(*row["peak_nbytes"], strict=True)]
        cells.append(f"{row['loss'][-1]:.4f}")
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _bound(num: int) -> float:
    return (num + NUM_RANKS - 1) / num


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Seconds a batch of two stages that do not wait for each other.")
    parser.add_argument("--epochs", type=int, default=12, help="timed epochs of each variant (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=8, help="of an epoch (default: %(default)s)")
    parser.add_argument("--micro-batches", type=int, default=4, help="of a batch (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a small model: tries the harness, measures nothing")
    arguments = parse(parser)
    if arguments.epochs < 1 or arguments.micro_batches < 1:
        parser.error("--epochs and --micro-batches must be at least 1")
    if arguments.batches < NUM_RANKS:
        parser.error(f"--batches must be at least {NUM_RANKS}, the number of stages")
    return arguments


def main() -> int:
    """Run, save and show; return the exit status."""
    return carry_out(parse_arguments(), run, table, readme=Path(__file__).parent / "asynchronous.md")


if __name__ == "__main__":
    sys.exit(main())
