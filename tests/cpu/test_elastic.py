"""Pipelines that halve when layers are frozen train on as from a checkpoint that another width has loaded."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import chunkmem
from chunkmem.pipeline import inventory
from tests.helpers.elastic import (
    FAST_BPS,
    MIDDLE_BPS,
    SLOW_BPS,
    Elastic,
    Ended,
    Run,
    by_checkpoints,
    different,
    elastic,
    fixed,
    killed,
    taken_up,
)
from tests.helpers.ranks import Team
from tests.helpers.spread import spread
from tests.helpers.staged_training import Net, StagedTask, loss_of

PREFIX = ((0, 1, 2),)
ALTERNATE = ((0, 2),)


@pytest.fixture(scope="module")
def pair() -> Iterator[Team]:
    with Team(2) as team:
        yield team


@pytest.fixture(scope="module")
def four() -> Iterator[Team]:
    with Team(4) as team:
        yield team


@spread(frozen=[PREFIX, ALTERNATE], precision=["fp32", "bf16"], model=["plain", "tied"], schedule=["1f1b", "auto"])
def test_two_stages_become_two_data_parallel_ranks(
    pair: Team, frozen: tuple[tuple[int, ...], ...], precision: str, model: str, schedule: str, tmp_path: Path
) -> None:
    run = Elastic((2, 1), frozen, precision, model, schedule)
    found = pair.run(elastic, run)
    assert [each.shapes for each in found] == [[(2, 1), (1, 2)]] * 2
    assert found[0].reasons == found[1].reasons
    assert found[0].reasons[0].startswith("1 x 2, a step of")
    assert different(found, pair.run(by_checkpoints, run, found[0].shapes, str(tmp_path))) == []


@pytest.mark.parametrize(
    ("frozen", "precision"),
    [
        pytest.param(((0, 1), (0, 1, 2)), "fp32", id="prefix", marks=pytest.mark.full),
        pytest.param(((0, 2), (0, 2)), "bf16", id="every second block", marks=pytest.mark.full),
    ],
)
def test_four_ranks_halve_twice(
    four: Team, frozen: tuple[tuple[int, ...], ...], precision: str, tmp_path: Path
) -> None:
    """4 x 1 becomes 2 x 2, at a speed that leaves two stages, and 1 x 4 when exchanges cost nothing."""
    run = Elastic((4, 1), frozen, precision, speeds=(MIDDLE_BPS, FAST_BPS))
    found = four.run(elastic, run)
    assert [each.shapes for each in found] == [[(4, 1), (2, 2), (1, 4)]] * 4
    assert different(found, four.run(by_checkpoints, run, found[0].shapes, str(tmp_path))) == []


@spread(precision=["fp32", "bf16"], model=["plain", "tied"])
def test_stages_are_cut_again_where_exchanges_are_slow(pair: Team, precision: str, model: str, tmp_path: Path) -> None:
    """Two frozen blocks of four have no backward: the two stages stay, and the first one gets three blocks."""
    run = Elastic((2, 1), ((0, 1),), precision, model, speeds=(SLOW_BPS,))
    found = pair.run(elastic, run)
    assert [each.shapes for each in found] == [[(2, 1), (2, 1)]] * 2
    assert found[0].reasons[0].startswith("2 x 1 of 3, 1 blocks, a step of")
    assert different(found, pair.run(by_checkpoints, run, found[0].shapes, str(tmp_path))) == []


@pytest.mark.parametrize(
    ("point", "bad"),
    [
        ("moving", 1),
        *(
            pytest.param(point, bad, marks=pytest.mark.full)
            for point, bad in itertools.product(("before", "undone", "moving", "at the end"), (0, 1))
            if (point, bad) != ("moving", 1)
        ),
    ],
)
def test_a_rank_that_is_killed_is_named_and_the_run_is_taken_up(point: str, bad: int, tmp_path: Path) -> None:
    run = Elastic((2, 1), PREFIX)
    with Team(2) as team:
        said = team.run(killed, run, str(tmp_path), point, bad, lost=[bad])
        assert f"rank {bad}" in said[1 - bad]
        found = team.run(taken_up, run, str(tmp_path))
        assert different(found, team.run(elastic, run)) == []


def run_the_document(rank: int, code: str) -> list[tuple[int, int]]:
    """Run a document's code on this rank; return stages and width after each epoch."""
    found: list[tuple[int, int]] = []

    def note(epoch: int, num_stages: int, width: int, reason: str) -> None:
        assert reason
        found.append((num_stages, width))

    torch.manual_seed(0)
    with fixed(FAST_BPS):
        exec(code, {"print": note})
    return found


