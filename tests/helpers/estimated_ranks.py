"""Small models of several kinds, asked about and trained over ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

import chunkmem
from chunkmem.data.errors import CapacityError, RankError
from chunkmem.data.types import Tier
from chunkmem.estimate.gpt import GPT, Shape
from chunkmem.estimate.hardware import HARDWARE, Hardware
from chunkmem.estimate.mesh import RankMesh
from chunkmem.estimate.model import Model, checkpointed
from chunkmem.estimate.question import Question

IN_RAM: Hardware = replace(HARDWARE["h100"], is_accelerator=False)
AMPLE_NBYTES = 64 << 20
STEPS = 6
"""After so many, ranks follow the plan that they keep."""


@dataclass(frozen=True)
class Case:
    """A model, its loss, and how it is trained."""

    name: str
    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module], torch.Tensor]
    chunk_numel: int
    config: dict[str, Any] = field(default_factory=dict)
    checkpointing: bool = False

    def question(self, world: int, **changes: Any) -> Question:
        """Ask about training it over `world` ranks."""
        asked = Question(
            model=lambda batch: Model(self.name, self.build, self.loss),
            batch=1,
            hardware=IN_RAM,
            device_nbytes=AMPLE_NBYTES,
            host_nbytes=AMPLE_NBYTES,
            precision=self.config.get("precision", "fp32"),
            reduce_dtype=self.config.get("distributed", {}).get("reduce_dtype", "fp32"),
            master="fp32" if self.config.get("master_weights", True) else "weights",
            checkpointing=self.checkpointing,
            mesh=RankMesh(shard=world),
            chunk_numel=self.chunk_numel,
        )
        return replace(asked, **changes)


@dataclass(frozen=True)
class Facts:
    """What one rank did in its last step."""

    digest: str | None
    """Of the trace whose plan was followed."""
    plan_misses: int
    device_peak_nbytes: int
    host_peak_nbytes: int
    copied_nbytes: int
    sent_nbytes: int
    received_nbytes: int
    buffered_nbytes: int


def gpt(shape: Shape) -> Callable[[], nn.Module]:
    return lambda: GPT(shape, seq=16)


def gpt_loss(shape: Shape) -> Callable[[nn.Module], torch.Tensor]:
    def loss(model: nn.Module) -> torch.Tensor:
        value: torch.Tensor = model(torch.randint(0, shape.vocab, (2, 16)))
        return value

    return loss


def mlp() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(5)))


def mlp_loss(model: nn.Module) -> torch.Tensor:
    value: torch.Tensor = model(torch.randn(8, 64)).square().mean()
    return value


SMALL, WIDE_ROOT = Shape(4, 32, 4, vocab=64), Shape(3, 32, 4, vocab=1000)
CASES = {
    case.name: case
    for case in (
        Case("gpt", gpt(SMALL), gpt_loss(SMALL), 4096),
        Case("mlp", mlp, mlp_loss, 8320),
        Case("reduced in bf16", mlp, mlp_loss, 8320, {"distributed": {"reduce_dtype": "bf16"}}),
        Case("large root", gpt(WIDE_ROOT), gpt_loss(WIDE_ROOT), 8192),
        Case("bf16", gpt(SMALL), gpt_loss(SMALL), 8192, {"precision": "bf16"}),
        Case("bf16 alone", gpt(SMALL), gpt_loss(SMALL), 8192, {"precision": "bf16", "master_weights": False}),
        Case("checkpointing", gpt(SMALL), gpt_loss(SMALL), 4096, checkpointing=True),
    )
}


def train(rank: int, name: str, device_nbytes: int, host_nbytes: int, steps: int = STEPS) -> Facts | None:
    """Train a case on one rank; None if its caps are too small."""
    case = CASES[name]
    torch.set_num_threads(1)
    memory = {"device": device_nbytes, "host": host_nbytes}
    config = {"memory": memory, "default_chunk_size": case.chunk_numel, **case.config}
    try:
        with chunkmem.ChunkManager(chunkmem.Config.from_dict(config)) as manager:
            return _trained(manager, case, rank, steps)
    except (CapacityError, RankError):  # on this rank, or on another one
        return None


def _trained(manager: chunkmem.ChunkManager, case: Case, rank: int, steps: int) -> Facts:
    torch.manual_seed(0)
    with manager.init():
        model = case.build()
    if case.checkpointing:
        checkpointed(model)
    optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-3)
    torch.manual_seed(rank)
    shards = manager.runtime.sharding.shards
    before = (0, 0)
    for _ in range(steps):
        if shards is not None:
            before = shards.exchange.traffic.sent_nbytes, shards.exchange.traffic.received_nbytes
            shards.exchange.traffic.peak_buffered_nbytes = 0
        manager.backward(case.loss(model))
        optimizer.step()
        optimizer.zero_grad()
    happened, trace = manager.timeline(), manager.trace
    assert happened is not None
    after = before if shards is None else (shards.exchange.traffic.sent_nbytes, shards.exchange.traffic.received_nbytes)
    return Facts(
        digest=None if trace is None else trace.digest,
        plan_misses=happened.plan_misses,
        device_peak_nbytes=happened.peak_nbytes[Tier.DEVICE],
        host_peak_nbytes=happened.peak_nbytes[Tier.HOST],
        copied_nbytes=sum(happened.moved_nbytes.values()),
        sent_nbytes=after[0] - before[0],
        received_nbytes=after[1] - before[1],
        buffered_nbytes=manager.memory().exchange_nbytes[1],
    )
