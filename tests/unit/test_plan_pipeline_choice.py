"""Which schedule is chosen, and why."""

from __future__ import annotations

import pytest

from chunkmem.data.errors import CapacityError, ConfigError
from chunkmem.plan.balance import Block, balance
from chunkmem.plan.pipeline_choice import PipelineMachine, choose_schedule, try_schedule
from chunkmem.plan.pipeline_schedule import Schedule

MIB = 1 << 20


def blocks(num: int, *, output_nbytes: int = 0) -> list[Block]:
    return [Block(f"b{at}", 0.8, 0.8, 8 * MIB, weight_nbytes=MIB, output_nbytes=output_nbytes) for at in range(num)]


def test_where_everything_fits_more_stages_make_the_bubble_smaller() -> None:
    choice = choose_schedule(blocks(16), 8, PipelineMachine(4))
    step = choice.best.step
    assert (step.schedule, step.num_stages) == (Schedule.INTERLEAVED, 16)
    assert step.bubble == pytest.approx(3 / (8 * 4 + 3))
    # Looped BFS takes as long, and has more in flight.
    assert choice.others[0].step.schedule is Schedule.LOOPED_BFS
    assert choice.others[0].step.step_s == pytest.approx(step.step_s)
    assert choice.others[0].in_flight > choice.best.in_flight


def test_one_block_a_device_leaves_1f1b() -> None:
    choice = choose_schedule(blocks(4), 8, PipelineMachine(4))
    assert choice.best.step.schedule is Schedule.ONE_F_ONE_B
    assert max(choice.best.step.num_in_flight) < 8
    assert "4 stages: " in choice.reason
    assert "; next " in choice.reason


def test_where_weights_are_fetched_the_traffic_decides() -> None:
    """A device has room for one block of four, and fetching one takes as long as computing four micro-batches in it."""
    machine = PipelineMachine(2, fetch_Bps=MIB / 0.2, kept_nbytes=MIB)
    choice = choose_schedule(blocks(8), 16, machine)
    assert (choice.best.step.schedule, choice.best.step.num_stages) == (Schedule.LOOPED_BFS, 8)
    fetching = try_schedule(Schedule.ONE_F_ONE_B, balance(blocks(8), 2), 16, machine)
    assert fetching.step.step_s > 1.5 * choice.best.step.step_s


def test_a_device_with_room_for_all_of_its_stages_fetches_nothing() -> None:
    """Weights, gradients and states: what is updated on HOST is fetched again."""
    row = blocks(4)
    for kept_nbytes, longest_s in ((2 * 8 * MIB, 0.2), (2 * 8 * MIB - 1, 30.0)):
        machine = PipelineMachine(2, fetch_Bps=2 * MIB / 30, kept_nbytes=kept_nbytes)
        step = try_schedule(Schedule.GPIPE, balance(row, 2), 8, machine).step
        assert max(call.end_s - call.start_s for call in step.calls) == pytest.approx(longest_s)


def test_stages_fit_their_devices() -> None:
    row = [*blocks(5), Block("wide", 0.1, 0.1, 40 * MIB, weight_nbytes=5 * MIB)]
    choice = choose_schedule(row, 4, PipelineMachine(2, cap_nbytes=40 * MIB))
    assert [len(stage.blocks) for stage in choice.best.stages] == [5, 1]
    with pytest.raises(CapacityError) as caught:
        choose_schedule(row, 4, PipelineMachine(2, cap_nbytes=40 * MIB - 1))
    assert caught.value.needed_nbytes == 40 * MIB


def test_a_slow_network_takes_fewer_stages() -> None:
    many = choose_schedule(blocks(16, output_nbytes=MIB), 8, PipelineMachine(2, send_Bps=100 * MIB)).best
    few = choose_schedule(blocks(16, output_nbytes=MIB), 8, PipelineMachine(2, send_Bps=MIB / 2)).best
    assert few.step.num_stages < many.step.num_stages


def test_one_device_computes_by_layer() -> None:
    choice = choose_schedule(blocks(3), 4, PipelineMachine(1))
    assert (choice.best.step.schedule, choice.best.step.num_stages) == (Schedule.BY_LAYER, 3)
    assert choice.reason.endswith("the only one for these devices and micro-batches")


def test_fewer_micro_batches_than_stages_leave_what_can_have_them() -> None:
    assert len(choose_schedule(blocks(4), 1, PipelineMachine(4)).best.step.calls) == 2 * 4
    with pytest.raises(ConfigError, match="4 stages, and the model has 3 blocks"):
        choose_schedule(blocks(3), 8, PipelineMachine(4))
