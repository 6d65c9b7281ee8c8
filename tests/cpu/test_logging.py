"""What is logged: kernels that are compiled, steps that are recorded, plans that are made. Else nothing is printed."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from chunkmem.runtime.build import Recipe, ensure_library
from tests.cpu.test_metrics import Training, manager_of

ROOT = Path(__file__).parents[2]
PLANNED = re.compile(
    r"(train|eval) step: planned in [\d.]+ s, as (.+); plan (.+) predicts [\d.e-]+ s a step, of which [\d.e-]+ s "
    r"stalled"
)


def said(caplog: pytest.LogCaptureFixture, logger: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == logger]


def test_plans_are_logged_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "chunkmem")
    with manager_of() as manager:
        training = Training(manager)
        training.step()
        assert said(caplog, "chunkmem.plan") == ["train step: recorded, as nothing is known of such steps"]
        caplog.clear()
        training.step()
        (planned,) = said(caplog, "chunkmem.plan")
        found = PLANNED.fullmatch(planned)
        assert found is not None
        assert manager.plan is not None
        assert found.groups() == ("train", "its trace is known", manager.plan.name)
        caplog.clear()
        for _ in range(5):
            training.step()
        again = said(caplog, "chunkmem.plan")
        assert any(", as a step was measured; " in message for message in again), again
        caplog.clear()
        training.evaluate()
        training.step()
        training.evaluate()
        messages = said(caplog, "chunkmem.plan")
        assert "eval step: recorded, as nothing is known of such steps" in messages
        assert any(message.startswith("eval step: planned in ") for message in messages)


def test_why_a_step_is_recorded_again(caplog: pytest.LogCaptureFixture) -> None:
    with manager_of() as manager:
        training = Training(manager)
        for _ in range(3):
            training.step()
        caplog.set_level(logging.INFO, "chunkmem")
        next(iter(training.model.parameters())).requires_grad_(False)
        training.step()
        recorded = "train step: recorded, as it begins with another model, or other parameters are trainable"
        assert recorded in said(caplog, "chunkmem.plan")


def test_what_is_compiled_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By a compiler that writes what it is asked for at once."""
    caplog.set_level(logging.INFO, "chunkmem")
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != "-o" ]; do shift; done\necho made > "$2"\n')
    compiler.chmod(0o755)
    recipe = Recipe("kernels", (str(compiler),), (("ops.cpp", ()),), ())
    path = ensure_library(recipe, tmp_path / "cache")
    began, ended = said(caplog, "chunkmem.build")
    assert began == f"compiling kernels with {compiler}; later runs load what is kept in {tmp_path / 'cache'}"
    assert re.fullmatch(rf"compiled kernels in [\d.]+ s: {re.escape(str(path))}", ended)
    caplog.clear()
    assert ensure_library(recipe, tmp_path / "cache") == path
    assert said(caplog, "chunkmem.build") == [], "it was there"


@pytest.mark.full
def test_nothing_is_printed_unless_asked_for() -> None:
    program = """
from tests.cpu.test_metrics import Training, manager_of
with manager_of() as manager:
    training = Training(manager)
    for _ in range(3):
        training.step()
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
