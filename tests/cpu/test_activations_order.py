"""Activations that are offloaded: nothing touches their memory, or what HOST has of them, without an order.

See [Note: Happens before]. COMPUTE, H2D and D2H are concurrent here, as on an accelerator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

import chunkmem
from chunkmem.data.types import Role
from chunkmem.runtime.copy_order import CopyOrder
from chunkmem.runtime.pool import Slab
from tests.cpu.test_activations import CASES, config, smallest_nbytes
from tests.helpers.happens_before import HappensBefore
from tests.helpers.scenes import Undisturbed
from tests.helpers.simulated import ClockedLanes
from tests.helpers.spread import spread
from tests.helpers.training import VARIANTS, Trainer, assert_same, train_plain
from tests.helpers.twins import cpu_only

pytestmark = cpu_only

STEPS = 6
VARIANT = {variant.name: variant for variant in VARIANTS}


def train(model: str, way: str, *, spare: float = 0.0, policy: str = "offload") -> tuple[HappensBefore, int]:
    """Train as plain PyTorch does, to the bit; return what was seen, and the activations moved in the last step."""
    case, variant = CASES[model], VARIANT[way]
    least = smallest_nbytes(case, variant, policy)
    expected = train_plain(case, variant, STEPS)
    with HappensBefore() as checker:
        settings = config(case, int(least * (1 + spare)), policy)
        with chunkmem.ChunkManager(settings, make_lanes=checker.lanes) as manager:
            trainer = Trainer(case, variant, Undisturbed(manager))
            outcome = trainer.run(STEPS)
            timeline = manager.timeline()
            assert timeline is not None
            moved = [span for span in timeline.spans if span.chunk is not None and span.chunk.role is Role.ACTIVATION]
    assert_same(outcome, expected)
    return checker, len(moved)


CASES_HERE = (
    ("gpt", "plain"), ("cnn", "plain"), ("bert", "micro_batches"), ("t5", "half_frozen"), ("inplace", "plain"),
    ("moe", "plain"), ("reused", "evaluation"), ("vit", "plain"),
)  # fmt: skip


@pytest.mark.few(1)
@spread(case=CASES_HERE, spare=(0.0, 0.3))
def test_no_race(case: tuple[str, str], spare: float) -> None:
    checker, moved = train(*case, spare=spare)
    checker.assert_ordered()
    assert moved > 0 or spare


@pytest.mark.few(1)
@spread(model=("gpt", "cnn"), policy=("recompute", "auto"))
def test_no_race_where_blocks_are_recomputed(model: str, policy: str) -> None:
    checker, _ = train(model, "plain", policy=policy)
    checker.assert_ordered()


def nothing(*_: object, **__: object) -> None:
    """Do not wait."""


@dataclass(frozen=True)
class Mutant:
    """Something that waits, and what it is replaced by."""

    name: str
    owner: type
    method: str
    instead: Callable[[Any], Any] = lambda _: nothing

    def __str__(self) -> str:
        return self.name


MUTANTS = (
    Mutant("copies are not held back", ClockedLanes, "_hold_back"),
    Mutant("memory is emptied under a copy", Slab, "rest"),
    Mutant("computing does not wait", CopyOrder, "_compute_waits"),
    Mutant("lanes do not wait", CopyOrder, "_lane_waits"),
    Mutant("new memory is filled at once", CopyOrder, "allocated"),
)


@pytest.mark.few(1)
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_mutant_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a single run, which has the right bits: all is done in the order in which it is issued."""
    monkeypatch.setattr(mutant.owner, mutant.method, mutant.instead(getattr(mutant.owner, mutant.method)))
    checker, _ = train("gpt", "plain")
    assert checker.races
