"""One rank of a training over two machines: what goes over its machine's NIC in each step, and how long that takes."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import chunkmem

WIDTH, DEPTH, NUM_SAMPLES = 256, 6, 64
NUM_MACHINES, NUM_RANKS_EACH = 2, 2
NUM_WARMUP_STEPS = 4
"""The first ones are recorded, the next ones are planned and timed."""


class Block(nn.Module):
    """A residual block of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def build() -> nn.Module:
    """Return the same blocks on each rank."""
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(DEPTH)])


class Training:
    """A model and its optimizer, as one of the variants has them."""

    def __init__(self, variant: str) -> None:
        """Build them; `variant` is a name of `benchmarks.machines.run.VARIANTS`."""
        sharded, _, exchange = variant.partition(" ")
        mesh = None
        if sharded.endswith("hybrid"):
            mesh = init_device_mesh("cpu", (NUM_MACHINES, NUM_RANKS_EACH), mesh_dim_names=("replicate", "shard"))
        self.manager: chunkmem.ChunkManager | None = None
        self.optimizer: Any
        if sharded in ("all", "hybrid"):
            opts = {"with_mem_saving_comm": {"p2p": None, "grouped": False, "saving": True}[exchange]}
            config = chunkmem.Config.from_dict({"client": {"opts": opts}})
            self.manager = chunkmem.ChunkManager(config, mesh=mesh)
            with self.manager.init():
                self.model = build()
            self.optimizer = chunkmem.AdamW(self.model.parameters(), manager=self.manager)
            return
        self.model = build()
        if sharded == "ddp":
            self.model = nn.parallel.DistributedDataParallel(self.model)
        else:
            for block in [*self.model.children(), self.model]:
                fully_shard(block, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self, x: Tensor) -> float:
        """Train once, and return the loss."""
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward() if self.manager is None else self.manager.backward(loss)
        self.optimizer.step()
        return loss.item()


def main() -> None:
    """Train as ``VARIANT NIC STEPS OUT`` say; rank 0 writes what it has measured to OUT."""
    variant, nic, num_steps, out = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    training = Training(variant)
    num_params = sum(param.numel() for param in build().parameters())
    x = torch.randn(NUM_SAMPLES, WIDTH, generator=torch.Generator().manual_seed(rank))
    steps: list[dict[str, float]] = []
    for _ in range(int(num_steps)):
        dist.barrier()
        began_s, before = time.perf_counter(), _nic_nbytes(nic)
        loss = training.step(x)
        dist.barrier()
        sent, received = (after - at for after, at in zip(_nic_nbytes(nic), before, strict=True))
        steps.append({"seconds": time.perf_counter() - began_s, "sent": sent, "received": received, "loss": loss})
    if rank == 0:
        predicted = {} if training.manager is None else training.manager.metrics()
        result = {
            "steps": steps[NUM_WARMUP_STEPS:],
            "predicted_s": predicted.get("plan/seconds"),
            "weights_nbytes": 4 * num_params,
        }
        Path(out).write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _nic_nbytes(nic: str) -> tuple[int, int]:
    """Return what a NIC has sent and received, headers included."""
    folder = Path("/sys/class/net") / nic / "statistics"
    return int((folder / "tx_bytes").read_text()), int((folder / "rx_bytes").read_text())


if __name__ == "__main__":
    main()
