"""The runtime of a manager: its parts wired together."""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from chunkmem.built_models import BuiltModels, several_ranks
from chunkmem.comm.exchange import Exchange
from chunkmem.comm.mesh import end_groups, groups_of, mesh_of
from chunkmem.comm.methods import ExchangeMethod, possible_exchanges, require_method
from chunkmem.comm.ranks import Ranks
from chunkmem.config import Config, flattened
from chunkmem.entry_points import EntryPoints, collect_abandoned
from chunkmem.errors import ConfigError, StateError
from chunkmem.nn.autocast import AutocastCache
from chunkmem.nn.binding import BoundChunk, move_to
from chunkmem.nn.gradients import GradientBook
from chunkmem.nn.registry import check_fits
from chunkmem.nn.shared_gradients import SharedGradients
from chunkmem.nn.wrappers import WrapperCheck
from chunkmem.optim.by_form import updates_by_form
from chunkmem.optim.ema import EMA
from chunkmem.optim.foreign import ForeignStepCheck
from chunkmem.optim.places import StatePlaces
from chunkmem.optim.saved import StatefulOptimizer
from chunkmem.optim.scaler import LossScaler
from chunkmem.parts import (
    DTYPES,
    Memory,
    make_modules,
    make_sharding,
    make_updater,
    margin_use_ratio,
)
from chunkmem.plan.machine import Machine
from chunkmem.runtime.device import ComputeDevice
from chunkmem.runtime.disk_calls import DiskCalls
from chunkmem.runtime.events import Lanes
from chunkmem.runtime.interrupts import InterruptGuard
from chunkmem.runtime.lanes import open_lanes
from chunkmem.runtime.numa import warn_of_far_cores
from chunkmem.runtime.pager import Pager
from chunkmem.runtime.storage import ChunkStorage, HostStorage, StorageBackend, default_backend
from chunkmem.runtime.store import ChunkStore
from chunkmem.runtime.tiers import Tiers, shadow_nbytes, warn_of_fragmentation, warn_of_shares
from chunkmem.speeds import Links
from chunkmem.steps.making import make_controller
from chunkmem.steps.trial import AheadTrial
from chunkmem.types import Tier

MakeLanes = Callable[[ComputeDevice], Lanes]


@dataclass(frozen=True)
class Origin:
    """What the parts of a manager are made from, and who uses them: for those that take their place."""

    process_group: Any
    mesh: object
    make_others: Callable[..., Runtime]
    optimizers: list[weakref.ref[torch.optim.Optimizer]] = field(default_factory=list)
    averages: list[weakref.ref[EMA]] = field(default_factory=list)
    groups: list[Any] = field(default_factory=list)
    """Process groups that were made for the mesh, and end with it: the user has made another one."""


