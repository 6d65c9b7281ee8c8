"""Every script, at ample room, at the smallest cap, and there with late copies: plain PyTorch's bits, or our error."""

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
    params = [getattr(item, "callspec", None) for item in request.session.items if item.path == Path(__file__)]
    names = list(dict.fromkeys(p.params["name"] for p in params if p is not None))
    chosen = {p.params["mode"] for p in params if p is not None}
    modes = [mode for mode in MODES if mode in chosen or mode == "ample"]  # which tells the smallest cap
    with Team(NUM_WORKERS, gloo=False) as team:
        shares = team.run(run_share, NUM_WORKERS, modes, names, timeout_s=ALL_S)
    reports = {name: report for share in shares for name, report in share.items()}
    return lambda name: reports[name]


@pytest.mark.parametrize("mode", [pytest.param(m, marks=() if m in ORDINARY else pytest.mark.full) for m in MODES])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script(name: str, mode: str, report_of: ReportOf) -> None:
    reports = report_of(name)
    wrong = verdict(SCRIPTS[name].expect, reports["plain"], reports[mode], mode)
    assert wrong is None, f"{name}, {mode}: {wrong}\n{reports[mode].get('stderr', '')}"


def test_there_are_many_scripts() -> None:
    assert len(SCRIPTS) >= 250
