"""Room for one access: exact answers, and certainty by brute force that a shortage is one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkmem.data.types import ChunkId, Role
from chunkmem.plan.demand import Eviction, RoomPlan, Shortage, TierRoom, make_room
from chunkmem.plan.victims import Resident, Standing


def param(group: int) -> ChunkId:
    return ChunkId(Role.PARAM, group)


def newest(group: int, last_use: int = 0, *, nbytes: int = 10) -> Resident:
    """The only newest replica: it can leave only with its bytes."""
    return Resident(param(group), nbytes, last_use, Standing.ACTIVE, spill=True)


def copied(group: int, last_use: int = 0, *, nbytes: int = 10) -> Resident:
    """A newest replica, as another one on the other tier."""
    return Resident(param(group), nbytes, last_use, Standing.ACTIVE, spill=False)


def dead(group: int, *, nbytes: int = 10) -> Resident:
    return Resident(param(group), nbytes, 0, Standing.DEAD, spill=False)


def room(free_nbytes: int, *residents: Resident) -> TierRoom:
    return TierRoom(free_nbytes, lambda: residents)


def spilled(*groups: int) -> tuple[Eviction, ...]:
    return tuple(Eviction(param(group), spill=True) for group in groups)


def left(*groups: int) -> tuple[Eviction, ...]:
    return tuple(Eviction(param(group), spill=False) for group in groups)


def test_free_bytes_are_taken_and_nobody_is_asked() -> None:
    def nobody() -> Iterator[Resident]:
        raise AssertionError("asked although the free bytes suffice")

    assert make_room(10, TierRoom(10, nobody), TierRoom(0, nobody)) == RoomPlan()


def test_the_other_tier_is_not_asked_while_it_has_room() -> None:
    def nobody() -> Iterator[Resident]:
        raise AssertionError("asked although the free bytes suffice")

    assert make_room(10, room(0, newest(0)), TierRoom(10, nobody)) == RoomPlan((), spilled(0))


def test_only_what_is_missing_leaves() -> None:
    here = room(15, newest(0, 1), newest(1, 2), newest(2, 3))
    assert make_room(30, here, room(100)) == RoomPlan((), spilled(0, 1))


def test_a_clean_copy_leaves_without_its_bytes() -> None:
    assert make_room(20, room(0, newest(0, 2), copied(1, 1)), room(10)) == RoomPlan((), (*left(1), *spilled(0)))


def test_the_other_tier_drops_duplicates_for_what_is_spilled() -> None:
    # here   | 0 newest | 1 copy |       10 are needed, 0 is the oldest
    # there  | 1 copy   |                full
    assert make_room(10, room(0, newest(0, 1), copied(1, 2)), room(0, copied(1))) == RoomPlan((param(1),), spilled(0))


def test_it_never_drops_the_duplicate_an_eviction_relies_on() -> None:
    # here   | 0 copy | 1 newest |       20 are needed: both leave, and 1 has no room but that of the copy of 0
    # there  | 0 copy |
    assert make_room(20, room(0, copied(0, 1), newest(1, 2)), room(0, copied(0))) == Shortage(10, 10)
    assert make_room(20, room(0, copied(0, 1), newest(1, 2)), room(10, copied(0))) == RoomPlan(
        (), (*left(0), *spilled(1))
    )


def test_it_drops_another_duplicate_than_the_one_it_relies_on() -> None:
    # here   | 0 copy | 1 newest |              20 are needed: both leave
    # there  | 0 copy, the older one | 2 copy |      and 2 makes room for 1
    here, there = room(0, copied(0, 1), newest(1, 2)), room(0, copied(0, 1), copied(2, 2))
    assert make_room(20, here, there) == RoomPlan((param(2),), (*left(0), *spilled(1)))


def test_nothing_newest_is_dropped_there() -> None:
    assert make_room(10, room(0, newest(0)), room(0, newest(1))) == Shortage(10, 10)


def test_what_is_dead_there_makes_room() -> None:
    assert make_room(10, room(0, newest(0)), room(0, dead(1))) == RoomPlan((param(1),), spilled(0))


def test_clean_ones_leave_instead_of_older_ones_the_other_tier_has_no_room_for() -> None:
    here = room(0, newest(0, 1), newest(1, 2), copied(2, 3))
    assert make_room(10, here, room(0, copied(2), newest(3))) == RoomPlan((param(2),), spilled(0))
    pinned_there = room(0)
    assert make_room(10, here, pinned_there) == RoomPlan((), left(2))


def test_a_mix_of_spilled_and_clean_ones() -> None:
    """Neither the oldest ones nor the clean ones alone would do: the other tier takes one, two are clean.

    here   | 0 newest | 1 newest | 2 copy | 3 copy |      30 are needed
    there  | free     | 2 pinned | 3 pinned |             of 0 and 1 it can take one
    """
    here = room(0, newest(0, 1), newest(1, 2), copied(2, 3), copied(3, 4))
    assert make_room(30, here, room(10)) == RoomPlan((), (*spilled(0), *left(2, 3)))


def test_a_large_one_that_does_not_fit_there_is_passed_over() -> None:
    here = room(0, newest(0, 1, nbytes=30), newest(1, 2), newest(2, 3))
    assert make_room(20, here, room(20)) == RoomPlan((), spilled(1, 2))


def test_of_several_mixes_the_smallest_leaves() -> None:
    # 60 are needed: with the 40 of 2, the 20 of 1 are enough, and the older 30 of 0 need not be copied
    here = room(0, newest(0, 1, nbytes=30), newest(1, 2, nbytes=20), copied(2, 3, nbytes=40))
    there = room(0, copied(3, nbytes=49))
    assert make_room(60, here, there) == RoomPlan((param(3),), (*spilled(1), *left(2)))


def test_a_large_one_needs_two_duplicates_dropped() -> None:
    # Evicting the copies of 1 and 2 here would leave 0 no room there; dropping them there lets it go.
    here = room(0, newest(0, 3, nbytes=30), copied(1, 1), copied(2, 2))
    there = room(10, copied(1), copied(2))
    assert make_room(30, here, there) == RoomPlan((param(1), param(2)), spilled(0))


def test_a_shortage_says_how_much_is_missing() -> None:
    assert make_room(40, room(5, newest(0), newest(1)), room(100)) == Shortage(15, None)
    assert make_room(25, room(5, newest(0), newest(1)), room(12)) == Shortage(10, 8)


@pytest.mark.parametrize("need_nbytes", [1, 10])
def test_nobody_may_leave(need_nbytes: int) -> None:
    assert make_room(need_nbytes, room(0), room(100)) == Shortage(need_nbytes, None)


@dataclass(frozen=True)
class Scene:
    """Two tiers with up to six replicas, and a request."""

    need_nbytes: int
    free_here: int
    free_there: int
    here: tuple[Resident, ...]
    there: tuple[Resident, ...]

    def plan(self, *, more_here: int = 0, more_there: int = 0) -> RoomPlan | Shortage:
        here = TierRoom(self.free_here + more_here, lambda: self.here)
        return make_room(self.need_nbytes, here, TierRoom(self.free_there + more_there, lambda: self.there))


STATES = {
    # chunk's state: (may leave here: spill, may leave there: spill); None: no replica, or a pinned one
    "newest here": (True, None),
    "newest there": (None, True),
    "both": (False, False),
    "both, pinned here": (None, False),
    "both, pinned there": (False, None),
    "dead here": (False, None),
    "dead there": (None, False),
    "newest here, stale there": (True, False),
    "stale here, newest there": (False, True),
}


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    here, there = [], []
    for group, state in enumerate(draw(st.lists(st.sampled_from(sorted(STATES)), max_size=6))):
        nbytes = draw(st.sampled_from((1, 1, 1, 2, 3, 5)))
        for place, spill in zip((here, there), STATES[state], strict=True):
            if spill is not None:
                standing = draw(st.sampled_from(Standing))
                place.append(Resident(param(group), nbytes, draw(st.integers(0, 3)), standing, spill))
    need, free_here, free_there = draw(st.integers(1, 12)), draw(st.integers(0, 3)), draw(st.integers(0, 5))
    return Scene(need, free_here, free_there, tuple(here), tuple(there))


def subsets(items: Sequence[Resident]) -> Iterator[tuple[Resident, ...]]:
    return chain.from_iterable(combinations(items, count) for count in range(len(items) + 1))


def is_allowed(scene: Scene, victims: Sequence[Resident], drops: Sequence[Resident]) -> bool:
    """The rules, straight: enough is freed here, the other tier is not overfilled, no newest content is lost."""
    freed = sum(r.nbytes for r in victims)
    arriving = sum(r.nbytes for r in victims if r.spill)
    dropped = sum(r.nbytes for r in drops)
    lost = {r.chunk for r in drops} & {r.chunk for r in victims if not r.spill}
    return (
        scene.free_here + freed >= scene.need_nbytes
        and scene.free_there + dropped - arriving >= 0
        and not any(r.spill for r in drops)
        and not any(_both_copies_go(scene, chunk) for chunk in lost)
    )


def _both_copies_go(scene: Scene, chunk: ChunkId) -> bool:
    """Dead or stale replicas have no content to lose; those of a pair are each other's only copy."""
    return any(r.chunk == chunk for r in scene.here) and any(r.chunk == chunk for r in scene.there)