def test_the_code_of_the_document(pair: Team) -> None:
    text = (Path(__file__).parents[2] / "docs" / "pipelines.md").read_text(encoding="utf-8")
    (code,) = (each for each in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL) if 'width="auto"' in each)
    assert pair.run(run_the_document, code) == [[(1, 2)] * 3] * 2


def refuse(rank: int) -> list[str]:
    """Call what cannot be done; return why nothing changed before the first step, and where a batch is not divided."""
    one = Run(Elastic((2, 1), PREFIX), (2, 1))
    said, pipe, manager = [], one.pipe, one.manager
    with manager:
        x, y = one.run.batches(0)[0]
        assert not pipe.resize()
        said.append(pipe.reason)
        pipe.step(x, y)
        with fixed(FAST_BPS), pytest.raises(chunkmem.StateError, match="gradient that waits for its step"):
            pipe.resize()
        one.optimizer.zero_grad()
        assert (pipe.num_stages, pipe.width, pipe.place, pipe.schedule) == (2, 1, 0, "1f1b")
        for odd in (x[:15], x[:16]):
            pipe.step(odd, y[: len(odd)])
            one.optimizer.zero_grad()
            with fixed(FAST_BPS):
                pipe.resize()
            said.append(pipe.reason)
        assert (pipe.num_stages, pipe.width, pipe.place, pipe.schedule) == (1, 2, rank, "by-layer")
        assert torch.equal(pipe.share(x), x[8 * rank :][:8])
        shared = pipe.share({"x": x, "scale": 2.0}, (y,))
        assert torch.equal(shared[0]["x"], x[8 * rank :][:8])
        assert shared[0]["scale"] == 2.0
        assert torch.equal(shared[1][0], y[8 * rank :][:8])
        with pytest.raises(chunkmem.StateError, match=r"pipe\.share\(\): 15 samples cannot be divided by 2"):
            pipe.share(x[:15])
        assert pipe.repartition(stages=2) is pipe
        pipe.step(x, y)
        assert (pipe.num_stages, pipe.schedule) == (2, "1f1b")
        assert pipe.evaluate(x, y).item() > 0
    with pytest.raises(chunkmem.StateError, match="closed"):
        pipe.resize()
    return said


def test_what_is_refused(pair: Team) -> None:
    first, second = pair.run(refuse)
    assert first == second
    assert first[0] == "nothing is known of block 0 yet: call pipe.step() before pipe.resize()"
    assert first[1].startswith("2 x 1 stays")
    assert "1 x 2 is not possible: a global batch of 15 samples cannot be divided by 2 ranks" in first[1]
    assert first[2].startswith("1 x 2, a step of")


def refuse_other_managers(rank: int, folder: str) -> None:
    config = StagedTask().make_config()

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("stage",))
    values = config.to_dict()
    values["memory"]["disk"] = {"path": folder, "capacity": 1 << 20}
    for given, options, said in (
        (chunkmem.ChunkManager(config), {"width": "auto"}, 'width="auto" divides the ranks of a mesh'),
        (chunkmem.ChunkManager(config, mesh=mesh), {"width": 2}, 'width is 2; give "auto", or leave it out'),
        (chunkmem.ChunkManager(chunkmem.Config.from_dict(values), mesh=mesh), {"width": "auto"}, r"with memory\.disk"),
    ):
        with given as manager:
            with manager.init():
                model = Net()
            with pytest.raises(chunkmem.ConfigError, match=said):
                manager.pipeline(
                    model.blocks, first=model.words, last=model.head, loss_fn=loss_of, micro_batches=2, **options
                )


def test_which_managers_cannot_have_another_width(pair: Team, tmp_path: Path) -> None:
    pair.run(refuse_other_managers, str(tmp_path))


def lack_room(rank: int, run: Elastic) -> tuple[str, Ended]:
    """Resize where chunks would need a TiB more while they move; then train on."""
    one = Run(run, run.sizes)
    with one.manager:
        one.steps(0)
        one.freeze(1)
        with fixed(FAST_BPS), patch.object(inventory, "extra_nbytes", return_value=1 << 40):
            assert not one.pipe.resize()
        one.steps(1)
        return one.pipe.reason, one.ended([run.sizes] * 2, [])


def test_without_room_to_move_the_stages_stay(pair: Team, tmp_path: Path) -> None:
    run = Elastic((2, 1), PREFIX)
    found = pair.run(lack_room, run)
    expected = pair.run(by_checkpoints, run, [(2, 1), (2, 1)], str(tmp_path))
    assert different([ended for _, ended in found], expected) == []
    for reason, _ in found:
        assert reason.startswith("2 x 1 stays: 1 x 2 has no room while chunks move: repartition: while chunks move")
