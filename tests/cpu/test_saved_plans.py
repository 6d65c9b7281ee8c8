"""Traces and plans of an earlier run: taken over where they fit, refused in one sentence where they do not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import chunkmem
from chunkmem.data.errors import CapacityError, PlanError, StateError, TraceError
from chunkmem.data.trace import Trace
from chunkmem.plan.machine import Machine, host_links
from chunkmem.plan.model import Plan
from chunkmem.plan.simulate import simulate
from chunkmem.plan.timeline import Timeline
from tests.helpers.training import VARIANTS, Chunked, Trainer, assert_same, capped, footprint, train_plain
from tests.helpers.zoo import ZOO

CASES = {case.name: case for case in ZOO}
GPT, CNN, PLAIN = CASES["gpt"], CASES["cnn"], VARIANTS[0]
SLOW = Machine(device_nbytes=0, host_nbytes=0, links=host_links(h2d_Bps=1e8, d2h_Bps=1e8))
"""Speeds by hand; the caps are the configuration's."""


def manager_for(cap_nbytes: int, **options: object) -> chunkmem.ChunkManager:
    return chunkmem.ChunkManager(capped(GPT, cap_nbytes), **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def cap_nbytes() -> int:
    sizes = footprint(GPT, PLAIN)
    return max(sizes.required_nbytes, sizes.param_nbytes // 2)


@pytest.fixture(scope="module")
def recorded(cap_nbytes: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory."""
    folder = tmp_path_factory.mktemp("runs") / "deep" / "first"
    with manager_for(cap_nbytes, machine=SLOW) as manager:
        Trainer(GPT, PLAIN, Chunked(manager)).run(3)
        manager.record(folder)
    return folder


def test_a_run_directory_has_trace_plan_and_timeline(recorded: Path) -> None:
    trace, plan = Trace.load(recorded / "trace.json"), Plan.load(recorded / "plan.json")
    timeline = Timeline.load(recorded / "timeline.json")
    assert sorted(path.name for path in recorded.iterdir()) == ["plan.json", "timeline.json", "trace.json"]
    predicted = simulate(plan, trace)
    assert predicted.moved_nbytes == timeline.moved_nbytes
    assert predicted.peak_nbytes == timeline.peak_nbytes
    assert timeline.plan_misses == 0
    assert str(timeline).startswith("moved ")


def test_a_saved_trace_and_plan_spare_the_recording(recorded: Path, cap_nbytes: int) -> None:
    with manager_for(cap_nbytes, machine=SLOW) as manager:
        trainer = Trainer(GPT, PLAIN, Chunked(manager))
        manager.trace = Trace.load(recorded / "trace.json")
        manager.plan = plan = Plan.load(recorded / "plan.json")
        outcome = trainer.run()
        assert manager.plan == plan
        assert_same(outcome, train_plain(GPT, PLAIN))


def test_a_saved_trace_alone_is_planned_for(recorded: Path, cap_nbytes: int) -> None:
    with manager_for(2 * cap_nbytes) as manager:
        trainer = Trainer(GPT, PLAIN, Chunked(manager))
        manager.trace = trace = Trace.load(recorded / "trace.json")
        outcome = trainer.run()
        assert manager.trace == trace
        assert_same(outcome, train_plain(GPT, PLAIN))


def test_a_moment_that_cannot_fit_is_refused_before_the_step(recorded: Path) -> None:
    trace = Trace.load(recorded / "trace.json")
    with manager_for(GPT.slab_nbytes) as manager:
        trainer = Trainer(GPT, PLAIN, Chunked(manager))
        manager.trace = trace
        with pytest.raises(CapacityError, match=r"moment \d+ \(.*\): .* of chunks are in use at once") as caught:
            trainer.loss()
        assert manager.memory().moved.h2d_nbytes == 0
    needed = caught.value.needed_nbytes
    assert needed == footprint(GPT, PLAIN).required_nbytes
    with manager_for(needed) as manager:
        trainer = Trainer(GPT, PLAIN, Chunked(manager))
        manager.trace = trace
        assert_same(trainer.run(), train_plain(GPT, PLAIN))


def test_a_trace_of_another_model_is_refused(recorded: Path) -> None:
    with chunkmem.ChunkManager(capped(CNN, 1 << 20)) as manager:
        Trainer(CNN, PLAIN, Chunked(manager))
        with pytest.raises(TraceError, match=r"layout \w+, and this manager's is \w+; build the same model"):
            manager.trace = Trace.load(recorded / "trace.json")
        assert manager.trace is None


def test_a_trace_of_another_chunk_size_is_refused(recorded: Path, cap_nbytes: int) -> None:
    settings = capped(GPT, cap_nbytes).to_dict()
    settings["default_chunk_size"] = GPT.chunk_numel * 2
    with chunkmem.ChunkManager(chunkmem.Config.from_dict(settings)) as manager:
        Trainer(GPT, PLAIN, Chunked(manager))
        with pytest.raises(TraceError, match="same default_chunk_size"):
            manager.trace = Trace.load(recorded / "trace.json")


def test_plans_for_something_else_are_refused(recorded: Path, cap_nbytes: int) -> None:
    trace, plan = Trace.load(recorded / "trace.json"), Plan.load(recorded / "plan.json")
    with manager_for(cap_nbytes + 4096, machine=SLOW) as manager:
        Trainer(GPT, PLAIN, Chunked(manager))
        with pytest.raises(PlanError, match=r"set manager\.trace first"):
            manager.plan = plan
        manager.trace = trace
        with pytest.raises(
            PlanError, match=rf"memory\.device of {cap_nbytes} bytes, and here it is {cap_nbytes + 4096}"
        ):
            manager.plan = plan
        own = replace(plan.machine, device_nbytes=cap_nbytes + 4096)
        with pytest.raises(PlanError, match="machine of another kind"):
            manager.plan = replace(plan, machine=replace(own, one_processor=False))
        with pytest.raises(PlanError, match=r"was made from trace other, and this manager's is \w+"):
            manager.plan = replace(plan, machine=own, trace_digest="other")
        with pytest.raises(PlanError, match="moment"):
            manager.plan = replace(plan, machine=own, actions=((),) * len(plan.actions))
        assert manager.plan is None
        manager.plan = replace(plan, machine=own)
        assert manager.plan is not None


def test_a_link_that_never_delivers_is_refused() -> None:
    with pytest.raises(PlanError, match=r"the link from HOST to DEVICE is 0\.0 bytes/s, and nothing could ever arrive"):
        Machine(device_nbytes=1, host_nbytes=1, links=host_links(h2d_Bps=0.0, d2h_Bps=1e9))


def test_nothing_is_recorded_before_there_is_a_plan(tmp_path: Path, cap_nbytes: int) -> None:
    with manager_for(cap_nbytes) as manager:
        with pytest.raises(StateError, match="nothing to record yet"):
            manager.record(tmp_path / "run")
        assert manager.timeline() is None
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path, cap_nbytes: int) -> None:
    (tmp_path / "file").write_text("mine")
    with manager_for(cap_nbytes) as manager:
        Trainer(GPT, PLAIN, Chunked(manager)).run(2)
        with pytest.raises(StateError, match="cannot be made"):
            manager.record(tmp_path / "file" / "run")
    assert (tmp_path / "file").read_text() == "mine"


def test_moments_and_copies_have_names_in_a_profile(cap_nbytes: int) -> None:
    with manager_for(cap_nbytes) as manager:
        trainer = Trainer(GPT, PLAIN, Chunked(manager))
        trainer.run(2)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            trainer.step()
    names = {event.key for event in profile.key_averages()}
    assert any(name.startswith("chunkmem h2d param chunk") for name in names), sorted(names)[:50]
    assert any(name.endswith(" backward") and name.startswith("chunkmem ") for name in names)
    assert "chunkmem update of group 0" in names


def test_a_sampling_thread_only_runs_while_a_step_is_recorded(cap_nbytes: int) -> None:
    import threading

    def samplers() -> list[str]:
        return [thread.name for thread in threading.enumerate() if "sampler" in thread.name]

    with manager_for(cap_nbytes) as manager:
        trainer = Trainer(GPT, PLAIN, Chunked(manager))
        loss = trainer.loss()
        assert len(samplers()) == 1
        manager.backward(loss)
        trainer.optimizer.step()
        assert samplers() == []
        trainer.optimizer.zero_grad()
        trainer.step()
        assert samplers() == []
        assert manager.trace is not None
        assert max(moment.sampled_peak_nbytes for moment in manager.trace.moments) > 0
        assert max(moment.non_model_peak_nbytes for moment in manager.trace.moments) > 0
    settings = capped(GPT, cap_nbytes).to_dict()
    settings["client"]["mem_tracer"]["use_async_mem_monitor"] = False
    with chunkmem.ChunkManager(chunkmem.Config.from_dict(settings)) as manager:
        trainer = Trainer(GPT, PLAIN, Chunked(manager))
        trainer.loss()
        assert samplers() == []
