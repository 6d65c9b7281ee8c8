"""The runtime of a manager: its parts wired together."""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from chunkmem.assembly.built_models import BuiltModels, several_ranks
from chunkmem.assembly.entry_points import EntryPoints, collect_abandoned
from chunkmem.assembly.parts import (
    DTYPES,
    Memory,
    Modules,
    Sharding,
    make_modules,
    make_sharding,
    make_shards,
    make_update_parts,
    make_updater,
    margin_use_ratio,
)
from chunkmem.assembly.speeds import Links
from chunkmem.comm.exchange import Exchange
from chunkmem.comm.mesh import end_groups, groups_of, mesh_of
from chunkmem.comm.methods import ExchangeMethod, possible_exchanges, require_method
from chunkmem.comm.ranks import Ranks, open_ranks
from chunkmem.config import Config, OptsConfig, flattened
from chunkmem.errors import ConfigError, StateError
from chunkmem.layout.spec import digest
from chunkmem.nn.autocast import AutocastCache
from chunkmem.nn.binding import BoundChunk, ManagedParameter, move_to, trainable
from chunkmem.nn.gradient_slots import GradientSlots
from chunkmem.nn.gradient_values import GradientValues
from chunkmem.nn.gradients import GradientBook
from chunkmem.nn.hooks import ModuleHooks
from chunkmem.nn.module_policy import ModulePolicies
from chunkmem.nn.registry import ModelRegistry, check_fits
from chunkmem.nn.wrappers import WrapperCheck
from chunkmem.optim.by_form import updates_by_form
from chunkmem.optim.chunk_states import StateHolder
from chunkmem.optim.foreign import ForeignStepCheck
from chunkmem.optim.optimizer import RuleOptimizer
from chunkmem.optim.places import StatePlaces
from chunkmem.optim.scaler import LossScaler
from chunkmem.optim.update import GroupUpdater, UpdateParts
from chunkmem.plan.candidate import PlanOptions
from chunkmem.plan.machine import Machine
from chunkmem.runtime.device import ComputeDevice
from chunkmem.runtime.disk_calls import DiskCalls
from chunkmem.runtime.events import Lanes
from chunkmem.runtime.interrupts import InterruptGuard
from chunkmem.runtime.lanes import open_lanes
from chunkmem.runtime.numa import warn_of_far_cores
from chunkmem.runtime.pager import Pager
from chunkmem.runtime.policy import SpeculativeUpdates
from chunkmem.runtime.storage import ChunkStorage, HostStorage, StorageBackend, default_backend
from chunkmem.runtime.store import ChunkStore
from chunkmem.runtime.tiers import Tiers, shadow_nbytes, warn_of_fragmentation, warn_of_shares
from chunkmem.shard.shards import ShardStore
from chunkmem.steps.controller import StepController
from chunkmem.steps.trial import AheadTrial
from chunkmem.tracing.watch import Watch
from chunkmem.types import Tier

T = TypeVar("T")
MakeLanes = Callable[[ComputeDevice], Lanes]


@dataclass(frozen=True)
class Origin:
    """What the parts of a manager are made from: the arguments of `ChunkManager`, and what users have asked for."""

    config: Config
    process_group: Any
    mesh: object
    exchange: type[ExchangeMethod] | None
    device_index: int | None
    machine: Machine | None
    make_lanes: MakeLanes | None
    disk_calls: DiskCalls | None
    asked: ModulePolicies = field(default_factory=ModulePolicies)
    """What users have asked for modules."""
    groups: list[Any] = field(default_factory=list)
    """Process groups that were made for the mesh, and end with it: the user has made another one."""


