"""Compare a case in plain PyTorch, with room for all, and in the settings that it has."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import chunkmem
from tests.fuzz.cases import Case
from tests.fuzz.loop import Loop, Rooms
from tests.helpers.twins import assert_equal

ROUNDS = 6


def check(case: Case) -> None:
    """Assert that a case sees and leaves the same in each of them.

    Where its numbers are not those of plain PyTorch, in the last two.
    """
    with tempfile.TemporaryDirectory() as folder:
        expected = None if case.own_bits else Loop(case, None).run()
        rooms = Rooms(case, Path(folder), ample=True)
        for rooms.ample, rooms.in_turn in ((True, False), (True, True), (False, True)):
            if rooms.ample and rooms.in_turn and not any(setting.ways for setting in case.settings):
                continue
            outcome = roomy(case, rooms)
            expected = outcome if expected is None else expected
            assert_equal(outcome, expected)


def roomy(case: Case, rooms: Rooms) -> Any:
    """Run a case; where its share of HOST does not do, with more."""
    for _ in range(ROUNDS):
        try:
            return Loop(case, rooms).run()
        except chunkmem.CapacityError as error:
            if "on HOST" not in str(error):
                raise
            rooms.more *= 1.5
    raise AssertionError(f"{rooms.more} times its share of HOST does not do")
