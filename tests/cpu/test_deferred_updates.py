"""Updates that `step()` leaves to their lane: they run under the next forward, in the order in which it needs them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import chunkmem
from chunkmem.data.types import Role, Tier
from chunkmem.plan.model import Lane
from chunkmem.runtime.device import ComputeDevice
from chunkmem.testing.lanes import AdversarialLanes
from tests.helpers.audit import assert_as_predicted, audit
from tests.helpers.lanes import MakeLanes, lanes_by_name_fixture  # noqa: F401
from tests.helpers.overlapped import WIDTH, Run, assert_alike
from tests.helpers.spread import spread
from tests.helpers.twins import cpu_only

LEARNED = 4
"""Steps until plans are followed and states exist."""
NUM_GROUPS = 5
ONE_GROUP = 1.5 * 3 * 5008 * 4 / (4 << 20)
"""Of HOST: shadow buffers for one of the groups and more."""


class Unhurried(AdversarialLanes):
    """Updates run when something waits for them, and not before."""

    def __init__(self, device: ComputeDevice) -> None:
        super().__init__(0)
        self._eagerness = dict.fromkeys(self._eagerness, 0.0)

    @property
    def num_waiting(self) -> int:
        return len(self._queues[Lane.HOST_UPDATE])


def learned(**keys: Any) -> Run:
    run = Run(overlap=True, **{"undo_log_ratio": ONE_GROUP, **keys})
    for seed in range(LEARNED):
        run.step(seed)
    return run


def plain(**keys: Any) -> Run:
    run = Run(overlap=False, **keys)
    for seed in range(LEARNED):
        run.step(seed)
    return run


def waiting(run: Run) -> int:
    lanes = run.manager.runtime.tiers.lanes
    assert isinstance(lanes, Unhurried)
    return lanes.num_waiting


def test_a_step_does_not_wait_for_them() -> None:
    run = learned(make_lanes=Unhurried)
    run.step(9)
    assert waiting(run) == run.num_left >= 1
    assert run.num_ahead + run.num_left == NUM_GROUPS


def read_weights(run: Run) -> object:
    return run.manager.state_dict()


def read_states(run: Run) -> object:
    return run.optimizer.state_dict()


def read_state(run: Run) -> object:
    return run.optimizer.state[run.model[3].up.weight]["exp_avg"].clone()


def gather(run: Run) -> object:
    with run.manager.gather(run.model[3]):
        return run.model[3].up.weight.detach().clone()


def evaluate(run: Run) -> object:
    with torch.no_grad():
        return run.model(torch.ones(2, WIDTH))


def backward_and_clip(run: Run) -> object:
    run.backward(11)
    return run.optimizer.clip_grad_norm_(1e-3)


def load(run: Run) -> object:
    run.manager.load_state_dict({key: value + 0.125 for key, value in run.manager.state_dict().items()})
    return None


def write(run: Run) -> object:
    with run.manager.gather(run.model[0]), torch.no_grad():
        run.model[0].up.weight[1] += 0.25


def zero(run: Run) -> object:
    return run.optimizer.zero_grad()


READS = (read_weights, read_states, read_state, gather, evaluate, backward_and_clip, load, write, zero)


def flat(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [tensor for each in values for tensor in flat(each)]


@pytest.mark.few(3)
@spread(read=READS, precision=("fp32", "bf16"))
def test_who_reads_waits(read: Callable[[Run], object], precision: str) -> None:
    runs = learned(make_lanes=Unhurried, precision=precision), plain(precision=precision)
    for tier in (Tier.DEVICE, Tier.HOST):
        runs[0].manager.runtime.memory.store.pools[tier].poison = True
    for seed in (9, 10):
        for run in runs:
            run.step(seed)
        # By the times that were measured, a plan may have an update on HOST after some that were left: it waits.
        assert 1 <= waiting(runs[0]) <= runs[0].num_left
        found = [flat(read(run)) for run in runs]
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    for run in runs:
        run.step(20)
    assert_alike(*runs)
    audit(runs[0].manager)


@pytest.mark.few(1)
@cpu_only
@pytest.mark.parametrize("seed", [pytest.param(s, marks=[] if s < 2 else [pytest.mark.full]) for s in range(40)])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_no_order_shows(precision: str, seed: int, lanes_by_name: Callable[..., MakeLanes]) -> None:
    """Of five groups one is updated ahead; in every fourth step gradients are clipped."""
    runs = (
        Run(overlap=True, precision=precision, max_norm=2.0, undo_log_ratio=ONE_GROUP,
            make_lanes=lanes_by_name("adversarial", seed)),
        Run(overlap=False, precision=precision, max_norm=2.0),
    )  # fmt: skip
    for tier in (Tier.DEVICE, Tier.HOST):
        runs[0].manager.runtime.memory.store.pools[tier].poison = True
    num_left = 0
    for step in range(14):
        losses = [run.step(step, factor=30.0 if step % 4 == 3 else 0.1) for run in runs]
        assert losses[0] == losses[1]
        num_left += runs[0].num_left
        if step % 5 == 4:
            audit(runs[0].manager)
    assert num_left > 20
    assert_alike(*runs)
    assert_as_predicted(runs[0].manager)


@cpu_only
def test_those_whose_assumptions_are_wrong_are_left_to_the_lane() -> None:
    """With room for all of them, and gradients that are clipped in each step."""
    run = Run(overlap=True, max_norm=2.0, never_off=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(10):
            run.step(seed, factor=30.0)
    assert run.num_ahead == 0
    assert run.num_left >= 4


def test_one_that_fails_is_said_and_its_chunks_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    run = learned()
    saved = run.manager.state_dict()

    def broken(*args: object, **keys: object) -> None:
        raise MemoryError("no threads left")

    with monkeypatch.context() as patch:
        patch.setattr(run.optimizer.updates.rule, "apply_", broken)
        with pytest.raises(
            chunkmem.TierIOError, match=r"the update of group \d, which step\(\) had left to its lane, has"
        ):
            for seed in (9, 10):
                run.step(seed)
    with pytest.raises(chunkmem.TierIOError, match="is lost"):
        run.manager.state_dict()
    with pytest.raises(chunkmem.TierIOError, match="is lost"):
        run.manager.load_state_dict(saved)


def test_a_manager_that_is_closed_has_finished_them() -> None:
    run = learned(make_lanes=Unhurried)
    run.step(9)
    chunks = run.manager.runtime.memory.store.chunks
    assert any(key.role is Role.PARAM for key in chunks)
    run.manager.close()
    assert waiting(run) == 0
