"""What does chunkmem cost over blocks that torch.compile runs? The README beside this file tells the method."""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import chunkmem
from benchmarks.overhead.variants import ADAMW, FULL, GPT, NUM_BATCHES, QUICK, Shape, num_params
from benchmarks.program import BenchmarkError, carry_out, command, heading, parse, surroundings
from benchmarks.stats import rows_of_times
from benchmarks.worker import Worker

HERE = Path(__file__).parent
NUM_WARMUP_STEPS = 5
"""The first one compiles, the second is recorded."""


@dataclass(frozen=True)
class Variant:
    """One row of the table."""

    name: str
    title: str
    cap_nbytes_per_param: float | None = None
    """chunkmem's device cap, in bytes for each parameter of the model; None: plain PyTorch."""
    compiles: bool = True

    @property
    def baseline(self) -> str:
        """The variant it is paired with and has to equal bit for bit."""
        return "plain-compiled" if self.compiles else "plain"


# Model data is 16 bytes a parameter: "resident" caps at twice that.
VARIANTS = (
    Variant("plain", "plain PyTorch, eager", compiles=False),
    Variant("plain-again", "plain PyTorch, eager, again (A/A)", compiles=False),
    Variant("resident", "chunkmem, eager, all resident", 32, compiles=False),
    Variant("plain-compiled", "plain PyTorch, compiled blocks"),
    Variant("plain-compiled-again", "plain PyTorch, compiled blocks, again (A/A)"),
    Variant("resident-compiled", "chunkmem, compiled blocks, all resident", 32),
    Variant("data-50-compiled", "chunkmem, compiled blocks, cap 50 % of model data", 0.5 * 16),
)


class Training:
    """A model in a process of its own."""

    def __init__(self, variant: Variant, shape: Shape) -> None:
        torch.manual_seed(0)
        if variant.cap_nbytes_per_param is None:
            self._model: Any = GPT(shape)
            for block in self._model.blocks if variant.compiles else ():
                block.compile()
            self._optimizer: Any = torch.optim.AdamW(self._model.parameters(), fused=True, **ADAMW)
        else:
            device_nbytes = round(variant.cap_nbytes_per_param * num_params(shape))
            manager = chunkmem.ChunkManager(chunkmem.Config.from_dict({"memory": {"device": device_nbytes}}))
            with manager.init():
                self._model = GPT(shape)
            if variant.compiles:
                manager.compile(self._model)
            self._optimizer = chunkmem.AdamW(self._model.parameters(), manager=manager, **ADAMW)
        draw = torch.Generator().manual_seed(1)
        size = (NUM_BATCHES, shape.num_sequences, shape.num_tokens + 1)
        self._batches = torch.randint(shape.vocabulary, size, generator=draw)

    def step(self, number: int) -> tuple[float, float, float]:
        """Train one step; return its seconds, its seconds of CPU and its loss."""
        began_s, cpu_began_s = time.perf_counter(), time.process_time()
        loss = self._model(self._batches[number % NUM_BATCHES])
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.perf_counter() - began_s, time.process_time() - cpu_began_s, loss.item()


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train all variants in turns, one step each, in an order drawn again every time.

    Raises:
        BenchmarkError: a process failed, or losses are not the bits of plain PyTorch, compiled likewise.
    """
    shape, draw = QUICK if arguments.quick else FULL, random.Random(0)
    times: dict[str, list[tuple[float, float]]] = {variant.name: [] for variant in VARIANTS}
    with ExitStack() as stack:
        workers = {v.name: Worker(v.name, Training, v, shape, stack=stack) for v in VARIANTS}
        for step in tqdm(range(NUM_WARMUP_STEPS + arguments.steps), unit="turn", disable=None):
            losses = {}
            for variant in draw.sample(VARIANTS, len(VARIANTS)):
                step_s, cpu_s, losses[variant.name] = workers[variant.name].ask("step", step)
                if step >= NUM_WARMUP_STEPS:
                    times[variant.name].append((step_s, cpu_s))
            wrong = [v.name for v in VARIANTS if losses[v.name] != losses[v.baseline]]
            if wrong:
                raise BenchmarkError(f"step {step}: losses are not those of plain PyTorch: {', '.join(wrong)}")
        load = os.getloadavg()
    rows = {
        variant.name: {
            **asdict(variant),
            "baseline": variant.baseline,
            "step_s": [step_s for step_s, _ in times[variant.name]],
            "cpu_s": [cpu_s for _, cpu_s in times[variant.name]],
        }
        for variant in VARIANTS
    }
    return {
        "command": command("compile"),
        **surroundings(),
        "shape": {**asdict(shape), "num_params": num_params(shape)},
        "load_average": load,
        "variants": rows,
    }


def table(results: Mapping[str, Any]) -> str:
    """Return the Markdown of results."""
    rows = results["variants"]
    lines = [
        *heading(results, num_steps=len(rows["plain"]["step_s"])),
        "| variant | step, median s | × plain, likewise | 95 % interval | CPU, median s | × plain, likewise "
        "| 95 % interval |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join(lines + rows_of_times(rows, ("step_s", "cpu_s")))


def main() -> int:
    """Run, save and show; return the exit status."""
    parser = argparse.ArgumentParser(description="Step time of chunkmem over compiled blocks, on a CPU.")
    parser.add_argument("--steps", type=int, default=40, help="timed steps of each variant (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a small model: tries the harness, measures nothing")
    return carry_out(parse(parser), measure, table, readme=HERE / "README.md")


if __name__ == "__main__":
    sys.exit(main())
