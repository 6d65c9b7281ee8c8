"""The batches of an epoch are the same for every number of ranks, also if it changes in the middle."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import chunkmem
from tests.helpers.ranks import Team
from tests.helpers.repartitioned import Change, Training
from tests.helpers.spread import spread
from tests.helpers.staged_training import StagedTask
from tests.helpers.twins import AMPLE_NBYTES, config

NUM, BATCH = 50, 12


def samplers(width: int, **options: Any) -> list[chunkmem.SplitSampler]:
    values = {"batch_size": BATCH, "seed": 3} | options
    return [chunkmem.SplitSampler(NUM, width=width, rank=rank, **values) for rank in range(width)]


def batches(some: list[chunkmem.SplitSampler], num: int | None = None) -> list[list[int]]:
    """What all ranks have together of the next batches."""
    found = []
    for parts in zip(*some, strict=True):
        assert len({len(part) for part in parts}) == 1
        found.append([one for part in parts for one in part])
        if len(found) == num:
            break
    return found


@spread(width=[1, 2, 3, 6, 12], drop_last=[False, True], shuffle=[True, False], epoch=[0, 7])
def test_batches_do_not_depend_on_the_width(width: int, drop_last: bool, shuffle: bool, epoch: int) -> None:
    expected, found = (samplers(w, drop_last=drop_last, shuffle=shuffle) for w in (1, width))
    for each in [*expected, *found]:
        each.set_epoch(epoch)
    whole = batches(expected)
    assert batches(found) == whole
    assert len(found[0]) == len(whole) == (4 if drop_last else 5)
    ids = [one for batch in whole for one in batch]
    # Each sample once; those that fill the last batch are the first ones.
    assert sorted(ids[:NUM]) == list(range(NUM)) if not drop_last else len(set(ids)) == len(ids) == 48
    assert ids[NUM:] == ids[: len(ids[NUM:])]


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_order_is_that_of_torch(shuffle: bool) -> None:
    (one,) = samplers(1, shuffle=shuffle)
    theirs: Any = DistributedSampler(range(NUM), num_replicas=1, rank=0, seed=3, shuffle=shuffle)  # type: ignore[arg-type]
    for epoch in range(3):
        one.set_epoch(epoch)
        theirs.set_epoch(epoch)
        assert [each for batch in one for each in batch][:NUM] == list(theirs)


@spread(widths=[(1, 2, 4), (4, 2, 1), (2, 3, 12), (12, 1, 6)], after=[(1, 2), (3, 1)])
def test_another_width_in_the_middle_of_an_epoch(widths: tuple[int, ...], after: tuple[int, int]) -> None:
    expected = batches(samplers(1))
    found: list[list[int]] = []
    state = None
    for width, num in zip(widths, (*after, None), strict=True):
        some = samplers(width)
        for one in some:
            if state is not None:
                one.load_state_dict(state)
        found += batches(some, num)
        states = [one.state_dict() for one in some]
        assert all(each == states[0] for each in states)
        state = copy.deepcopy(states[0])
    assert found == expected


def test_set_width_is_for_what_was_not_given_out() -> None:
    (one,) = samplers(1)
    expected = batches(samplers(1))
    iterator = iter(one)
    assert [next(iterator), next(iterator)] == expected[:2]
    one.set_width(1, 2)
    assert (one.rank, one.width) == (1, 2)
    assert next(iterator) == expected[2][BATCH // 2 :]
    one.set_width(0, 3, next_batch=1)  # workers were ahead
    assert list(one) == [batch[:4] for batch in expected[1:]]
    assert list(one) == [batch[:4] for batch in expected], "an epoch that is over begins again"


def test_an_epoch_that_is_under_way_is_not_begun_again() -> None:
    (one,) = samplers(1)
    expected = batches(samplers(1))
    next(iter(one))
    one.set_epoch(0)
    assert list(one) == expected[1:]
    next(iter(one))
    one.set_epoch(1)
    assert len(list(one)) == 5


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.full)])
def test_a_loader_takes_it(num_workers: int) -> None:
    dataset = TensorDataset(torch.arange(NUM))
    loaded = []
    for rank in range(2):
        sampler = chunkmem.SplitSampler(dataset, batch_size=BATCH, width=2, rank=rank)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=num_workers)
        assert len(loader) == 5
        loaded.append([x.tolist() for (x,) in loader])
    assert [a + b for a, b in zip(*loaded, strict=True)] == list(chunkmem.SplitSampler(NUM, batch_size=BATCH))


def test_one_process_has_whole_batches() -> None:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        sampler = chunkmem.SplitSampler(NUM, batch_size=BATCH, seed=3, manager=manager)
        assert list(sampler) == batches(samplers(1))
        with pytest.raises(chunkmem.ConfigError, match="leave width and rank out"):
            chunkmem.SplitSampler(NUM, batch_size=BATCH, width=2, manager=manager)
        with pytest.raises(chunkmem.ConfigError, match="its ranks are those of the manager"):
            sampler.set_width(0, 1)


def over_stages(rank: int) -> tuple[list[list[int]], list[list[int]]]:
    change = Change(StagedTask(sizes=(2, 1)), stages=1)
    training = Training(change, (2, 1))
    with training.manager as manager:
        sampler = iter(chunkmem.SplitSampler(NUM, batch_size=BATCH, seed=3, manager=manager))
        before = [next(sampler), next(sampler)]
        training.steps(change.batches(rank, (2, 1))[:1])
        training.pipe.repartition(stages=1)
        return before, list(sampler)


def test_it_follows_a_pipeline_that_is_divided_again(pair: Team) -> None:
    expected = batches(samplers(1))
    (first, left), (second, right) = pair.run(over_stages)
    assert first == second == expected[:2], "stages have the same samples"
    assert [a + b for a, b in zip(left, right, strict=True)] == expected[2:]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_size": 8, "width": 3}, "batches of 8 samples cannot be divided over 3 ranks"),
        ({"batch_size": 0}, "batch_size is 0; give a whole number of at least 1"),
        ({"batch_size": 2.0}, "batch_size is 2.0"),
        ({"batch_size": 8, "width": 2, "rank": 2}, "rank is 2 of 2; ranks count from 0"),
        ({"batch_size": 8, "width": 0}, "width is 0"),
        ({"batch_size": 8, "seed": -1}, "seed is -1"),
    ],
)
def test_numbers_that_mean_nothing(options: dict[str, Any], said: str) -> None:
    with pytest.raises(chunkmem.ConfigError, match=said):
        chunkmem.SplitSampler(NUM, **options)


def test_a_state_of_something_else_is_refused() -> None:
    (one,) = samplers(1)
    with pytest.raises(chunkmem.CheckpointError, match="batch_size is 12 here and 24 in the state"):
        one.load_state_dict(samplers(1, batch_size=24)[0].state_dict())
    with pytest.raises(chunkmem.CheckpointError, match="the state has no epoch, next_batch"):
        one.load_state_dict({"yielded": 3})
    with pytest.raises(chunkmem.ConfigError, match="next_batch is 6, and an epoch has 5 batches"):
        one.state_dict(next_batch=6)
    assert list(one) == batches(samplers(1))


def test_a_dataset_without_samples() -> None:
    assert list(chunkmem.SplitSampler(0, batch_size=2)) == []
    assert list(chunkmem.SplitSampler([7], batch_size=4)) == [[0, 0, 0, 0]]
