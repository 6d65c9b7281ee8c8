"""The picture of a pipeline's schedule: as much of each colour as there is time."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

import pytest

from chunkmem.plan.pipeline_schedule import PipelineStep, Schedule, StageTimes, simulate_pipeline
from chunkmem.report.schedule import schedule_picture

FORWARD, BACKWARD, BUBBLE = (0x56, 0xB4, 0xE9), (0xE6, 0x9F, 0x00), (0xEE,) * 3


def step(schedule: Schedule, stages: int = 4, devices: int = 4) -> PipelineStep:
    return simulate_pipeline(schedule, [StageTimes(1e-3, 2e-3)] * stages, num_devices=devices, num_micro_batches=8)


def pixels(steps: Sequence[PipelineStep]) -> dict[tuple[int, int, int], int]:
    """How many there are of the colours that mean something, in boxes and in the legend."""
    image = pytest.importorskip("matplotlib.image").imread(io.BytesIO(schedule_picture(steps)))
    codes = (image[..., :3] * 255).round().astype(int) @ (1 << 16, 1 << 8, 1)
    return {color: int((codes == (color[0] << 16 | color[1] << 8 | color[2])).sum()) for color in
            (FORWARD, BACKWARD, BUBBLE)}  # fmt: skip


def test_colours_are_in_proportion_to_times() -> None:
    found, of_step = pixels([step(Schedule.GPIPE)]), step(Schedule.GPIPE)
    forward_share = found[FORWARD] / (found[FORWARD] + found[BACKWARD])
    assert forward_share == pytest.approx(1 / 3, abs=0.05)
    assert found[BUBBLE] / sum(found.values()) == pytest.approx(of_step.bubble, abs=0.08)


def test_later_stages_of_a_device_are_paler() -> None:
    """So half of the boxes have colours of their own."""
    looped = pixels([step(Schedule.LOOPED_BFS, stages=8)])
    plain = pixels([step(Schedule.GPIPE, stages=4)])
    assert 0 < looped[FORWARD] < 0.7 * plain[FORWARD]


def test_several_steps_share_a_time_axis() -> None:
    one = pixels([step(Schedule.GPIPE)])
    both = pixels([step(Schedule.GPIPE), step(Schedule.ONE_F_ONE_B)])
    assert both[BACKWARD] > 1.5 * one[BACKWARD]


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match="matplotlib is missing, which draws schedules"):
        schedule_picture([step(Schedule.GPIPE)])