class Runtime:
    """The parts of one manager, which has it; see `ChunkManager` and [Note: Order of parts]."""

    def __init__(
        self,
        config: Config,
        *,
        process_group: Any,
        mesh: object,
        exchange: type[ExchangeMethod] | None,
        device_index: int | None,
        machine: Machine | None,
        make_lanes: MakeLanes | None,
        disk_calls: DiskCalls | None,
        before: Runtime | None = None,
    ) -> None:
        """Wire the parts together.

        Args:
            config, process_group, mesh, exchange, device_index, machine, make_lanes, disk_calls: those of
                `ChunkManager`.
            before: what these parts take the place of, and use the tiers and the loss scale of; it has stopped.
        """
        self.config = _checked(config)
        make_others = partial(
            Runtime,
            config,
            exchange=exchange,
            device_index=device_index,
            machine=machine,
            make_lanes=make_lanes,
            disk_calls=disk_calls,
        )
        self.origin = Origin(process_group, mesh, make_others)
        interrupts = (None if before is None else before.memory.interrupts) or InterruptGuard()
        interrupts.install()
        compute = ComputeDevice.default(device_index) if before is None else before.tiers.compute
        require_method(exchange)
        rows = mesh_of(mesh, process_group=process_group)
        self.ranks = Ranks(process_group, mesh=rows, timeout_s=config.distributed.timeout_s)
        self.ranks.require_whole()
        for ranks in several_ranks(self.ranks):
            for path, value in flattened(config.to_dict()).items():
                ranks.agree(f"{path} of the configuration", json.dumps(value))
        if before is None:
            self.scaler: LossScaler | None = LossScaler(config.fp16) if config.precision == "fp16" else None
            self.tiers: Tiers = Tiers(config, compute, num_local=self.ranks.num_local, disk_calls=disk_calls)
            warn_of_fragmentation(compute, self.tiers.caps)
            warn_of_far_cores(compute)
            warn_of_shares(compute, config.client.mem_tracer)
        else:
            self.scaler, self.tiers = before.scaler, before.tiers
        backend = default_backend()
        self.memory: Memory = open_memory(self.tiers, backend, interrupts=interrupts)
        opts = config.client.opts
        blocking = not (opts.with_async_move and backend.moves_contents)
        lanes = (make_lanes or partial(open_lanes, blocking=blocking))(compute)
        self.tiers.device_pool.wait = lanes.compute_waits
        places = StatePlaces(self.memory.store, self.tiers.caps, margin_use_ratio=margin_use_ratio(config))
        self.gradients = GradientBook(
            self.memory.pager,
            settles=places.updates_on_host,
            is_shared=self.ranks.size > 1,
            is_of_stage=self.ranks.stages is not None,
        )
        exchanges = _agreed_exchanges(self.ranks, compute, saving=opts.with_mem_saving_comm, own=exchange)
        self.sharding = make_sharding(self.memory, self.ranks, exchanges, self.gradients)
        # Asked by optimizers for every parameter: without a call in between.
        self.owns, self.from_owner = self.sharding.owns, self.sharding.from_owner
        self.updater = make_updater(self.memory, self.gradients, places, lanes, num_threads=opts.update_threads)
        self.modules = make_modules(config, self.memory, self.sharding, self.gradients, self.updater)
        if before is not None:
            self.modules.mark_as(before.modules)
        self.registry = self.modules.registry
        log_nbytes = 0 if blocking else shadow_nbytes(opts, compute, self.tiers.caps)
        native = self.updater.native
        self.links = Links(
            self.sharding.shards,
            self.tiers,
            machine,
            lambda numel: updates_by_form(native.kernels, numel),
            shadow_nbytes=log_nbytes,
        )
        self.controller = make_controller(
            config, self.memory, self.sharding, self.modules, self.tiers, lanes, self.links.machine
        )
        if self.ranks.size == 1:  # else the ranks have to agree on what they learn from
            self.memory.pager.on_failure = self.controller.access_failed
        prefetch, measure = self.sharding.units.prefetch, self.links.measure
        trial = None if prefetch is None else AheadTrial(prefetch, self.controller, self.ranks, measure=measure)
        self.foreign_steps = ForeignStepCheck(self.registry, self.gradients)
        collect_others = partial(collect_abandoned, self.foreign_steps.is_alone)
        self.entry_points = EntryPoints(
            self.memory,
            self.sharding,
            self.modules,
            tiers=self.tiers,
            controller=self.controller,
            trial=trial,
            scaler=self.scaler,
            autocast=AutocastCache(compute.device.type, precision=config.precision),
            after_first_step=collect_others,
        )
        self.foreign_wrappers = WrapperCheck(
            self.registry, self.gradients, self.entry_points.declare_last, num_ranks=self.ranks.size
        )
        self.modules.backward.on_end = self.entry_points.end_backward
        if self.sharding.shards is not None:
            self.gradients.shared = SharedGradients(
                self.gradients,
                self.memory.pager,
                self.ranks,
                parameters=lambda: self.registry.parameters,
                owns=self.owns,
                settled=partial(self.entry_points.step, updates=False),
            )
        self.modules.server.before_use = self.entry_points.begin_outside
        self.modules.copies.reading = self._reading_a_copy
        self.modules.compiled.on_change = self.forget_plans
        self.hooks = self.modules.hooks(self.entry_points)
        self.built = BuiltModels(
            self.sharding,
            self.modules,
            self.updater,
            self.entry_points,
            self.hooks,
            device=self.device,
            dtype=self.dtype,
        )
        collect_others()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise StateError("what a manager has cannot be copied or pickled: make another manager from its config")

    @contextlib.contextmanager
    def _reading_a_copy(self) -> Iterator[None]:
        """Surround the reading of weights by `copy.deepcopy` of a model, which all ranks call."""
        self.require_open()
        self.modules.surface.awaited.require()
        self.registry.check()
        with self.together("copy.deepcopy() of a managed model"):
            yield

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
        after: Runtime = self.origin.make_others(process_group=None, mesh=mesh, before=self)
        after.origin.groups.extend(groups_of(mesh))
        self.end_groups()
        return after

    def over_same_ranks(self) -> Runtime:
        """Return parts for the same ranks, once these have stopped; nothing is packed in them yet.

        What was counted of chunks so far, and what happened in the last steps, is known to them.
        """
        origin = self.origin
        after: Runtime = origin.make_others(process_group=origin.process_group, mesh=origin.mesh, before=self)
        after.origin.groups.extend(origin.groups)
        after.memory.store.moved.update(self.memory.store.moved)
        after.memory.pager.required_nbytes.update(self.memory.pager.required_nbytes)
        after.controller.timelines.take_over(self.controller.timelines)
        if self.sharding.shards is not None and after.sharding.shards is not None:
            after.sharding.shards.ownership = self.sharding.shards.ownership
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
            self.modules.access.close()
            self.modules.backward.reset(step=True)
            self.sharding.units.close()
            self.ranks.close()
            self.memory.pager.close(reason)
        return stops

    def end_groups(self) -> None:
        """End the process groups that were made for the mesh of these parts, which have stopped."""
        end_groups(self.origin.groups)
        self.origin.groups.clear()

    # What optimizers see: `chunkmem.optim.host`.

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Know of an optimizer, as long as somebody has it."""
        self.origin.optimizers.append(weakref.ref(optimizer))

    def add_averages(self, averages: EMA) -> None:
        """Know of averages, as long as somebody has them."""
        self.origin.averages.append(weakref.ref(averages))

    def adopt(self, params: Iterable[torch.Tensor]) -> None:
        """Take in those parameters that were added to models after these were packed, as rank 0 has them."""
        added = self.registry.adopt(params)
        for param in added:
            if param.device != self.device:
                move_to(param, param.data.to(self.device))
        if added and self.sharding.shards is not None:
            self.entry_points.adopt(added)

    @property
    def optimizers(self) -> list[StatefulOptimizer]:
        """Those that somebody has, in the order in which they were made."""
        alive = (ref() for ref in self.origin.optimizers)
        return [optimizer for optimizer in alive if isinstance(optimizer, StatefulOptimizer)]

    @property
    def averages(self) -> list[EMA]:
        """Those that somebody has and has not closed, in the order in which they were made."""
        alive = (ref() for ref in self.origin.averages)
        return [averages for averages in alive if averages is not None and not averages.is_closed]

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


def _agreed_exchanges(
    ranks: Ranks, compute: ComputeDevice, *, saving: bool | None, own: type[ExchangeMethod] | None
) -> Sequence[Exchange]:
    """Return the ways to exchange chunks, the same on all ranks; none with one rank."""
    if ranks.size == 1:
        return ()
    ranks.agree("the exchange method", "chunkmem's" if own is None else f"{own.__module__}.{own.__qualname__}")
    return possible_exchanges(ranks, compute.device, memory_saving=saving, own=own)


def open_memory(tiers: Tiers, backend: StorageBackend, *, interrupts: InterruptGuard | None = None) -> Memory:
    """Return chunks in real memory; `backend` has that of DEVICE change hands, and `interrupts` keeps signals off."""
    tiers.device_pool.maps_slabs = backend.moves_contents
    device = tiers.compute.device

    def make_home(dtype: torch.dtype, tier: Tier) -> BoundChunk:
        if tier is Tier.HOST:
            in_ram = torch.device("cpu")
            return BoundChunk(HostStorage(backend, device=in_ram, dtype=dtype), device=in_ram)
        return BoundChunk(ChunkStorage(backend, device=device, dtype=dtype), device=device)

    store = ChunkStore(tiers.pools, tiers.compute.clock)
    follow_stream = tiers.compute.current_stream if tiers.compute.is_accelerator else None
    pager = Pager(store, meter=tiers.meter, follow_stream=follow_stream)
    if interrupts is not None:
        interrupts.broken = pager.break_off
    return Memory(tiers.compute, tiers.caps, pager, make_home, interrupts)


def _checked(config: object) -> Config:
    if not isinstance(config, Config):
        raise ConfigError(
            f"config is a {type(config).__name__}; pass Config.from_json(path), Config.from_dict(values) or None"
        )
    return config
