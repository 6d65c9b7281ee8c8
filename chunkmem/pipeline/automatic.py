"""Choose a schedule of stages over ranks before any of them has run.

How long a block takes is not known then, nor how large batches are. What decides is whether a rank's weights, gradients
and optimizer states stay on DEVICE. So a block is taken to compute a micro-batch in a time in proportion to its weights
(lookups in embeddings take none), and to be fetched in as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from chunkmem.plan.balance import Block
from chunkmem.plan.pipeline_choice import PipelineMachine, choose_schedule

_BYTES_A_PARAMETER = 16
"""Weight, gradient and two states, with master weights where it computes in less than fp32."""


@dataclass(frozen=True)
class Choice:
    """A schedule."""

    schedule: str
    stages_per_rank: int
    reason: str
    """In one line."""


def choose(
    blocks: Sequence[Sequence[nn.Module]],
    *,
    num_ranks: int,
    num_shards: int,
    micro_batches: int,
    device_nbytes: int,
) -> Choice:
    """Return how to run blocks, which come one after the other, over ranks.

    Args:
        blocks: the modules of each; they are not cut.
        num_ranks: in a pipeline.
        num_shards: ranks that share what each of those has.
        micro_batches: of a batch.
        device_nbytes: the cap on DEVICE.

    Raises:
        ConfigError: there are fewer blocks than ranks.
    """
    costs = [_costs(modules, str(number), micro_batches, num_shards) for number, modules in enumerate(blocks)]
    machine = PipelineMachine(num_ranks, fetch_Bps=1.0, kept_nbytes=device_nbytes)
    found = choose_schedule(costs, micro_batches, machine)
    step = found.best.step
    name, per_rank = step.schedule.value, step.num_stages // num_ranks
    reason = f"{name}, {per_rank} of {step.num_stages} stages on each rank, bubble {100 * step.bubble:.0f} %"
    if found.others:
        other = found.others[0].step
        times = f"takes {other.step_s / step.step_s:.2f} x as long"
        reason += f"; {other.schedule.value}, {other.num_stages // num_ranks} of {other.num_stages}, {times}"
    return Choice(name, per_rank, f"{reason} (simulated)")


def _costs(modules: Sequence[nn.Module], name: str, micro_batches: int, num_shards: int) -> Block:
    parts = [part for module in modules for part in module.modules()]
    embedded = {id(each.weight) for each in parts if isinstance(each, nn.Embedding)}
    params = {id(param): param for part in parts for param in part.parameters(recurse=False)}
    weights = sum(param.nbytes for param in params.values())
    computed = sum(param.nbytes for key, param in params.items() if key not in embedded)
    numel = sum(param.numel() for param in params.values())
    seconds = float(max(1, computed) * micro_batches)
    return Block(name, seconds, 2 * seconds, _BYTES_A_PARAMETER * numel // num_shards, weight_nbytes=weights)
