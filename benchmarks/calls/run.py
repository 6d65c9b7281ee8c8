"""How many calls of Python and C functions does a step take for each module without children, beside plain PyTorch?

Counts, which do not depend on the machine or on what else runs there: `tests/cpu/test_calls.py` holds them to a limit.
And how much processor time does a step of small modules take, in turn with plain PyTorch's? And a block's call in a
pipeline?
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import os
import pstats
import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import chunkmem
from benchmarks.program import Results, carry_out, parse

WIDTH, NUM_LEAVES = 32, 8
"""Of a block: of its vectors, and its modules without children."""
WARM_UP, COUNTED = 12, 4
"""Steps: after twelve, plans are final."""

SHARE = 0.3
"""Of model data that fits DEVICE, where not all does."""

Step = Callable[[], object]


class Block(nn.Module):
    """A transformer's, small: what computing takes is next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        h = F.scaled_dot_product_attention(self.query(h)[None], self.key(h)[None], self.value(h)[None])[0]
        x = x + self.out(h)
        y: torch.Tensor = x + self.narrow(F.gelu(self.wide(self.norm2(x))))
        return y


def network(num_blocks: int) -> nn.Sequential:
    """Build the blocks from one seed."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(num_blocks)))


class Experts(nn.Module):
    """A layer of which a step uses a few experts, other ones each time."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)) for _ in range(256)
        )
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        draw = torch.Generator().manual_seed(self.num_calls)
        self.num_calls += 1
        for number in torch.randperm(len(self.experts), generator=draw)[:8].tolist():
            x = x + self.experts[number](x)
        return x


SMALL: dict[str, Callable[[], nn.Module]] = {
    "64 transformer blocks": lambda: nn.Sequential(*(Block() for _ in range(64))),
    "2 000 linear layers": lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2000))),
    "4 layers of 256 experts, 8 of each used": lambda: nn.Sequential(*(Experts() for _ in range(4))),
}


def _loop(model: nn.Module, optimizer: torch.optim.Optimizer, backward: Callable[[torch.Tensor], object]) -> Step:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))

    def step() -> None:
        backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    return step


PIPELINED = 8
"""Blocks of a pipeline, a linear layer each, and micro-batches."""


def plain(num_blocks: int) -> Step:
    """Return a step of plain PyTorch."""
    return _plain_step(lambda: network(num_blocks))


def _plain_step(build: Callable[[], nn.Module]) -> Step:
    torch.manual_seed(0)
    model = build()
    return _loop(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), torch.Tensor.backward)


def managed(num_blocks: int, *, share: float | None = None) -> Step:
    """Return a step of chunkmem; DEVICE holds this share of model data, or all of it."""
    return _managed_step(lambda: network(num_blocks), share)


def _managed_step(build: Callable[[], nn.Module], share: float | None = None) -> Step:
    numel = sum(param.numel() for param in build().parameters())
    cap_nbytes = 1 << 30 if share is None else int(16 * numel * share)
    manager = chunkmem.ChunkManager(chunkmem.Config.from_dict({"memory": {"device": cap_nbytes}}))
    torch.manual_seed(0)
    with manager.init():
        model = build()
    return _loop(model, chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-3), manager.backward)


def _linears() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(PIPELINED)))


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(4 * PIPELINED, WIDTH, generator=draw), torch.randn(4 * PIPELINED, WIDTH, generator=draw)


def accumulating() -> Step:
    """Return a step of plain PyTorch that adds up the gradients of micro-batches."""
    model, (inputs, target) = _linears(), _batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    parts = list(zip(inputs.chunk(PIPELINED), target.chunk(PIPELINED), strict=True))

    def step() -> None:
        for part, wanted in parts:
            (F.mse_loss(model(part), wanted) / PIPELINED).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def pipelined(checkpoint: str) -> Step:
    """Return a step of `manager.pipeline()` over the same, with room for all of it."""
    manager = chunkmem.ChunkManager(chunkmem.Config.from_dict({"memory": {"device": 1 << 30}}))
    with manager.init():
        model = _linears()
    optimizer, (inputs, target) = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-3), _batch()
    pipe = manager.pipeline(model, micro_batches=PIPELINED, loss_fn=F.mse_loss, checkpoint=checkpoint)

    def step() -> None:
        pipe.step(inputs, target)
        optimizer.step()
        optimizer.zero_grad()

    return step


