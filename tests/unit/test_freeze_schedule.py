"""How many blocks are frozen after how many epochs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import chunkmem
from chunkmem.ranks.ranks import open_ranks


class Here:
    """A manager of nothing: gradients are in `.grad`."""

    def __init__(self) -> None:
        self.runtime: Any = SimpleNamespace(ranks=open_ranks(timeout_s=1.0))

    @contextlib.contextmanager
    def gather(self, params: Any = None, *, grads: bool = False) -> Iterator[None]:
        yield


def blocks(num: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(num))


def test_a_third_of_what_is_left_each_time() -> None:
    schedule = chunkmem.FreezeSchedule(blocks(12), alpha=1 / 3)
    numbers = []
    for _ in range(9):
        schedule.step()
        numbers.append(schedule.prefix)
    assert numbers == [4, 7, 9, 10, 11, 11, 12, 12, 12]


def test_what_comes_before_the_blocks_is_frozen_with_the_first() -> None:
    first, rest = nn.Linear(2, 2), blocks(4)
    schedule = chunkmem.FreezeSchedule(rest, alpha=0.5, first=first)
    assert schedule.frozen == []
    assert schedule.step() == [first, rest[0], rest[1]]


def with_gradients(rest: nn.ModuleList, *sizes: float) -> None:
    for block, size in zip(rest, sizes, strict=True):
        block.weight.grad = torch.full((2, 2), float(size))


def test_it_stops_at_the_block_with_the_smallest_gradients() -> None:
    rest = blocks(8)
    schedule = chunkmem.FreezeSchedule(rest, alpha=0.5, adaptive=True)
    with_gradients(rest, 9, 1, 5, 5, 5, 5, 5, 5)
    schedule.observe(Here())
    schedule.step()
    assert schedule.prefix == 1
    with_gradients(rest, 0, 9, 9, 9, 9, 9, 9, 1)  # of 7 that are left, half are 4
    schedule.observe(Here())
    schedule.step()
    assert schedule.prefix == 5


def test_gradients_of_an_epoch_are_added_up_and_then_forgotten() -> None:
    rest = blocks(4)
    schedule = chunkmem.FreezeSchedule(rest, alpha=0.9, adaptive=True)
    for sizes in ((5, 1, 3, 3), (5, 9, 3, 3)):
        with_gradients(rest, *sizes)
        schedule.observe(Here())
    schedule.step()
    assert schedule.prefix == 2  # 3 and 3 are the smallest sums
    with pytest.raises(chunkmem.StateError, match="observe"):
        schedule.step()


def test_it_is_resumed() -> None:
    ours, theirs = (chunkmem.FreezeSchedule(blocks(12)) for _ in range(2))
    ours.step()
    theirs.load_state_dict(ours.state_dict())
    assert len(theirs.frozen) == 4
    ours.step()
    theirs.step()
    assert ours.prefix == theirs.prefix == 7
    with pytest.raises(chunkmem.CheckpointError, match="saved for 12 blocks"):
        chunkmem.FreezeSchedule(blocks(3)).load_state_dict(ours.state_dict())


@pytest.mark.parametrize("alpha", [0, 1, -0.5, "third"])
def test_a_share_that_is_none(alpha: Any) -> None:
    with pytest.raises(chunkmem.ConfigError, match="alpha"):
        chunkmem.FreezeSchedule(blocks(2), alpha=alpha)


def test_no_blocks() -> None:
    with pytest.raises(chunkmem.ConfigError, match="blocks"):
        chunkmem.FreezeSchedule([])
