"""Every script, at ample room, at the smallest cap, and there with late copies: plain PyTorch's bits, or our error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.twins import cpu_only
from tests.hostile.harness import MODES, ORDINARY
from tests.hostile.judge import verdict
from tests.hostile.worker import load

ROOT = Path(__file__).parents[2]
SCRIPTS = load()
NUM_WORKERS = min(4, os.cpu_count() or 1)
pytestmark = cpu_only

ReportOf = Callable[[str], dict[str, Any]]


def run(modes: list[str], names: list[str]) -> dict[str, Any]:
    """What became of some scripts, by name and mode; they run in a process of their own, and its children."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile.worker", ";".join(modes), *names],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"the worker itself failed:\n{done.stderr[-2000:]}"
    reports: dict[str, Any] = json.loads(done.stdout)
    return reports


@pytest.fixture(scope="session")
def report_of(request: pytest.FixtureRequest) -> ReportOf:
    """Run the scripts that this session asks for, a share for each processor, once."""
    params = [getattr(item, "callspec", None) for item in request.session.items if item.path == Path(__file__)]
    names = list(dict.fromkeys(p.params["name"] for p in params if p is not None))
    chosen = {p.params["mode"] for p in params if p is not None}
    modes = [mode for mode in MODES if mode in chosen or mode == "ample"]  # which tells the smallest cap
    with ThreadPoolExecutor(NUM_WORKERS) as pool:
        shares = [share for index in range(NUM_WORKERS) if (share := names[index::NUM_WORKERS])]
        reports = {n: report for share in pool.map(partial(run, modes), shares) for n, report in share.items()}
    return lambda name: reports[name]


@pytest.mark.parametrize("mode", [pytest.param(m, marks=() if m in ORDINARY else pytest.mark.full) for m in MODES])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script(name: str, mode: str, report_of: ReportOf) -> None:
    reports = report_of(name)
    wrong = verdict(SCRIPTS[name].expect, reports["plain"], reports[mode], mode)
    assert wrong is None, f"{name}, {mode}: {wrong}\n{reports[mode].get('stderr', '')}"


def test_there_are_many_scripts() -> None:
    assert len(SCRIPTS) >= 250
