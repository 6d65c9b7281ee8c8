"""What makes `test_hostile_ranks` able to fail: every kind of wrong outcome on any rank is seen, and named."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch

import chunkmem
from chunkmem.modules.begun import options_in_words
from tests.helpers.ranks import RankFailure, Team
from tests.helpers.twins import cpu_only
from tests.hostile.harness import Script
from tests.hostile.models import Net
from tests.hostile_ranks.harness import ALIKE, EQUAL, Either, Expected, Leaves, Refused, User
from tests.hostile_ranks.judge import PROMPT_S, verdict
from tests.hostile_ranks.worker import Report, run_script

pytestmark = cpu_only

FINE: Report = {"differences": [], "digest": "a", "seconds": 0.1}
REFUSED = Refused("StateError", "do that")


def state_error(message: str = "weight: do that", **changes: Any) -> Report:
    found = {"error": "StateError", "message": message, "where": "", "is_ours": True, "seconds": 0.1}
    return found | changes


def rank_error(message: str = "rank 1 raised ValueError", **changes: Any) -> Report:
    return state_error(message, error="RankError", **changes)


@pytest.mark.parametrize(
    ("expect", "reports", "phrase"),
    [
        (EQUAL, [FINE, FINE], None),
        (EQUAL, [FINE, FINE | {"differences": ["off"]}], "rank 1: off"),
        (EQUAL, [FINE, FINE | {"digest": "b"}], "rank 1 has other weights"),
        (ALIKE, [FINE, FINE | {"digest": "b"}], "rank 1 has other weights"),
        (EQUAL, [FINE, state_error()], "rank 1: StateError: weight"),
        (EQUAL, [FINE, {"reference": state_error()}], "rank 1, the reference itself"),
        (REFUSED, [state_error(), state_error()], None),
        (REFUSED, [state_error(), FINE], "rank 1: nothing raised"),
        (REFUSED, [state_error(), state_error("another: do that")], "in other words on rank 0"),
        (REFUSED, [state_error("x"), state_error("x")], "'do that' is declared"),
        (REFUSED, [state_error(is_ours=False)] * 2, "where StateError is declared"),
        (REFUSED, [rank_error(), rank_error()], "where StateError is declared"),
        (REFUSED, [state_error(), state_error(seconds=PROMPT_S + 1)], "was waited for"),
        (Leaves(1, "ValueError"), [rank_error(), state_error(error="ValueError", is_ours=False)], None),
        (Leaves(1, "ValueError"), [FINE, state_error(error="ValueError")], "rank 0: nothing raised"),
        (Leaves(1, "ValueError"), [rank_error("gone"), state_error(error="ValueError")], "does not name rank 1"),
        (Leaves(1, "ValueError"), [rank_error(), FINE], "where ValueError is declared"),
        (Leaves(1, "ValueError"), [rank_error(), rank_error()], "where ValueError is declared"),
        (
            Leaves(1, "ValueError"),
            [rank_error(seconds=PROMPT_S + 1), state_error(error="ValueError")],
            "was waited for",
        ),
        (Either("StateError", "do that"), [FINE, FINE], None),
        (Either("StateError", "do that"), [state_error(), state_error()], None),
        (Either("StateError", "do that"), [state_error(), FINE], "nothing raised"),
        (Either("StateError", "do that"), [FINE | {"differences": ["off"]}, FINE], "rank 0: off"),
    ],
)
def test_a_wrong_outcome_is_named(expect: Expected, reports: list[Report], phrase: str | None) -> None:
    wrong = verdict(expect, reports)
    assert wrong is None if phrase is None else wrong is not None and phrase in wrong, wrong


def trains(user: User) -> None:
    user.train(0, 1)


def records_another_number_on_rank_one(user: User) -> None:
    user.record(float(user.rank) if user.manager else 0.0)


def learns_something_else_in_chunkmem(user: User) -> None:
    user.train(0, 2 if user.manager else 1)


def leaves_out_the_last_bit(user: User) -> None:
    user.record(torch.ones(3) + (2e-7 if user.manager else 0.0))


def has_other_weights_on_rank_one(user: User) -> None:
    """The rank updates what it owns by another rule, and says that it does not."""
    said = options_in_words(user.opt.param_groups) if user.manager else ""
    user.opt.param_groups[0]["lr"] = 0.5 if user.manager and user.rank == 1 else 1e-2
    with patch("chunkmem.optim.optimizer.options_in_words", return_value=said):
        user.train(0)


def dies(user: User) -> None:
    if user.manager is not None and user.rank == 1:
        os.kill(os.getpid(), signal.SIGABRT)


def run_here(rank: int, run: Callable[[User], object], expect: Expected) -> Report:
    return run_script(rank, Script("under_test", "test", run, Net, expect, ()), "point to point")


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    with Team(2) as found:
        yield found


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("run", "phrase"),
    [
        (trains, None),
        (records_another_number_on_rank_one, "rank 1: .seen[0]: 1.0 is not 0.0"),
        (learns_something_else_in_chunkmem, ".seen[1]"),
        (leaves_out_the_last_bit, "off by up to 2.38e-07"),
        (has_other_weights_on_rank_one, "off by up to"),
    ],
)
def test_a_script_over_two_ranks(run: Callable[[User], object], phrase: str | None, team: Team) -> None:
    wrong = verdict(EQUAL, team.run(run_here, run, EQUAL))
    assert wrong is None if phrase is None else wrong is not None and phrase in wrong, wrong


def test_times_are_no_part_of_what_errors_say(team: Team) -> None:
    reports = team.run(run_here, waits_and_raises, REFUSED)
    assert {report["message"] for report in reports} == {"rank 0 after … s: do that"}
    assert verdict(REFUSED, reports) is None


def waits_and_raises(user: User) -> None:
    raise chunkmem.StateError(f"rank 0 after {user.rank}.5 s: do that")


def test_a_rank_that_crashes_is_named(team: Team) -> None:
    with pytest.raises(RankFailure, match="rank 1 died of SIGABRT"):
        team.run(run_here, dies, EQUAL)
