"""Which steps are recorded, which follow a plan, and what happens when one goes another way."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chunkmem
from chunkmem.data.trace import Kind, Mode, Trace
from chunkmem.plan.machine import Machine, host_links
from chunkmem.plan.timeline import Timeline
from chunkmem.runtime.step_log import StepLog
from chunkmem.steps import planning
from tests.helpers.audit import assert_as_predicted, audit
from tests.helpers.preloaded import WORK_IN_TRAINING

WIDTH, NUM_BLOCKS = 32, 6
PARAM_NBYTES = 4 * (WIDTH * WIDTH + WIDTH)
"""Of a block."""
SLAB_NUMEL = WIDTH * WIDTH + WIDTH
FAST = Machine(device_nbytes=0, host_nbytes=0, links=host_links(h2d_Bps=1e10, d2h_Bps=1e10))


class Blocks(nn.Module):
    """Blocks in a row; `detour` leaves some out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BLOCKS))
        self.detour = False

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            if not (self.detour and index in (2, 3)):
                x = torch.tanh(block(x))
        return x


class Training:
    """A model in plain PyTorch or in chunks, trained step by step."""

    def __init__(self, manager: chunkmem.ChunkManager | None) -> None:
        torch.manual_seed(0)
        self.manager = manager
        with nullcontext() if manager is None else manager.init():
            self.model = Blocks()
        params: Any = self.model.parameters()
        if manager is None:
            self.optimizer: Any = torch.optim.AdamW(params, lr=1e-2, fused=True)
        else:
            self.optimizer = chunkmem.AdamW(params, manager=manager, lr=1e-2)
        self.seed = 0
        self.losses: list[float] = []

    def batch(self) -> Tensor:
        self.seed += 1
        return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(self.seed))

    def step(self) -> None:
        loss = self.model(self.batch()).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        if self.manager is not None:
            audit(self.manager)

    @torch.no_grad()
    def evaluate(self) -> None:
        self.losses.append(self.model(self.batch()).square().mean().item())

    def plan_misses(self) -> int:
        assert self.manager is not None
        timeline = self.manager.timeline()
        assert timeline is not None
        return timeline.plan_misses


def manager_with(num_chunks: float, *, machine: Machine = FAST, **options: Any) -> chunkmem.ChunkManager:
    """A manager with room for so many chunks on DEVICE."""
    values = {
        "memory": {"device": int(num_chunks * PARAM_NBYTES), "host": 16 << 20},
        "default_chunk_size": SLAB_NUMEL,
        **options,
    }
    return chunkmem.ChunkManager(chunkmem.Config.from_dict(values), machine=machine)


def same(num_chunks: float, scenario: Any) -> Training:
    """Run a scenario in plain PyTorch and in chunks and compare the losses; return the training in chunks."""
    plain = Training(None)
    scenario(plain)
    manager = manager_with(num_chunks)
    chunked = Training(manager)
    scenario(chunked)
    assert chunked.losses == plain.losses
    state = manager.state_dict()
    assert all(torch.equal(state[key], value) for key, value in plain.model.state_dict().items())
    return chunked


def test_the_first_step_is_recorded_and_the_second_follows() -> None:
    with manager_with(4) as manager:
        training = Training(manager)
        assert manager.trace is None
        training.step()
        first = manager.timeline()
        assert first is not None
        assert first.python_s is None  # a recorded step is watched, and takes longer
        training.step()
        assert manager.trace is not None
        assert manager.plan is not None
        assert_as_predicted(manager)
        kinds = [moment.kind for moment in manager.trace.moments]
        assert kinds.count(Kind.UPDATE) == kinds.count(Kind.CONSUME) == kinds.count(Kind.CREATE) == NUM_BLOCKS
        assert kinds.count(Kind.HOLD) == kinds.count(Kind.RELEASE) == 2 * NUM_BLOCKS
        assert {m.label for m in manager.trace.moments} >= {
            "blocks.3 forward",
            "blocks.3 backward",
            "update of group 3",
        }
        for _ in range(3):
            training.step()
            assert_as_predicted(manager)


@pytest.mark.parametrize("num_chunks", [3, 5, 8])
def test_clipping_follows_the_plan(num_chunks: float) -> None:
    """A gradient may be on both tiers when it is scaled: both stay what the plan takes them for."""
    with manager_with(num_chunks, gradient_clipping=0.01) as manager:
        training = Training(manager)
        training.step()
        for _ in range(4):
            training.step()
            assert_as_predicted(manager)


