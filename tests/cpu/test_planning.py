"""Plans that become better while training goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import chunkmem
from chunkmem.data.trace import Trace
from chunkmem.plan.machine import Machine, host_links
from chunkmem.plan.model import Plan
from chunkmem.plan.planner import make_plan
from chunkmem.steps import cached_plan, planning
from chunkmem.steps.planning import StepPlanner
from tests.helpers.audit import audit
from tests.helpers.twins import cpu_only

WIDTH, LAYERS, STEPS = 16, 8, 50
CHUNK_NUMEL = WIDTH * WIDTH + WIDTH
WORK = 1
"""A step: one candidate."""


class SlowStepPlanner(StepPlanner):
    """Counts the steps that continue the search."""

    def __init__(self, trace: Trace, machine: Machine, **options: Any) -> None:
        super().__init__(trace, machine, **options)
        self.num_improved = 0

    def improve(self) -> None:
        self.num_improved += not self.is_done
        super().improve()


def train(manager: chunkmem.ChunkManager | None, plans: list[Plan]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    make = lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))  # noqa: E731
    if manager is None:
        model = make()
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(list(model.parameters())[:LAYERS], fused=True)
    else:
        with manager.init():
            model = make()
        optimizer = chunkmem.AdamW(list(model.parameters())[:LAYERS], manager=manager)
    for seed in range(STEPS):
        model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if manager is not None and seed > 0:
            audit(manager)
            timeline = manager.timeline()
            assert timeline is not None
            assert timeline.plan_misses == 0
            assert manager.plan is not None
            plans.append(manager.plan)
    return [param.detach().clone() for param in model.parameters()]


@cpu_only
def test_a_plan_is_followed_while_a_better_one_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first plan is Belady's with no room set aside; better ones come in later steps, until all are tried.

    Half of the layers have no optimizer, so their gradients accumulate for ever: what is evicted has to be written.
    """
    planners: list[SlowStepPlanner] = []

    def make_planner(trace: Trace, machine: Machine, **options: Any) -> SlowStepPlanner:
        planners.append(SlowStepPlanner(trace, machine, **options))
        return planners[-1]

    monkeypatch.setattr(planning, "WORK_A_STEP", WORK)
    monkeypatch.setattr(cached_plan, "StepPlanner", make_planner)
    monkeypatch.setattr(cached_plan, "_MAX_REFINEMENTS", 1)  # further ones come with noise, and begin the search again
    values = {"memory": {"device": 24 * CHUNK_NUMEL, "host": 1 << 22}, "default_chunk_size": CHUNK_NUMEL}
    plans: list[Plan] = []
    slow = Machine(1, 1, host_links(h2d_Bps=1e7, d2h_Bps=1e7))
    with chunkmem.ChunkManager(chunkmem.Config.from_dict(values), machine=slow) as manager:
        found = train(manager, plans)
        assert manager.trace is not None
        assert manager.plan is not None
        assert planners[-1].is_done
        entry = manager.runtime.controller.known.training
        assert entry is not None
        assert entry.has_measured_times
        assert 5 <= planners[-1].num_improved <= 40
        assert manager.plan.actions == make_plan(manager.trace, manager.plan.machine).actions
    assert plans[0].name == "belady, 0 set aside"
    assert plans[-1].actions != plans[0].actions
    for ours, plain in zip(found, train(None, []), strict=True):
        assert torch.equal(ours, plain)
