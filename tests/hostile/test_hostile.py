"""Every script with ample room, and at the smallest cap (also with late copies): plain PyTorch's bits, or our error."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ranks import Team
from tests.helpers.twins import cpu_only
from tests.hostile.harness import AXES, MODES, ORDINARY
from tests.hostile.judge import verdict, verdict_of_axis
from tests.hostile.worker import load, run_on_a_rank, run_share
from tests.hostile_ranks.harness import NOT_OWNED

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
    chosen = [(param["name"], param["mode"]) for param in params if "mode" in param]
    modes = {  # with ample room each, which tells the smallest cap
        name: [mode for mode in (*MODES, *AXES) if (name, mode) in chosen or mode == "ample"]
        for name in dict.fromkeys(name for name, _ in chosen)
    }
    with Team(NUM_WORKERS, gloo=False) as team:
        shares = team.run(run_share, NUM_WORKERS, modes, timeout_s=ALL_S)
    reports = {name: report for share in shares for name, report in share.items()}
    return lambda name: reports[name]


@pytest.fixture(scope="module")
def pair() -> Iterator[Team]:
    """Two ranks."""
    with Team(2) as team:
        yield team


def cases() -> list[Any]:
    """Ample room and one of the other ordinary modes each, in turn; all others with `--full`."""
    found = []
    for index, name in enumerate(SCRIPTS):
        ordinary = (ORDINARY[0], ORDINARY[1 + index % (len(ORDINARY) - 1)])
        for mode in MODES:
            found.append(pytest.param(name, mode, marks=() if mode in ordinary else pytest.mark.full))
    return found


@pytest.mark.few(40)
@pytest.mark.parametrize(("name", "mode"), cases())
def test_a_script(name: str, mode: str, report_of: ReportOf) -> None:
    reports = report_of(name)
    wrong = verdict(SCRIPTS[name].expect, reports["plain"], reports[mode], mode)
    assert wrong is None, f"{name}, {mode}: {wrong}\n{reports[mode].get('stderr', '')}"


def axis_cases() -> list[Any]:
    """Each script with one feature, in turn; with all others with `--full`."""
    found = []
    for index, (name, script) in enumerate(SCRIPTS.items()):
        axes = [axis for axis, feature in AXES.items() if name not in feature.not_for]
        if script.is_lowered:
            axes.remove("8-bit states")  # whose numbers are of their own already
        for place, axis in enumerate(axes):
            marks = () if place == index % len(axes) else pytest.mark.full
            found.append(pytest.param(name, axis, marks=marks))
    return found


@pytest.mark.few(15)
@pytest.mark.parametrize(("name", "mode"), axis_cases())
def test_a_script_with_a_feature(name: str, mode: str, report_of: ReportOf) -> None:
    """Such as a disk: with room for all, and at a small cap with late copies."""
    reports = report_of(name)
    wrong = verdict_of_axis(SCRIPTS[name].expect, reports["plain"], reports[mode], AXES[mode])
    assert wrong is None, f"{name}, {mode}: {wrong}\n{reports[mode].get('stderr', '')}"


@pytest.mark.few(2)
@pytest.mark.parametrize("name", [name for name, script in SCRIPTS.items() if not script.is_lowered])
def test_a_script_on_two_ranks(name: str, pair: Team) -> None:
    """On the same batches: the mean of two equal gradients is each of them. Or an error of ours on both."""
    (plain, one), (_, other) = pair.run(run_on_a_rank, name)
    if "error" in one or "error" in other:
        for report in (one, other):  # torch's compiler wraps ours
            assert "error" in report, (one, other)
            assert report["is_ours"] or "error" in plain or re.search(NOT_OWNED, report["message"]), (one, other)
    else:
        assert (one["differences"], other["differences"]) == ([], [])


def test_there_are_many_scripts() -> None:
    assert len(SCRIPTS) >= 250
