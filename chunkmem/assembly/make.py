"""The parts of a manager, made over real memory, each of earlier ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial

import torch

from chunkmem.assembly.built_models import BuiltModels, several_ranks
from chunkmem.assembly.entry_points import EntryPoints, collect_abandoned
from chunkmem.assembly.parts import (
    DTYPES,
    Memory,
    Modules,
    Sharding,
    make_modules,
    make_training,
    make_update_parts,
    margin_use_ratio,
)
from chunkmem.assembly.runtime import Origin, Runtime
from chunkmem.assembly.speeds import Links
from chunkmem.config import Config, OptsConfig, flattened
from chunkmem.data.errors import ConfigError
from chunkmem.data.layout import digest
from chunkmem.data.types import Tier
from chunkmem.modules.autocast import AutocastCache
from chunkmem.modules.binding import BoundChunk
from chunkmem.modules.wrappers import check_wrappers
from chunkmem.optim.by_form import updates_by_form
from chunkmem.optim.foreign import ForeignStepCheck
from chunkmem.optim.scaler import LossScaler
from chunkmem.plan.candidate import PlanOptions
from chunkmem.ranks.exchange import Exchange
from chunkmem.ranks.mesh import mesh_of
from chunkmem.ranks.methods import ExchangeMethod, possible_exchanges, require_method
from chunkmem.ranks.ranks import Ranks, open_ranks
from chunkmem.runtime.device import ComputeDevice
from chunkmem.runtime.interrupts import InterruptGuard
from chunkmem.runtime.lanes import open_lanes
from chunkmem.runtime.numa import warn_of_far_cores
from chunkmem.runtime.pager import Pager
from chunkmem.runtime.policy import SpeculativeUpdates
from chunkmem.runtime.storage import ChunkStorage, HostStorage, StorageBackend, default_backend
from chunkmem.runtime.store import ChunkStore
from chunkmem.runtime.tiers import Tiers, shadow_nbytes, warn_of_fragmentation, warn_of_shares
from chunkmem.steps.controller import StepController
from chunkmem.steps.first_steps import FirstSteps
from chunkmem.steps.watch import Watch


def build_runtime(origin: Origin, *, before: Runtime | None = None) -> Runtime:
    """Make the parts of a manager, each of earlier ones.

    Args:
        origin: what they are made from.
        before: what these parts take the place of, and use the tiers and the loss scale of; it has stopped.
    """
    _require_config(origin.config)
    require_method(origin.exchange)
    config, opts, backend = origin.config, origin.config.client.opts, default_backend()
    interrupts = (None if before is None else before.memory.pager.interrupts) or InterruptGuard()
    interrupts.install()
    ranks = _open_ranks(config, origin)
    scaler = LossScaler(config.fp16) if config.precision == "fp16" else None
    scaler = scaler if before is None else before.scaler
    tiers = _open_tiers(origin, ranks, backend) if before is None else before.tiers
    compute = tiers.compute
    store = ChunkStore(tiers.pools, compute.clock)
    update_parts = make_update_parts(store, compute, tiers.lanes, num_threads=opts.update_threads)
    memory = _make_memory(tiers, store, update_parts.ahead, backend, interrupts)
    exchanges = _agreed_exchanges(ranks, compute, config, origin.exchange)
    gradients, sharding, updater = make_training(
        memory, ranks, exchanges, update_parts, margin_use_ratio=margin_use_ratio(config)
    )
    modules = make_modules(config, memory, sharding, gradients, updater, origin.asked)
    if before is not None:
        modules.know_as(before.modules)
    links = Links(
        sharding.shards,
        memory.pager,
        tiers,
        origin.machine,
        lambda numel: updates_by_form(updater.native.kernels, numel),
        shadow_nbytes=shadow_nbytes(opts, compute, tiers.caps) if _moves_async(opts, backend) else 0,
    )
    controller = _make_controller(config, memory, sharding, modules, tiers, links)
    foreign_steps = ForeignStepCheck(modules.registry, gradients)
    collect = partial(collect_abandoned, foreign_steps.is_alone)
    prefetch = sharding.units.prefetch
    entry_points = EntryPoints(
        memory,
        sharding,
        modules,
        tiers=tiers,
        controller=controller,
        first_steps=None if prefetch is None else FirstSteps(prefetch, controller, ranks, measure=links.measure),
        scaler=scaler,
        autocast=AutocastCache(compute.device.type, precision=config.precision),
        after_first_step=collect,
    )
    hooks = modules.hooks(entry_points, memory.pager.events)
    built = BuiltModels(sharding, modules, entry_points, hooks, compute.device, DTYPES[config.precision])
    foreign_wrappers = check_wrappers(modules.registry, gradients.values, entry_points.declare_last, ranks.size)
    collect()
    return Runtime(
        config, origin, ranks, scaler, tiers, memory, gradients, sharding, updater, modules, links, controller,
        entry_points, hooks, built, foreign_steps, foreign_wrappers,
    )  # fmt: skip


def _require_config(config: object) -> None:
    if not isinstance(config, Config):
        raise ConfigError(
            f"config is a {type(config).__name__}; pass Config.from_json(path), Config.from_dict(values) or None"
        )


def _open_ranks(config: Config, origin: Origin) -> Ranks:
    """Return this rank among the others, which all have the same configuration."""
    rows = mesh_of(origin.mesh, process_group=origin.process_group)
    opened = open_ranks(origin.process_group, mesh=rows, timeout_s=config.distributed.timeout_s)
    opened.require_whole()
    parts = [] if opened.parts is None else [opened.parts]
    for ranks in (*parts, *several_ranks(opened)):
        values = flattened(config.to_dict()).items()
        named = {f"{path} of the configuration": json.dumps(value) for path, value in values}
        ranks.agree_on_all(named, label="comparing the configuration")
    return opened


def _moves_async(opts: OptsConfig, backend: StorageBackend) -> bool:
    return opts.with_async_move and backend.moves_contents


def _open_tiers(origin: Origin, ranks: Ranks, backend: StorageBackend) -> Tiers:
    config, compute = origin.config, ComputeDevice.default(origin.device_index)
    open_own = partial(open_lanes, blocking=not _moves_async(config.client.opts, backend))
    tiers = Tiers(
        config,
        compute,
        (origin.make_lanes or open_own)(compute),
        num_local=ranks.num_local,
        calls=origin.calls,
        maps_slabs=backend.moves_contents,
    )
    warn_of_fragmentation(compute, tiers.caps)
    warn_of_far_cores(compute)
    warn_of_shares(compute, config.client.mem_tracer)
    return tiers


def _make_memory(
    tiers: Tiers,
    store: ChunkStore,
    ahead: SpeculativeUpdates,
    backend: StorageBackend,
    interrupts: InterruptGuard,
) -> Memory:
    """Return chunks in real memory; `backend` has that of DEVICE change hands."""
    compute = tiers.compute

    def make_home(dtype: torch.dtype, tier: Tier) -> BoundChunk:
        on_host = tier is Tier.HOST
        kind, device = (HostStorage, torch.device("cpu")) if on_host else (ChunkStorage, compute.device)
        return BoundChunk(kind(backend, device=device, dtype=dtype), device=device)

    pager = Pager(
        store,
        meter=tiers.meter,
        follow_stream=compute.current_stream if compute.is_accelerator else lambda: None,
        speculative=ahead,
        interrupts=interrupts,
    )
    return Memory(compute, tiers.caps, pager, make_home)


def _agreed_exchanges(
    ranks: Ranks, compute: ComputeDevice, config: Config, own: type[ExchangeMethod] | None
) -> Sequence[Exchange]:
    """Return the ways to exchange chunks, the same on all ranks; none with one rank."""
    if ranks.size == 1:
        return ()
    ranks.agree("the exchange method", "chunkmem's" if own is None else f"{own.__module__}.{own.__qualname__}")
    saving, reduce_dtype = config.client.opts.with_mem_saving_comm, DTYPES[config.distributed.reduce_dtype]
    return possible_exchanges(
        ranks, compute.device, memory_saving=saving, reduce_dtype=reduce_dtype, overlap=compute.overlap, own=own
    )


def _make_controller(
    config: Config, memory: Memory, sharding: Sharding, modules: Modules, tiers: Tiers, links: Links
) -> StepController:
    """Return what decides before each step whether to record it, to follow a plan, or to serve it on demand."""
    tracer, registry = config.client.mem_tracer, modules.registry
    static_nbytes = int(tiers.caps.device_nbytes * tracer.warmup_gpu_chunk_mem_ratio)
    where = "" if sharding.shards is None else f" on rank {sharding.ranks.shard.rank} of {sharding.ranks.shard.size}"
    return StepController(
        memory.pager,
        tiers,
        machine=links.machine,
        options=PlanOptions(
            margin_use_ratio=margin_use_ratio(config),
            static_nbytes=static_nbytes if tracer.with_static_partition else None,
        ),
        layout=lambda: digest(model.layout for model in registry.models) + where,
        is_lone=sharding.shards is None,
        trainable=registry.trained,
        num_backwards=lambda: modules.backward.num_ended,
        regions=modules.regions,
        is_model=lambda root: any(id(model.root) == root for model in registry.models),
        watch=lambda: Watch(tiers, is_chunk=modules.declared.is_chunk, sample=tracer.use_async_mem_monitor),
    )
