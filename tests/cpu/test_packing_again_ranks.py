"""Chunks packed again over ranks: parameters go to other owners, and bits are those of `requires_grad_(False)`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import chunkmem
from tests.helpers.audit import audit
from tests.helpers.half_frozen import CHUNK_NUMEL, peak_of
from tests.helpers.ranks import Team
from tests.helpers.spread import spread
from tests.helpers.twins import AMPLE_NBYTES, SEED, Blocks, config, copied, features


@pytest.fixture(scope="module")
def pair() -> Iterator[Team]:
    with Team(2) as team:
        yield team


@dataclass
class Found:
    """What one rank ends with."""

    weights: dict[str, Tensor]
    states: dict[int, Any]
    reports: list[chunkmem.FreezeReport]
    extra_nbytes: int
    """The most that it had more than before while chunks were packed."""


def train(rank: int, packs: bool, precision: str, device_nbytes: int, replicas: int = 1) -> Found:
    """Freeze every second block, then others; with an alias, or chunks that are too small, nothing is packed."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    chosen = config(device_nbytes, precision=precision, default_chunk_size=CHUNK_NUMEL if packs else 256)
    mesh = None if replicas == 1 else init_device_mesh("cpu", (replicas, 1), mesh_dim_names=("replicate", "shard"))
    found = Found({}, {}, [], 0)
    with chunkmem.ChunkManager(chosen, mesh=mesh) as manager:
        with manager.init():
            model = Blocks(num_blocks=12)
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)

        def steps(first: int, num: int) -> None:
            for step in range(first, first + num):
                manager.backward(model(features(10 * step + rank)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                audit(manager)

        def freeze(modules: Any) -> None:
            before_nbytes = sum(ledger.total_nbytes for ledger in manager.runtime.tiers.ledgers)
            with peak_of(manager) as peaks:
                found.reports.append(manager.freeze(modules))
            found.extra_nbytes = max(found.extra_nbytes, peaks[0] - before_nbytes)
            audit(manager)

        steps(0, 6)
        freeze(model.blocks[::2])
        steps(6, 4)
        manager.unfreeze(model)
        steps(10, 2)
        freeze([param for param in model.parameters() if param.dim() > 1])
        steps(12, 4)
        manager.unfreeze(model)
        steps(16, 2)
        found.weights, found.states = copied(manager.state_dict()), copied(optimizer.state_dict()["state"])
    return found


@pytest.mark.few(1)
@spread(precision=["fp32", "bf16"], device_nbytes=[28 << 10, AMPLE_NBYTES], replicas=[1, 2])
def test_the_numbers_are_those_of_chunks_that_stay(
    precision: str, device_nbytes: int, replicas: int, pair: Team
) -> None:
    ours = pair.run(train, True, precision, device_nbytes, replicas)
    theirs = pair.run(train, False, precision, AMPLE_NBYTES, replicas)
    for found in (*ours[1:], *theirs):
        assert found.weights.keys() == ours[0].weights.keys()
        assert all(torch.equal(value, found.weights[name]) for name, value in ours[0].weights.items())
    assert sorted(ours[0].states) == sorted(theirs[0].states)
    for index, state in ours[0].states.items():
        assert all(torch.equal(value, theirs[0].states[index][key]) for key, value in state.items())
    num_roles = 2 if precision == "fp32" else 3
    num_shards = 2 // replicas
    for which in range(2):
        reports = [found.reports[which] for found in ours]
        assert all(report.packed_nbytes > 0 for report in reports), reports
        frozen_nbytes = 4 * num_roles * (reports[0].num_params - num_shards * CHUNK_NUMEL)
        assert sum(report.freed_nbytes for report in reports) >= replicas * frozen_nbytes
    chunk_nbytes = 4 * CHUNK_NUMEL
    assert max(found.extra_nbytes for found in ours) <= (num_roles + 1) * chunk_nbytes


def add_on_one(rank: int) -> tuple[str, int]:
    """Rank 1 adds a module that nobody calls; return what all are told."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    with chunkmem.ChunkManager(config(AMPLE_NBYTES, default_chunk_size=CHUNK_NUMEL)) as manager:
        with manager.init():
            model = Blocks(num_blocks=12)
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        for step in range(3):
            manager.backward(model(features(10 * step + rank)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                if rank == 1:
                    model.added = nn.Linear(4, 4)
                report = manager.freeze(model.blocks[::2])
        audit(manager)
        return report.not_packed, report.packed_nbytes


@pytest.mark.full
def test_what_stands_against_it_on_one_rank_is_told_to_all(pair: Team) -> None:
    assert pair.run(add_on_one) == [("parameters were added to the model after it was packed", 0)] * 2
