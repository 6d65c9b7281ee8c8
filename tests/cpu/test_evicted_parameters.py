"""Over a hundred ordinary operations on parameters that are away: the numbers of plain PyTorch, or a clear error."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.evicted import in_a_child, run_all
from tests.helpers.evicted_operations import OPERATIONS, Op, Outcome
from tests.helpers.ranks import Team
from tests.helpers.training import compute_device

ALL_S = 1200.0
"""For all operations; one that hangs is ended by itself."""


@pytest.fixture(scope="session")
def reports(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """What became of each operation that this session asks for, in a process of its own."""
    items = [item for item in request.session.items if item.path == Path(__file__)]
    params = [item.callspec.params for item in items if isinstance(item, pytest.Function) and hasattr(item, "callspec")]
    names = {param["op"].name for param in params if "op" in param}
    with Team(1, gloo=False) as team:
        (found,) = team.run(run_all, names, timeout_s=ALL_S)
    return found  # type: ignore[no-any-return]


@pytest.mark.few(12)
@pytest.mark.parametrize("op", OPERATIONS, ids=lambda op: op.name)
def test_an_operation_on_evicted_parameters(op: Op, reports: dict[str, dict[str, Any]]) -> None:
    report = reports[op.name]
    assert "died" not in report, f"ended the process by {report['died']}"
    assert "broken" not in report, report
    if op.outcome is Outcome.REFUSED:
        assert str(report["error"]).startswith("StateError: "), report
    else:
        assert report["error"] is None
        assert report["same"], report["value"]
    assert report["trained"], "the step after it differs from plain PyTorch"


def test_a_crash_would_be_seen() -> None:
    """What makes the tests above able to fail."""
    if compute_device().type != "cpu":
        pytest.skip("forks, which a process that has used the accelerator must not")

    def crash(_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_a_child(Op("crash", crash, Outcome.SAME)) == {"died": "SIGKILL"}


def test_there_are_many_operations_each_named_once() -> None:
    names = [op.name for op in OPERATIONS]
    assert len(set(names)) == len(names) >= 100
