"""Over a hundred ordinary operations on parameters that are away: none ends the process, none is silently wrong."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.evicted_operations import OPERATIONS, WRITES, Op, Outcome
from tests.helpers.training import compute_device

ROOT = Path(__file__).parents[2]
TO_THE_MATRIX = {op.name for op in WRITES if "single" not in op.name}


@functools.cache
def reports() -> dict[str, dict[str, Any]]:
    """What became of each operation, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.evicted"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def expected_of(op: Op) -> Outcome:
    return op.outcome if compute_device().type == "cpu" else op.on_accelerator or op.outcome


@pytest.mark.parametrize("op", OPERATIONS, ids=lambda op: op.name)
def test_an_operation_on_evicted_parameters(op: Op) -> None:
    report = reports()[op.name]
    assert "died" not in report, f"ended the process by {report['died']}"
    assert "broken" not in report, report
    expected = expected_of(op)
    if expected is Outcome.ERROR:
        assert report["error"] is not None
    else:
        assert report["error"] is None
    if expected is Outcome.NAN:
        assert report["nan"], report["value"]
    if expected is Outcome.TRUE:
        assert report["same"], report["value"]
    if expected is Outcome.TOLD:
        told, *after = report["steps"]
        name = r"second\.weight \(16, 16\)" if op.name in TO_THE_MATRIX else r"scale \(\)"
        assert re.match(rf"StateError: parameter {name}( \(and \d more\))? was", told), told
        assert after == ["done"]
    else:
        assert report["steps"] == ["done"]
    assert report["trained"], "the step after it differs from plain PyTorch"


def test_a_crash_would_be_seen() -> None:
    """What makes the tests above able to fail."""
    if compute_device().type != "cpu":
        pytest.skip("forks, which a process that has used the accelerator must not")
    from tests.helpers.evicted import in_a_child

    def crash(_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_a_child(Op("crash", crash, Outcome.NAN)) == {"died": "SIGKILL"}


def test_there_are_many_operations_each_named_once() -> None:
    names = [op.name for op in OPERATIONS]
    assert len(set(names)) == len(names) >= 100
