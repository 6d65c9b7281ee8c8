"""On a machine with an accelerator, caps in these tests are for chunks alone, as they are on a CPU."""

from __future__ import annotations

import pytest

from tests.helpers.chunk_caps import count_chunks_alone
from tests.helpers.training import compute_device


@pytest.fixture(autouse=True)
def caps_are_for_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave activations out of caps; tests of them have an accelerator of their own, or are in `tests/gpu`."""
    if compute_device().type != "cpu":
        count_chunks_alone(monkeypatch)
