"""A run with most of its model data on DISK is killed, and resumes on twice as many ranks: bit for bit."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chunkmem
from chunkmem.plan.model import Lane
from tests.helpers.audit import assert_as_predicted, audit
from tests.helpers.ranks import RankFailure, Team

WIDTH, NUM_BLOCKS = 32, 12
"""The blocks are as many for each rank of the run that is killed."""
CHUNK_NUMEL = WIDTH * (WIDTH + 1)
SAVED_AT, DIES_AT, NUM_STEPS = 4, 6, 10
ROLES = 4
"""Weights, gradients and two states: all in fp32."""


@dataclass(frozen=True)
class Task:
    num_ranks: int
    num_blocks: int
    saved: Path
    disk: Path | None
    """None: ample memory, and no DISK."""

    @property
    def rank_nbytes(self) -> int:
        """Model data of a rank."""
        return ROLES * sum(parameter.nbytes for parameter in self.model().parameters()) // self.num_ranks

    def model(self) -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(self.num_blocks)))

    def open(self) -> tuple[chunkmem.ChunkManager, nn.Module, chunkmem.AdamW]:
        memory: dict[str, Any] = {"device": 64 << 20, "host": 64 << 20}
        if self.disk is not None:
            # DEVICE has two blocks gathered, and their gradients.
            disk = {"path": str(self.disk), "capacity": "64MiB"}
            memory = {"device": 5 * 4 * CHUNK_NUMEL, "host": self.rank_nbytes // 4, "disk": disk}
        config = chunkmem.Config.from_dict({"memory": memory, "default_chunk_size": CHUNK_NUMEL})
        manager = chunkmem.ChunkManager(config)
        torch.manual_seed(0)
        with manager.init():
            model = self.model()
        return manager, model, chunkmem.AdamW(model.parameters(), lr=1e-2, manager=manager)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    loss: Tensor = model(torch.randn(6, WIDTH, generator=generator)).square().mean()
    return loss


def train(task: Task, manager: Any, model: nn.Module, optimizer: Any, rank: int, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(model, rank, step)
        manager.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        audit(manager)
        # Four steps try ways to exchange; the fifth follows the plan of the faster one, whichever that is.
        if task.disk is not None and step >= steps.start + 4:
            assert_as_predicted(manager)
            moved = manager.timeline().moved_nbytes
            assert moved[Lane.DISK_READ] > 0 < moved[Lane.DISK_WRITE]
    return losses


def train_and_die(rank: int, task: Task) -> None:
    """Save, train on, and be killed in the middle of a backward; without DISK: end."""
    manager, model, optimizer = task.open()
    train(task, manager, model, optimizer, rank, range(SAVED_AT))
    manager.save(task.saved, optimizer, extra={"step": SAVED_AT})
    if task.disk is not None:
        train(task, manager, model, optimizer, rank, range(SAVED_AT, DIES_AT))
        middle = model[task.num_blocks // 2]
        middle.register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        manager.backward(loss_of(model, rank, DIES_AT))
    manager.close()


def resume(rank: int, task: Task) -> tuple[list[float], dict[str, Tensor], dict[int, Any]]:
    """Continue to the end; return losses, weights and states."""
    manager, model, optimizer = task.open()
    extra = manager.load(task.saved, optimizer)
    losses = train(task, manager, model, optimizer, rank, range(extra["step"], NUM_STEPS))
    weights = {name: value.clone() for name, value in manager.state_dict().items()}
    states = {at: {k: v.clone() for k, v in row.items()} for at, row in optimizer.state_dict()["state"].items()}
    manager.close()
    return losses, weights, states


@pytest.mark.full
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_killed_run_resumes_on_twice_the_ranks(num_ranks: int, tmp_path: Path) -> None:
    """HOST has 25 % of the model data of a rank. The other run had ample memory, and nobody killed it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    num_blocks = NUM_BLOCKS * num_ranks
    ample = Task(num_ranks, num_blocks, tmp_path / "ample", None)
    tight = Task(num_ranks, num_blocks, tmp_path / "tight", disk)
    with Team(num_ranks) as team:
        team.run(train_and_die, ample)
        with pytest.raises(RankFailure, match="died of SIGKILL"):
            team.run(train_and_die, tight)
    assert list(disk.iterdir()) == [], "a file is left of those who were killed"
    with Team(2 * num_ranks) as team:
        expected = team.run(resume, replace(ample, num_ranks=2 * num_ranks))
        found = team.run(resume, replace(tight, num_ranks=2 * num_ranks))
    for (losses, weights, states), (other_losses, others, other_states) in zip(found, expected, strict=True):
        assert losses == other_losses
        assert all(torch.equal(weights[name], value) for name, value in others.items())
        assert states.keys() == other_states.keys()
        for at, row in other_states.items():
            assert all(torch.equal(states[at][name], value) for name, value in row.items())
    assert list(disk.iterdir()) == []
