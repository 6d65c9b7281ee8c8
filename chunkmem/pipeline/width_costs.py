"""What a number of stages is chosen by: times, bytes and speeds of all ranks, the same on each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf

import torch
from torch import nn

from chunkmem.assembly import Runtime
from chunkmem.comm.mesh import ranks_by_stage
from chunkmem.comm.ranks import Ranks
from chunkmem.errors import ConfigError, LayoutError
from chunkmem.pipeline.block_times import BlockTimes, SampleCost
from chunkmem.pipeline.modules import divide, with_ends
from chunkmem.pipeline.options import PipelineOptions
from chunkmem.pipeline.staged import with_schedule
from chunkmem.plan.balance import Block
from chunkmem.plan.pipeline_schedule import Schedule
from chunkmem.plan.pipeline_width import Division, WidthChoice, WidthMachine, WidthTask, choose_width
from chunkmem.runtime.device import runtime_mode
from chunkmem.types import Tier

_BYTES_A_PARAMETER = 16
"""Weight, gradient and two states, with master weights where it computes in less than fp32."""
_LARGEST_NBYTES = 8 << 20
"""Of what is sent to measure how fast ranks exchange."""
_NUM_TRIALS = 3


class WidthCosts:
    """Asks all ranks, and has the first one choose."""

    def __init__(self, options: PipelineOptions, times: BlockTimes) -> None:
        """Choose for this pipeline, whose blocks are timed by `times`."""
        self._options = options
        self._times = times
        self._exchange_Bps = inf
        self._chain = with_ends(options.blocks, first=options.first, last=options.last)

    def choose(self, runtime: Runtime, now: Division) -> WidthChoice | str:
        """Return what is best, the same on all ranks, which all call it; or why nothing can be said.

        Args:
            runtime: of the manager, as things are.
            now: how the ranks are divided.

        Raises:
            RankError: a rank is missing.
        """
        ranks = runtime.ranks
        costs = ranks.over_stages(self._times.per_sample(), label="resize: times of blocks")
        missing = [at for at in range(len(self._chain)) if at not in costs]
        known = ranks.from_first((costs, missing, self._times.num_samples), label="resize: times of blocks")
        costs, missing, num_samples = known
        if missing:
            return f"nothing is known of block {missing[0]} yet: call pipe.step() before pipe.resize()"
        task = self._task(runtime, costs, num_samples * ranks.size, now)
        machine = self._machine(runtime)
        return ranks.from_first(choose_width(task, now, machine), label="resize: another number of stages")

    def _task(self, runtime: Runtime, costs: Mapping[int, SampleCost], num_samples: int, now: Division) -> WidthTask:
        """Return what is trained with a global batch of so many samples."""
        kinds, blocks, exchanged, held = self._times.kinds(), [], [], []
        replicas = 1 if runtime.ranks.replicate is None else runtime.ranks.replicate.size
        num_samples //= replicas
        for at, modules in enumerate(self._chain):
            block, trained_nbytes = _block(at, modules, runtime)
            cost = costs[at]
            blocks.append(
                replace(
                    block,
                    forward_s=num_samples * cost.forward_s,
                    backward_s=num_samples * cost.backward_s,
                    output_nbytes=num_samples * cost.output_nbytes,
                )
            )
            exchanged.append(block.weight_nbytes * (2 if kinds[at] else 1) + trained_nbytes)
            held.append(block.weight_nbytes + trained_nbytes)
        return WidthTask(
            blocks, exchanged, held, num_samples, self._options.micro_batches, self._schedules(runtime, now)
        )

    def _schedules(self, runtime: Runtime, now: Division) -> dict[int, tuple[Schedule, int]]:
        """Return by number of stages, of those that these ranks and blocks can have, what runs them."""
        options, found = self._options, {1: (Schedule.BY_LAYER, 1)}
        num_ranks = _num_ranks(runtime.ranks)
        for num in (each for each in range(2, num_ranks + 1) if num_ranks % each == 0):
            asked = replace(options, schedule="auto") if options.schedule == "by-layer" else options
            try:
                ranks_by_stage(runtime.origin.mesh, num)
                chosen, per_rank, _ = with_schedule(runtime, asked, num_ranks=num, num_shards=num_ranks // num)
                divide(options.blocks, first=options.first, last=options.last, num=per_rank * num)
            except (ConfigError, LayoutError):
                continue
            found[num] = Schedule(chosen.schedule), per_rank
        return found | {now.num_ranks: (now.schedule, len(now.num_blocks) // now.num_ranks)}

    def _machine(self, runtime: Runtime) -> WidthMachine:
        caps = runtime.tiers.caps
        others = sum(ledger.now.get("frozen_cache", 0) for ledger in runtime.tiers.ledgers)
        h2d = runtime.links.machine().links[Tier.HOST, Tier.DEVICE]
        own = [float(caps.device_nbytes), float(caps.device_nbytes + caps.host_nbytes - others), h2d.Bps]
        # The least of all ranks.
        device_nbytes, cap_nbytes, fetch_Bps = (-each for each in _max_over(runtime.ranks, [-each for each in own]))
        return WidthMachine(
            _num_ranks(runtime.ranks),
            int(device_nbytes),
            int(cap_nbytes),
            exchange_Bps=self._speed(runtime),
            fetch_Bps=fetch_Bps,
            keeps_all=caps.shared,
        )

    def _speed(self, runtime: Runtime) -> float:
        """Return how fast these ranks exchange, measured once."""
        if self._exchange_Bps == inf and _num_ranks(runtime.ranks) > 1:
            largest = max(_block(at, modules, runtime)[0].weight_nbytes for at, modules in enumerate(self._chain))
            nbytes = min(_LARGEST_NBYTES, max(1, largest))
            ranks = runtime.ranks if runtime.ranks.stages is None else runtime.ranks.stages
            own = [_broadcast_s(runtime, ranks, nbytes) for _ in range(_NUM_TRIALS)]
            (seconds,) = _max_over(runtime.ranks, [min(own)])
            self._exchange_Bps = nbytes / max(seconds, 1e-9)
        return self._exchange_Bps


def _num_ranks(ranks: Ranks) -> int:
    """Return those of one replica."""
    return (1 if ranks.stages is None else ranks.stages.size) * ranks.shard.size


def _max_over(ranks: Ranks, values: list[float]) -> tuple[float, ...]:
    """Return the largest of all ranks, those of other stages included."""
    label = "resize: comparing ranks"
    found = ranks.max_over(values, label=label)
    return found if ranks.stages is None else ranks.stages.max_over(found, label=label)


def _broadcast_s(runtime: Runtime, ranks: Ranks, nbytes: int) -> float:
    """Return how long it takes to send so many bytes to all of some ranks, the way that chunks go."""
    label, group = "resize: measuring exchanges", ranks.group(runtime.device)
    with runtime_mode():
        sent = torch.zeros(nbytes, dtype=torch.uint8, device=runtime.device)
    ranks.barrier(label=label)
    with ranks.waiting(label):
        return runtime.memory.compute.time_s(lambda: group.broadcast(sent, 0).wait())


def _block(at: int, modules: list[nn.Module], runtime: Runtime) -> tuple[Block, int]:
    """Return a block without times, and the bytes of its gradients."""
    params = {id(param): param for module in modules for param in module.parameters()}.values()
    itemsize = runtime.dtype.itemsize
    trained = sum(param.numel() for param in params if param.requires_grad)
    frozen = sum(param.numel() for param in params if not param.requires_grad)
    nbytes = _BYTES_A_PARAMETER * trained + itemsize * frozen
    return Block(str(at), 0.0, 0.0, nbytes, weight_nbytes=itemsize * (trained + frozen)), itemsize * trained
