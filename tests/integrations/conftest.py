"""What all of these tests share: no network, and no state of a library that outlives its test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Importing the libraries takes seconds: leave the files alone where none of their tests would run."""
    expression = config.option.markexpr
    is_wanted = config.getoption("--full") or ("full" in expression and "not full" not in expression)
    return None if is_wanted else True


@pytest.fixture(autouse=True)
def left_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ask no model hub for anything, and forget afterwards what accelerate keeps for the process."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    yield
    try:
        from accelerate.state import AcceleratorState, GradientState
    except ImportError:
        return
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
