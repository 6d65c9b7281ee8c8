"""Trainings over 2 to 4 ranks that nobody has written down: the numbers of one process, or an error on all ranks."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import seed as seeded

from tests.helpers.ranks import Team
from tests.helpers.twins import cpu_only
from tests.hostile.judge import differences
from tests.hostile_ranks.fuzz_cases import MAX_RANKS, Case, Phase, Step, Unit, cases
from tests.hostile_ranks.fuzz_worker import plain, train, train_without_a_part
from tests.hostile_ranks.harness import TIMEOUT_S
from tests.hostile_ranks.judge import verdict

MANY = 200
MAX_REFUSED = 0.2
"""As a share of all cases."""
SMALL = Case((Phase(2),), (Unit("block"),))
STEPWISE = {"database": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}
pytestmark = cpu_only


@pytest.fixture(scope="module")
def teams() -> Iterator[dict[int, Team]]:
    found = {size: Team(size) for size in (2, MAX_RANKS)}
    yield found
    for team in found.values():
        team.close()


def judge(case: Case, team: Team, run: Callable[..., Any] = train) -> bool:
    """Run a case on all ranks; tell whether it was refused, as it may be.

    Raises:
        AssertionError: it is neither the training of one process nor refused.
    """
    losses, norms, left = plain(case)
    with tempfile.TemporaryDirectory() as folder:
        by_rank = team.run(run, case, Path(folder) / "checkpoint", timeout_s=2 * TIMEOUT_S)
    begun = [0] * MAX_RANKS
    num_norms = 0
    for index, phase in enumerate(case.phases):
        reports = [each[index] for each in by_rank[: phase.size]]
        if any("error" in report for report in reports):
            wrong = verdict(phase.expect, reports)
            assert wrong is None, f"phase {index}: {wrong}"
            return True
        for rank, report in enumerate(reports):
            expected = {"losses": losses[rank][begun[rank] :][: len(report["losses"])], "left": left[index]}
            expected["norms"] = norms[num_norms:][: len(report["norms"])]
            found = {key: report[key] for key in expected}
            report["differences"] = differences(found, expected, tolerance=case.tolerance)
            begun[rank] += len(report["losses"])
        num_norms += len(reports[0]["norms"])
        wrong = verdict(phase.expect, reports)
        assert wrong is None, f"phase {index}: {wrong}"
    return False


@pytest.mark.parametrize(
    ("count", "most_ranks", "least_steps", "most_steps"),
    [pytest.param(20, 2, 1, 2, id="few"), pytest.param(MANY, MAX_RANKS, 2, 5, marks=pytest.mark.full, id="many")],
)
def test_random_trainings_are_those_of_one_process(
    count: int, most_ranks: int, least_steps: int, most_steps: int, teams: dict[int, Team]
) -> None:
    """The few are the same ones each time, the many are others."""
    refused = []
    number = None if count < MANY else random.SystemRandom().randrange(2**32)

    @seeded(number)
    @settings(max_examples=count, **STEPWISE | {"derandomize": number is None})
    @given(cases(most_ranks=most_ranks, least_steps=least_steps, most_steps=most_steps))
    def run(case: Case) -> None:
        refused.append(judge(case, teams[most_ranks]))

    try:
        run()
    except Exception as error:
        error.add_note(f"drawn with seed {number}")
        raise
    assert len(refused) >= count
    assert sum(refused) <= MAX_REFUSED * len(refused)


def test_a_part_of_a_mean_that_is_left_out_is_found(teams: dict[int, Team]) -> None:
    assert not judge(SMALL, teams[2])
    with pytest.raises(AssertionError, match="off by up to"):
        judge(SMALL, teams[2], train_without_a_part)


def test_micro_batches_that_others_do_not_have_where_units_stay(teams: dict[int, Team]) -> None:
    """All is there, so nothing is exchanged in them that ranks without them could take part in: they parted ways."""
    counts = [(1, 1, 1, 1), (1, 1, 1, 1), (0, 2, 0, 0), (1, 2, 0, 0), (1, 1, 1, 1)]
    assert not judge(Case((Phase(2, tuple(map(Step, counts))),), (Unit("experts"),)), teams[2])


@pytest.mark.full
def test_what_is_found_is_shrunk(teams: dict[int, Team]) -> None:
    def is_wrong(case: Case) -> bool:
        try:
            judge(case, teams[2], train_without_a_part)
        except AssertionError:
            return True
        return False

    found = hypothesis.find(cases(most_ranks=2), is_wrong, settings=settings(max_examples=50, **STEPWISE))
    assert [(phase.size, phase.steps) for phase in found.phases] == [(2, (Step(),))]
    assert len(found.units) == 1
