"""Pipelines whose stages are on different ranks: they train as one process does in the order of the schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.helpers.ranks import Team
from tests.helpers.staged_training import StagedTask, different, train

pytest.importorskip("torch.distributed.pipelining.stage")


@pytest.fixture(scope="module")
def pair() -> Iterator[Team]:
    with Team(2) as team:
        yield team


SHAPES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 1),
    ("looped-bfs", 1),
    ("interleaved", 2),
    ("looped-bfs", 2),
]
MODES = ("always", "except_last", "never")


def _matrix() -> Iterator[object]:
    for row, (schedule, per_rank) in enumerate(SHAPES):
        for column, mode in enumerate(MODES):
            for number, precision in enumerate(("fp32", "bf16", "fp16")):
                task = StagedTask(schedule, per_rank, mode, precision=precision)
                is_usual = number == row % 3 and column == row % 3
                marks = () if is_usual else (pytest.mark.full,)
                yield pytest.param(task, id=f"{schedule}-{per_rank}-{mode}-{precision}", marks=marks)


@pytest.mark.parametrize("task", list(_matrix()))
def test_stages_train_as_one_process(pair: Team, task: StagedTask) -> None:
    outcomes = pair.run(train, task)
    assert different(task, outcomes) == []
    assert all(outcome.misses[3:] == [0] * (task.steps - 3) for outcome in outcomes)
    tight = replace(task, device_nbytes=max(outcome.required_nbytes for outcome in outcomes))
    outcomes = pair.run(train, tight)
    assert different(tight, outcomes) == []
    assert all(outcome.misses[3:] == [0] * (task.steps - 3) for outcome in outcomes)
