"""A disk below HOST over two ranks: each has a file of its own, and together they train as with ample memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chunkmem
from tests.helpers.audit import assert_as_predicted, audit
from tests.helpers.ranks import Team
from tests.helpers.spread import spread

WIDTH, NUM_BLOCKS, NUM_STEPS = 32, 8, 7
SLAB = 4 * 2 * WIDTH * WIDTH


@dataclass(frozen=True)
class Task:
    precision: str
    overlap: bool
    path: str | None
    """None: ample memory, and no DISK."""

    def config(self) -> chunkmem.Config:
        memory: dict[str, Any] = {"device": 8 << 20, "host": 64 << 20}
        if self.path is not None:
            memory = {"device": 8 * SLAB, "host": 5 * SLAB, "disk": {"path": self.path, "capacity": "64MiB"}}
        return chunkmem.Config.from_dict(
            {
                "memory": memory,
                "precision": self.precision,
                "default_chunk_size": 2 * WIDTH * WIDTH,
                "client": {"opts": {"overlap_optimizer": self.overlap}},
            }
        )


def model_of() -> nn.Module:
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(NUM_BLOCKS))
    return nn.Sequential(*blocks)


def trained(rank: int, task: Task) -> tuple[list[float], dict[str, Tensor]]:
    with chunkmem.ChunkManager(task.config()) as manager:
        torch.manual_seed(0)
        with manager.init():
            model = model_of()
        optimizer = chunkmem.AdamW(model.parameters(), lr=1e-2, manager=manager)
        losses = []
        for step in range(NUM_STEPS):
            generator = torch.Generator().manual_seed(10 * step + rank)
            loss = model(torch.randn(6, WIDTH, generator=generator)).square().mean()
            manager.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if task.path is not None and step > 3:
                assert_as_predicted(manager)
            audit(manager)
        moved = manager.memory().moved
        assert (moved.read_nbytes > 0 < moved.written_nbytes) is (task.path is not None)
        return losses, {name: value.clone() for name, value in manager.state_dict().items()}


@pytest.mark.few(1)
@spread(precision=["fp32", "bf16"], overlap=[True, False])
def test_two_ranks_train_as_with_ample_memory(pair: Team, precision: str, overlap: bool, tmp_path: Path) -> None:
    ample = pair.run(trained, Task(precision, overlap, None))
    tight = pair.run(trained, Task(precision, overlap, str(tmp_path)))
    for (losses, weights), (expected, others) in zip(tight, ample, strict=True):
        assert losses == expected
        assert all(torch.equal(weights[name], others[name]) for name in others)
    assert list(tmp_path.iterdir()) == []
