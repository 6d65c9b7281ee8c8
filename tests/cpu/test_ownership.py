"""Training takes any way in which groups are dealt out to ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import chunkmem
from chunkmem.data.layout import Layout
from chunkmem.data.layout_pack import pack
from chunkmem.packing import model_packer
from tests.helpers.ranks import Team
from tests.helpers.shared_training import MODELS, Task, batch_of, loss_of, make_config, serial


def pack_lopsided(*args: Any, **options: Any) -> Layout:
    """All groups but the first belong to the last rank."""
    layout = pack(*args, **options)
    return replace(layout, groups=tuple(replace(group, owner=int(group.id > 0)) for group in layout.groups))


def train(rank: int, way: dict[str, object]) -> tuple[dict[str, torch.Tensor], list[list[int]], int]:
    """The weights after a few steps, what is exchanged together, and the bytes of optimizer states on this rank."""
    torch.set_num_threads(1)
    task = Task("reused", steps=5, config=way, device_nbytes=64 << 10)
    with pytest.MonkeyPatch.context() as patch, chunkmem.ChunkManager(make_config(task)) as manager:
        shards = manager.runtime.sharding.shards
        assert shards is not None
        patch.setattr(model_packer, "pack", pack_lopsided)
        torch.manual_seed(0)
        with manager.init():
            model = MODELS[task.model]()
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        for step in range(task.steps):
            manager.backward(loss_of(model, batch_of(task, step, 0, rank)))
            optimizer.step()
            optimizer.zero_grad()
        report = manager.memory()
        states = sum(tier.by_role.get("exp_avg", (0, 0))[0] for tier in (report.device, report.host))
        return (
            manager.state_dict(),
            shards.together({managed.group for managed in manager.runtime.registry.parameters}),
            states,
        )


def test_training_takes_another_way(pair: Team) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    _, weights, _ = serial(Task("reused", steps=5), 2)
    torch.set_num_threads(threads)
    outcomes = pair.run(train, {})
    for trained, together, _ in outcomes:
        assert together == [[0, 1], [2], [3]], "each list has at most one group of each owner"
        assert [key for key, value in weights.items() if not torch.equal(value, trained[key])] == []
    (_, _, less), (_, _, more) = outcomes
    assert more == 3 * less > 0


@pytest.mark.few(1)
@pytest.mark.parametrize("saves_memory", [False, True])
def test_so_do_the_collectives_of_the_library(pair: Team, *, saves_memory: bool) -> None:
    way = {"client": {"opts": {"with_mem_saving_comm": saves_memory}}}
    (first, _, _), (second, _, _) = pair.run(train, way)
    _, weights, _ = serial(Task("reused", steps=5), 2)
    assert all(torch.equal(value, second[key]) for key, value in first.items())
    assert all(torch.allclose(value, first[key], atol=1e-5) for key, value in weights.items())
