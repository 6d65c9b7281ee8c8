"""Teams of ranks. On a machine with an accelerator, caps in these tests are for chunks alone, as they are on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.chunk_caps import count_chunks_alone
from tests.helpers.ranks import Team
from tests.helpers.training import compute_device


@pytest.fixture(scope="module")
def pair() -> Iterator[Team]:
    """Two ranks, which a file has for itself."""
    with Team(2) as team:
        yield team


@pytest.fixture(scope="module")
def three() -> Iterator[Team]:
    """Likewise."""
    with Team(3) as team:
        yield team


@pytest.fixture(scope="module")
def four() -> Iterator[Team]:
    """Likewise."""
    with Team(4) as team:
        yield team


@pytest.fixture(autouse=True)
def caps_are_for_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave activations out of caps; tests of them have an accelerator of their own, or are in `tests/gpu`."""
    if compute_device().type != "cpu":
        count_chunks_alone(monkeypatch)
