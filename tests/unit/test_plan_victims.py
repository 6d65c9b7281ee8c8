"""Which replicas leave: exact answers, and what holds for any of them."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from chunkmem.plan.victims import Resident, Standing, choose_victims, in_leaving_order, spare_needless
from chunkmem.types import ChunkId, Role

DEAD, SETTLED, ACTIVE, STATE = Standing


def resident(
    group: int, last_use: int, *, nbytes: int = 10, standing: Standing = ACTIVE, role: Role = Role.PARAM
) -> Resident:
    return Resident(ChunkId(role, group), nbytes, last_use, standing, spill=False)


def groups(victims: tuple[Resident, ...] | None) -> list[int]:
    assert victims is not None
    return [victim.chunk.group for victim in victims]


def test_least_recently_used_leaves_first() -> None:
    # clock   1   2   3   4
    # group   2   0   3   1     two are needed: 2 and 0 go
    residents = [resident(0, 2), resident(1, 4), resident(2, 1), resident(3, 3)]
    assert groups(choose_victims(residents, 20)) == [2, 0]


def test_a_byte_more_takes_another_one() -> None:
    residents = [resident(0, 2), resident(1, 4), resident(2, 1)]
    assert groups(choose_victims(residents, 10)) == [2]
    assert groups(choose_victims(residents, 11)) == [2, 0]


def test_standing_comes_before_age() -> None:
    residents = [
        resident(0, 1, standing=STATE),
        resident(1, 2, standing=ACTIVE),
        resident(2, 3, standing=SETTLED),
        resident(3, 4, standing=DEAD),
    ]
    assert groups(choose_victims(residents, 40)) == [3, 2, 1, 0]


def test_ties_go_to_the_lower_id() -> None:
    residents = [resident(1, 5), resident(0, 5, role=Role.PARAM), resident(0, 5, role=Role.GRAD)]
    chosen = choose_victims(residents, 30)
    assert chosen is not None
    assert [str(victim.chunk) for victim in chosen] == ["grad chunk 0", "param chunk 0", "param chunk 1"]


def test_all_or_nothing() -> None:
    assert choose_victims([resident(0, 1), resident(1, 2)], 21) is None
    assert choose_victims([], 1) is None


def test_nothing_leaves_for_nothing() -> None:
    assert choose_victims([resident(0, 1)], 0) == ()
    assert choose_victims([resident(0, 1)], -5) == ()
    assert choose_victims([], 0) == ()


def test_small_ones_stay_if_a_large_one_covers_it_all() -> None:
    # age        oldest .......... newest
    # group      0 (10)  1 (10)  2 (100)      100 are needed: 0 and 1 come first, but once 2 leaves they may stay
    residents = [resident(0, 1), resident(1, 2), resident(2, 3, nbytes=100)]
    assert groups(choose_victims(residents, 100)) == [2]
    assert groups(choose_victims(residents, 101)) == [0, 2]


def test_of_two_that_may_stay_the_more_recent_one_does() -> None:
    chosen = [resident(0, 1), resident(1, 2), resident(2, 3)]
    assert groups(spare_needless(chosen, 20)) == [0, 1]
    assert spare_needless(chosen, 0) == ()


residents_of_any_size = st.lists(
    st.builds(
        Resident,
        st.builds(ChunkId, st.sampled_from(Role), st.integers(0, 9)),
        st.integers(1, 12),
        st.integers(0, 6),
        st.sampled_from(Standing),
        st.booleans(),
    ),
    max_size=12,
    unique_by=lambda r: r.chunk,
)


@given(residents=residents_of_any_size, need_nbytes=st.integers(-3, 80))
def test_enough_leave_and_none_for_nothing(residents: list[Resident], need_nbytes: int) -> None:
    chosen = choose_victims(residents, need_nbytes)
    if chosen is None:
        assert sum(r.nbytes for r in residents) < need_nbytes
        return
    covered = sum(r.nbytes for r in chosen)
    assert covered >= need_nbytes
    assert all(covered - r.nbytes < need_nbytes for r in chosen)
    order = in_leaving_order(residents)
    assert [order.index(r) for r in chosen] == sorted(order.index(r) for r in chosen)


@given(residents=residents_of_any_size, need_nbytes=st.integers(1, 80))
def test_none_leaves_that_could_stay_if_later_ones_may_not(residents: list[Resident], need_nbytes: int) -> None:
    """No shorter beginning of the leaving order would do."""
    chosen = choose_victims(residents, need_nbytes)
    if chosen is not None:
        before = [r for r in residents if _key(r) < _key(chosen[-1])]
        assert choose_victims(before, need_nbytes) is None


@given(residents=residents_of_any_size, need_nbytes=st.integers(1, 40), seed=st.randoms(use_true_random=False))
def test_the_order_they_are_named_in_does_not_matter(
    residents: list[Resident], need_nbytes: int, seed: random.Random
) -> None:
    shuffled = list(residents)
    seed.shuffle(shuffled)
    assert choose_victims(shuffled, need_nbytes) == choose_victims(residents, need_nbytes)


def _key(r: Resident) -> tuple[int, int, int, str]:
    return (r.standing, r.last_use, r.chunk.group, r.chunk.role.value)
