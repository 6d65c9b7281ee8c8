"""Models on the meta device over pipeline stages: each rank initialises its own, to the bits of a plain model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import chunkmem
from tests.helpers.peak_memory import IS_COUNTED, MIB, NEEDS_COUNT, increase_nbytes
from tests.helpers.ranks import Team
from tests.helpers.repartitioned import Change, differences, divided, resumed
from tests.helpers.spread import spread
from tests.helpers.staged_training import StagedTask, train
from tests.helpers.twins import assert_equal


@pytest.fixture(scope="module")
def teams() -> Iterator[dict[int, Team]]:
    found = {size: Team(size) for size in (2, 4)}
    yield found
    for team in found.values():
        team.close()


@pytest.mark.few(1)
@spread(model=["tied", "norms", "plain"], sizes=[(2,), (2, 2)], stages_per_rank=[1, 2])
def test_a_pipeline_trains_as_from_a_plain_model(
    model: str, sizes: tuple[int, ...], stages_per_rank: int, teams: dict[int, Team]
) -> None:
    schedule = "1f1b" if stages_per_rank == 1 else "interleaved"
    task = StagedTask(schedule, stages_per_rank, model=model, sizes=sizes, steps=3, on_meta=True)
    team = teams[4 if len(sizes) == 2 else 2]
    expected = team.run(train, replace(task, on_meta=False))
    for found, plain in zip(team.run(train, task), expected, strict=True):
        assert found.losses == plain.losses
        assert_equal(found.weights, plain.weights)
        assert_equal(found.states, plain.states)


@pytest.mark.full
@spread(model=["tied", "plain"], kind=["first excluded", "plain", "excluded"])
def test_another_number_of_stages(model: str, kind: str, teams: dict[int, Team]) -> None:
    """As from a checkpoint."""
    change = Change(StagedTask(model=model, sizes=(2, 1), on_meta=True), stages=1, kind=kind)
    assert differences(teams[2].run(divided, change), teams[2].run(resumed, change)) == []


def build(manager: chunkmem.ChunkManager, width: int, kept: list[nn.Module]) -> None:
    with manager.init(), torch.device("meta"):
        shapes = [(width, width + 1), (width + 1, width)] * 20
        model = nn.Sequential(*(nn.Linear(*shape) for shape in shapes))
    manager.pipeline(model, loss_fn=nn.functional.mse_loss, micro_batches=2, schedule="1f1b")
    kept.append(model)


def measure(rank: int) -> tuple[int, int]:
    """Return by how many bytes memory grows at the most, and how many chunks have then."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("stage",))
    config = {"memory": {"device": "8MiB", "host": "2GiB"}, "default_chunk_size": 1 << 20}
    kept: list[nn.Module] = []
    for width in (8, 1023):  # what is loaded once
        with chunkmem.ChunkManager(chunkmem.Config.from_dict(config), mesh=mesh) as manager:
            increase = increase_nbytes(partial(build, manager, width, kept))
            held = manager.memory()
    return increase, held.device.now_nbytes + held.host.now_nbytes


@pytest.mark.skipif(not IS_COUNTED, reason=NEEDS_COUNT)
def test_no_rank_holds_the_whole_model() -> None:
    """160 MiB of weights; a chunk has 4."""
    with Team(2) as fresh:
        for increase, held in fresh.run(measure):
            assert held < 90 * MIB
            assert increase - held <= 2 * 4 * MIB + 32 * MIB
