"""The order in which groups are moved to ranks that pack their parameters in other groups."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkmem.data.layout import TensorSpec
from chunkmem.data.layout_pack import pack
from chunkmem.plan.moves import HeldGroup, Moves, WantedGroup, extra_nbytes, plan_moves


def held(*groups: tuple[int, str]) -> list[HeldGroup]:
    """One letter is a parameter; groups are numbered by rank, and take a byte in each of two phases."""
    counts = Counter[int]()
    found = []
    for rank, letters in groups:
        found.append(HeldGroup(rank, counts[rank], tuple(map(ord, letters)), (1, 1)))
        counts[rank] += 1
    return found


def wanted(*groups: tuple[int, str]) -> list[WantedGroup]:
    return [WantedGroup(each.rank, each.group, each.params, each.nbytes) for each in held(*groups)]


def in_letters(moves: Moves) -> list[str]:
    return ["".join(map(chr, group.params)) for group in moves.order]


def test_two_stages_become_two_shards() -> None:
    #   rank 0   A B C D        A C E G
    #   rank 1   E F G H   to   B D F H
    before = held(*((0, letter) for letter in "ABCD"), *((1, letter) for letter in "EFGH"))
    moves = plan_moves(before, wanted(*((0, letter) for letter in "ACEG"), *((1, letter) for letter in "BDFH")))
    assert in_letters(moves) == list("ACFHEBGD")
    assert [extra_nbytes(before, moves, rank=rank) for rank in (0, 1)] == [1, 1]


def test_what_is_half_empty_is_emptied_first() -> None:
    before = held((0, "AB"), (0, "CD"), (1, "EF"), (1, "GH"))
    moves = plan_moves(before, wanted((0, "A"), (0, "CE"), (1, "BD"), (1, "FG"), (1, "H")))
    left, opened, most = moves.num_moves(), set[HeldGroup](), 0
    for group in moves.order:
        for _, source in moves.of(group):
            left[source] -= 1
            (opened.add if left[source] else opened.discard)(source)
        most = max(most, len(opened))
    assert most <= 2


def test_a_rank_takes_what_it_has_itself_and_else_from_the_first_that_has_it() -> None:
    before = held((0, "AB"), (1, "BC"), (2, "B"))
    moves = plan_moves(before, wanted((1, "AB"), (3, "B"), (3, "C")))
    sources = {(group.rank, chr(param)): source.rank for group in moves.order for param, source in moves.of(group)}
    assert sources == {(1, "A"): 0, (1, "B"): 1, (3, "B"): 0, (3, "C"): 1}
    assert moves.num_moves()[before[2]] == 0  # given up at once


def test_a_parameter_that_nobody_has_is_an_error() -> None:
    with pytest.raises(KeyError, match="no rank has parameter 66"):
        plan_moves(held((0, "A")), wanted((0, "B")))


def groups_of(sizes: list[int], *, num_stages: int, num_ranks: int, slab_nbytes: int) -> list[HeldGroup]:
    """What ranks have of parameters of so many units of 64 bytes, packed for so many stages."""
    width, found = num_ranks // num_stages, []
    for stage in range(num_stages):
        start, stop = (len(sizes) * place // num_stages for place in (stage, stage + 1))
        specs = [TensorSpec(str(number), (16 * sizes[number],), "float32", 4) for number in range(start, stop)]
        for group in pack(specs, slab_nbytes=slab_nbytes).groups:
            params = tuple(start + slot.tensor for slot in group.slots)
            rank = stage * width + group.id % width
            found.append(HeldGroup(rank, group.id, params, (group.nbytes,)))
    return found


@pytest.mark.parametrize(("now", "then"), [(8, 1), (1, 8), (8, 2), (2, 4)])
def test_ranks_that_all_exchange_with_each_other(now: int, then: int) -> None:
    """In the order of the model, or with a look at the next group of each rank alone, they have up to 26 more."""
    sizes = [1 + (7 * number) % 10 for number in range(4000)]
    before, after = (groups_of(sizes, num_stages=num, num_ranks=8, slab_nbytes=64 * 20) for num in (now, then))
    moves = plan_moves(before, [WantedGroup(one.rank, one.group, one.params, one.nbytes) for one in after])
    for rank in range(8):
        has, will_have = (sum(one.rank == rank for one in some) for some in (before, after))
        assert has + extra_nbytes(before, moves, rank=rank) // (64 * 20) <= max(has, will_have) + 2


@given(
    sizes=st.lists(st.integers(1, 12), min_size=8, max_size=120),
    width=st.sampled_from([(2, 2, 1), (2, 1, 2), (4, 4, 1), (4, 2, 1), (4, 1, 4), (4, 4, 2), (8, 2, 4), (8, 8, 1)]),
    slab=st.integers(4, 40),
)
@settings(max_examples=300, deadline=None)
def test_a_rank_never_has_much_more_than_before_or_afterwards(
    sizes: list[int], width: tuple[int, int, int], slab: int
) -> None:
    num_ranks, now, then = width
    before = groups_of(sizes, num_stages=now, num_ranks=num_ranks, slab_nbytes=64 * slab)
    after = groups_of(sizes, num_stages=then, num_ranks=num_ranks, slab_nbytes=64 * slab)
    moves = plan_moves(before, [WantedGroup(one.rank, one.group, one.params, one.nbytes) for one in after])
    assert sorted(moves.order, key=lambda one: (one.rank, one.group)) == sorted(
        (WantedGroup(one.rank, one.group, one.params, one.nbytes) for one in after), key=lambda o: (o.rank, o.group)
    )
    largest = max(sum(one.nbytes) for one in (*before, *after))
    for rank in range(num_ranks):
        has, will_have = (sum(sum(one.nbytes) for one in some if one.rank == rank) for some in (before, after))
        most = has + extra_nbytes(before, moves, rank=rank)
        assert most <= max(has, will_have) + 3 * largest
