"""What do updates inside backward cost, and give back? The README in this folder tells the method."""

from __future__ import annotations

import argparse
import os
import random
import resource
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from tqdm import tqdm

import chunkmem
from benchmarks.overhead.variants import ADAMW, FULL, GPT, NUM_BATCHES, QUICK, Shape, num_params
from benchmarks.program import BenchmarkError, carry_out, command, heading, parse, surroundings
from benchmarks.stats import median_interval, paired_ratios
from benchmarks.worker import Worker

HERE = Path(__file__).parent
NUM_WARMUP_STEPS = 4
"""The first one is recorded, the next ones are planned and timed."""
BASELINE = "plain"


@dataclass(frozen=True)
class Variant:
    """One row of the table."""

    name: str
    title: str
    in_backward: bool = False
    cap_nbytes_per_param: float | None = None
    """chunkmem's device cap, in bytes for each parameter of the model; None: plain PyTorch."""


# Model data is 16 bytes a parameter, 12 without gradients: "tight" has room for the latter and a few chunks.
VARIANTS = (
    Variant("plain", "plain PyTorch"),
    Variant("plain-again", "plain PyTorch, again (A/A)"),
    Variant("plain-hooks", "plain PyTorch, an AdamW for each parameter, stepped by a hook", in_backward=True),
    Variant("resident", "chunkmem, all resident", cap_nbytes_per_param=32),
    Variant("resident-in-backward", "chunkmem, all resident, `in_backward`", True, 32),
    Variant("tight", "chunkmem, cap of 14.5 bytes a parameter", cap_nbytes_per_param=14.5),
    Variant("tight-in-backward", "chunkmem, cap of 14.5 bytes a parameter, `in_backward`", True, 14.5),
)


class Training:
    """A model in a process of its own."""

    def __init__(self, variant: Variant, shape: Shape) -> None:
        torch.manual_seed(0)
        self._before_nbytes = psutil.Process().memory_info().rss
        self._manager: chunkmem.ChunkManager | None = None
        self._optimizers: list[Any] = []
        if variant.cap_nbytes_per_param is None:
            self._model: Any = GPT(shape)
            if variant.in_backward:
                for param in self._model.parameters():
                    _step_in_hook(param)
            else:
                self._optimizers.append(torch.optim.AdamW(self._model.parameters(), fused=True, **ADAMW))
        else:
            device_nbytes = round(variant.cap_nbytes_per_param * num_params(shape))
            self._manager = chunkmem.ChunkManager(chunkmem.Config.from_dict({"memory": {"device": device_nbytes}}))
            with self._manager.init():
                self._model = GPT(shape)
            options = {"manager": self._manager, "in_backward": variant.in_backward, **ADAMW}
            self._optimizers.append(chunkmem.AdamW(self._model.parameters(), **options))
        draw = torch.Generator().manual_seed(1)
        size = (NUM_BATCHES, shape.num_sequences, shape.num_tokens + 1)
        self._batches = torch.randint(shape.vocabulary, size, generator=draw)

    def step(self, number: int) -> tuple[float, float]:
        """Train one step; return its seconds and its loss."""
        began_s = time.perf_counter()
        loss = self._model(self._batches[number % NUM_BATCHES])
        loss.backward()
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return time.perf_counter() - began_s, loss.item()

    def memory(self) -> tuple[int, int | None]:
        """Return the process's peak of RAM since before the model in bytes, and the bytes that the last step moved."""
        peak_nbytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - self._before_nbytes
        timeline = None if self._manager is None else self._manager.timeline()
        return peak_nbytes, None if timeline is None else sum(timeline.moved_nbytes.values())


def _step_in_hook(param: torch.Tensor) -> None:
    """Update a parameter, and free its gradient, once that is there: the recipe that PyTorch's tutorials have."""
    optimizer = torch.optim.AdamW([param], fused=True, **ADAMW)

    def step(_: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    param.register_post_accumulate_grad_hook(step)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train all variants in turns, one step each, in an order drawn again every time.

    Raises:
        BenchmarkError: a process failed, or losses are not the bits of plain PyTorch.
    """
    shape, draw = QUICK if arguments.quick else FULL, random.Random(0)
    times: dict[str, list[float]] = {variant.name: [] for variant in VARIANTS}
    with ExitStack() as stack:
        workers = {v.name: Worker(v.name, Training, v, shape, stack=stack) for v in VARIANTS}
        for step in tqdm(range(NUM_WARMUP_STEPS + arguments.steps), unit="turn", disable=None):
            losses = {}
            for variant in draw.sample(VARIANTS, len(VARIANTS)):
                step_s, losses[variant.name] = workers[variant.name].ask("step", step)
                if step >= NUM_WARMUP_STEPS:
                    times[variant.name].append(step_s)
            if wrong := [name for name, loss in losses.items() if loss != losses[BASELINE]]:
                raise BenchmarkError(f"step {step}: losses are not those of plain PyTorch: {', '.join(wrong)}")
        load = os.getloadavg()
        memory = {name: worker.ask("memory") for name, worker in workers.items()}
    rows = {
        variant.name: {
            **asdict(variant),
            "step_s": times[variant.name],
            "peak_nbytes": memory[variant.name][0],
            "moved_nbytes": memory[variant.name][1],
        }
        for variant in VARIANTS
    }
    return {
        "command": command("in_backward"),
        **surroundings(),
        "shape": {**asdict(shape), "num_params": num_params(shape)},
        "load_average": load,
        "variants": rows,
    }


def table(results: Mapping[str, Any]) -> str:
    """Return the Markdown of results."""
    shape, rows = results["shape"], results["variants"]
    lines = [
        *heading(results, num_steps=len(rows[BASELINE]["step_s"])),
        "| variant | step, median s | × plain | 95 % interval | moved a step, MB | peak of RAM, bytes a parameter |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows.values():
        ratio = median_interval(paired_ratios(row["step_s"], rows[BASELINE]["step_s"]))
        seconds = median_interval(row["step_s"]).median
        moved = "" if row["moved_nbytes"] is None else f"{row['moved_nbytes'] / 1e6:.0f}"
        lines.append(
            f"| {row['title']} | {seconds:.3f} | {ratio.median:.3f} | {ratio.low:.3f} – {ratio.high:.3f} | {moved} "
            f"| {row['peak_nbytes'] / shape['num_params']:.1f} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Run, save and show; return the exit status."""
    parser = argparse.ArgumentParser(description="Step time and memory of updates inside backward, on a CPU.")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each variant (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a small model: tries the harness, measures nothing")
    return carry_out(parse(parser), measure, table, readme=HERE / "README.md")


if __name__ == "__main__":
    sys.exit(main())
