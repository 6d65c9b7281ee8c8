"""How long is a step of two stages on two ranks, compared with torch's own pipelining? The README tells the method."""

from __future__ import annotations

import argparse
import os
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage

import chunkmem
from benchmarks.pipeline.models import NUM_BATCHES, Workload, loss_of
from benchmarks.pipeline.variants import ADAMW, AMPLE_NBYTES, PLAIN, Setting, Trainee
from benchmarks.program import BenchmarkError, carry_out, parse, surroundings
from benchmarks.stats import median_interval, paired_ratios
from benchmarks.worker import Worker
from chunkmem.pipeline.schedules import SCHEDULES

NUM_RANKS = 2
SHARE = 0.35
NUM_WARMUP_STEPS = 14
LOSS_TOLERANCE = 1e-4
WORK = Workload(num_layers=4, width=512, num_heads=8, num_sequences=32, num_tokens=64)
"""An even number of layers: half of its parts are those of a stage."""
QUICK = replace(WORK, width=64, num_tokens=16)
TITLES = {
    "torch": "torch.distributed.pipelining, all resident",
    "torch-again": "the same again (A/A)",
    "resident": "chunkmem, all resident",
    "tight": f"chunkmem, {SHARE:.0%} of PARAM and the activations of two micro-batches",
}
AIMS = {"resident": "≤ 1.05", "tight": "≤ 1.25"}


@dataclass(frozen=True)
class Setup:
    """What both ranks of a variant are given."""

    name: str
    work: Workload
    schedule: str
    num: int
    """Micro-batches."""
    activation_nbytes: int
    """Of a micro-batch, over all stages."""


@dataclass(frozen=True)
class Step:
    """One step on one rank."""

    step_s: float
    cpu_s: float
    """Of all threads of the process."""
    loss: float | None
    """On the last stage."""


class Rank:
    """A stage under training, in a process of its own."""

    def __init__(self, rank: int, setup: Setup, folder: str) -> None:
        meeting = f"file://{folder}/{setup.name}"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=NUM_RANKS)
        self._batches, self._num_steps = setup.work.batches(), 0
        self._manager: chunkmem.ChunkManager | None = None
        self._run = self._torch(setup, rank) if setup.name.startswith("torch") else self._chunkmem(setup)

    def _torch(self, setup: Setup, rank: int) -> Callable[[Tensor], float | None]:
        parts = list(setup.work.build().in_turn())
        half = len(parts) // NUM_RANKS
        stage = nn.Sequential(*parts[half * rank : half * (rank + 1)])
        self._optimizer: Any = torch.optim.AdamW(stage.parameters(), fused=True, **ADAMW)
        on_rank = PipelineStage(stage, rank, NUM_RANKS, torch.device("cpu"))
        schedule: Any = SCHEDULES[setup.schedule](on_rank, setup.num, loss_fn=loss_of)

        def run(batch: Tensor) -> float | None:
            if rank == 0:
                schedule.step(batch[:, :-1])
                return None
            losses: list[Tensor] = []
            schedule.step(target=batch[:, 1:], losses=losses)
            return torch.stack(losses).mean().item()

        return run

    def _chunkmem(self, setup: Setup) -> Callable[[Tensor], float | None]:
        device_nbytes = AMPLE_NBYTES
        if setup.name == "tight":
            in_flight_nbytes = 2 * setup.activation_nbytes  # each stage has half of four
            device_nbytes = int(SHARE * setup.work.param_nbytes / NUM_RANKS) + in_flight_nbytes
        mesh = init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("stage",))
        values = {"memory": {"device": device_nbytes, "host": AMPLE_NBYTES}}
        manager = self._manager = chunkmem.ChunkManager(chunkmem.Config.from_dict(values), mesh=mesh)
        with manager.init():
            model = setup.work.build()
        pipe = manager.pipeline(
            model.blocks,
            first=model.embeddings,
            last=model.head,
            loss_fn=loss_of,
            micro_batches=setup.num,
            checkpoint="never",
            schedule=setup.schedule,
        )
        self._optimizer = chunkmem.AdamW(model.parameters(), manager=manager, **ADAMW)
        return lambda batch: pipe.step(batch[:, :-1], batch[:, 1:]).item()

    def step(self) -> Step:
        """Train one step."""
        batch = self._batches[self._num_steps % NUM_BATCHES]
        self._num_steps += 1
        began_s, cpu_began_s = time.perf_counter(), time.process_time()
        loss = self._run(batch)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return Step(time.perf_counter() - began_s, time.process_time() - cpu_began_s, loss)

    def peak_nbytes(self) -> int | None:
        """Return the peak of DEVICE; None in plain PyTorch."""
        return None if self._manager is None else self._manager.memory().device.peak_nbytes


