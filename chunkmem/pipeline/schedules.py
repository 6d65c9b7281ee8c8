"""The schedules of a pipeline over ranks; torch.distributed.pipelining has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

from chunkmem.errors import ConfigError
from chunkmem.pipeline.options import ASYNCHRONOUS
from chunkmem.pipeline.stage import PackedStage

SCHEDULES: Mapping[str, Any] = MappingProxyType(
    {
        "gpipe": ScheduleGPipe,
        "1f1b": Schedule1F1B,
        "interleaved": ScheduleInterleaved1F1B,
        "looped-bfs": ScheduleLoopedBFS,
        ASYNCHRONOUS: ScheduleGPipe,
    }
)
"""Classes by name of the schedule; for an asynchronous pipeline, the schedule of its evaluations."""
FOR_ANY_NUMBER = MappingProxyType({"1f1b": "gpipe", "interleaved": "looped-bfs"})
"""By schedule that is not for any number of micro-batches: one of as many stages that is."""


def check_schedule(schedule: str, stages_per_rank: int | None) -> tuple[str, int]:
    """Return the name of a schedule, and how many stages each rank has.

    Args:
        schedule: one of `SCHEDULES`, or "auto".
        stages_per_rank: None: one, or two where the schedule is for several.

    Raises:
        ConfigError: there is no such schedule over ranks, or it cannot have so many stages for each rank.
    """
    if schedule == "auto":
        schedule = "1f1b" if stages_per_rank in (None, 1) else "looped-bfs"
    if schedule == "by-layer":
        raise ConfigError('schedule "by-layer" is for one stage; over the ranks of a mesh with stages, take "1f1b"')
    if schedule not in SCHEDULES:
        raise ConfigError(
            f"schedule {schedule!r} is not available; take one of {', '.join(SCHEDULES)}. Zero-bubble schedules are "
            "not: the gradients of weights, which they compute apart, would be held outside of chunks and of every cap"
        )
    is_looped = _is_looped(schedule)
    num = 1 + is_looped if stages_per_rank is None else stages_per_rank
    if num < 1 or (num > 1 and not is_looped):
        raise ConfigError(
            f"stages_per_rank is {num}; give at least 1, and for schedules other than interleaved and looped-bfs 1"
        )
    return schedule, num


def make_schedule(name: str, stages: Sequence[PackedStage], num_micro_batches: int) -> Any:
    """Return a schedule of torch's that runs the stages of this rank.

    Raises:
        ConfigError: it cannot run so many micro-batches.
    """
    given = list(stages) if _is_looped(name) else stages[0]
    try:
        return SCHEDULES[name](given, num_micro_batches, loss_fn=_given_loss, scale_grads=False)
    except ValueError as error:
        raise ConfigError(f"schedule {name} with {num_micro_batches} micro-batches: {error}") from None


def _is_looped(name: str) -> bool:
    """A rank may have several stages."""
    return issubclass(SCHEDULES[name], PipelineScheduleMulti)


def _given_loss(output: torch.Tensor, _number: torch.Tensor) -> torch.Tensor:
    """Return the loss, which the last stage gives in place of an output."""
    return output
