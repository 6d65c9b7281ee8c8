"""Blocks are frozen and trained again, in several orders and in every way to train: the bits of plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.frozen_training import SCENES, WAYS, Task, expected, train
from tests.helpers.ranks import Team
from tests.helpers.twins import assert_equal, cpu_only

pytestmark = cpu_only


SLOW = ("ranks by layer", "ranks in a loop", "stages")
"""Ways of which an ordinary run has the one with a cache alone."""


def matrix() -> Iterator[Any]:
    """An ordinary run has each scene and each precision, and most ways."""
    for row, way in enumerate(WAYS):
        for column, scene in enumerate(SCENES):
            for place, precision in enumerate(("fp32", "bf16")):
                is_usual = column == row % len(SCENES) and place == row % 2 and way not in SLOW
                is_usual = is_usual or (way, scene, precision) == ("by layer", "behind a trained one", "fp32")
                yield pytest.param(
                    Task(scene, way, precision),
                    id=f"{way}-{scene}-{precision}",
                    marks=() if is_usual else pytest.mark.full,
                )
                yield pytest.param(
                    Task(scene, way, precision, steps_a_phase=13),
                    id=f"{way}-{scene}-{precision}-52 steps",
                    marks=pytest.mark.full,
                )


@pytest.mark.parametrize("task", list(matrix()))
@pytest.mark.few(2)
def test_it_has_the_numbers_of_plain_pytorch(task: Task, pair: Team) -> None:
    ours = [train(0, task)] if task.how.num_ranks == 1 else pair.run(train, task, timeout_s=15.0 * task.steps_a_phase)
    plain = expected(task)
    states = {index: state for found in ours for index, state in found.states.items()}
    for rank, found in enumerate(ours):
        assert found.losses[0] == plain.losses[rank % task.how.num_columns]
        assert_equal(found.weights, plain.weights)
        assert found.rates == plain.rates
    is_found = task.how.is_cached and task.scene != "every second block"  # there the embedding is trained
    assert bool(sum(found.num_found for found in ours)) is is_found
    assert_equal(dict(sorted(states.items())), plain.states)