class Pair:
    """The ranks of a variant."""

    def __init__(self, name: str, make: Callable[..., Any], *arguments: Any, stack: ExitStack) -> None:
        """Have `make(rank, *arguments)` in a process of its own, for each rank."""
        self.name = name
        self._pool = stack.enter_context(ThreadPoolExecutor(NUM_RANKS))
        self._ranks = [Worker(f"{name}, rank {rank}", make, rank, *arguments, stack=stack) for rank in range(NUM_RANKS)]

    def ask(self, *request: Any) -> list[Any]:
        """Call a method on all ranks at once, by its name and arguments."""
        return list(self._pool.map(lambda rank: rank.ask(*request), self._ranks))


def in_turns(pairs: Sequence[Pair], steps: int) -> dict[str, Any]:
    """Let all variants take turns, one step each, in an order drawn again every time.

    Raises:
        BenchmarkError: a process failed, or losses differ.
    """
    draw = random.Random(0)
    for pair in pairs:
        for _ in range(NUM_WARMUP_STEPS):
            pair.ask("step")
    rows: dict[str, Any] = {pair.name: {"step_s": [], "cpu_s": [], "loss": []} for pair in pairs}
    for _ in range(steps):
        for pair in draw.sample(pairs, len(pairs)):
            found: list[Step] = pair.ask("step")
            row = rows[pair.name]
            row["step_s"].append(max(step.step_s for step in found))
            row["cpu_s"].append(sum(step.cpu_s for step in found))
            row["loss"].append(found[-1].loss)
    for pair in pairs:
        rows[pair.name]["peak_nbytes"] = pair.ask("peak_nbytes")
    for name, row in rows.items():
        if any(abs(a - b) > LOSS_TOLERANCE for a, b in zip(row["loss"], rows["torch"]["loss"], strict=True)):
            raise BenchmarkError(f"{name}: its losses are not those of torch.distributed.pipelining")
    return rows


def activation_nbytes(work: Workload, num: int) -> int:
    """Return the bytes that autograd saves of a micro-batch, without weights."""
    trainee = Trainee(PLAIN, work)
    trainee.start(Setting(num))
    return trainee.activation_nbytes()


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure what the command line asks for and return it with all that is needed to repeat it."""
    work, num = (QUICK if arguments.quick else WORK), arguments.micro_batches
    saved_nbytes = activation_nbytes(work, num)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        setups = [Setup(name, work, arguments.schedule, num, saved_nbytes) for name in TITLES]
        pairs = [Pair(setup.name, Rank, setup, folder, stack=stack) for setup in setups]
        rows = in_turns(pairs, arguments.steps)
    return {
        "command": shlex.join(["python", "-m", "benchmarks.pipeline.ranks", *sys.argv[1:]]),
        **surroundings(),
        **asdict(work),
        "param_nbytes": work.param_nbytes,
        "activation_nbytes": saved_nbytes,
        "num_micro_batches": num,
        "schedule": arguments.schedule,
        "load_average": os.getloadavg()[0],
        "variants": rows,
    }


def table(results: dict[str, Any]) -> str:
    """Return the Markdown of `results`."""
    rows, mib = results["variants"], 2**20
    lines = [
        f"`{results['command']}`\n\n{results['num_micro_batches']} micro-batches, `{results['schedule']}`, 1 thread a "
        f"rank; {results['param_nbytes'] / mib:.0f} MiB of weights, {results['activation_nbytes'] / mib:.0f} MiB of "
        f"activations a micro-batch, both over two stages. Load average {results['load_average']:.1f}.\n",
        "| two ranks | seconds | × torch | seconds of CPU, both | × torch | aim | DEVICE peak, MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, title in TITLES.items():
        cells = []
        for clock in ("step_s", "cpu_s"):
            found = median_interval(paired_ratios(rows[name][clock], rows["torch"][clock]))
            cells += [f"{statistics.median(rows[name][clock]):.2f}"]
            cells += [f"{found.median:.2f} ({found.low:.2f} – {found.high:.2f})"]
        peaks = " + ".join("–" if each is None else f"{each / mib:.0f}" for each in rows[name]["peak_nbytes"])
        lines.append(f"| {title} | {' | '.join(cells)} | {AIMS.get(name, '')} | {peaks} |")
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Step time of two stages on two ranks of a CPU.")
    parser.add_argument("--steps", type=int, default=12, help="timed steps of each variant (default: %(default)s)")
    parser.add_argument("--micro-batches", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--schedule", choices=("gpipe", "1f1b"), default="1f1b", help="(default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a small model: tries the harness, measures nothing")
    arguments = parse(parser, has_table=False)
    if arguments.steps < 1 or arguments.micro_batches < 1:
        parser.error("--steps and --micro-batches must be at least 1")
    return arguments


def main() -> int:
    """Run, save and show; return the exit status."""
    return carry_out(parse_arguments(), run, table, readme=Path(__file__).parent / "README.md")


if __name__ == "__main__":
    sys.exit(main())
