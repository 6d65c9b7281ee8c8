"""Time that is counted, so that plans do not depend on what else a machine does."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from chunkmem.runtime import queues, timestamps

A_LOOK_S = 1e-6


def count_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each look at a clock be a microsecond after the one before: computing takes less than copies, always."""
    looks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: A_LOOK_S * next(looks))
    for module in (timestamps, queues):
        monkeypatch.setattr(module, "time", clock)
