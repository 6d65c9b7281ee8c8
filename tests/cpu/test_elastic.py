"""Pipelines that halve when layers are frozen train on as from a checkpoint that another width has loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.elastic import (
    FAST_BPS,
    MIDDLE_BPS,
    SLOW_BPS,
    Elastic,
    by_checkpoints,
    different,
    elastic,
    killed,
    taken_up,
)
from tests.helpers.ranks import Team
from tests.helpers.spread import spread

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
        pytest.param(((0, 1), (0, 1, 2)), "fp32", id="prefix"),
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


@spread(point=["before", "moving", "undone", "at the end"], bad=[1, 0])
def test_a_rank_that_is_killed_is_named_and_the_run_is_taken_up(point: str, bad: int, tmp_path: Path) -> None:
    run = Elastic((2, 1), PREFIX)
    with Team(2) as team:
        said = team.run(killed, run, str(tmp_path), point, bad, lost=[bad])
        assert f"rank {bad}" in said[1 - bad]
        found = team.run(taken_up, run, str(tmp_path))
        assert different(found, team.run(elastic, run)) == []
