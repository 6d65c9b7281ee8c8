"""The step controller of a manager, made of its parts."""

from __future__ import annotations

from collections.abc import Callable

import torch

from chunkmem.config import Config
from chunkmem.layout.spec import digest
from chunkmem.parts import Memory, Modules, Sharding, margin_use_ratio
from chunkmem.plan.candidate import PlanOptions
from chunkmem.plan.machine import Machine
from chunkmem.runtime.events import Lanes
from chunkmem.runtime.tiers import Tiers
from chunkmem.steps.controller import StepController
from chunkmem.tracing.watch import Watch


def make_controller(
    config: Config,
    memory: Memory,
    sharding: Sharding,
    modules: Modules,
    tiers: Tiers,
    lanes: Lanes,
    machine: Callable[[], Machine],
) -> StepController:
    """Return what decides before each step whether to record it, to follow a plan, or to serve it on demand."""
    tracer, registry = config.client.mem_tracer, modules.registry
    static_nbytes = int(tiers.caps.device_nbytes * tracer.warmup_gpu_chunk_mem_ratio)
    where = "" if sharding.shards is None else f" on rank {sharding.ranks.shard.rank} of {sharding.ranks.shard.size}"
    controller = StepController(
        memory.pager,
        tiers,
        lanes,
        machine=machine,
        options=PlanOptions(
            margin_use_ratio=margin_use_ratio(config),
            static_nbytes=static_nbytes if tracer.with_static_partition else None,
        ),
        layout=lambda: digest(model.layout for model in registry.models) + where,
        is_lone=sharding.shards is None,
        trainable=lambda: bytes(managed.requires_grad for managed in registry.parameters),
        num_backwards=lambda: modules.backward.num_ended,
        regions=modules.regions,
        watch=lambda: Watch(tiers, is_chunk=modules.declared.is_chunk, sample=tracer.use_async_mem_monitor),
    )

    def leave_out(storage: torch.UntypedStorage) -> None:
        if controller.watch is not None:
            controller.watch.leave_out(storage)

    def count_again(storage: torch.UntypedStorage) -> None:
        if controller.watch is not None:
            controller.watch.count_again(storage)

    modules.regions.on_taken = modules.parked.on_taken = leave_out
    modules.regions.on_left = count_again
    return controller
