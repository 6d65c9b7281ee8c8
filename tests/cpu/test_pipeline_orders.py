"""The orders that are simulated are those in which torch's schedules call stages."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as of_torch

from chunkmem.plan.pipeline_schedule import Order, Schedule, orders
from chunkmem.plan.timeline import StageWork

CASES = [(1, 1, 3), (2, 1, 2), (2, 2, 4), (4, 2, 4), (4, 2, 8), (3, 3, 9), (2, 4, 6), (4, 1, 12)]


def compared(found: Order, expected: Iterable[Any]) -> None:
    """What torch has between calls, reductions and pauses, does not count."""
    assert [(stage, part, kind is StageWork.FORWARD) for stage, part, kind in found] == [
        (action.stage_index, action.microbatch_index, action.computation_type is of_torch.FORWARD)
        for action in expected
        if action is not None and action.microbatch_index is not None
    ]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["interleaved", "looped-bfs"])
def test_orders_are_torch_s(name: str, case: tuple[int, int, int]) -> None:
    num_devices, loops, parts = case
    kind: Any = {"interleaved": of_torch.ScheduleInterleaved1F1B, "looped-bfs": of_torch.ScheduleLoopedBFS}[name]
    schedule = SimpleNamespace(
        pp_group_size=num_devices,
        n_local_stages=loops,
        _stages=[None] * loops,
        _n_microbatches=parts,
        microbatches_per_round=parts // max(1, parts // num_devices),
    )
    found = orders(Schedule(name), num_devices=num_devices, num_stages=num_devices * loops, num_micro_batches=parts)
    for device, order in enumerate(found):
        compared(order, kind._calculate_single_rank_operations(schedule, device))


@pytest.mark.parametrize(("stages", "parts"), [(1, 3), (2, 2), (4, 4), (3, 8)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_orders_of_one_stage_a_device_are_torch_s(name: str, stages: int, parts: int) -> None:
    kind: Any = {"gpipe": of_torch.ScheduleGPipe, "1f1b": of_torch.Schedule1F1B}[name]
    expected = kind._get_pipeline_order(
        SimpleNamespace(_num_stages=stages, pp_group_size=stages, _n_microbatches=parts)
    )
    found = orders(Schedule(name), num_devices=stages, num_stages=stages, num_micro_batches=parts)
    # What torch draws for 1F1B, which it does not run, leaves out the last stage's first forward.
    for device, order in enumerate(found if name == "gpipe" else found[:-1]):
        compared(order, expected[device])
