"""Every Wait of a plan is there for a reason: without it, training goes wrong, however little of it runs at once.

The simulator is kept out of this: it would not let such plans through. Copies come late (`chunkmem.testing.lanes`) or
early ([Note: Copies that come too early]), by the dice, in any order that what is left of the plan allows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

import chunkmem
from chunkmem.plan.model import Lane, Plan
from chunkmem.runtime.events import COPY_LANES
from tests.helpers.backdate import HastyLanes, HastyPerformer
from tests.helpers.orders import Race, Reading
from tests.helpers.scenes import (
    FOLLOWED,
    Scene,
    Undisturbed,
    is_the_first_layer,
    unread_until_covered,
    writes_beside,
)
from tests.helpers.training import STEPS, Trainer, assert_same, capped, compute_device, train_plain

pytestmark = pytest.mark.skipif(compute_device().type != "cpu", reason="copies are late or early at will in RAM only")

SEEDS = 200
"""Within these a missing Wait shows."""
SEEDS_EXPLAINED = 30
"""The same where there is a reason to believe that it cannot: all would take long, and say no more."""

SCENES = [
    Scene("loose", "plain", 0.4),
    Scene("loose", "micro_batches", 3.6),
    Scene("cnn", "plain", 1.6),
    Scene("cnn", "plain", 3.6),
]
"""One tight cap, and roomier ones; the two widest with some of the groups updated on DEVICE."""
IN_FULL = [
    Scene("cnn", "plain", 0.4),
    Scene("direct", "plain", 0.4),
    Scene("sliced", "plain", 0.4),
    Scene("lstm", "plain", 1.6),
    Scene("t5", "plain", 1.6),
    Scene("gpt", "plain", 1.6),
    Scene("cnn", "micro_batches", 1.6),
    Scene("loose", "micro_batches", 1.6),
]


def scenes() -> list[Any]:
    full = [pytest.param(scene, id=str(scene), marks=pytest.mark.full) for scene in IN_FULL]
    return [pytest.param(scene, id=str(scene)) for scene in SCENES] + full


def brings_back_the_same_bytes(scene: Scene, races: list[Race]) -> bool:
    """The chunk was in this very slab, and only read there; the copy is too early, and changes nothing."""
    reading = scene.reading
    for race in races:
        copy, before = race.second, race.first
        if copy.lane is not Lane.H2D or before.lane is not Lane.COMPUTE or before.writes & copy.writes:
            return False
        between = reading.operations[before.order : copy.order]
        writers = [operation for operation in between if operation.lane not in COPY_LANES]
        if any(before.tenants[slab] != copy.chunk for slab in before.reads & copy.writes) or any(
            operation.tenants[slab] == copy.chunk for operation in writers for slab in operation.writes
        ):
            return False
    return True


def one_thread_does_both(reading: Reading) -> bool:
    """On a CPU one thread computes, and updates on HOST, in the order of the plan: both are one lane in truth."""
    both = [operation for operation in reading.operations if operation.lane in (Lane.COMPUTE, Lane.HOST_UPDATE)]
    for race in reading.races:
        behind = [each.order for each in both if each is race.first or each.comes_after(race.first)]
        ahead = [each.order for each in both if each is race.second or race.second.comes_after(each)]
        if not behind or not ahead or min(behind) > max(ahead):
            return False
    return True


REASONS: tuple[Callable[[Scene, list[Race]], bool], ...] = (
    unread_until_covered,
    brings_back_the_same_bytes,
    writes_beside,
    is_the_first_layer,
)
"""Why a race between two operations can have no effect."""


def is_right(scene: Scene, plan: Plan, reading: Reading, seed: int) -> bool:
    """Train by a plan that no simulator has seen; tell whether everything is as in plain PyTorch."""
    expected = train_plain(scene.case, scene.variant)  # first: both draw their dropout from one generator
    perform = functools.partial(HastyPerformer, reading=reading, seed=seed)
    with (
        pytest.MonkeyPatch.context() as patch,
        chunkmem.ChunkManager(
            capped(scene.case, scene.device_nbytes), machine=plan.machine, make_lanes=lambda _: HastyLanes(seed)
        ) as manager,
    ):
        patch.setattr("chunkmem.steps.cached_plan.PlanExecutor", perform)
        trainer = Trainer(scene.case, scene.variant, Undisturbed(manager))
        manager.trace = scene.trace
        manager.runtime.controller.known.training.adopt(scene.trace, plan)
        try:
            for _ in range(STEPS):
                trainer.step()
                if tuple(trainer.losses) != expected.losses[: len(trainer.losses)]:
                    return False
        except (chunkmem.ChunkmemError, RuntimeError):
            return False
        outcome = trainer.outcome()
        timeline = manager.timeline()
    assert timeline is not None
    assert timeline.plan_misses == 0
    try:
        assert_same(outcome, expected)
    except AssertionError:
        return False
    return True


@dataclass(frozen=True)
class Result:
    """What became of the Waits of a plan, each removed in turn."""

    shown: list[str]
    explained: dict[str, list[str]]
    """Those that did not show, and why they cannot."""
    unexplained: list[str]


@functools.cache
def removed_in_turn(scene: Scene) -> Result:
    result = Result([], {}, [])
    for name, plan in scene.waits():
        reading = Reading(plan, scene.trace, iterations=FOLLOWED)
        why = [reason.__name__ for reason in REASONS if reason(scene, reading.races)]
        why += [one_thread_does_both.__name__] if one_thread_does_both(reading) else []
        if not all(is_right(scene, plan, reading, seed) for seed in range(SEEDS_EXPLAINED if why else SEEDS)):
            result.shown.append(name)
        elif why:
            result.explained[name] = why
        else:
            result.unexplained.append(name)
    return result


@pytest.mark.few(1)
@pytest.mark.parametrize("scene", scenes())
def test_with_every_wait_nothing_shows(scene: Scene) -> None:
    """What the other tests see is the missing Wait, and not how they look for it."""
    assert scene.reading.races == []
    for seed in range(8):
        assert is_right(scene, scene.plan, scene.reading, seed), seed


@pytest.mark.parametrize("scene", scenes())
def test_every_wait_is_needed(scene: Scene) -> None:
    """Without it two operations on the same memory have no order: no Wait is implied by others."""
    assert [name for name, plan in scene.waits() if not Reading(plan, scene.trace, iterations=FOLLOWED).races] == []


@pytest.mark.full
@pytest.mark.few(1)
@pytest.mark.parametrize("scene", scenes())
def test_a_missing_wait_shows(scene: Scene) -> None:
    """Results are wrong without it, unless there is a reason why they cannot be."""
    assert removed_in_turn(scene).unexplained == []


@pytest.mark.full
@pytest.mark.parametrize("chosen", [SCENES, pytest.param(SCENES + IN_FULL, marks=pytest.mark.full)], ids=len)
def test_nearly_all_waits_show(chosen: list[Scene]) -> None:
    results = [removed_in_turn(scene) for scene in chosen]
    shown = sum(len(result.shown) for result in results)
    assert shown >= 60
    assert shown >= 0.95 * (shown + sum(len(result.explained) for result in results))
