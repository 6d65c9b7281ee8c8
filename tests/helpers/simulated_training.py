"""What one of many ranks does in training, simulated: it starts, steps, saves, and sees another one die."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn

import chunkmem
from chunkmem.checkpoints import replacing
from chunkmem.data.errors import RankError
from chunkmem.ranks.agreement import Operation
from chunkmem.ranks.connection import Connection
from tests.helpers.shared_training import WIDTH, Block
from tests.helpers.simulated_ranks import Counts, Simulation, counted

TIMEOUT_S = 12.0
CONFIG = {"distributed": {"timeout_s": TIMEOUT_S}, "client": {"opts": {"with_mem_saving_comm": False}}}

Cost = tuple[Counts, float]
"""What was counted, and the virtual seconds that passed."""


def trained(size: int, folder: Path) -> dict[tuple[str, str], Cost]:
    """Return what a rank takes until its model is there, for a step that follows a plan, and for a save.

    Args:
        size: number of ranks.
        folder: a new one.

    Returns:
        By "rank 0" or "others", and "start", "step" or "save".
    """
    first, other = Simulation(size, mirrored=0), Simulation(size, mirrored=size // 2)
    found = {}
    for who, simulation in (("rank 0", first), ("others", other)):
        found |= {(who, phase): cost for phase, cost in _trained(simulation, folder / who).items()}
        other.first = first.ranks[0].journal
    return found


def _trained(simulation: Simulation, folder: Path) -> dict[str, Cost]:
    def program(_: int) -> dict[str, Cost]:
        costs = {}
        with counted(simulation) as found:
            manager = chunkmem.ChunkManager(chunkmem.Config.from_dict(CONFIG))
            torch.manual_seed(0)
            with manager.init():
                model = nn.Sequential(*(Block() for _ in range(3)))
            optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-3)
        costs["start"] = found()
        for _ in range(4):
            with counted(simulation) as found:
                manager.backward(model(torch.ones(3, WIDTH)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        costs["step"] = found()
        with counted(simulation) as found:
            manager.save(folder / "checkpoint", optimizer)
        costs["save"] = found()
        return costs

    def appears(mark: Path) -> bool:
        mark.parent.mkdir(parents=True, exist_ok=True)  # the first rank, which makes it, has run before
        return True

    with patch.object(replacing, "_appears", appears):
        (costs,) = simulation.run(program)
    assert isinstance(costs, dict)
    return costs


def failed(
    size: int, *, hangs: bool = False, timeout_s: float = TIMEOUT_S
) -> Iterator[tuple[int, RankError, Counts, float]]:
    """Yield what each of the other ranks raises when one dies or hangs before a step, and what that takes."""
    simulation, dead = Simulation(size), size // 2

    def program(rank: int) -> tuple[int, RankError, Counts, float] | None:
        ranks = Connection(timeout_s=timeout_s)
        ranks.begin(Operation("a step"))
        if rank == dead and not hangs:
            simulation.die()
        if rank == dead:
            simulation.pause(10 * timeout_s)
            return None
        with counted(simulation) as found:
            try:
                ranks.begin(Operation("the next step"))
            except RankError as error:
                return rank, error, *found()
        raise AssertionError(f"rank {rank} has not noticed")

    for rank, found in enumerate(simulation.run(program)):
        if rank != dead:
            assert isinstance(found, tuple), found
            yield found
