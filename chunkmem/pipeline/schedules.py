"""The schedules of a pipeline over ranks, which torch.distributed.pipelining has, and which of them is chosen.

It is chosen before any of them has run. How long a block takes is not known then, nor how large batches are. What
decides is whether a rank's weights, gradients and optimizer states stay on DEVICE. So a block is taken to compute a
micro-batch in a time in proportion to its weights (lookups in embeddings take none), and to be fetched in as long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

from chunkmem.data.errors import ConfigError
from chunkmem.pipeline.options import ASYNCHRONOUS, PipelineOptions
from chunkmem.pipeline.stage import PackedStage
from chunkmem.plan.balance import Block
from chunkmem.plan.pipeline_choice import PipelineMachine, choose_schedule

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
            f"there is no schedule {schedule!r}; take one of {', '.join(SCHEDULES)}. Zero-bubble schedules are "
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


_BYTES_A_PARAMETER = 16
"""Weight, gradient and two states, with master weights where it computes in less than fp32."""


def choose(
    options: PipelineOptions, *, num_ranks: int, num_shards: int, device_nbytes: int
) -> tuple[PipelineOptions, str]:
    """Return options with the name of a schedule and the stages of each rank, and why, in one line.

    Args:
        options: of a pipeline, whose blocks are not cut.
        num_ranks: in a pipeline.
        num_shards: ranks that share what each of those has.
        device_nbytes: the cap on DEVICE.

    Raises:
        ConfigError: there are fewer blocks than ranks.
    """
    micro_batches = options.micro_batches
    costs = [_costs(modules, str(number), micro_batches, num_shards) for number, modules in enumerate(options.chain)]
    machine = PipelineMachine(num_ranks, fetch_Bps=1.0, kept_nbytes=device_nbytes)
    found = choose_schedule(costs, micro_batches, machine)
    step = found.best.step
    name, per_rank = step.schedule.value, step.num_stages // num_ranks
    reason = f"{name}, {per_rank} of {step.num_stages} stages on each rank, bubble {100 * step.bubble:.0f} %"
    if found.others:
        other = found.others[0].step
        times = f"takes {other.step_s / step.step_s:.2f} x as long"
        reason += f"; {other.schedule.value}, {other.num_stages // num_ranks} of {other.num_stages}, {times}"
    return replace(options, schedule=name, stages_per_rank=per_rank), f"{reason} (simulated)"


def _costs(modules: Sequence[nn.Module], name: str, micro_batches: int, num_shards: int) -> Block:
    root = nn.ModuleList(modules)
    embedded = {each.weight for each in root.modules() if isinstance(each, nn.Embedding)}
    params = list(root.parameters())
    computed = sum(param.nbytes for param in params if param not in embedded)
    numel, nbytes = sum(param.numel() for param in params), sum(param.nbytes for param in params)
    seconds = float(max(1, computed) * micro_batches)
    return Block(name, seconds, 2 * seconds, _BYTES_A_PARAMETER * numel // num_shards, weight_nbytes=nbytes)
