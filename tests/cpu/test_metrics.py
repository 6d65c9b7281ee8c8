"""`manager.metrics()`: plain numbers of the step that is over, and what they are equal to."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import chunkmem
from chunkmem.data.types import Tier
from chunkmem.plan.simulate import simulate
from tests.helpers.ranks import Team
from tests.helpers.twins import CHUNK_NUMEL, WIDTH, Blocks, cpu_only

SLAB = 4 * CHUNK_NUMEL
MOVED = ("h2d_bytes", "d2h_bytes")


def manager_of(**keys: Any) -> chunkmem.ChunkManager:
    memory = {"device": 6 * SLAB, "host": 1 << 20} | keys.pop("memory", {})
    return chunkmem.ChunkManager(
        chunkmem.Config.from_dict({"memory": memory, "default_chunk_size": CHUNK_NUMEL, **keys})
    )


class Training:
    """A small model, trained step by step."""

    def __init__(self, manager: chunkmem.ChunkManager) -> None:
        torch.manual_seed(0)
        self.manager = manager
        with manager.init():
            self.model = Blocks()
        self.optimizer = chunkmem.AdamW(self.model.parameters(), manager=manager)

    def step(self, scale: float = 1.0) -> dict[str, float]:
        loss = self.model(torch.randn(4, WIDTH)).square().mean()
        self.manager.backward(loss * scale)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.manager.metrics()

    def evaluate(self) -> None:
        with torch.no_grad():
            self.model(torch.randn(4, WIDTH))


def of(metrics: dict[str, float], section: str) -> set[str]:
    return {name for name in metrics if name.startswith(f"{section}/")}


def test_metrics_are_plain_numbers_and_their_names_stay() -> None:
    with manager_of() as manager:
        training = Training(manager)
        before = manager.metrics()
        steps = [training.step() for _ in range(5)]
        assert not of(before, "step") | of(before, "plan")
        assert of(steps[0], "step")
        assert not of(steps[0], "plan"), "it was recorded, and nothing is planned yet"
        assert all(of(each, "plan") for each in steps[1:])
        assert steps[1].keys() == steps[4].keys()
        for each in (before, *steps):
            assert {type(value) for value in each.values()} <= {int, float}
            assert all(math.isfinite(value) for value in each.values())
            json.dumps(each, allow_nan=False)


@cpu_only
def test_they_are_what_memory_timeline_and_plan_say() -> None:
    with manager_of() as manager:
        training = Training(manager)
        for _ in range(4):
            found = training.step()
        memory, timeline, plan, trace = manager.memory(), manager.timeline(), manager.plan, manager.trace
        assert timeline is not None
        assert plan is not None
        assert trace is not None
        assert found["memory/device_peak_bytes"] == memory.device.peak_nbytes
        assert found["memory/device_step_peak_bytes"] == timeline.peak_nbytes[Tier.DEVICE] <= 6 * SLAB
        assert found["memory/host_bytes"] == memory.host.now_nbytes
        assert found["step/seconds"] == timeline.step_s
        assert found["plan/seconds"] == simulate(plan, trace).step_s
        assert found["total/h2d_bytes"] == memory.moved.h2d_nbytes


@cpu_only
def test_bytes_of_a_step_are_what_the_totals_grow_by() -> None:
    with manager_of() as manager:
        training = Training(manager)
        for _ in range(8):  # when a plan is followed the first time, chunks go where it has them
            before = training.step()
        for _ in range(3):
            found = training.step()
            assert found["step/plan_misses"] == 0
            for name in MOVED:
                assert found[f"total/{name}"] - before[f"total/{name}"] == found[f"step/{name}"] > 0
            before = found


def test_an_evaluation_does_not_hide_the_last_training_step() -> None:
    with manager_of() as manager:
        training = Training(manager)
        training.step()
        found = training.step()
        training.evaluate()
        after = manager.metrics()
        assert {name: after[name] for name in of(after, "step")} == {name: found[name] for name in of(found, "step")}


def test_a_step_that_nobody_watched_has_no_numbers_of_an_earlier_one() -> None:
    with manager_of() as manager:
        training = Training(manager)
        assert of(training.step(), "step")
        manager.runtime.controller.forget()
        manager.runtime.controller.may_record = False  # as in the first steps over ranks
        assert not of(training.step(), "step")
        manager.runtime.controller.may_record = True
        assert of(training.step(), "step")


def test_disk_and_fp16_have_their_own(tmp_path: Path) -> None:
    disk = {"path": str(tmp_path), "capacity": 1 << 20}
    with manager_of(memory={"host": 16 * SLAB, "disk": disk}) as manager:
        training = Training(manager)
        for _ in range(3):
            found = training.step()
        assert found["memory/disk_peak_bytes"] > 0
        assert found["step/disk_read_bytes"] > 0
        assert found["total/disk_write_bytes"] > 0
    with manager_of(precision="fp16") as manager:
        training = Training(manager)
        first, second = training.step(), training.step(scale=math.inf)
        assert (first["fp16/skipped_steps"], second["fp16/skipped_steps"]) == (0, 1)
        assert second["fp16/loss_scale"] == manager.loss_scale


def exchanged_on(rank: int) -> list[float]:
    torch.manual_seed(0)
    with manager_of() as manager:
        training = Training(manager)
        found = [training.step() for _ in range(6)]
        assert not of(found[0], "step"), "the first steps over ranks are neither recorded nor planned"
        assert manager.timeline() is not None
        return [each["step/exchanged_bytes"] for each in found if of(each, "step")]


def test_each_rank_has_its_own() -> None:
    with Team(2) as pair:
        for exchanged in pair.run(exchanged_on):
            assert len(exchanged) >= 3
            assert all(nbytes > 0 for nbytes in exchanged)


@pytest.mark.parametrize("kind", ["ample", "tight"])
def test_they_are_the_timeline_s(kind: str) -> None:
    """Which is not made for them: it has a label for each moment."""
    with manager_of(**({} if kind == "tight" else {"memory": {"device": 1 << 20}})) as manager:
        training = Training(manager)
        for _ in range(6):
            training.step()
            timeline = manager.timeline()
            assert timeline is not None
            assert manager.runtime.controller.timelines.figures() == timeline.figures


@pytest.mark.full
def test_a_plan_is_simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics are asked for after every step."""
    from chunkmem.steps import cached_plan

    calls = []

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return simulate(*arguments)

    with manager_of() as manager:
        training = Training(manager)
        for _ in range(20):
            training.step()
        monkeypatch.setattr(cached_plan, "simulate", counted)
        plans = set()
        for _ in range(4):
            training.step()
            manager.metrics()
            plans.add(id(manager.plan))
        assert len(calls) <= len(plans)