def sharded(num_blocks: int) -> Step:
    """Return a step of FSDP2 over one rank, which gathers block by block."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo")
    mesh, model = init_device_mesh("cpu", (1,)), network(num_blocks)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _loop(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), torch.Tensor.backward)


def count(make: Callable[[int], Step], num_blocks: int) -> float:
    """Return the calls of a step, for each module without children."""
    step = make(num_blocks)
    for _ in range(WARM_UP):
        step()
    gc.collect()
    with cProfile.Profile() as profile:
        for _ in range(COUNTED):
            step()
    calls: int = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]
    return calls / COUNTED / (NUM_LEAVES * num_blocks)


def ways(build: Callable[[], nn.Module]) -> dict[str, Step]:
    """Return steps of a model, by who takes them."""
    return {
        "plain": _plain_step(build),
        "chunkmem, all fits": _managed_step(build),
        "chunkmem, 30 %": _managed_step(build, SHARE),
        "plain again": _plain_step(build),
    }


def pipeline_ways() -> dict[str, Step]:
    """Return steps of micro-batches, by who takes them."""
    pipes = {f'checkpoint="{policy}"': pipelined(policy) for policy in ("never", "always")}
    return {"plain": accumulating(), **pipes, "plain again": accumulating()}


def times(steps: Mapping[str, Step], rounds: int) -> dict[str, list[float]]:
    """Return the processor seconds of steps, in turn."""
    for _ in range(WARM_UP):
        for step in steps.values():
            step()
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            began_s = time.process_time()
            step()
            found[name].append(time.process_time() - began_s)
    return found


def _more_ms(times_s: dict[str, list[float]], name: str) -> float:
    """Return by how many milliseconds the call of a block takes longer than plain PyTorch's: the median."""
    more_s = (a - b for a, b in zip(times_s[name], times_s["plain"], strict=True))
    return round(1e3 * statistics.median(more_s) / PIPELINED**2, 3)


def _ratio(times_s: dict[str, list[float]], name: str) -> dict[str, float]:
    ratios = sorted(a / b for a, b in zip(times_s[name], times_s["plain"], strict=True))
    tenth = len(ratios) // 10
    return {"median": statistics.median(ratios), "low": ratios[tenth], "high": ratios[-1 - tenth]}


WAYS: dict[str, Callable[[int], Step]] = {
    "plain PyTorch": plain,
    "chunkmem, all fits": managed,
    "chunkmem, 30 % of model data fits": partial(managed, share=SHARE),
    "FSDP2 by block, one rank": sharded,
}


def measure(arguments: argparse.Namespace) -> Results:
    """Count them all."""
    calls = {name: round(count(make, arguments.blocks), 1) for name, make in WAYS.items()}
    if dist.is_initialized():
        dist.destroy_process_group()
    torch.set_num_threads(1)
    ratios = {}
    for model, build in SMALL.items():
        times_s = times(ways(build), arguments.rounds)
        ratios[model] = {name: _ratio(times_s, name) for name in times_s if name != "plain"}
    times_s = times(pipeline_ways(), arguments.rounds)
    pipeline = {name: _more_ms(times_s, name) for name in times_s if name != "plain"}
    found = {"calls": calls, "processor_time": ratios, "pipeline_ms": pipeline}
    return {"blocks": arguments.blocks, "torch": torch.__version__, **found}


def table(results: Results) -> str:
    """Return the table of the README."""
    rows = [f"| {name} | {calls:.0f} |" for name, calls in results["calls"].items()]
    head = f"| {results['blocks']} blocks of {NUM_LEAVES} modules, torch {results['torch']} | calls a module and step |"
    shown = []
    for model, ratios in results["processor_time"].items():
        cells = [f"{each['median']:.2f} ({each['low']:.2f} – {each['high']:.2f})" for each in ratios.values()]
        shown.append(f"| {model} | {' | '.join(cells)} |")
    second = "| one thread: processor time of a step / plain PyTorch | chunkmem, all fits | chunkmem, 30 % | A/A |"
    third = "| one thread: the call of a block in a pipeline, forward and backward, over plain PyTorch's | ms |"
    more = [f"| {name.replace('plain again', 'A/A')} | {value:.2f} |" for name, value in results["pipeline_ms"].items()]
    tables = [[head, "|---|---:|", *rows], [second, "|---|---:|---:|---:|", *shown], [third, "|---|---:|", *more]]
    return "\n\n".join(map("\n".join, tables))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.calls.run")
    parser.add_argument("--blocks", type=int, default=24, metavar="N", help="transformer blocks (default: 24)")
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="timed steps of each (default: 15)")
    return carry_out(parse(parser), measure, table, readme=Path(__file__).with_name("README.md"))


if __name__ == "__main__":
    sys.exit(main())
