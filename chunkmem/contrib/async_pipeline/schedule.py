"""An asynchronous pipeline: stages update their weights batch by batch, and never wait for the pipeline to drain. Pure.

[Note: Rounds] Each stage works in rounds. In round r, stage s of P runs forward of batch r - s, backward of batch
r - (P - 1), and the update of that batch, which is the same for all stages. So P - 1 - s updates lie between the
forward of a batch and its backward: the delay of the stage, the same for all micro-batches of the batch. With P = 2
stages and M = 2 micro-batches, a batch and a micro-batch in each cell, backward as long as forward:

    stage 0   F00 F01 F10 B00 F11 B01 F20 B10 F21 B11    delay 1, updates after B01 and B11
    stage 1   ... F00 B00 F01 B01 F10 B10 F11 B11 ...    delay 0, updates after B01 and B11

What a stage needs in a round for forward was sent in the round before, and each stage runs behind the next one by the
time of one backward. So no stage waits once the pipeline is full, also if messages take long; the bubble is that of
filling it once.

Where backward needs other weights than forward, these calls do not alternate: a round has all forwards, then all
backwards, so weights are exchanged twice a round and not for each micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from chunkmem.errors import ConfigError
from chunkmem.plan.pipeline_schedule import Order, Pass, StageCall, StageTimes, timed_calls


def delay_of(stage: int, num_stages: int) -> int:
    """Return how many updates of a stage lie between forward and backward of a batch, once the pipeline is full."""
    return num_stages - 1 - stage


def round_calls(num_forward: int, num_backward: int, *, is_grouped: bool) -> Iterator[tuple[Pass, int]]:
    """Yield the calls of a stage in one round: pass and micro-batch.

    Args:
        num_forward: micro-batches of the batch whose forward it is; 0: there is none.
        num_backward: likewise for backward.
        is_grouped: all forwards come before all backwards; else they alternate.
    """
    if is_grouped:
        yield from ((Pass.FORWARD, part) for part in range(num_forward))
        yield from ((Pass.BACKWARD, part) for part in range(num_backward))
        return
    for part in range(max(num_forward, num_backward)):
        if part < num_forward:
            yield Pass.FORWARD, part
        if part < num_backward:
            yield Pass.BACKWARD, part


def asynchronous_orders(
    *, num_stages: int, num_micro_batches: int, num_batches: int, is_grouped: bool = False
) -> tuple[Order, ...]:
    """Return the calls of each stage for some batches, from the first forward to the last backward, in order.

    Micro-batches are counted over all batches.

    Args:
        num_stages: one a device.
        num_micro_batches: of each batch.
        num_batches: after which the pipeline drains.
        is_grouped: stages with a delay run all forwards of a round before all backwards.

    Raises:
        ConfigError: a number is below 1.
    """
    if min(num_stages, num_micro_batches, num_batches) < 1:
        raise ConfigError(
            f"async-1f1b: {num_stages} stages, {num_micro_batches} micro-batches, {num_batches} batches; give 1 at "
            "least"
        )
    found = []
    for stage in range(num_stages):
        order: list[tuple[int, int, Pass]] = []
        delay = delay_of(stage, num_stages)
        for backward in range(-delay, num_batches):
            forward = backward + delay
            numbers = (num_micro_batches * (0 <= batch < num_batches) for batch in (forward, backward))
            for kind, part in round_calls(*numbers, is_grouped=is_grouped and delay > 0):
                batch = forward if kind is Pass.FORWARD else backward
                order.append((stage, batch * num_micro_batches + part, kind))
        found.append(tuple(order))
    return tuple(found)


def simulate_asynchronous(
    stages: Sequence[StageTimes], *, num_micro_batches: int, num_batches: int, is_grouped: bool = False
) -> tuple[StageCall, ...]:
    """Return the calls of `asynchronous_orders`, and when each of them runs; see `simulate_pipeline`."""
    planned = asynchronous_orders(
        num_stages=len(stages),
        num_micro_batches=num_micro_batches,
        num_batches=num_batches,
        is_grouped=is_grouped,
    )
    return timed_calls(planned, stages)


def bubbles_of(calls: Sequence[StageCall], num_stages: int) -> tuple[float, ...]:
    """Return the share of time in which each stage waits for others, from its first call to its last."""
    found = []
    for stage in range(num_stages):
        own = [call for call in calls if call.stage == stage]
        busy_s = sum(call.end_s - call.start_s for call in own)
        found.append(1 - busy_s / (own[-1].end_s - own[0].start_s))
    return tuple(found)
