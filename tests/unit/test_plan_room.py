"""Room: the tree agrees with going through the moments one by one."""

from __future__ import annotations

import random

import pytest

from chunkmem.plan.intervals import Room


class OneByOne:
    """The same by the definition."""

    def __init__(self, nbytes: list[int]) -> None:
        self.nbytes = list(nbytes)

    def take(self, start: int, stop: int, nbytes: int) -> None:
        for moment in range(start, stop):
            self.nbytes[moment % len(self.nbytes)] -= nbytes

    def last_short(self, start: int, stop: int, nbytes: int) -> int | None:
        backward = range(stop - 1, start - 1, -1)
        return next((moment for moment in backward if self.nbytes[moment % len(self.nbytes)] < nbytes), None)


@pytest.mark.few(100)
@pytest.mark.parametrize("seed", range(200))
def test_as_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    n = rng.randint(1, 40)
    nbytes = [rng.randint(-5, 50) for _ in range(n)]
    room, simple = Room(nbytes), OneByOne(nbytes)
    for _ in range(60):
        start = rng.randint(-n, 2 * n)
        stop = start + rng.randint(0, n)
        taken = rng.randint(-8, 20)
        assert room.last_short(start, stop, taken) == simple.last_short(start, stop, taken)
        if rng.random() < 0.5:
            room.take(start, stop, taken)
            simple.take(start, stop, taken)


def test_moments_of_the_laps_before_and_after_keep_their_numbers() -> None:
    #       0  1  2  3
    room = Room([9, 2, 9, 9])
    assert room.last_short(-4, 0, 5) == -3
    assert room.last_short(2, 6, 5) == 5
    assert room.last_short(-2, 1, 5) is None  # moments 2, 3 and 0
    room.take(3, 5, 6)  # moments 3 and 0
    assert room.last_short(2, 5, 5) == 4
    assert room.last_short(2, 4, 5) == 3
    assert room.last_short(2, 3, 5) is None


def test_an_empty_stretch_is_never_short() -> None:
    room = Room([0])
    room.take(0, 0, 5)
    assert room.last_short(0, 0, 1) is None
    assert room.last_short(0, 1, 1) == 0
