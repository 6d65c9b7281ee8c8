"""Free room in a file: neighbours are joined, nothing is given out twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chunkmem.runtime.free_room import Extent, FreeRoom


def room_of(*extents: tuple[int, int]) -> FreeRoom:
    room = FreeRoom()
    for start, nbytes in extents:
        room.give(Extent(start, nbytes))
    return room


def test_neighbours_are_joined() -> None:
    # |0 1|2 3|4 5|   the middle one comes last
    room = room_of((4, 2), (0, 2), (2, 2))
    assert room.cut(6) == Extent(0, 6)
    assert room.nbytes == 0


def test_the_first_run_that_fits_is_cut_from_its_start() -> None:
    room = room_of((0, 2), (3, 4), (8, 9))
    assert room.cut(3) == Extent(3, 3)
    assert room.cut(3) == Extent(8, 3)
    assert room.cut(7) is None
    assert room.nbytes == 2 + 1 + 6


def test_the_last_run_that_fits_is_cut_from_its_end() -> None:
    room = room_of((0, 5), (6, 4), (12, 2))
    assert room.cut(3, from_end=True) == Extent(7, 3)
    assert room.cut(3, from_end=True) == Extent(2, 3)
    assert room.cut(3, from_end=True) is None
    assert room.nbytes == 2 + 1 + 2


def test_room_in_several_places_is_gathered_from_large_runs_first() -> None:
    room = room_of((0, 2), (3, 4), (8, 9))
    assert room.gather(11) == (Extent(8, 9), Extent(3, 2))
    assert room.gather(9) == (Extent(0, 2), Extent(5, 2))  # all that there is
    assert room.gather(1) == ()


@given(
    st.lists(st.tuples(st.sampled_from(["cut", "gather", "give"]), st.integers(1, 9), st.integers(0, 99)), max_size=60)
)
def test_every_byte_is_free_or_given_out_once(actions: list[tuple[str, int, int]]) -> None:
    size = 64
    room = room_of((0, size))
    taken: list[Extent] = []
    for action, nbytes, which in actions:
        if action == "give" and taken:
            room.give(taken.pop(which % len(taken)))
        elif action == "cut":
            run = room.cut(nbytes)
            taken += [] if run is None else [run]
        elif action == "gather":
            before = room.nbytes
            found = room.gather(nbytes)
            assert sum(extent.nbytes for extent in found) == min(nbytes, before)
            taken += found
        covered = [byte for extent in taken for byte in range(extent.start, extent.end)]
        assert len(set(covered)) == len(covered)
        assert len(covered) + room.nbytes == size
    for extent in taken:
        room.give(extent)
    assert room.cut(size) == Extent(0, size)