@dataclass(frozen=True, eq=False)
class Runtime:
    """The parts of one manager, which has it; see `build_runtime` and [Note: Order of parts]."""

    config: Config
    origin: Origin
    ranks: Ranks
    scaler: LossScaler | None
    tiers: Tiers
    memory: Memory
    gradients: GradientBook
    sharding: Sharding
    updater: GroupUpdater
    modules: Modules
    links: Links
    controller: StepController
    entry_points: EntryPoints
    hooks: ModuleHooks
    built: BuiltModels
    foreign_steps: ForeignStepCheck
    foreign_wrappers: WrapperCheck
    _holders: weakref.WeakKeyDictionary[StateHolder, None] = field(default_factory=weakref.WeakKeyDictionary)

    @property
    def registry(self) -> ModelRegistry:
        """All managed parameters."""
        return self.modules.registry

    @cached_property
    def owns(self) -> Callable[[ManagedParameter], bool]:
        """Tells whether this rank keeps a parameter; asked for every one by optimizers, without a call in between."""
        return self.sharding.owns

    def from_owner(self, managed: ManagedParameter, read: Callable[[], T]) -> T:
        """Return what `read` returns on the rank that owns a parameter; see `Sharding.from_owner`."""
        return self.sharding.from_owner(managed, read)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise StateError("what a manager has cannot be copied or pickled: make another manager from its config")

    def root(self, model: nn.Module | None) -> nn.Module:
        """Return `model`, or the only one; see `ModelRegistry.only_root`."""
        if model is None and self.built.unpacked is not None and len(self.built.unpacked.roots) == 1:
            model = self.built.unpacked.roots[0]
        return self.registry.only_root(model)

    def load_state_dict(self, state: Mapping[str, Any], root: nn.Module, *, strict: bool) -> _IncompatibleKeys:
        """Load values by name; see `ChunkManager.load_state_dict`."""
        with self.together("manager.load_state_dict()"):
            check_fits(state, self.modules.surface.expected_state(root), strict=strict)
            keys: _IncompatibleKeys = root.load_state_dict(state, strict=strict)
            self.send_on_host("manager.load_state_dict()")
        return keys

    def with_all_stages(self, state: dict[str, Any]) -> dict[str, Any]:
        """Put the tensors that other stages have into the state of a model; return it."""
        if self.ranks.stages is None:
            return state
        tensors = ((key, value) for key, value in state.items() if isinstance(value, torch.Tensor))
        own = {key: value for key, value in tensors if not value.is_meta}
        state.update(self.ranks.over_stages(own, label="sending the weights of a stage"))
        return state

    def for_ranks(self, mesh: object) -> Runtime:
        """Return parts for the same ranks in a mesh that was made for them, once these have stopped.

        Nothing is packed in them yet.
        """
        origin = replace(self.origin, process_group=None, mesh=mesh, groups=[*groups_of(mesh)])
        after = build_runtime(origin, before=self)
        self.end_groups()
        return after

    def over_same_ranks(self) -> Runtime:
        """Return parts for the same ranks, once these have stopped; nothing is packed in them yet.

        What was counted of chunks so far, and what happened in the last steps, is known to them.
        """
        after = build_runtime(self.origin, before=self)
        after.memory.store.moved.update(self.memory.store.moved)
        after.memory.pager.required_nbytes.update(self.memory.pager.required_nbytes)
        after.controller.timelines.take_over(self.controller.timelines)
        if self.sharding.shards is not None and after.sharding.shards is not None:
            after.sharding.shards.own_as(self.sharding.shards)
        return after

    def stop(self, reason: str) -> bool:
        """Have nothing run any more. What chunks hold stays; `reason` is what those are told who use the manager.

        Returns:
            Whether something ran until now, and not in the process that this one was forked from.
        """
        if self.memory.store.snapshot is not None:
            self.memory.store.snapshot.read_all()
        self.foreign_steps.remove()
        self.foreign_wrappers.remove()
        self.entry_points.close()
        self.modules.compiled.close()
        stops = self.memory.pager.can_close
        if stops:
            self.controller.close()
            self.updater.ahead.forget()
            self.modules.access.close()
            self.modules.backward.reset(step=True)
            self.sharding.units.close()
            self.ranks.close()
            self.memory.pager.close(reason)
        return stops

    def free(self) -> None:
        """Give back what chunks hold, and join the lanes; these parts have stopped, and no others take their place."""
        self.tiers.lanes.close()
        self.memory.store.close()

    def end_groups(self) -> None:
        """End the process groups that were made for the mesh of these parts, which have stopped."""
        end_groups(self.origin.groups)
        self.origin.groups.clear()

    # What optimizers see: `chunkmem.optim.host`.

    def add_holder(self, holder: StateHolder) -> None:
        """Know of what has states in chunks, as long as somebody has it."""
        self._holders[holder] = None

    def drop_holder(self, holder: StateHolder) -> None:
        """It has none any more."""
        self._holders.pop(holder, None)

    def adopt(self, params: Iterable[torch.Tensor]) -> None:
        """Take in those parameters that were added to models after these were packed, as rank 0 has them."""
        added = self.registry.adopt(params)
        for param in added:
            if param.device != self.device:
                move_to(param, param.data.to(self.device))
        if added and self.sharding.shards is not None:
            self.entry_points.adopt(added)

    @property
    def holders(self) -> list[StateHolder]:
        """Those that somebody has: optimizers, then others, each in the order in which they were made."""
        return sorted(self._holders, key=lambda holder: not isinstance(holder, RuleOptimizer))

    @property
    def open_block(self) -> str:
        """The `with` block of a holder that is open; empty: none."""
        return next((holder.open_block for holder in self.holders if holder.open_block), "")

    @property
    def optimizers(self) -> list[RuleOptimizer]:
        """Those among them."""
        return [holder for holder in self.holders if isinstance(holder, RuleOptimizer)]

    def forget_plans(self) -> None:
        """There are other chunks than in the steps that were recorded."""
        self.entry_points.forget_steps()

    @property
    def device(self) -> torch.device:
        """That computes."""
        return self.memory.compute.device

    @property
    def dtype(self) -> torch.dtype:
        """That modules compute in."""
        return DTYPES[self.config.precision]

    @property
    def is_lowered(self) -> bool:
        """Weights are computed with in bf16 or fp16."""
        return self.config.precision != "fp32"

    @property
    def is_shared(self) -> bool:
        """Several ranks train together."""
        return self.sharding.shards is not None

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of all models, by their names in them; with pipeline stages, those of all stages."""
        for unpacked in self.built.added:
            for root in unpacked.roots:
                yield from root.named_parameters()

    @property
    def is_closed(self) -> bool:
        """Nothing can be served any more."""
        return self.memory.pager.closed is not None

    def send_on_host(self, reader: str) -> None:
        """Weights were written: over ranks, those computed with on HOST go to all of them."""
        if self.sharding.shards is not None:
            self.sharding.shards.send_on_host(reader=reader)

    def require_open(self) -> None:
        """Raise a `StateError` if the manager is closed."""
        self.memory.require_open()

    def note_scaled(self) -> None:
        """The gradients up to the next step come multiplied by the loss scale, where there is one."""
        if self.scaler is not None:
            self.scaler.note_scaled()

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Surround the backwards of a batch, whose gradients come multiplied by the loss scale."""
        self.note_scaled()
        guard = self.entry_points.make_guard()
        with self.ranks.telling(), guard or contextlib.nullcontext():
            yield

    def together(self, call: str) -> contextlib.AbstractContextManager[None]:
        """Surround a call that all ranks make; see `EntryPoints.together`.

        Raises:
            StateError: in addition, if a step has begun and is not over.
        """
        self.updater.ledger.require_over(call)
        return self.entry_points.together(call)

    def step(self, options: str, *, updates: bool, goes_on: bool = False) -> contextlib.AbstractContextManager[None]:
        """Surround `step()` and clipping; see `EntryPoints.step`."""
        return self.entry_points.step(options, updates=updates, goes_on=goes_on)

    def skip_step(self) -> None:
        """The optimizer's step changes nothing: neither record it nor learn from it."""
        self.controller.excuse_iteration()


