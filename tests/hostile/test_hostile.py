"""Every script with ample room, and at the smallest cap (also with late copies): plain PyTorch's bits, or our error."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ranks import Team
from tests.helpers.twins import cpu_only
from tests.hostile.harness import MODES, ORDINARY
from tests.hostile.judge import verdict
from tests.hostile.worker import load, run_share

SCRIPTS = load()
NUM_WORKERS = min(4, os.cpu_count() or 1)
ALL_S = 3600.0
"""For all scripts in all modes; one that hangs is ended by its worker."""
pytestmark = cpu_only

ReportOf = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="session")
def report_of(request: pytest.FixtureRequest) -> ReportOf:
    """Run the scripts that this session asks for, a share for each processor, once."""
    items = [item for item in request.session.items if item.path == Path(__file__)]
    params = [item.callspec.params for item in items if isinstance(item, pytest.Function) and hasattr(item, "callspec")]
    chosen = {(param["name"], param["mode"]) for param in params}
    modes = {
        name: [mode for mode in MODES if (name, mode) in chosen or mode == "ample"]  # which tells the smallest cap
        for name in dict.fromkeys(param["name"] for param in params)
    }
    with Team(NUM_WORKERS, gloo=False) as team:
        shares = team.run(run_share, NUM_WORKERS, modes, timeout_s=ALL_S)
    reports = {name: report for share in shares for name, report in share.items()}
    return lambda name: reports[name]


def cases() -> list[Any]:
    """Ample room and one of the other ordinary modes each, in turn; all others with `--full`."""
    found = []
    for index, name in enumerate(SCRIPTS):
        ordinary = (ORDINARY[0], ORDINARY[1 + index % (len(ORDINARY) - 1)])
        for mode in MODES:
            found.append(pytest.param(name, mode, marks=() if mode in ordinary else pytest.mark.full))
    return found


@pytest.mark.few(60)
@pytest.mark.parametrize(("name", "mode"), cases())
def test_a_script(name: str, mode: str, report_of: ReportOf) -> None:
    reports = report_of(name)
    wrong = verdict(SCRIPTS[name].expect, reports["plain"], reports[mode], mode)
    assert wrong is None, f"{name}, {mode}: {wrong}\n{reports[mode].get('stderr', '')}"


def test_there_are_many_scripts() -> None:
    assert len(SCRIPTS) >= 250
