"""Which replicas leave: exact answers, and what holds for any of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkmem.data.types import ChunkId, Role
from chunkmem.plan.choose import furthest_next_use
from chunkmem.plan.victims import LeavingOrder, Resident, Standing, choose_victims, in_leaving_order, spare_needless

DEAD, AWAITS_UPDATE, ACTIVE, STATE = Standing


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
        resident(2, 3, standing=AWAITS_UPDATE),
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
        st.builds(
            ChunkId,
            st.sampled_from([Role.PARAM, Role.GRAD, Role.MASTER, Role("exp_avg"), Role("another_state")]),
            st.integers(0, 9),
        ),
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


@dataclass(frozen=True)
class There:
    """What a tier knows of one replica."""

    resident: Resident
    is_pinned: bool = False


class WatchedTier:
    """Replicas that come, are used, pinned, finished and evicted; counts how often one is looked at."""

    def __init__(self) -> None:
        self.replicas: dict[ChunkId, There] = {}
        self.order = LeavingOrder(self.look)
        self.num_looks = 0
        self.clock = 0

    def look(self, chunk: ChunkId) -> Resident | None:
        self.num_looks += 1
        there = self.replicas.get(chunk)
        return None if there is None or there.is_pinned else there.resident

    def may_leave(self) -> list[Resident]:
        return [there.resident for there in self.replicas.values() if not there.is_pinned]

    def come(self, chunk: ChunkId, *, nbytes: int = 10, last_use: int = 0) -> None:
        self.replicas[chunk] = There(Resident(chunk, nbytes, last_use, DEAD, spill=False))
        self.order.announced.add(chunk)

    def use(self, chunk: ChunkId) -> None:
        """Which makes it leave later, and so needs no announcement."""
        self.clock += 1
        self.change(chunk, last_use=self.clock)

    def change(self, chunk: ChunkId, **fields: object) -> None:
        there = self.replicas[chunk]
        self.replicas[chunk] = replace(there, resident=there.resident._replace(**fields))

    def become(self, chunk: ChunkId, standing: Standing) -> None:
        is_sooner = standing < self.replicas[chunk].resident.standing
        self.change(chunk, standing=standing)
        if is_sooner:
            self.order.announced.add(chunk)

    def pin(self, chunk: ChunkId, *, is_pinned: bool) -> None:
        self.replicas[chunk] = replace(self.replicas[chunk], is_pinned=is_pinned)
        if not is_pinned:
            self.order.announced.add(chunk)

    def evict(self, nbytes: int) -> tuple[Resident, ...]:
        victims = choose_victims(self.order.first(nbytes), nbytes)
        assert victims is not None
        for victim in victims:
            del self.replicas[victim.chunk]
        return victims


OPERATIONS = ("come", "use", "use", "become", "pin", "unpin", "go", "choose", "choose", "evict")


@given(
    operations=st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 11), st.integers(0, 60)), max_size=120)
)
def test_the_first_ones_in_order_are_those_that_a_scan_finds(operations: list[tuple[str, int, int]]) -> None:
    tier = WatchedTier()
    chunks = [ChunkId(role, group) for role in (Role.PARAM, Role.GRAD) for group in range(6)]
    for name, index, number in operations:
        chunk = chunks[index]
        if name in ("choose", "evict"):
            expected = choose_victims(tier.may_leave(), number)
            assert choose_victims(tier.order.first(number), number) == expected
            if name == "evict" and expected is not None:
                assert tier.evict(number) == expected
        elif name == "come":
            tier.come(chunk, nbytes=1 + number % 7)
        elif chunk not in tier.replicas:
            continue
        elif name == "use":
            tier.use(chunk)
        elif name == "become":
            tier.become(chunk, Standing(number % 4))
        elif name in ("pin", "unpin"):
            tier.pin(chunk, is_pinned=name == "pin")
        else:
            del tier.replicas[chunk]
    assert tier.order.first(10**6) == in_leaving_order(tier.may_leave())


def train(tier: WatchedTier, chunks: Sequence[ChunkId], *, cap: int) -> int:
    """Read the chunks forth and back, pinning each one; at the cap another leaves first. Return how many left."""
    num_evicted = 0
    for chunk in (*chunks, *reversed(chunks)):
        if chunk not in tier.replicas:
            if len(tier.replicas) == cap:
                num_evicted += len(tier.evict(10))
            tier.come(chunk)
        tier.pin(chunk, is_pinned=True)
        tier.become(chunk, ACTIVE)
        tier.use(chunk)
        tier.pin(chunk, is_pinned=False)
    return num_evicted


@pytest.mark.parametrize("num_chunks", [30, 300, 3000])
def test_how_many_are_looked_at_does_not_grow_with_those_there_are(num_chunks: int) -> None:
    """1 500 small Linears once spent seven seconds of their first step looking at all others for each that left."""
    tier = WatchedTier()
    num_evicted = train(tier, [ChunkId(Role.PARAM, group) for group in range(num_chunks)], cap=num_chunks // 3)
    assert num_evicted > num_chunks
    assert tier.num_looks < 5 * num_evicted


def test_what_is_announced_again_and_again_is_kept_once() -> None:
    """A plan that is followed announces, and asks for nothing; a tier may also always have others that leave first."""
    tier = WatchedTier()
    chunks = [ChunkId(Role.PARAM, group) for group in range(10)]
    for chunk in chunks:
        tier.come(chunk)
    for step in range(1000):
        for chunk in chunks:
            tier.pin(chunk, is_pinned=True)
            tier.become(chunk, DEAD if chunk.group == 0 else ACTIVE)
            tier.use(chunk)
            tier.pin(chunk, is_pinned=False)
        if step > 500:
            assert groups(choose_victims(tier.order.first(10), 10)) == [0]
    assert len(tier.order._heap) + len(tier.order.announced) < 5 * len(chunks)


def test_in_a_plan_what_is_needed_last_leaves_first_and_of_two_the_lower_id() -> None:
    gaps = [(0, 5, 2), (1, 9, 3), (0, 9, 1), (3, 4, 0)]
    assert sorted(gaps, key=lambda gap: furthest_next_use(*gap)) == [(0, 9, 1), (1, 9, 3), (0, 5, 2), (3, 4, 0)]
