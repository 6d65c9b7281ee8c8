"""Every script over ranks: the numbers of one process with all batches, or the same clear error on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.ranks import Team
from tests.helpers.twins import cpu_only
from tests.hostile_ranks.harness import EXCHANGES, TIMEOUT_S
from tests.hostile_ranks.judge import verdict
from tests.hostile_ranks.worker import load, run_named

SCRIPTS = load()
SIZES = (2, 3)
HANGS_S = 2 * TIMEOUT_S
"""After which a script hangs; the slowest that ends by itself waits for `distributed.timeout_s` once."""
pytestmark = cpu_only


def cases() -> list[Any]:
    """Two ranks and one exchange each, in turn; all others with `--full`."""
    found = []
    for index, name in enumerate(SCRIPTS):
        for place, exchange in enumerate(EXCHANGES):
            for size in SIZES:
                is_ordinary = size == 2 and place == index % len(EXCHANGES)
                marks = [] if is_ordinary else [pytest.mark.full]
                found.append(pytest.param(name, exchange, size, marks=marks, id=f"{name}-{exchange}-{size}"))
    return found


@pytest.fixture(scope="module")
def teams() -> Iterator[dict[int, Team]]:
    found = {size: Team(size) for size in SIZES}
    yield found
    for team in found.values():
        team.close()


@pytest.mark.few(12)
@pytest.mark.parametrize(("name", "exchange", "size"), cases())
def test_a_script(name: str, exchange: str, size: int, teams: dict[int, Team]) -> None:
    reports = teams[size].run(run_named, name, exchange, timeout_s=HANGS_S)
    wrong = verdict(SCRIPTS[name].expect, reports)
    assert wrong is None, f"{name}, {exchange}, {size} ranks: {wrong}"


def test_there_are_many_scripts() -> None:
    assert len(SCRIPTS) >= 100
