"""Schedules of a pipeline: drawn, as torch orders them, and as long as formulas say."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkmem.data.errors import ConfigError
from chunkmem.plan.pipeline_schedule import PipelineStep, Schedule, StageTimes, orders, simulate_pipeline
from chunkmem.plan.timeline import StageWork

F, B = StageWork.FORWARD, StageWork.BACKWARD
EQUAL = StageTimes(1.0, 1.0)


def simulate(
    schedule: str, times: Sequence[StageTimes], devices: int, parts: int, *, num_kept: int | None = None
) -> PipelineStep:
    return simulate_pipeline(Schedule(schedule), times, num_devices=devices, num_micro_batches=parts, num_kept=num_kept)


def drawn(step: PipelineStep) -> list[str]:
    """A row for each device, a cell for each second: pass and micro-batch, with stages in letters if there are more."""
    rows = [[".."] * round(step.step_s) for _ in range(step.num_devices)]
    for call in step.calls:
        loop = "" if step.num_stages == step.num_devices else "abcd"[call.stage // step.num_devices]
        for second in range(round(call.start_s), round(call.end_s)):
            rows[step.device_of(call)][second] = f"{'F' if call.work is F else 'B'}{loop}{call.micro_batch}"
    return [" ".join(row) for row in rows]


def test_gpipe() -> None:
    step = simulate("gpipe", [EQUAL] * 2, 2, 3)
    assert drawn(step) == [
        "F0 F1 F2 .. .. B0 B1 B2",
        ".. F0 F1 F2 B0 B1 B2 ..",
    ]
    assert step.bubbles == (0.25, 0.25)
    assert step.num_in_flight == (3, 3)


def test_1f1b() -> None:
    step = simulate("1f1b", [EQUAL] * 2, 2, 3)
    assert drawn(step) == [
        "F0 F1 .. B0 F2 B1 .. B2",
        ".. F0 B0 F1 B1 F2 B2 ..",
    ]
    assert step.num_in_flight == (2, 1)
    assert drawn(simulate("1f1b", [StageTimes(1, 2)] * 3, 3, 4)) == [
        "F0 F1 F2 .. .. .. .. B0 B0 F3 B1 B1 .. B2 B2 .. B3 B3",
        ".. F0 F1 .. .. B0 B0 F2 B1 B1 F3 B2 B2 .. B3 B3 .. ..",
        ".. .. F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .. .. .. ..",
    ]


def test_interleaved() -> None:
    step = simulate("interleaved", [EQUAL] * 4, 2, 2)
    assert drawn(step) == [
        "Fa0 Fa1 Fb0 Fb1 .. Bb0 .. Bb1 Ba0 Ba1",
        ".. Fa0 Fa1 Fb0 Bb0 Fb1 Bb1 Ba0 Ba1 ..",
    ]


def test_looped_bfs_and_by_layer() -> None:
    step = simulate("looped-bfs", [EQUAL] * 4, 2, 2)
    assert drawn(step) == [
        "Fa0 Fa1 Fb0 Fb1 .. .. Bb1 Bb0 Ba1 Ba0",
        ".. Fa0 Fa1 Fb0 Fb1 Bb1 Bb0 Ba1 Ba0 ..",
    ]
    step = simulate("by-layer", [EQUAL] * 2, 1, 3)
    assert drawn(step) == ["Fa0 Fa1 Fa2 Fb0 Fb1 Fb2 Bb2 Bb1 Bb0 Ba2 Ba1 Ba0"]
    assert (step.bubble, step.num_in_flight) == (0.0, (6,))


def test_sending_takes_time_and_one_thing_goes_after_the_other() -> None:
    step = simulate("gpipe", [StageTimes(1, 1, send_s=2.0), EQUAL], 2, 2)
    assert drawn(step) == [
        "F0 F1 .. .. .. .. .. .. .. B0 .. B1",
        ".. .. .. F0 .. F1 B0 B1 .. .. .. ..",
    ]
    # On one device nothing is sent.
    assert simulate("by-layer", [StageTimes(1, 1, send_s=2.0), EQUAL], 1, 2).step_s == 8


@pytest.mark.parametrize(
    ("schedule", "devices", "kept", "num_fetches"),
    [
        # 4 stages on a device in two passes; the last of forward is there when backward begins.
        ("by-layer", 1, 1, 7),
        ("by-layer", 1, 3, 5),
        ("by-layer", 1, 4, 4),
        ("by-layer", 1, 0, 4 * 2 * 6),
        ("looped-bfs", 2, 1, 2 * 3),
        ("gpipe", 4, 0, 4 * 2 * 6),
        ("1f1b", 4, 1, 4),
    ],
)
def test_weights_are_fetched_where_they_are_not(schedule: str, devices: int, kept: int, num_fetches: int) -> None:
    """A call takes as long as its fetch, if that is longer."""
    step = simulate(schedule, [StageTimes(1, 1, fetch_s=5)] * 4, devices, 6, num_kept=kept)
    assert sum(call.end_s - call.start_s == 5 for call in step.calls) == num_fetches
    assert simulate(schedule, [StageTimes(1, 1, fetch_s=1)] * 4, devices, 6, num_kept=0).busy_s == (48 / devices,) * (
        devices
    )


@pytest.mark.parametrize("num_stages", [1, 2, 4, 7])
@pytest.mark.parametrize("parts", [7, 8, 32])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_bubble_of_equal_stages(schedule: str, parts: int, num_stages: int) -> None:
    """(N - 1) / (M + N - 1), whatever backward takes."""
    for times in (EQUAL, StageTimes(1, 2)):
        step = simulate(schedule, [times] * num_stages, num_stages, parts)
        assert step.bubble == pytest.approx((num_stages - 1) / (parts + num_stages - 1))
        in_flight = [parts] * num_stages if schedule == "gpipe" else range(num_stages, 0, -1)
        assert step.num_in_flight == tuple(in_flight)


@pytest.mark.parametrize("loops", [2, 4])
def test_loops_make_the_bubble_smaller(loops: int) -> None:
    """(N - 1) / (M V + N - 1) for N devices of V stages."""
    for schedule in ("interleaved", "looped-bfs"):
        step = simulate(schedule, [EQUAL] * 4 * loops, 4, 8)
        assert step.bubble == pytest.approx(3 / (8 * loops + 3))


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Schedule, list[StageTimes], int, int]:
    schedule = draw(st.sampled_from(Schedule))
    devices = 1 if schedule is Schedule.BY_LAYER else draw(st.integers(1, 4))
    loops = draw(st.integers(1, 3)) if schedule.is_looped else 1
    parts = draw(st.integers(1, 4)) * devices if schedule is Schedule.INTERLEAVED else draw(st.integers(devices, 9))
    seconds = st.integers(0, 16).map(lambda eighths: eighths / 8)
    times = [StageTimes(*draw(st.tuples(seconds, seconds, seconds))) for _ in range(devices * loops)]
    return schedule, times, devices, parts


@settings(max_examples=150)
@given(pipelines())
def test_every_call_is_made_once_after_what_it_needs(pipeline: tuple[Schedule, list[StageTimes], int, int]) -> None:
    schedule, times, devices, parts = pipeline
    step = simulate_pipeline(schedule, times, num_devices=devices, num_micro_batches=parts)
    calls = {(call.stage, call.micro_batch, call.work): call for call in step.calls}
    assert len(calls) == len(step.calls) == 2 * len(times) * parts
    for (stage, part, kind), call in calls.items():
        before = (stage - 1, part, F) if kind is F else (stage + 1, part, B)
        if kind is B and stage == len(times) - 1:
            before = stage, part, F
        if before in calls:
            sent_s = 0.0 if devices == 1 else times[min(stage, before[0])].send_s * (stage != before[0])
            assert call.start_s >= calls[before].end_s + sent_s
        assert call.end_s - call.start_s == (times[stage].forward_s if kind is F else times[stage].backward_s)
    for device in range(devices):
        for one, other in pairwise(call for call in step.calls if step.device_of(call) == device):
            assert one.end_s <= other.start_s
    assert step.step_s >= max(step.busy_s)


@pytest.mark.parametrize(
    ("schedule", "devices", "stages", "parts", "message"),
    [
        ("gpipe", 2, 4, 4, "gpipe: 4 stages for 2 devices; it needs one on each"),
        ("interleaved", 2, 3, 4, "interleaved: 3 stages for 2 devices; it needs as many on each"),
        ("1f1b", 4, 4, 3, "1f1b: 3 micro-batches for 4 stages; give 4 at least, or gpipe"),
        ("interleaved", 2, 4, 5, "5 micro-batches are not a multiple of 2 rounds; give 4, or a multiple of the 2"),
        ("by-layer", 2, 4, 4, "by-layer is for one device, and there are 2"),
        ("looped-bfs", 2, 4, 0, "0 micro-batches; give 1 at least"),
    ],
)
def test_what_a_schedule_cannot_have(schedule: str, devices: int, stages: int, parts: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        orders(Schedule(schedule), num_devices=devices, num_stages=stages, num_micro_batches=parts)
