"""Weights that plans round from master weights for each fetch, as HOST has no room to keep them: bits and order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chunkmem
from chunkmem.plan.model import Lane, Round, Wait
from chunkmem.runtime.actions import PlanActions
from chunkmem.runtime.copy_order import CopyOrder
from tests.helpers.happens_before import HappensBefore
from tests.helpers.lanes import MakeLanes, adversarial
from tests.helpers.training import compute_device
from tests.helpers.twins import Twin, assert_equal, features
from tests.helpers.vector_clocks import Actor

pytestmark = pytest.mark.skipif(compute_device().type != "cpu", reason="knows every byte of DEVICE")

WIDTH, NUM_BLOCKS = 32, 12
NUMEL = WIDTH * WIDTH
BATCH = (2, WIDTH)
ACTIVATIONS_NBYTES = 8 << 10
"""Where a simulated accelerator is charged for them."""
STATES = {"masters": ("fp32", 12.0), "8 bits": ("8bit", 4 + 2 * 33 / 32)}
"""`optimizer.params.states`, and the bytes of a parameter in chunks of HOST that stay."""


def build() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(NUM_BLOCKS)))


def config(states: str, *, tight: bool, device_nbytes: int = 8 * NUMEL, **opts: Any) -> chunkmem.Config:
    kind, per_parameter = STATES[states]
    host_nbytes = int(NUM_BLOCKS * NUMEL * per_parameter) + 8 * NUMEL if tight else 8 << 20
    return chunkmem.Config.from_dict(
        {
            "precision": "bf16",
            "memory": {"device": device_nbytes, "host": host_nbytes},
            "default_chunk_size": NUMEL,
            "optimizer": {"params": {"states": kind, "in_backward": True}},
            "client": {"opts": opts},
        }
    )


def train(chosen: chunkmem.Config, *, make_lanes: MakeLanes | None = None) -> tuple[Any, ...]:
    options = {} if make_lanes is None else {"make_lanes": make_lanes}
    with chunkmem.ChunkManager(chosen, **options) as manager:
        for pool in manager.runtime.memory.store.pools.values():
            pool.poison = make_lanes is None
        ours = Twin(manager, build)
        losses: list[float] = []
        for seed in range(8):
            loss: Tensor = ours.loss(features(seed, shape=BATCH))
            loss.backward()
            ours.optimizer.step()
            ours.optimizer.zero_grad()
            losses.append(loss.item())
            if seed == 5:  # a use that no moment tells of
                manager.state_dict()
        plan, timeline = manager.plan, manager.timeline()
        num_rounded = 0
        if plan is not None:
            num_rounded = sum(isinstance(action, Round) for actions in plan.actions for action in actions)
        assert timeline is not None
        return (losses, ours.left()), num_rounded, timeline


@pytest.mark.few(1)
@pytest.mark.parametrize("lanes", [None, "adversarial"])
@pytest.mark.parametrize("states", STATES)
def test_the_bits_are_those_of_weights_that_stay(states: str, lanes: str | None) -> None:
    expected, none_rounded, _ = train(config(states, tight=False))
    make_lanes = None if lanes is None else adversarial(3)
    found, num_rounded, timeline = train(config(states, tight=True), make_lanes=make_lanes)
    assert_equal(found, expected)
    assert none_rounded == 0
    assert num_rounded > NUM_BLOCKS
    assert timeline.plan_misses == 0
    spans = [span for span in timeline.spans if span.label.startswith("rounding of group")]
    assert len(spans) == num_rounded
    assert {span.lane for span in spans} == {Lane.HOST_UPDATE}


@pytest.mark.few(1)
@pytest.mark.parametrize("overlap", [False, True])
def test_no_race(overlap: bool) -> None:
    chosen = config("masters", tight=True, device_nbytes=8 * NUMEL + ACTIVATIONS_NBYTES, overlap_optimizer=overlap)
    with HappensBefore() as checker:
        _, num_rounded, _ = train(chosen, make_lanes=checker.lanes)
    assert num_rounded > NUM_BLOCKS
    checker.assert_ordered()


@pytest.mark.few(1)
@pytest.mark.parametrize("what", ["copies for roundings", "roundings for what read their slabs"])
def test_each_wait_for_or_of_a_rounding_is_needed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it there is a race, which the checker finds in a single run."""
    wait_step = CopyOrder.wait_step

    def dropped(self: CopyOrder, wait: Wait) -> Any:
        lane = wait.on if what == "copies for roundings" else wait.lane
        return None if lane is Lane.HOST_UPDATE else wait_step(self, wait)

    monkeypatch.setattr(CopyOrder, "wait_step", dropped)
    chosen = config("masters", tight=True, device_nbytes=8 * NUMEL + ACTIVATIONS_NBYTES)
    with HappensBefore() as checker:
        _, num_rounded, _ = train(chosen, make_lanes=checker.lanes)
    assert num_rounded > NUM_BLOCKS
    actors = {frozenset(access.operation.actor for access in (race.first, race.second)) for race in checker.races}
    assert frozenset({Actor.H2D, Actor.HOST_UPDATE}) in actors


def test_where_things_are_not_as_planned_slabs_tell_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan's wait counts then; see [Note: Two ways to order copies]."""
    begin = PlanActions._round

    def inexact(self: PlanActions, chunk: Any) -> None:
        self._order.is_exact = False
        begin(self, chunk)

    monkeypatch.setattr(PlanActions, "_round", inexact)
    chosen = config("masters", tight=True, device_nbytes=8 * NUMEL + ACTIVATIONS_NBYTES)
    with HappensBefore() as checker:
        _, num_rounded, _ = train(chosen, make_lanes=checker.lanes)
    assert num_rounded > NUM_BLOCKS
    checker.assert_ordered()


def test_a_user_writes_weights_between_steps() -> None:
    """Master weights follow, and what is rounded next has them."""

    def run(*, tight: bool) -> list[float]:
        with chunkmem.ChunkManager(config("masters", tight=tight)) as manager:
            ours = Twin(manager, build)
            losses = [ours.step(features(seed, shape=BATCH)) for seed in range(4)]
            with manager.gather(ours.model[3]), torch.no_grad():
                ours.model[3][0].weight.mul_(0.5)
            losses += [ours.step(features(seed, shape=BATCH)) for seed in range(4, 8)]
            ours.model[5][0].weight.data.add_(0.25)
            return losses + [ours.step(features(seed, shape=BATCH)) for seed in range(8, 10)]

    assert run(tight=True) == run(tight=False)
