"""An asynchronous pipeline: stages update their weights batch by batch, and never wait for the pipeline to drain. Pure.

Each stage works in rounds. In round r, stage s of P runs forward of batch r - s, backward of batch r - (P - 1), and the
update of that batch, which is the same for all stages. So P - 1 - s updates lie between the forward of a batch and its
backward: the delay of the stage, the same for all micro-batches of the batch. With P = 2 stages and M = 2
micro-batches, a batch and a micro-batch in each cell, backward as long as forward:

    stage 0   F00 F01 F10 B00 F11 B01 F20 B10 F21 B11    delay 1, updates after B01 and B11
    stage 1   ... F00 B00 F01 B01 F10 B10 F11 B11 ...    delay 0, updates after B01 and B11

What a stage needs in a round for forward was sent in the round before, and each stage runs behind the next one by the
time of one backward. So no stage waits once the pipeline is full, also if messages take long; the bubble is that of
filling it once.

Where backward needs other weights than forward, these calls do not alternate: a round has all forwards, then all
backwards, so weights are exchanged twice a round and not for each micro-batch.

Decided in ADR 48.
"""

from __future__ import annotations

from collections.abc import Iterator

from chunkmem.plan.timeline import StageWork


def delay_of(stage: int, num_stages: int) -> int:
    """Return how many updates of a stage lie between forward and backward of a batch, once the pipeline is full."""
    return num_stages - 1 - stage


def round_calls(num_forward: int, num_backward: int, *, is_grouped: bool) -> Iterator[tuple[StageWork, int]]:
    """Yield the calls of a stage in one round: forward or backward, and micro-batch.

    Args:
        num_forward: micro-batches of the batch whose forward it is; 0: there is none.
        num_backward: likewise for backward.
        is_grouped: all forwards come before all backwards; else they alternate.
    """
    if is_grouped:
        yield from ((StageWork.FORWARD, part) for part in range(num_forward))
        yield from ((StageWork.BACKWARD, part) for part in range(num_backward))
        return
    for part in range(max(num_forward, num_backward)):
        if part < num_forward:
            yield StageWork.FORWARD, part
        if part < num_backward:
            yield StageWork.BACKWARD, part
