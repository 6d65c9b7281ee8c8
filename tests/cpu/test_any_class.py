"""`chunkmem.Optimizer(class, ...)` against the class itself: the same weights and states, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers.any_class import WAYS, ClassTwin, muon_and_adamw
from tests.helpers.twins import Blocks, Twin, same

STEPS = range(6)


def alike(scenario: Callable[[Twin], Any], kind: str, **options: Any) -> int:
    return same(Blocks, scenario, twin=ClassTwin, kind=kind, **options)


@pytest.mark.parametrize("name", [way.name for way in WAYS])
def test_with_ample_room_and_on_demand_at_the_smallest_cap(name: str) -> None:
    alike(lambda twin: twin.steps(*STEPS), name)


def test_two_classes_in_the_same_chunks() -> None:
    alike(lambda twin: twin.steps(*STEPS), "pairs", params=muon_and_adamw)
