"""The schedules of a pipeline over ranks; torch.distributed.pipelining has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

from chunkmem.errors import ConfigError
from chunkmem.pipeline.options import ASYNCHRONOUS
from chunkmem.pipeline.stage import PackedStage

ONE_STAGE = ("gpipe", "1f1b", ASYNCHRONOUS)
"""Schedules of one stage for each rank."""
SCHEDULES = MappingProxyType(
    {
        "gpipe": ScheduleGPipe,
        "1f1b": Schedule1F1B,
        "interleaved": ScheduleInterleaved1F1B,
        "looped-bfs": ScheduleLoopedBFS,
    }
)


FOR_ANY_NUMBER = MappingProxyType({"1f1b": "gpipe", "interleaved": "looped-bfs"})
"""By schedule that is not for any number of micro-batches: one of as many stages that is."""


class RankSchedule(Protocol):
    """Runs the stages of this rank."""

    def step(self, *args: Any, target: Any = None, return_outputs: bool = True, **kwargs: Any) -> Any:
        """Run one step."""
        ...

    def eval(self, *args: Any, target: Any = None, return_outputs: bool = True, **kwargs: Any) -> Any:
        """Run forward only."""
        ...


def check_schedule(schedule: str, stages_per_rank: int | None) -> tuple[str, int]:
    """Return the name of a schedule, and how many stages each rank has.

    Args:
        schedule: one of `SCHEDULES`, `ASYNCHRONOUS`, or "auto".
        stages_per_rank: None: one, or two where the schedule is for several.

    Raises:
        ConfigError: there is no such schedule over ranks, or it cannot have so many stages for each rank.
    """
    if schedule == "auto":
        schedule = "1f1b" if stages_per_rank in (None, 1) else "looped-bfs"
    if schedule == "by-layer":
        raise ConfigError('schedule "by-layer" is for one stage; over the ranks of a mesh with stages, take "1f1b"')
    if schedule not in (*SCHEDULES, ASYNCHRONOUS):
        names = ", ".join((*SCHEDULES, ASYNCHRONOUS))
        raise ConfigError(
            f"schedule {schedule!r} is not available; take one of {names}. Zero-bubble schedules are "
            "not: the gradients of weights, which they compute apart, would be held outside of chunks and of every cap"
        )
    num = (1 if schedule in ONE_STAGE else 2) if stages_per_rank is None else stages_per_rank
    if num < 1 or (num > 1 and schedule in ONE_STAGE):
        raise ConfigError(
            f"stages_per_rank is {num}; give at least 1, and for schedules other than interleaved and looped-bfs 1"
        )
    return schedule, num


def make_schedule(name: str, stages: Sequence[PackedStage], num_micro_batches: int) -> RankSchedule:
    """Return a schedule of the stages of this rank.

    Raises:
        ConfigError: it cannot run so many micro-batches.
    """
    options: dict[str, Any] = {"loss_fn": _given_loss, "scale_grads": False}
    make: Callable[..., RankSchedule] = SCHEDULES[name]
    try:
        return make(stages[0] if name in ONE_STAGE else list(stages), num_micro_batches, **options)
    except ValueError as error:
        raise ConfigError(f"schedule {name} with {num_micro_batches} micro-batches: {error}") from None


def _given_loss(output: torch.Tensor, _number: torch.Tensor) -> torch.Tensor:
    """Return the loss, which the last stage gives in place of an output."""
    return output
