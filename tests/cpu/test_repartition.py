"""Pipelines divided into another number of stages between steps: they train on as from a checkpoint, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import chunkmem
from chunkmem.pipeline.moving import ChunkMover
from tests.helpers.ranks import Team
from tests.helpers.repartitioned import Change, Training, differences, divided, measured, resumed
from tests.helpers.spread import spread
from tests.helpers.staged_training import AMPLE, StagedTask, train

Way = tuple[tuple[int, int], int]
"""Stages and data-parallel ranks, then the number of stages afterwards."""


@pytest.fixture(scope="module")
def pair() -> Iterator[Team]:
    with Team(2) as team:
        yield team


@pytest.fixture(scope="module")
def four() -> Iterator[Team]:
    with Team(4) as team:
        yield team


@spread(precision=["fp32", "bf16", "fp16"], optimizer=["AdamW", "SGD"], model=["plain", "tied", "frozen", "norms"])
def test_two_stages_become_two_data_parallel_ranks(pair: Team, precision: str, optimizer: str, model: str) -> None:
    change = Change(StagedTask(precision=precision, model=model, sizes=(2, 1)), optimizer=optimizer)
    assert differences(pair.run(divided, change), pair.run(resumed, change)) == []


@spread(precision=["bf16", "fp32", "fp16"], model=["tied", "norms", "frozen"])
def test_two_data_parallel_ranks_become_two_stages(pair: Team, precision: str, model: str) -> None:
    change = Change(StagedTask(precision=precision, model=model, sizes=(1, 2)), stages=2)
    assert differences(pair.run(divided, change), pair.run(resumed, change)) == []


@pytest.mark.parametrize(
    ("way", "model"),
    [
        pytest.param(((2, 2), 1), "tied", id="2 x 2 to 1 x 4"),
        pytest.param(((4, 1), 2), "plain", id="4 x 1 to 2 x 2"),
        pytest.param(((4, 1), 2), "tied", id="4 x 1 to 2 x 2, tied", marks=pytest.mark.full),
        pytest.param(((1, 4), 2), "tied", id="1 x 4 to 2 x 2", marks=pytest.mark.full),
        pytest.param(((2, 2), 4), "tied", id="2 x 2 to 4 x 1", marks=pytest.mark.full),
        pytest.param(((4, 1), 1), "plain", id="4 x 1 to 1 x 4", marks=pytest.mark.full),
        pytest.param(((1, 4), 4), "plain", id="1 x 4 to 4 x 1", marks=pytest.mark.full),
    ],
)
def test_four_ranks(four: Team, way: Way, model: str) -> None:
    sizes, stages = way
    change = Change(StagedTask(model=model, sizes=sizes, precision="bf16"), stages)
    assert differences(four.run(divided, change), four.run(resumed, change)) == []


@spread(
    kind=["excluded", "on host", "tiled", "offloaded", "clipped", "two", "scheduled"],
    way=[((2, 1), 1), ((1, 2), 2)],
    precision=["fp32", "bf16"],
)
def test_other_parts_of_a_run(pair: Team, kind: str, way: Way, precision: str) -> None:
    sizes, stages = way
    change = Change(StagedTask(precision=precision, sizes=sizes), stages, kind=kind)
    assert differences(pair.run(divided, change), pair.run(resumed, change)) == []


@spread(
    way=[((2, 1), 1), ((1, 2), 2), ((4, 1), 1), ((4, 1), 2)],
    precision=["fp32", "bf16"],
    chunk_numel=[600, 1600],
    device_nbytes=[None, AMPLE],
)
def test_memory_and_bytes_sent(
    pair: Team, four: Team, way: Way, precision: str, chunk_numel: int, device_nbytes: int | None
) -> None:
    """Each parameter and state is sent once, to its new owner alone; a rank has at most one chunk a role more."""
    sizes, stages = way
    task = StagedTask(precision=precision, sizes=sizes)
    change = Change(task, stages, chunk_numel=chunk_numel, device_nbytes=device_nbytes)
    costs = (pair if sizes[0] * sizes[1] == 2 else four).run(measured, change)
    owner = {name: rank for rank, cost in enumerate(costs) for name in cost.owned}
    expected = [0] * len(costs)
    for rank, cost in enumerate(costs):
        for name in cost.wanted:
            numel, roles = costs[owner[name]].owned[name]
            # Of bf16 weights, which are rounded from master weights, those are sent: 4 bytes in every role.
            expected[owner[name]] += 4 * numel * (len(roles) - (precision == "bf16")) * (owner[name] != rank)
    assert [sum(cost.sent.values()) for cost in costs] == expected
    assert sum(expected) > 0
    for cost in costs:
        assert cost.peak_nbytes <= max(cost.before_nbytes, cost.after_nbytes) + sum(cost.largest.values())


def go_and_return(rank: int, task: StagedTask) -> dict[str, torch.Tensor]:
    """Train two stages, which are data-parallel ranks for a while; return the weights."""
    training = Training(Change(task), task.sizes)
    batches = list(task.batches())
    with training.manager:
        training.steps(batches[:2])
        training.pipe = training.pipe.repartition(stages=1)
        training.model.eval()
        assert training.pipe.evaluate(*batches[0]).item() > 0
        training.model.train()
        training.pipe = training.pipe.repartition(stages=2)
        training.steps(batches[2:4])
        training.pipe = training.pipe.repartition(stages=1).repartition(stages=2)
        training.steps(batches[4:])
        assert training.manager.timeline().plan_misses == 0
        return training.manager.state_dict()


@pytest.mark.parametrize("model", ["tied", pytest.param("norms", marks=pytest.mark.full)])
def test_there_and_back_changes_nothing(pair: Team, model: str) -> None:
    task = StagedTask(model=model, sizes=(2, 1), steps=9)
    expected = pair.run(train, task)[0].weights
    for weights in pair.run(go_and_return, task):
        assert [key for key, value in expected.items() if not torch.equal(value, weights[key])] == []


def refuse(rank: int) -> None:
    task = StagedTask(sizes=(2, 1))
    training = Training(Change(task), task.sizes)
    pipe, manager, batches = training.pipe, training.manager, list(task.batches())
    own = training.model.words if rank == 0 else training.model.head
    with manager:
        pipe.step(*batches[0])
        with pytest.raises(chunkmem.StateError, match=r"has a gradient that waits for its step; call optimizer\.step"):
            pipe.repartition(stages=1)
        training.optimizers[0].step()
        training.optimizers[0].zero_grad()
        with pytest.raises(
            chunkmem.ConfigError, match=r"2 x 1 ranks .* cannot become 3 stages: 2 ranks divide into 1, 2"
        ):
            pipe.repartition(stages=3)
        for bad in (0, True, "1"):
            with pytest.raises(chunkmem.ConfigError, match=f"stages is {bad!r}; give a number of at least 1"):
                pipe.repartition(stages=bad)
        with pytest.raises(chunkmem.StateError, match=r"there are 2 x 1 ranks .* already"):
            pipe.repartition(stages=2)
        with pytest.raises(chunkmem.ConfigError, match="number of stages that a pipeline is divided into differs"):
            pipe.repartition(stages=1 + rank)
        kept = own.weight.data if rank == 1 else None
        said = "somebody keeps the memory of param chunk"
        said = said if rank == 1 else f"another rank refuses: StateError.*{said}"
        with pytest.raises(chunkmem.StateError, match=said):
            pipe.repartition(stages=1)
        del kept
        training.steps(batches[1:4])
        training.pipe = pipe.repartition(stages=1)
        for call in (lambda: pipe.step(*batches[0]), lambda: pipe.repartition(1), lambda: pipe.evaluate(*batches[0])):
            with pytest.raises(
                chunkmem.StateError,
                match=r"this pipeline is over: its 2 x 1 ranks .* are 1 x 2 now; use what",
            ):
                call()
        with manager.gather(), pytest.raises(chunkmem.StateError, match=r"inside manager\.gather"):
            training.pipe.repartition(stages=2)
        training.pipe = training.pipe.repartition(stages=2)
        training.steps(batches[4:])
        weights = manager.state_dict()
    expected = train(rank, task).weights
    assert [key for key, value in expected.items() if not torch.equal(value, weights[key])] == []


def test_what_is_refused_changes_nothing(pair: Team) -> None:
    pair.run(refuse)


def fail(rank: int, bad: int) -> str:
    """Return the error of this rank, when another one has no memory left in the middle."""
    task = StagedTask(sizes=(2, 1), timeout_s=20.0)
    training = Training(Change(task), task.sizes)
    manager = training.manager

    def begin(self: ChunkMover, *args: Any) -> Any:
        if rank == bad:
            raise OSError("no memory left")
        return usual_begin(self, *args)

    usual_begin = ChunkMover._begin
    with manager, pytest.MonkeyPatch.context() as patch:
        training.steps(list(task.batches())[:2])
        patch.setattr(ChunkMover, "_begin", begin)
        with pytest.raises((OSError, chunkmem.RankError)) as raised:
            training.pipe.repartition(stages=1)
        for call in (manager.state_dict, lambda: training.pipe.step(*next(task.batches()))):
            with pytest.raises(chunkmem.StateError, match=r"repartition\(\) has failed; continue from a checkpoint"):
                call()
        ledgers = (manager.runtime.tiers.device, manager.runtime.tiers.host)
        assert sum(ledger.total_nbytes for ledger in ledgers) == 0
    return f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.parametrize("bad", [1, pytest.param(0, marks=pytest.mark.full)])
def test_what_one_rank_raises_is_said_on_all(pair: Team, bad: int) -> None:
    said = pair.run(fail, bad)
    assert said[bad] == "OSError: no memory left"
    assert f"rank {bad} raised OSError: no memory left" in said[1 - bad]
