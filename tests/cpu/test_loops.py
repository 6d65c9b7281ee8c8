"""Training loops whose steps are not all alike: each settles on plans, and has the numbers of plain PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from chunkmem.data.trace import Kind, Mode
from chunkmem.data.types import Role
from chunkmem.plan.merge import phase_of
from chunkmem.plan.model import FETCH
from tests.helpers.audit import assert_as_predicted, audit
from tests.helpers.lanes import adversarial
from tests.helpers.loops import LOOPS, WIDTH, Dropped, Loop, Side, frozen_at_times, mlp, trained
from tests.helpers.spread import spread

SETTLED = 12
"""Steps after which every one follows its plan."""


def run(loop: Loop, side: Side, steps: int) -> list[int | None]:
    """Run so many steps; return the plan misses of each, None where it had no plan."""
    torch.manual_seed(0)
    found: list[int | None] = []
    going = loop(side)
    for _ in range(steps):
        next(going)
        if side.manager is not None:
            audit(side.manager)
            plan_executor = side.manager.runtime.controller.now.plan_executor
            found.append(None if plan_executor is None else plan_executor.step_log.plan_misses)
    return found


@pytest.mark.few(4)
@pytest.mark.parametrize("name", LOOPS)
def test_every_loop_settles_on_plans(name: str) -> None:
    plain, chunked = Side(None), Side(5.5)
    run(LOOPS[name], plain, 24)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan_misses = run(LOOPS[name], chunked, 24)
    assert chunked.losses == plain.losses
    settled = plan_misses[SETTLED:]
    assert settled == [0] * len(settled), plan_misses


LATE = (
    "GAN",
    "max_norm",
    "averages by hand",
    "LayerDrop, shared chunks",
    "experts",
    "second optimizer 1:2",
    "one in three is given up",
)


@pytest.mark.few(1)
@spread(name=LATE, overlap=(False, True), has_disk=(False, True))
def test_settled_loops_wait_for_all_they_have_to(name: str, overlap: bool, has_disk: bool, tmp_path: Path) -> None:
    """Copies and updates overlapped with backward are as late as the waits allow."""
    options = {
        "optimizer": {"params": {"use_hybrid_adam": False}},
        "client": {"opts": {"overlap_optimizer": overlap, "undo_log_ratio": 0.5}},
    }
    plain, chunked = Side(None), Side(5.5, lanes=adversarial(6), disk=tmp_path if has_disk else None, **options)
    run(LOOPS[name], plain, 18)
    run(LOOPS[name], chunked, 18)
    assert chunked.losses == plain.losses


@pytest.mark.parametrize("name", ["LayerDrop", "experts"])
def test_what_forward_has_left_out_is_not_fetched_for_backward(name: str) -> None:
    side, num_fetched = Side(4.5), 0
    going = LOOPS[name](side)
    for _ in range(24):
        next(going)
        assert side.manager is not None
        executor = side.manager.runtime.controller.now.plan_executor
        if executor is None or executor.step_log.plan_misses:  # served on demand
            continue
        moments = executor.trace.moments
        came = set(executor.left_out.come(len(moments)))
        for lane, begun, chunk, _ in executor.step_log.copies:
            if lane is FETCH and chunk.id.role is Role.PARAM:
                holds = [
                    at for at, moment in enumerate(moments) if (moment.kind, moment.chunk) == (Kind.HOLD, chunk.id)
                ]
                before, after = ([at for at in holds if (at >= begun) is late] for late in (False, True))
                if before and after and phase_of(moments[after[0]].label) == "backward":
                    num_fetched += 1
                    assert before[-1] in came, f"{chunk.label} is fetched for a backward that does not come"
    assert num_fetched


class Shuffled(Dropped):
    """All blocks, in another order each time."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.random.sample(list(self.blocks), len(self.blocks)):
            x = x + torch.tanh(block(x))
        return x


def test_a_loop_without_any_order_is_told_once_and_computes_what_it_should() -> None:
    plain, chunked = Side(None), Side(5.5)
    shuffled = trained(lambda _: Shuffled(0.0, [nn.Linear(WIDTH, WIDTH) for _ in range(6)]))
    run(shuffled, plain, 24)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan_misses = run(shuffled, chunked, 24)
    assert chunked.losses == plain.losses
    assert [warning.message.args[0].partition(":")[0] for warning in caught] == [
        "6 of the last 6 train steps missed their plans, as none of them did what one before had done"
    ]
    assert plan_misses.count(None) <= 8, "most steps are not recorded"


class Growing(Shuffled):
    """From its 20th step on it has a further block."""

    def forward(self, x: Tensor) -> Tensor:
        self.num_steps = getattr(self, "num_steps", 0) + 1
        return super().forward(x) if self.num_steps < 20 else super().forward(x + self.late(x))


def test_a_loop_without_any_order_needs_no_plans_while_everything_fits() -> None:
    """Such as experts that are chosen again in each step: each was recorded and planned again, for nothing."""

    def build(_side: Side) -> nn.Module:
        model = Growing(0.0, [nn.Linear(WIDTH, WIDTH) for _ in range(6)])
        model.late = nn.Linear(WIDTH, WIDTH)
        return model

    plain, chunked = Side(None), Side(60)
    run(trained(build), plain, 24)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        served = run(trained(build), chunked, 24)
    assert chunked.losses == plain.losses
    assert served[SETTLED:20] == [None] * 8, "served on demand"
    assert chunked.manager is not None
    kinds = chunked.manager.runtime.controller.known.kinds[Mode.TRAIN]
    assert len(kinds.traces) <= 4, "steps that move nothing are not recorded"
    assert any(misses is not None for misses in served[20:]), "the block that was on HOST had to be fetched"


def six_models(side: Side) -> Iterator[None]:
    with side.building():
        models = [mlp(2) for _ in range(6)]
    optimizers = [side.optimizer(model) for model in models]
    while True:
        for model, optimizer in zip(models, optimizers, strict=True):
            side.step(model(side.batch()).square().mean(), optimizer)
            yield


def test_kinds_beyond_the_fourth_are_recorded_when_they_come_again() -> None:
    plain, chunked = Side(None), Side(5.5)
    run(six_models, plain, 24)
    plan_misses = run(six_models, chunked, 24)
    assert chunked.losses == plain.losses
    assert plan_misses[12:] == [0] * 12


def test_trace_and_plan_are_those_of_the_last_step() -> None:
    side = Side(5.5)
    going = frozen_at_times(side)
    for _ in range(8):
        next(going)
    assert side.manager is not None
    for _ in range(4):
        next(going)
        assert_as_predicted(side.manager)


@pytest.mark.parametrize("name", ["GAN", "frozen at times", "evaluations"])
def test_where_everything_fits_kinds_that_take_turns_fetch_nothing(name: str) -> None:
    """The plan of one leaves on DEVICE what only the other one uses."""
    side = Side(60)
    going = LOOPS[name](side)
    for _ in range(SETTLED):
        next(going)
    assert side.manager is not None
    before = side.manager.memory().moved.h2d_nbytes
    for _ in range(8):
        next(going)
    assert side.manager.memory().moved.h2d_nbytes == before
