"""How many calls of Python and C functions does a step take for each module without children, beside plain PyTorch?

Counts, which do not depend on the machine or on what else runs there: `tests/cpu/test_calls.py` holds them to a limit.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import os
import pstats
import socket
import sys
from collections.abc import Callable
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


def _loop(model: nn.Module, optimizer: torch.optim.Optimizer, backward: Callable[[torch.Tensor], object]) -> Step:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))

    def step() -> None:
        backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    return step


def plain(num_blocks: int) -> Step:
    """Return a step of plain PyTorch."""
    model = network(num_blocks)
    return _loop(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), torch.Tensor.backward)


def managed(num_blocks: int, *, share: float | None = None) -> Step:
    """Return a step of chunkmem; DEVICE holds this share of model data, or all of it."""
    numel = sum(param.numel() for param in network(num_blocks).parameters())
    cap_nbytes = 1 << 30 if share is None else int(16 * numel * share)
    manager = chunkmem.ChunkManager(chunkmem.Config.from_dict({"memory": {"device": cap_nbytes}}))
    with manager.init():
        model = network(num_blocks)
    return _loop(model, chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-3), manager.backward)


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


WAYS: dict[str, Callable[[int], Step]] = {
    "plain PyTorch": plain,
    "chunkmem, all fits": managed,
    "chunkmem, 30 % of model data fits": partial(managed, share=0.3),
    "FSDP2 by block, one rank": sharded,
}


def measure(arguments: argparse.Namespace) -> Results:
    """Count them all."""
    calls = {name: round(count(make, arguments.blocks), 1) for name, make in WAYS.items()}
    if dist.is_initialized():
        dist.destroy_process_group()
    return {"blocks": arguments.blocks, "torch": torch.__version__, "calls": calls}


def table(results: Results) -> str:
    """Return the table of the README."""
    rows = [f"| {name} | {calls:.0f} |" for name, calls in results["calls"].items()]
    head = f"| {results['blocks']} blocks of {NUM_LEAVES} modules, torch {results['torch']} | calls a module and step |"
    return "\n".join([head, "|---|---:|", *rows])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.calls.run")
    parser.add_argument("--blocks", type=int, default=24, metavar="N", help="transformer blocks (default: 24)")
    return carry_out(parse(parser), measure, table, readme=Path(__file__).with_name("README.md"))


if __name__ == "__main__":
    sys.exit(main())
