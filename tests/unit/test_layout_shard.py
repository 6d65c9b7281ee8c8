"""Who owns which chunk: formulas against dealing the chunks out one by one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkmem.errors import LayoutError
from chunkmem.layout.shard import Sharding

SHARDINGS = st.builds(Sharding, st.integers(0, 40), st.integers(1, 9))


@st.composite
def sized(draw: st.DrawFn) -> tuple[Sharding, list[int]]:
    """A sharding, and bytes for each of its chunks."""
    sharding = draw(SHARDINGS)
    sizes = st.lists(st.integers(0, 10**6), min_size=sharding.num_chunks, max_size=sharding.num_chunks)
    return sharding, draw(sizes)


def test_seven_chunks_on_three_ranks() -> None:
    # chunk   0 1 2 | 3 4 5 | 6
    # owner   0 1 2 | 0 1 2 | 0
    sharding = Sharding(num_chunks=7, world_size=3)
    assert [sharding.owner(i) for i in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert [sharding.group_of(i) for i in range(7)] == [0, 0, 0, 1, 1, 1, 2]
    assert [list(sharding.members(g)) for g in range(sharding.num_groups)] == [[0, 1, 2], [3, 4, 5], [6]]
    assert [list(sharding.owned(r)) for r in range(3)] == [[0, 3, 6], [1, 4], [2, 5]]


def test_bytes_of_seven_chunks_on_three_ranks() -> None:
    sharding, nbytes = Sharding(7, 3), [1, 2, 4, 8, 16, 32, 64]
    assert [sharding.owned_nbytes(r, nbytes) for r in range(3)] == [73, 18, 36]
    assert [sharding.remote_nbytes(1, g, nbytes) for g in range(3)] == [1 + 4, 8 + 32, 64]
    assert sharding.peak_nbytes(1, nbytes) == 18 + 64
    assert sharding.peak_nbytes(1, nbytes, num_whole=2) == 18 + 64 + 40
    assert sharding.peak_nbytes(1, nbytes, num_whole=9) == 127
    assert (sharding.taken_nbytes(1, nbytes), sharding.given_nbytes(1, nbytes)) == (109, 36)


def test_one_rank_owns_everything_and_exchanges_nothing() -> None:
    sharding = Sharding(3, 1)
    assert list(sharding.owned(0)) == [0, 1, 2]
    assert sharding.num_groups == 3
    assert (sharding.taken_nbytes(0, [5, 6, 7]), sharding.given_nbytes(0, [5, 6, 7])) == (0, 0)
    assert sharding.peak_nbytes(0, [5, 6, 7]) == 18


def test_a_model_without_chunks_has_no_groups() -> None:
    assert Sharding(0, 4).num_groups == 0
    assert list(Sharding(0, 4).owned(3)) == []
    assert Sharding(0, 4).peak_nbytes(3, []) == 0


@given(SHARDINGS)
def test_every_chunk_has_one_owner_and_one_group(sharding: Sharding) -> None:
    ranks, groups = range(sharding.world_size), range(sharding.num_groups)
    everything = list(range(sharding.num_chunks))
    assert sorted(i for rank in ranks for i in sharding.owned(rank)) == everything
    assert [i for group in groups for i in sharding.members(group)] == everything
    for index in everything:
        assert index in sharding.owned(sharding.owner(index))
        assert index in sharding.members(sharding.group_of(index))


@given(SHARDINGS)
def test_no_rank_has_two_chunks_of_a_group_and_only_the_last_is_short(sharding: Sharding) -> None:
    for group in range(sharding.num_groups):
        owners = [sharding.owner(index) for index in sharding.members(group)]
        assert owners == list(range(len(owners)))
        assert 0 < len(owners) <= sharding.world_size
        assert len(owners) == sharding.world_size or group == sharding.num_groups - 1


@given(SHARDINGS)
def test_shares_differ_by_one_chunk_at_most(sharding: Sharding) -> None:
    shares = [len(sharding.owned(rank)) for rank in range(sharding.world_size)]
    assert max(shares) - min(shares) <= 1
    assert shares == sorted(shares, reverse=True)


@given(sized())
def test_bytes_by_rank_add_up(case: tuple[Sharding, list[int]]) -> None:
    sharding, nbytes = case
    ranks, groups = range(sharding.world_size), range(sharding.num_groups)
    total = sum(nbytes)
    assert sum(sharding.owned_nbytes(rank, nbytes) for rank in ranks) == total
    # What is given away arrives, and it is every chunk at every rank but its owner.
    taken = [sharding.taken_nbytes(rank, nbytes) for rank in ranks]
    assert sum(sharding.given_nbytes(rank, nbytes) for rank in ranks) == sum(taken)
    assert sum(taken) == total * (sharding.world_size - 1)
    for rank in ranks:
        assert sum(sharding.remote_nbytes(rank, group, nbytes) for group in groups) == taken[rank]
        held = [sharding.peak_nbytes(rank, nbytes, num_whole=n) for n in range(sharding.num_groups + 1)]
        assert held == sorted(held)
        assert held[0] == sharding.owned_nbytes(rank, nbytes)
        assert held[-1] == total


@pytest.mark.parametrize("numbers", [(-1, 2), (3, 0), (3, -1)])
def test_what_cannot_be_dealt_out_is_refused(numbers: tuple[int, int]) -> None:
    with pytest.raises(LayoutError, match=f"{numbers[0]} chunks cannot be dealt out to {numbers[1]} ranks"):
        Sharding(*numbers)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda s: s.owner(7), "there is no chunk 7: there are 7"),
        (lambda s: s.owner(-1), "there is no chunk -1"),
        (lambda s: s.group_of(7), "there is no chunk 7"),
        (lambda s: s.members(3), "there is no exchange group 3: there are 3"),
        (lambda s: s.members(-1), "there is no exchange group -1"),
        (lambda s: s.owned(3), "there is no rank 3"),
        (lambda s: s.remote_nbytes(3, 0, [1] * 7), "there is no rank 3"),
        (lambda s: s.owned_nbytes(0, [1] * 6), "sizes of 6 chunks were given, for 7 chunks"),
        (lambda s: s.peak_nbytes(0, [1] * 8), "sizes of 8 chunks"),
        (lambda s: s.taken_nbytes(0, []), "sizes of 0 chunks"),
    ],
)
def test_what_is_not_there_is_refused(ask: Callable[[Sharding], object], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        ask(Sharding(num_chunks=7, world_size=3))


def test_a_sharding_does_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Sharding(7, 3).num_chunks = 8  # type: ignore[misc]