def build_runtime(origin: Origin, *, before: Runtime | None = None) -> Runtime:
    """Make the parts of a manager, each of earlier ones.

    Args:
        origin: what they are made from.
        before: what these parts take the place of, and use the tiers and the loss scale of; it has stopped.
    """
    _require_config(origin.config)
    require_method(origin.exchange)
    config, opts, backend = origin.config, origin.config.client.opts, default_backend()
    interrupts = (None if before is None else before.memory.interrupts) or InterruptGuard()
    interrupts.install()
    ranks = _open_ranks(config, origin)
    own_scaler = LossScaler(config.fp16) if config.precision == "fp16" else None
    scaler = own_scaler if before is None else before.scaler
    tiers = _open_tiers(origin, ranks, backend) if before is None else before.tiers
    compute = tiers.compute
    store = ChunkStore(tiers.pools, compute.clock)
    update_parts = make_update_parts(store, compute, tiers.lanes, num_threads=opts.update_threads)
    memory = _make_memory(tiers, store, update_parts.ahead, backend, interrupts)
    shards = make_shards(memory, ranks, _agreed_exchanges(ranks, compute, opts.with_mem_saving_comm, origin.exchange))
    places = StatePlaces(store, tiers.caps, margin_use_ratio=margin_use_ratio(config))
    gradients = _make_gradients(memory.pager, update_parts, places, shards, ranks)
    sharding = make_sharding(memory, ranks, shards, gradients.slots, gradients.show_mean)
    updater = make_updater(memory, gradients, places, update_parts)
    modules = make_modules(config, memory, sharding, gradients, updater, origin.asked)
    if before is not None:
        modules.know_as(before.modules)
    links = Links(
        shards,
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
        trial=None if prefetch is None else AheadTrial(prefetch, controller, ranks, measure=links.measure),
        scaler=scaler,
        autocast=AutocastCache(compute.device.type, precision=config.precision),
        after_first_step=collect,
    )
    hooks = modules.hooks(entry_points)
    built = BuiltModels(
        sharding, modules, updater, entry_points, hooks, device=compute.device, dtype=DTYPES[config.precision]
    )
    foreign_wrappers = WrapperCheck(modules.registry, gradients.values, entry_points.declare_last, num_ranks=ranks.size)
    collect()
    return Runtime(
        config, origin, ranks, scaler, tiers, memory, gradients, sharding, updater, modules, links, controller,
        entry_points, hooks, built, foreign_steps, foreign_wrappers,
    )  # fmt: skip


