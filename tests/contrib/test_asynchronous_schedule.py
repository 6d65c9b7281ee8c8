"""Asynchronous pipelines: drawn, with the delays of their stages, and without bubbles once they are full."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkmem.contrib.async_pipeline.schedule import delay_of, round_calls
from chunkmem.plan.pipeline_schedule import Order, Schedule, StageTimes, simulate_pipeline, timed_calls
from chunkmem.plan.timeline import StageCall, StageWork

F, B = StageWork.FORWARD, StageWork.BACKWARD
EQUAL = StageTimes(1.0, 1.0)


def orders_of(num_stages: int, parts: int, num_batches: int, *, is_grouped: bool = False) -> tuple[Order, ...]:
    """The calls of each stage, one a device, over some batches: micro-batches are counted over all of them."""
    found = []
    for stage in range(num_stages):
        order: list[tuple[int, int, StageWork]] = []
        delay = delay_of(stage, num_stages)
        for backward in range(-delay, num_batches):
            forward = backward + delay
            numbers = (parts * (0 <= batch < num_batches) for batch in (forward, backward))
            for work, part in round_calls(*numbers, is_grouped=is_grouped and delay > 0):
                order.append((stage, (forward if work is F else backward) * parts + part, work))
        found.append(tuple(order))
    return tuple(found)


def simulated(
    stages: list[StageTimes], *, parts: int, num_batches: int, is_grouped: bool = False
) -> tuple[StageCall, ...]:
    return timed_calls(orders_of(len(stages), parts, num_batches, is_grouped=is_grouped), stages)


def bubbles_of(calls: tuple[StageCall, ...], num_stages: int) -> list[float]:
    """The share of time in which each stage waits for others, from its first call to its last."""
    found = []
    for stage in range(num_stages):
        own = [call for call in calls if call.stage == stage]
        busy_s = sum(call.end_s - call.start_s for call in own)
        found.append(1 - busy_s / (own[-1].end_s - own[0].start_s))
    return found


def drawn(calls: tuple[StageCall, ...], num_stages: int, parts: int) -> list[str]:
    """A row for each stage, a cell for each second: pass, batch and micro-batch."""
    rows = [["..."] * round(max(call.end_s for call in calls)) for _ in range(num_stages)]
    for call in calls:
        name = f"{'F' if call.work is F else 'B'}{call.micro_batch // parts}{call.micro_batch % parts}"
        for second in range(round(call.start_s), round(call.end_s)):
            rows[call.stage][second] = name
    return [" ".join(row) for row in rows]


def test_two_stages_alternate() -> None:
    calls = simulated([EQUAL] * 2, parts=2, num_batches=3)
    assert drawn(calls, 2, 2) == [
        "F00 F01 F10 B00 F11 B01 F20 B10 F21 B11 ... B20 ... B21",
        "... F00 B00 F01 B01 F10 B10 F11 B11 F20 B20 F21 B21 ...",
    ]


def test_a_stage_with_a_delay_may_have_all_forwards_first() -> None:
    calls = simulated([EQUAL] * 2, parts=2, num_batches=3, is_grouped=True)
    assert drawn(calls, 2, 2)[0].startswith("F00 F01 F10 F11 B00 B01 F20 F21 B10 B11")


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 6), st.booleans())
def test_delays(num_stages: int, parts: int, num_batches: int, is_grouped: bool) -> None:
    """Between forward and backward of each micro-batch lie as many updates as the delay says, fewer at the start."""
    for stage, order in enumerate(orders_of(num_stages, parts, num_batches, is_grouped=is_grouped)):
        updates, seen = 0, {}
        for at, micro_batch, kind in order:
            assert at == stage
            if kind is F:
                seen[micro_batch] = updates
                continue
            batch = micro_batch // parts
            assert updates == batch, "all stages update the same batch in the same round"
            assert updates - seen.pop(micro_batch) == min(batch, delay_of(stage, num_stages))
            updates += micro_batch % parts == parts - 1
        assert not seen
        assert updates == num_batches


@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize("times", [EQUAL, StageTimes(1.0, 2.0), StageTimes(1.0, 2.0, send_s=0.5)])
def test_two_ranks_have_next_to_no_bubble(times: StageTimes, is_grouped: bool) -> None:
    """1F1B drains after each batch, and its bubble is (P - 1) / (M + P - 1) = 0.2; here the pipeline fills once."""
    calls = simulated([times] * 2, parts=4, num_batches=100, is_grouped=is_grouped)
    assert max(bubbles_of(calls, 2)) <= 0.02
    synchronous = simulate_pipeline(Schedule("1f1b"), [EQUAL] * 2, num_devices=2, num_micro_batches=4)
    assert synchronous.bubble == pytest.approx(1 / 5)


def test_no_stage_waits_once_the_pipeline_is_full() -> None:
    calls = simulated([StageTimes(1.0, 2.0)] * 4, parts=4, num_batches=40)
    for stage in range(4):
        own = [call for call in calls if call.stage == stage and call.start_s > 60 and call.end_s < 400]
        assert sum(call.end_s - call.start_s for call in own) == pytest.approx(own[-1].end_s - own[0].start_s)
