"""Stages of a pipeline: against every way to cut."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkmem.data.errors import CapacityError, ConfigError
from chunkmem.plan.balance import Block, Stage, balance, tie_groups, tied_over


def row(*seconds: float, nbytes: Sequence[int] | None = None) -> list[Block]:
    """Blocks b0, b1, ... a third of whose time is forward."""
    sizes = [1] * len(seconds) if nbytes is None else nbytes
    return [Block(f"b{at}", s / 3, 2 * s / 3, n) for at, (s, n) in enumerate(zip(seconds, sizes, strict=True))]


def every_cut(blocks: Sequence[Block], num_stages: int) -> Iterator[list[Stage]]:
    for inner in combinations(range(1, len(blocks)), num_stages - 1):
        yield [Stage(tuple(blocks[start:stop])) for start, stop in pairwise([0, *inner, len(blocks)])]


def largest(stages: Sequence[Stage]) -> tuple[float, int]:
    return max(stage.seconds for stage in stages), max(stage.nbytes for stage in stages)


def respects(stages: Sequence[Stage], blocks: Sequence[Block], ties: Sequence[Collection[int]]) -> bool:
    place = [at for at, stage in enumerate(stages) for _ in stage.blocks]
    return len(place) == len(blocks) and all(len({place[index] for index in tie}) == 1 for tie in ties)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Block], int, int | None, list[set[int]]]:
    """Seconds are eighths, so that sums are exact in any order."""
    names = st.dictionaries(st.sampled_from("xyz"), st.just(0), max_size=2)
    shared_nbytes = {"x": 3, "y": 5, "z": 11}
    blocks = [
        Block(f"b{at}", f / 8, b / 8, nbytes, {name: shared_nbytes[name] for name in shared})
        for at, (f, b, nbytes, shared) in enumerate(
            draw(st.lists(st.tuples(*[st.integers(0, 9)] * 3, names), min_size=1, max_size=9))
        )
    ]
    num_stages = draw(st.integers(1, len(blocks)))
    index = st.integers(0, len(blocks) - 1)
    ties = draw(st.one_of(st.just([]), st.lists(st.sets(index, min_size=1, max_size=3), max_size=2)))
    return blocks, num_stages, draw(st.none() | st.integers(0, 60)), ties


@settings(max_examples=300)
@given(problems())
def test_it_is_the_best_of_all(problem: tuple[list[Block], int, int | None, list[set[int]]]) -> None:
    """Least time of the slowest stage, then least bytes of the largest one, among those that fit and keep ties."""
    blocks, num_stages, cap_nbytes, ties = problem
    possible = [stages for stages in every_cut(blocks, num_stages) if respects(stages, blocks, ties)]
    fitting = [stages for stages in possible if cap_nbytes is None or largest(stages)[1] <= cap_nbytes]
    if not possible:
        with pytest.raises(ConfigError):
            balance(blocks, num_stages, cap_nbytes=cap_nbytes, ties=ties)
    elif not fitting:
        with pytest.raises(CapacityError) as caught:
            balance(blocks, num_stages, cap_nbytes=cap_nbytes, ties=ties)
        assert caught.value.needed_nbytes == min(largest(stages)[1] for stages in possible)
    else:
        found = balance(blocks, num_stages, cap_nbytes=cap_nbytes, ties=ties)
        assert respects(found, blocks, ties)
        assert [block for stage in found for block in stage.blocks] == blocks
        assert largest(found) == min(map(largest, fitting))


def names(stages: Sequence[Stage]) -> list[str]:
    return [" ".join(block.name for block in stage.blocks) for stage in stages]


def test_a_slow_head() -> None:
    assert names(balance(row(1, 1, 1, 1, 1, 3), 2)) == ["b0 b1 b2 b3", "b4 b5"]
    assert names(balance(row(1, 1, 1, 1, 1, 4), 3)) == ["b0 b1", "b2 b3 b4", "b5"]


def test_bytes_decide_between_cuts_as_fast() -> None:
    """b2 bounds the time: what is around it may be cut anywhere.."""
    assert names(balance(row(1, 1, 9, 1, nbytes=[9, 9, 1, 9]), 3)) == ["b0 b1", "b2", "b3"]
    assert names(balance(row(1, 1, 1, 9, nbytes=[8, 1, 9, 1]), 3)) == ["b0 b1", "b2", "b3"]


def test_what_is_shared_counts_once_a_stage() -> None:
    blocks = [Block("embed", 1, 1, 0, {"w": 7}), Block("b", 1, 1, 1), Block("head", 1, 1, 0, {"w": 7})]
    together, (first, second) = balance(blocks, 1), balance(blocks, 2)
    assert [stage.nbytes for stage in together] == [8]
    assert sorted([first.nbytes, second.nbytes]) == [7, 8]
    assert tie_groups(blocks) == ((0, 2),)
    assert tied_over(together) == {}
    assert tied_over((first, second)) == {"w": (0, 1)}


def test_more_stages_than_places_to_cut_are_refused() -> None:
    with pytest.raises(ConfigError, match="4 stages, and the model has 3 blocks: a stage needs one at least"):
        balance(row(1, 1, 1), 4)
    with pytest.raises(ConfigError, match=r"3 blocks, which ties keep together in 2 groups: .* give 1 to 2 stages"):
        balance(row(1, 1, 1), 3, ties=[{1, 2}])
    with pytest.raises(ConfigError, match="0 stages"):
        balance(row(1, 1, 1), 0)


def test_a_cap_that_no_cut_keeps_names_the_one_that_does() -> None:
    blocks = row(1, 1, 1, nbytes=[2**20, 2**20, 3 * 2**20])
    with pytest.raises(CapacityError, match=r"2 stages: the largest one needs 3.00 MiB .* may have 2.00 MiB") as caught:
        balance(blocks, 2, cap_nbytes=2 * 2**20)
    assert names(balance(blocks, 2, cap_nbytes=caught.value.needed_nbytes)) == ["b0 b1", "b2"]
