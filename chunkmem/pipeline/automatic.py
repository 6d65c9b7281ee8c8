"""Choose a schedule of stages over ranks before any of them has run.

How long a block takes is not known then, nor how large batches are. What decides is whether a rank's weights, gradients
and optimizer states stay on DEVICE. So a block is taken to compute a micro-batch in a time in proportion to its weights
(lookups in embeddings take none), and to be fetched in as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from chunkmem.pipeline.options import PipelineOptions
from chunkmem.plan.balance import Block
from chunkmem.plan.pipeline_choice import PipelineMachine, choose_schedule

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