def test_gradients_set_to_zero_follow_the_plan_too() -> None:
    with manager_with(3) as manager:
        training = Training(manager)
        for _ in range(4):
            training.model(training.batch()).square().mean().backward()
            training.optimizer.zero_grad(set_to_none=False)
            training.optimizer.step()
            training.optimizer.zero_grad()
        assert_as_predicted(manager)


def test_plans_are_made_from_the_shortest_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded, followed, followed faster, followed slower by accident; what comes later is not asked for."""
    moments_s = iter([3.0, 1.0, 0.25, 5.0, 0.01, 0.01])
    durations = StepLog.durations

    def scripted(step_log: StepLog) -> dict[int, float]:
        return dict.fromkeys(durations(step_log), next(moments_s))

    monkeypatch.setattr(StepLog, "durations", scripted)
    monkeypatch.setattr(planning, "WORK_A_STEP", WORK_IN_TRAINING)
    with manager_with(4) as manager:
        training = Training(manager)
        training.step()
        seen, settled = [], []
        for _ in range(6):
            training.step()  # which learns from the step before
            assert manager.trace is not None
            seen.append(manager.trace.compute_s / len(manager.trace.moments))
            entry = manager.runtime.controller.known.training
            assert entry is not None
            settled.append(entry.has_measured_times and entry._planner is not None and entry._planner.is_done)
    assert seen == [3.0, 1.0, 0.25, 0.25, 0.25, 0.25]
    assert settled == [False, False, False, True, True, True]


def test_what_is_recorded_after_an_evaluation_is_the_training(tmp_path: Path) -> None:
    with manager_with(4) as manager:
        training = Training(manager)
        training.step()
        training.step()
        happened = manager.timeline()
        training.evaluate()
        manager.record(tmp_path)
    written = Timeline.load(tmp_path / "timeline.json")
    assert happened is not None
    assert written.moved_nbytes == happened.moved_nbytes
    assert len(written.device_nbytes) == len(Trace.load(tmp_path / "trace.json").moments)


def test_evaluations_have_a_plan_of_their_own() -> None:
    def scenario(training: Training) -> None:
        for _ in range(3):
            training.step()
            for _ in range(3):
                training.evaluate()
                if training.manager is not None and training.seed > 6:
                    assert training.plan_misses() == 0
        training.step()
        training.step()

    training = same(4, scenario)
    assert training.manager is not None
    assert training.plan_misses() == 0
    evaluation = training.manager.runtime.controller.known.kinds[Mode.EVAL].last
    assert evaluation is not None
    assert evaluation.trace is not None
    assert evaluation.plan is not None
    assert {moment.kind for moment in evaluation.trace.moments} == {Kind.HOLD, Kind.RELEASE}
    assert_as_predicted(training.manager)


@pytest.mark.parametrize("hybrid", [True, False])
def test_where_everything_fits_evaluations_move_no_more_than_weights_to_the_device(hybrid: bool) -> None:
    """And those only if HOST has made new ones, so that the next step would have fetched them."""
    with manager_with(8 * NUM_BLOCKS, optimizer={"params": {"use_hybrid_adam": hybrid}}) as manager:
        training = Training(manager)
        for _ in range(3):
            training.step()
        training.evaluate()
        training.step()
        moved = []
        for _ in range(3):
            before = manager.memory().moved
            training.evaluate()
            after = manager.memory().moved
            moved.append((after.h2d_nbytes - before.h2d_nbytes, after.d2h_nbytes - before.d2h_nbytes))
            training.step()
            assert training.plan_misses() == 0
        assert all(d2h == 0 for _, d2h in moved)
        assert all(h2d == 0 if hybrid else h2d <= NUM_BLOCKS * PARAM_NBYTES for h2d, _ in moved)


def test_a_step_that_leaves_modules_out_follows_its_plan_without_them() -> None:
    def scenario(training: Training) -> None:
        for index in range(6):
            training.model.detour = index == 3
            training.step()
            if training.manager is not None and index > 1:
                assert training.plan_misses() == 0

    training = same(4, scenario)
    assert training.manager is not None
    assert_as_predicted(training.manager)


def test_steps_that_go_on_differently_are_recorded_anew() -> None:
    def scenario(training: Training) -> None:
        for index in range(9):
            training.model.detour = index >= 3
            training.step()

    training = same(4, scenario)
    assert training.manager is not None
    assert training.plan_misses() == 0
    assert training.manager.trace is not None
    kinds = [moment.kind for moment in training.manager.trace.moments]
    assert kinds.count(Kind.UPDATE) == NUM_BLOCKS - 2
    assert_as_predicted(training.manager)


def test_reading_and_loading_between_steps_is_allowed() -> None:
    def scenario(training: Training) -> None:
        for index in range(6):
            training.step()
            manager = training.manager
            if index == 2:
                state = training.model.state_dict() if manager is None else manager.state_dict()
                state = {key: value.clone() * 0.5 for key, value in state.items()}
                training.model.load_state_dict(state)
            if index == 3:
                with nullcontext() if manager is None else manager.gather(training.model.blocks[1]), torch.no_grad():
                    training.model.blocks[1].weight.mul_(2)

    training = same(4, scenario)
    assert training.plan_misses() == 0


def test_weights_changed_in_the_middle_are_kept() -> None:
    """`no_grad` writes to weights that are present: what the plan wanted to drop is now the newest."""

    def scenario(training: Training) -> None:
        for _ in range(5):
            out = training.model.blocks[0](training.batch())
            with torch.no_grad():
                training.model.blocks[0].bias.add_(0.25)
            training.losses.append(out.sum().item())
            training.step()

    same(6, scenario)


def test_without_async_move_it_is_the_same_plan() -> None:
    moved = []
    losses = []
    for async_move in (True, False):
        with manager_with(4, client={"opts": {"with_async_move": async_move}}) as manager:
            training = Training(manager)
            for _ in range(4):
                training.step()
                if manager.plan is not None:
                    assert_as_predicted(manager)
            timeline = manager.timeline()
            assert timeline is not None
            moved.append(dict(timeline.moved_nbytes))
            losses.append(training.losses)
    assert moved[0] == moved[1]
    assert losses[0] == losses[1]


def test_a_second_model_is_recorded_too() -> None:
    with manager_with(6) as manager:
        training = Training(manager)
        training.step()
        training.step()
        assert manager.plan is not None
        with manager.init():
            other = nn.Linear(WIDTH, WIDTH)
        assert manager.plan is None
        optimizer = chunkmem.AdamW(other.parameters(), manager=manager, lr=1e-2)
        for _ in range(3):
            training.step()
        assert training.plan_misses() == 0
        other(training.batch()).sum().backward()
        optimizer.step()
        audit(manager)


def test_larger_activations_than_traced_are_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with manager_with(6) as manager:
        training = Training(manager)
        for _ in range(3):
            training.step()
        assert manager.trace is not None
        before = [moment.non_model_peak_nbytes for moment in manager.trace.moments]
        monkeypatch.setattr(manager.runtime.tiers, "overshoot_nbytes", lambda: 4096)
        training.step()
        monkeypatch.undo()
        after = [moment.non_model_peak_nbytes for moment in manager.trace.moments]
        assert after == [nbytes + 4096 for nbytes in before]
        training.step()
        assert manager.plan is not None
        assert_as_predicted(manager)


def test_activations_that_leave_no_room_for_a_plan_do_not_end_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step raised a CapacityError, after steps that had all fit."""
    plain = Training(None)
    machine = replace(FAST, charges_non_model=True)
    with manager_with(6, machine=machine) as manager:
        training = Training(manager)
        for _ in range(3):
            training.step()
        monkeypatch.setattr(manager.runtime.tiers, "overshoot_nbytes", lambda: 6 * PARAM_NBYTES)
        training.step()
        monkeypatch.undo()
        with pytest.warns(UserWarning, match=r"no plan is followed.*took 24.75 KiB more.*: .*raise memory.device to"):
            training.step()
        for _ in range(3):
            training.step()
        assert manager.plan is None
    for _ in range(8):
        plain.step()
    assert training.losses == plain.losses


def test_an_interrupted_step_leaves_nothing_behind() -> None:
    with manager_with(4) as manager:
        training = Training(manager)
        for _ in range(3):
            training.step()
        handle = training.model.blocks[3].register_forward_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            training.step()
        handle.remove()
        training.step()
        training.step()
        assert training.plan_misses() == 0
        assert_as_predicted(manager)