def _make_gradients(
    pager: Pager, parts: UpdateParts, places: StatePlaces, shards: ShardStore | None, ranks: Ranks
) -> GradientBook:
    slots = GradientSlots(pager, settles=places.updates_on_host, landed=parts.landed)
    values = GradientValues(
        slots,
        pager,
        parts.ledger,
        before_change=parts.ahead.roll_back,
        shards=shards,
        is_of_stage=ranks.stages is not None,
    )
    return GradientBook(pager, slots, values)


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
    for ranks in several_ranks(opened):
        for path, value in flattened(config.to_dict()).items():
            ranks.agree(f"{path} of the configuration", json.dumps(value))
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
        disk_calls=origin.disk_calls,
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
        if tier is Tier.HOST:
            in_ram = torch.device("cpu")
            return BoundChunk(HostStorage(backend, device=in_ram, dtype=dtype), device=in_ram)
        return BoundChunk(ChunkStorage(backend, device=compute.device, dtype=dtype), device=compute.device)

    pager = Pager(
        store,
        meter=tiers.meter,
        follow_stream=compute.current_stream if compute.is_accelerator else None,
        speculative=ahead,
        interrupts=interrupts,
    )
    return Memory(compute, tiers.caps, pager, make_home, interrupts)


def _agreed_exchanges(
    ranks: Ranks, compute: ComputeDevice, saving: bool | None, own: type[ExchangeMethod] | None
) -> Sequence[Exchange]:
    """Return the ways to exchange chunks, the same on all ranks; none with one rank."""
    if ranks.size == 1:
        return ()
    ranks.agree("the exchange method", "chunkmem's" if own is None else f"{own.__module__}.{own.__qualname__}")
    return possible_exchanges(ranks, compute.device, memory_saving=saving, own=own)


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
        trainable=lambda: bytes(trainable(registry.parameters)),
        num_backwards=lambda: modules.backward.num_ended,
        regions=modules.regions,
        watch=lambda: Watch(tiers, is_chunk=modules.declared.is_chunk, sample=tracer.use_async_mem_monitor),
    )
