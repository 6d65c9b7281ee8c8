"""torch.profiler and TensorBoard around training in chunks: nothing is disturbed, and what they show is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

import chunkmem
from tests.helpers.twins import Blocks, Twin, assert_equal, config, cpu_only, features

CAP_NBYTES = 5_000
"""Chunks come and go in every step."""


@cpu_only
@pytest.mark.parametrize(
    "with_stack", [False, pytest.param(True, marks=pytest.mark.full)], ids=["without stacks", "with stacks"]
)
def test_a_profiled_loop_has_the_same_numbers_and_plans(with_stack: bool, tmp_path: Path) -> None:
    """As in torch's tutorials: with a schedule, shapes, memory, and a trace for TensorBoard."""
    plain = Twin(None, Blocks)
    expected = plain.steps(*range(8))
    with chunkmem.ChunkManager(config(CAP_NBYTES)) as manager:
        twin = Twin(manager, Blocks)
        losses, misses = [], []
        with profile(
            activities=[ProfilerActivity.CPU],
            schedule=schedule(wait=1, warmup=1, active=3, repeat=2),
            on_trace_ready=tensorboard_trace_handler(str(tmp_path)),
            record_shapes=True,
            profile_memory=True,
            with_stack=with_stack,
            acc_events=True,
        ) as profiler:
            for seed in range(8):
                losses.append(twin.step(features(seed)))
                timeline = manager.timeline()
                misses.append(None if manager.plan is None or timeline is None else timeline.plan_misses)
                profiler.step()
        assert losses == expected
        assert misses[4:] == [0] * 4
        assert_equal(twin.left(), plain.left())
        names = {event.key for event in profiler.key_averages()}
        assert {"aten::addmm", "aten::tanh"} <= names
        traces = list(tmp_path.glob("*.pt.trace.json"))
        assert traces
        for trace in traces:
            assert json.loads(trace.read_text())["traceEvents"]


@cpu_only
def test_weights_and_gradients_are_drawn_by_tensorboard(tmp_path: Path) -> None:
    """`add_histogram(name, param)` and of `param.grad`, between backward and step."""
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    def train(manager: chunkmem.ChunkManager | None, folder: Path) -> Any:
        twin = Twin(manager, Blocks)
        with SummaryWriter(str(folder)) as writer:
            for step in range(6):
                loss = twin.loss(features(step))
                loss.backward()
                writer.add_scalar("loss", loss, step)
                for name, param in twin.model.named_parameters():
                    writer.add_histogram(name, param, step)
                    writer.add_histogram(f"{name}.grad", param.grad, step)
                twin.update()
        return histograms_in(folder)

    with chunkmem.ChunkManager(config(CAP_NBYTES)) as manager:
        assert train(manager, tmp_path / "ours") == train(None, tmp_path / "plain")


def histograms_in(folder: Path) -> list[Any]:
    """What TensorBoard reads."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    tags = found.Tags()["histograms"]
    assert len(tags) > 20
    return [(tag, [event.histogram_value for event in found.Histograms(tag)]) for tag in tags]


def test_a_users_ranges_are_around_our_copies() -> None:
    """`record_function` around a step counts what it contains, copies between tiers included."""
    with chunkmem.ChunkManager(config(1 << 20)) as manager:
        twin = Twin(manager, Blocks)
        twin.steps(0, 1, 2)
        with profile(activities=[ProfilerActivity.CPU]) as profiler, torch.profiler.record_function("one step"):
            twin.step(features(3))
        ranges = [event for event in profiler.events() if event.name == "one step"]
        assert len(ranges) == 1
        assert any(event.name == "aten::addmm" for event in profiler.events())
