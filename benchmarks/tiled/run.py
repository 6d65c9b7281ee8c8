"""What does it cost to tile wide layers where all fits? The README beside this file tells the method."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import chunkmem
from benchmarks.overhead.variants import ADAMW, FULL, GPT, NUM_BATCHES, QUICK, Shape, num_params
from benchmarks.program import BenchmarkError, carry_out, command, parse, surroundings
from benchmarks.stats import rows_of_times
from chunkmem.packing.tiling import tile_linears

HERE = Path(__file__).parent
NUM_WARMUP_STEPS = 4
NBYTES_A_PARAMETER = 32
"""The cap on DEVICE: twice the model data."""


@dataclass(frozen=True)
class Variant:
    """One row of the table."""

    name: str
    title: str
    tiles: int = 0
    """Of the widest layer; 0: nothing is tiled."""
    chunked: bool = True
    baseline: str = "untiled"
    """The untiled training it is compared to."""


VARIANTS = (
    Variant("untiled", "chunkmem, untiled"),
    Variant("untiled-again", "chunkmem, untiled, again (A/A)"),
    Variant("tiled-4", "chunkmem, widest layers in 4 tiles", 4),
    Variant("tiled-16", "chunkmem, widest layers in 16 tiles", 16),
    Variant("plain", "plain PyTorch, untiled", chunked=False, baseline="plain"),
    Variant("plain-again", "plain PyTorch, untiled, again (A/A)", chunked=False, baseline="plain"),
    Variant("plain-4", "plain PyTorch, widest layers in 4 tiles", 4, chunked=False, baseline="plain"),
    Variant("plain-16", "plain PyTorch, widest layers in 16 tiles", 16, chunked=False, baseline="plain"),
)


def build(variant: Variant, shape: Shape) -> GPT:
    """Return the model, its wide layers tiled."""
    torch.manual_seed(0)
    model = GPT(shape)
    if variant.tiles:
        tile_linears(model, max_numel=4 * shape.width**2 // variant.tiles)
    return model


def make_step(variant: Variant, shape: Shape) -> Callable[[torch.Tensor], float]:
    """Return a function that trains one step on a batch and returns its loss."""
    if variant.chunked:
        device_nbytes = NBYTES_A_PARAMETER * num_params(shape)
        manager = chunkmem.ChunkManager(chunkmem.Config.from_dict({"memory": {"device": device_nbytes}}))
        with manager.init():
            model = build(variant, shape)
        optimizer: Any = chunkmem.AdamW(model.parameters(), manager=manager, **ADAMW)
    else:
        model = build(variant, shape)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def step(batch: torch.Tensor) -> float:
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def serve(connection: Connection, variant: Variant, shape: Shape) -> None:
    """Answer a step's number with its seconds, its seconds of CPU and its loss."""
    draw = torch.Generator().manual_seed(1)
    size = (NUM_BATCHES, shape.num_sequences, shape.num_tokens + 1)
    batches = torch.randint(shape.vocabulary, size, generator=draw)
    step = make_step(variant, shape)
    while True:
        batch = batches[connection.recv() % NUM_BATCHES]
        began_s, cpu_began_s = time.perf_counter(), time.process_time()
        loss = step(batch)
        connection.send((time.perf_counter() - began_s, time.process_time() - cpu_began_s, loss))


class Worker:
    """A variant in a process of its own, which works only while it is asked to."""

    def __init__(self, variant: Variant, shape: Shape, stack: ExitStack) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = variant.name
        self._connection, far_end = context.Pipe()
        process = context.Process(target=serve, args=(far_end, variant, shape), daemon=True)
        process.start()
        far_end.close()
        stack.callback(process.join)
        stack.callback(process.terminate)

    def ask(self, step: int) -> tuple[float, float, float]:
        """Have a step trained; return its seconds, its seconds of CPU and its loss."""
        try:
            self._connection.send(step)
            answer: tuple[float, float, float] = self._connection.recv()
            return answer
        except (EOFError, BrokenPipeError):
            raise BenchmarkError(f"{self.name}: its process ended, see above") from None


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train all variants in turns, one step each, in an order drawn again every time.

    Raises:
        BenchmarkError: a process failed, or losses of the same tiles are not the same bits with chunkmem and without.
    """
    shape, draw = QUICK if arguments.quick else FULL, random.Random(0)
    times: dict[str, list[tuple[float, float]]] = {variant.name: [] for variant in VARIANTS}
    losses: dict[int, set[tuple[int, float]]] = {}
    with ExitStack() as stack:
        workers = [Worker(variant, shape, stack) for variant in VARIANTS]
        tiles = {variant.name: variant.tiles for variant in VARIANTS}
        for step in tqdm(range(NUM_WARMUP_STEPS + arguments.steps), unit="turn", disable=None):
            for worker in draw.sample(workers, len(workers)):
                step_s, cpu_s, loss = worker.ask(step)
                losses.setdefault(tiles[worker.name], set()).add((step, loss))
                if step >= NUM_WARMUP_STEPS:
                    times[worker.name].append((step_s, cpu_s))
        if any(len(found) != NUM_WARMUP_STEPS + arguments.steps for found in losses.values()):
            raise BenchmarkError("chunkmem's losses are not those of plain PyTorch with the same tiles")
        load = os.getloadavg()
    return {
        "command": command("tiled"),
        **surroundings(),
        "shape": {**asdict(shape), "num_params": num_params(shape)},
        "load_average": load,
        "variants": {
            variant.name: {
                **asdict(variant),
                "step_s": [step_s for step_s, _ in times[variant.name]],
                "cpu_s": [cpu_s for _, cpu_s in times[variant.name]],
            }
            for variant in VARIANTS
        },
    }


def table(results: Mapping[str, Any]) -> str:
    """Return the Markdown of results."""
    hardware, shape, rows = results["hardware"], results["shape"], results["variants"]
    num_steps = len(rows["untiled"]["step_s"])
    lines = [
        f"`{results['command']}`",
        "",
        f"{hardware['cpu']}, {hardware['num_cpus']} cores; torch {results['versions']['torch']}; "
        f"{shape['num_params'] / 1e6:.1f} M parameters, {shape['num_sequences']} × {shape['num_tokens']} tokens a "
        f"step; {num_steps} steps; load average at the end: {results['load_average'][0]:.1f}.",
        "",
        "| variant | step, median s | × untiled | 95 % interval | CPU, median s | × untiled | 95 % interval |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join(lines + rows_of_times(rows, ("step_s", "cpu_s")))


def main() -> int:
    """Run, save and show; return the exit status."""
    parser = argparse.ArgumentParser(description="Step time with and without tiled layers, on a CPU.")
    parser.add_argument("--steps", type=int, default=40, help="timed steps of each variant (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a small model: tries the harness, measures nothing")
    return carry_out(parse(parser), measure, table, readme=HERE / "README.md")


if __name__ == "__main__":
    sys.exit(main())