def is_possible(scene: Scene) -> bool:
    return any(is_allowed(scene, victims, drops) for victims in subsets(scene.here) for drops in subsets(scene.there))


def check(scene: Scene, outcome: RoomPlan | Shortage) -> None:
    if isinstance(outcome, Shortage):
        assert not is_possible(scene)
        return
    at_here = {r.chunk: r for r in scene.here}
    at_there = {r.chunk: r for r in scene.there}
    victims = [at_here[eviction.chunk] for eviction in outcome.evictions_here]
    drops = [at_there[chunk] for chunk in outcome.drops_below]
    assert [eviction.spill for eviction in outcome.evictions_here] == [r.spill for r in victims]
    assert len({r.chunk for r in victims}) == len(victims)
    assert len({r.chunk for r in drops}) == len(drops)
    assert is_allowed(scene, victims, drops)
    for index in range(len(victims)):
        fewer = victims[:index] + victims[index + 1 :]
        assert sum(r.nbytes for r in fewer) + scene.free_here < scene.need_nbytes, "one leaves for nothing"
    for index in range(len(drops)):
        assert not is_allowed(scene, victims, drops[:index] + drops[index + 1 :]), "one is dropped for nothing"


@given(scene=scenes())
@settings(max_examples=300)
def test_a_plan_keeps_the_rules_and_a_shortage_is_certain(scene: Scene) -> None:
    check(scene, scene.plan())


@pytest.mark.full
@given(scene=scenes())
@settings(max_examples=4000, deadline=None)
def test_a_plan_keeps_the_rules_and_a_shortage_is_certain_at_length(scene: Scene) -> None:
    check(scene, scene.plan())


@given(scene=scenes())
@settings(max_examples=300)
def test_a_shortage_is_exactly_that_large(scene: Scene) -> None:
    outcome = scene.plan()
    if not isinstance(outcome, Shortage):
        return
    assert isinstance(scene.plan(more_here=outcome.here_nbytes), RoomPlan)
    assert isinstance(scene.plan(more_here=outcome.here_nbytes - 1), Shortage)
    if outcome.below_nbytes is None:
        assert isinstance(scene.plan(more_there=10**6), Shortage)
    else:
        assert isinstance(scene.plan(more_there=outcome.below_nbytes), RoomPlan)
        assert isinstance(scene.plan(more_there=outcome.below_nbytes - 1), Shortage)
