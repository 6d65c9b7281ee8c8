"""What a number of stages is chosen by: times, bytes and speeds of all ranks, the same on each of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from statistics import median_low

import torch
from torch import nn

from chunkmem.assembly.runtime import Runtime
from chunkmem.contrib.elastic.block_times import BlockTimes, LastSteps, SampleCost, kinds_of
from chunkmem.contrib.elastic.widths import (
    CallCost,
    Division,
    WidthChoice,
    WidthMachine,
    WidthTask,
    choose_width,
    num_calls,
    predicted_s,
    trained_nbytes,
)
from chunkmem.data.errors import ConfigError, LayoutError
from chunkmem.data.types import Tier
from chunkmem.pipeline.options import PipelineOptions
from chunkmem.pipeline.staged import stages_of
from chunkmem.plan.balance import Block
from chunkmem.plan.pipeline_schedule import Schedule
from chunkmem.ranks.mesh import ranks_by_stage
from chunkmem.ranks.ranks import Ranks
from chunkmem.runtime.device import runtime_mode

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
        self._exchange_s: float | None = None
        self._update_Bps: float | None = None
        self._overheads_s: dict[int, float] = {}
        """By number of stages on different ranks, of the last steps with so many: see `WidthMachine`."""
        self._chain = options.chain

    def choose(self, runtime: Runtime, now: Division) -> WidthChoice | str:
        """Return what is best, the same on all ranks, which all call it; or why nothing can be said.

        Args:
            runtime: of the manager, as things are.
            now: how the ranks are divided.

        Raises:
            RankError: a rank is missing.
        """
        ranks = runtime.ranks
        per_sample = [self._times.per_sample(), self._times.per_sample(then=True)]
        own = [ranks.over_stages(each, label="resize: times of blocks") for each in per_sample]
        costs, then = ranks.from_first(own, label="resize: times of blocks of all stages")
        num_samples = ranks.from_first(self._times.num_samples, label="resize: samples of a batch")
        trained = self._times.trained()
        # What has no backward, and was not run although others were, comes from a cache.
        first = min(costs, default=0)
        missing = [at for at in range(len(self._chain)) if at not in costs and (at > first or kinds_of(trained)[at])]
        if missing or not costs:
            return f"nothing is known of block {(missing or [0])[0]} yet: call pipe.step() before pipe.resize()"
        schedules = self._schedules(runtime, now)
        task = self._task(runtime, costs, num_samples, schedules, trained)
        machine = self._machine(runtime)
        last = self._last(runtime)
        if last is not None:
            before = self._task(runtime, then, num_samples, schedules, last.trained)
            self._learn(before, now, machine, last)
        machine = replace(
            machine,
            update_Bps=self._update_Bps or inf,
            overheads_s=dict(self._overheads_s),
            overhead_s=max(0.0, self._overheads_s.get(now.num_ranks, 0.0)),
        )
        return ranks.from_first(choose_width(task, now, machine), label="resize: another number of stages")

    def _last(self, runtime: Runtime) -> LastSteps | None:
        """Return what is known of the last steps, on the slowest rank; None: nothing on one of them."""
        own = self._times.last()
        missing, step_s, update_s = _max_over(
            runtime.ranks, [1.0, 0.0, 0.0] if own is None else [0.0, own.step_s, own.update_s]
        )
        return None if missing or own is None else replace(own, step_s=step_s, update_s=update_s)

    def _learn(self, task: WidthTask, now: Division, machine: WidthMachine, last: LastSteps) -> None:
        """Know from the last steps how fast updates are, and what else they took."""
        updated_nbytes = trained_nbytes(task, now)
        if updated_nbytes and last.update_s:  # where there is little to update, other things take the time
            self._update_Bps = max(self._update_Bps or 0.0, updated_nbytes / last.update_s)
        with contextlib.suppress(ConfigError):  # else the batch has changed since, and cannot be divided so
            machine = replace(machine, update_Bps=self._update_Bps or inf)
            more_s = last.step_s + last.update_s - predicted_s(task, now, machine)
            self._overheads_s[now.num_ranks] = more_s / max(1, num_calls(task, now))

    def _task(
        self,
        runtime: Runtime,
        costs: Mapping[int, SampleCost],
        num_samples: int,
        schedules: dict[int, tuple[Schedule, int]],
        trained: Sequence[int],
    ) -> WidthTask:
        """Return what is trained with a global batch of so many samples; blocks that `costs` lacks are not run."""
        blocks, calls, exchanged, held = [], [], [], []
        replicas = 1 if runtime.ranks.replicate is None else runtime.ranks.replicate.size
        num_samples //= replicas
        itemsize, kinds = runtime.dtype.itemsize, kinds_of(trained)
        for at, modules in enumerate(self._chain):
            block, cost = _block(at, modules, trained[at], itemsize), costs.get(at, SampleCost(0.0, 0.0, 0))
            is_run, trained_nbytes = at in costs, itemsize * trained[at]
            blocks.append(
                replace(
                    block,
                    forward_s=num_samples * cost.forward_s,
                    backward_s=num_samples * cost.backward_s,
                    output_nbytes=num_samples * cost.output_nbytes,
                )
            )
            num = is_run + (kinds[at] > 0)
            calls.append(CallCost(num, cost.call_s, num + (trained[at] > 0), trained_nbytes))
            exchanged.append(block.weight_nbytes * num + trained_nbytes)
            held.append(block.weight_nbytes + trained_nbytes)
        return WidthTask(blocks, exchanged, held, num_samples, self._options.micro_batches, schedules, calls)

    def _schedules(self, runtime: Runtime, now: Division) -> dict[int, tuple[Schedule, int]]:
        """Return by number of stages, of those that these ranks and blocks can have, what runs them."""
        options, found = self._options, {1: (Schedule.BY_LAYER, 1)}
        num_ranks = _num_ranks(runtime.ranks)
        for num in (each for each in range(2, num_ranks + 1) if num_ranks % each == 0):
            asked = replace(options, schedule="auto") if options.schedule == "by-layer" else options
            try:
                ranks_by_stage(runtime.origin.mesh, num)
                chosen, stages, _ = stages_of(runtime, asked, num_ranks=num, num_shards=num_ranks // num)
            except (ConfigError, LayoutError):
                continue
            found[num] = Schedule(chosen.schedule), len(stages) // num
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
            exchange_s=self._latency_s(runtime),
        )

    def _speed(self, runtime: Runtime) -> float:
        """Return how fast these ranks exchange, measured once."""
        if self._exchange_Bps == inf and _num_ranks(runtime.ranks) > 1:
            itemsize = runtime.dtype.itemsize
            largest = max(_block(at, modules, 0, itemsize).weight_nbytes for at, modules in enumerate(self._chain))
            nbytes = min(_LARGEST_NBYTES, max(1, largest))
            ranks = runtime.ranks if runtime.ranks.stages is None else runtime.ranks.stages
            own = [_broadcast_s(runtime, ranks, nbytes) for _ in range(_NUM_TRIALS)]
            (seconds,) = _max_over(runtime.ranks, [min(own)])
            self._exchange_Bps = nbytes / max(seconds, 1e-9)
        return self._exchange_Bps

    def _latency_s(self, runtime: Runtime) -> float:
        """Return how long an exchange of little takes, which ranks agree on before it begins: measured once."""
        if self._exchange_s is None:
            ranks = runtime.ranks if runtime.ranks.stages is None else runtime.ranks.stages
            own = []
            for _ in range(_NUM_TRIALS):
                began_s = time.perf_counter()
                ranks.barrier(label="resize: measuring exchanges")
                own.append(time.perf_counter() - began_s)
            (self._exchange_s,) = _max_over(runtime.ranks, [median_low(own)])
        return self._exchange_s


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
    label, group = "resize: measuring exchanges", ranks.all_ranks.group(runtime.device)
    with runtime_mode():
        sent = torch.zeros(nbytes, dtype=torch.uint8, device=runtime.device)
    ranks.barrier(label=label)
    with ranks.connection.waiting(label):
        return runtime.memory.compute.time_s(lambda: group.broadcast(sent, 0).wait())


def _block(at: int, modules: list[nn.Module], trained: int, itemsize: int) -> Block:
    """Return a block without times, of which so many elements are trained."""
    num = sum(param.numel() for param in {id(p): p for module in modules for p in module.parameters()}.values())
    nbytes = _BYTES_A_PARAMETER * trained + itemsize * (num - trained)
    return Block(str(at), 0.0, 0.0, nbytes, weight_nbytes=itemsize * num)
