"""The runtime of a manager: its parts wired together, and models added to them."""

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

from chunkmem.comm.exchange import Exchange
from chunkmem.comm.mesh import mesh_of
from chunkmem.comm.methods import ExchangeMethod, possible_exchanges, require_method
from chunkmem.comm.ranks import Ranks
from chunkmem.config import Config, flattened
from chunkmem.entry_points import EntryPoints, collect_abandoned
from chunkmem.errors import ConfigError, StateError
from chunkmem.layout.spec import digest
from chunkmem.nn.autocast import AutocastCache
from chunkmem.nn.binding import BoundChunk, ManagedParameter, move_to
from chunkmem.nn.built import HERE, Built
from chunkmem.nn.collect import Collector
from chunkmem.nn.elsewhere import Elsewhere, Unpacked
from chunkmem.nn.gradients import GradientBook
from chunkmem.nn.initialisers import Initialisers
from chunkmem.nn.meta import BuiltOnMeta, has_meta_tensors
from chunkmem.nn.ordinary import same_random_numbers
from chunkmem.nn.packing import move_ordinary_tensors
from chunkmem.nn.registry import check_fits
from chunkmem.nn.shared_gradients import SharedGradients
from chunkmem.nn.wrappers import WrapperCheck
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
    require_open,
)
from chunkmem.plan.machine import Machine
from chunkmem.runtime.device import ComputeDevice
from chunkmem.runtime.disk_calls import DiskCalls
from chunkmem.runtime.events import Lanes
from chunkmem.runtime.lanes import open_lanes
from chunkmem.runtime.pager import Pager
from chunkmem.runtime.storage import ChunkStorage, HostStorage, StorageBackend, default_backend
from chunkmem.runtime.store import ChunkStore
from chunkmem.runtime.tiers import Tiers, shadow_nbytes, warn_of_fragmentation
from chunkmem.speeds import Links, machine_for
from chunkmem.steps.making import make_controller
from chunkmem.steps.trial import AheadTrial
from chunkmem.types import Tier

MakeLanes = Callable[[ComputeDevice], Lanes]


@dataclass(frozen=True)
class Origin:
    """What the parts of a manager are made from, and who uses them: for those that take their place."""

    mesh: object
    make_others: Callable[..., Runtime]
    optimizers: list[weakref.ref[torch.optim.Optimizer]] = field(default_factory=list)


@dataclass
class BuiltModels:
    """What was built with a manager."""

    collector: Collector | None = None
    """Of the models under construction."""
    initialisers: Initialisers = field(default_factory=Initialisers)
    """Of what is on the meta device, of the model that was built last."""
    unpacked: Unpacked | None = None
    """What was built, until it is known which stage has what; None without pipeline stages."""
    added: list[Unpacked] = field(default_factory=list)
    """All that was built."""
    values: Built = HERE
    """Where `add_stages` finds values."""
    elsewhere: Elsewhere = field(default_factory=Elsewhere)
    """What other stages have."""


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
        self.origin = Origin(mesh, make_others)
        compute = ComputeDevice.default(device_index) if before is None else before.tiers.compute
        require_method(exchange)
        rows = mesh_of(mesh, process_group=process_group)
        self.ranks = Ranks(process_group, mesh=rows, timeout_s=config.distributed.timeout_s)
        for ranks in self._several_ranks():
            for path, value in flattened(config.to_dict()).items():
                ranks.agree(f"{path} of the configuration", json.dumps(value))
        if before is None:
            self.scaler: LossScaler | None = LossScaler(config.fp16) if config.precision == "fp16" else None
            self.tiers: Tiers = Tiers(config, compute, num_local=self.ranks.num_local, disk_calls=disk_calls)
            warn_of_fragmentation(compute, self.tiers.caps)
        else:
            self.scaler, self.tiers = before.scaler, before.tiers
        backend = default_backend()
        self.memory = open_memory(self.tiers, backend)
        opts = config.client.opts
        blocking = not (opts.with_async_move and backend.moves_contents)
        lanes = (make_lanes or partial(open_lanes, blocking=blocking))(compute)
        self.tiers.device_pool.wait = lanes.compute_waits
        places = StatePlaces(self.memory.store, self.tiers.caps, margin_use_ratio=margin_use_ratio(config))
        self.gradients = GradientBook(self.memory.pager, settles=places.updates_on_host, is_shared=self.ranks.size > 1)
        exchanges = _agreed_exchanges(self.ranks, compute, saving=opts.with_mem_saving_comm, own=exchange)
        self.sharding = make_sharding(self.memory, self.ranks, exchanges, self.gradients)
        # Asked by optimizers for every parameter: without a call in between.
        self.owns, self.from_owner = self.sharding.owns, self.sharding.from_owner
        self.updater = make_updater(self.memory, self.gradients, places, lanes, num_threads=opts.update_threads)
        self.modules = make_modules(config, self.memory, self.sharding, self.gradients, self.updater)
        if before is not None:
            self.modules.mark_as(before.modules)
        self.registry = self.modules.registry
        self.links = Links(self.sharding.shards, compute)
        log_nbytes = 0 if blocking else shadow_nbytes(opts, compute, self.tiers.caps)
        speeds = partial(machine_for, self.tiers, self.links, machine, shadow_nbytes=log_nbytes)
        self.controller = make_controller(config, self.memory, self.sharding, self.modules, self.tiers, lanes, speeds)
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
        self.modules.compiled.on_change = self.forget_plans
        self.hooks = self.modules.hooks(self.entry_points)
        self.built = BuiltModels()
        collect_others()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise StateError("what a manager has cannot be copied or pickled: make another manager from its config")

    def add(
        self,
        roots: Sequence[nn.Module],
        excluded: Sequence[nn.Module],
        *,
        kept: Sequence[nn.Module] = (),
        built: Built = HERE,
        initialisers: Initialisers | None = None,
    ) -> None:
        """Pack; gradients of `kept` modules, which are excluded, are not averaged over ranks.

        With pipeline stages, that is put off until `add_stages`. `initialisers`: of what is on the meta device.

        Raises:
            StateError: with pipeline stages, there is a model already.
        """
        unpacked = Unpacked(tuple(roots), tuple(excluded), tuple(kept))
        self.built.initialisers = initialisers or Initialisers()
        if self.ranks.stages is not None:
            if self.built.unpacked is not None:
                raise StateError("a manager with pipeline stages has one model; build all of it in one manager.init()")
            self.built.unpacked = unpacked
            self.built.added.append(unpacked)
            return
        self._pack(roots, excluded, kept=kept, built=built, models=roots)
        self.built.added.append(unpacked)

    def check_stages(self, stages: Iterable[nn.Module]) -> None:
        """Check that the model that was built can be packed as these stages.

        Raises:
            StateError: there is no model, or its stages are packed already.
            LayoutError: a parameter of the model is in no stage.
        """
        if self.built.unpacked is None or self.built.unpacked.is_packed:
            raise StateError(
                "manager.pipeline() packs the model that was built in manager.init(), once: build it before"
            )
        self.built.unpacked.check(stages)

    def add_stages(self, stages: Mapping[int, nn.Module]) -> None:
        """Pack the stages of this rank, and let go of the memory of all other parameters.

        Args:
            stages: all stages of the pipeline by number; those of this rank are `number % number of ranks`.

        Raises:
            LayoutError: a parameter cannot be packed.
            CapacityError: the weights fit no tier.
        """
        ranks, unpacked = self.ranks.stages, self.built.unpacked
        assert ranks is not None
        assert unpacked is not None
        own = [stage for number, stage in stages.items() if number % ranks.size == ranks.rank]
        modules = {module for stage in own for module in stage.modules()}
        excluded = [module for module in unpacked.excluded if module in modules]
        unpacked.is_packed = True
        kept = [module for module in unpacked.kept if module in modules]
        self._pack(own, excluded, kept=kept, built=self.built.values, models=unpacked.roots)
        for number, stage in stages.items():
            where = f"stage {number}, which rank {ranks.name(number % ranks.size)} has"
            self.registry.add_elsewhere(self.built.elsewhere.leave(stage, modules, where=where))
        self.registry.place([param for root in unpacked.roots for param in root.parameters()])

    def _pack(
        self,
        roots: Sequence[nn.Module],
        excluded: Sequence[nn.Module],
        *,
        kept: Sequence[nn.Module],
        built: Built,
        models: Sequence[nn.Module],
    ) -> None:
        """Pack `roots`, which are all of the `models` that were built, or stages of them."""
        self.forget_plans()
        if not built.is_put_off and has_meta_tensors(models):
            read, write = self.updater.read_weight, self.modules.surface.write
            wanted, shards = self.built.initialisers, self.sharding.shards
            built = BuiltOnMeta(models, built, shards, read=read, write=write, initialisers=wanted)
        with self.random_numbers() if isinstance(built, BuiltOnMeta) else contextlib.nullcontext():
            added = self.registry.add(roots, excluded, built)
        reduced = [module for module in excluded if module not in kept]
        self.entry_points.averaged += [param for module in reduced for param in module.parameters(recurse=False)]
        if self.sharding.shards is not None:
            self.ranks.agree("the layout of the chunks", digest(packed.layout for packed in added))
            for packed in added:
                self.sharding.shards.drop_unowned(group.id for group in packed.layout.groups)
            if not built.is_put_off:
                self.sharding.shards.send_on_host(reader="packing")
            self.entry_points.ordinary.add(roots, excluded, kept=kept)
        self.modules.fit(roots, added, self.hooks, dtype=DTYPES[self.config.precision])
        for module in (*roots, *excluded):
            move_ordinary_tensors(module, excluded, self.device, on_host=self.registry.on_host)
        if isinstance(built, BuiltOnMeta):
            built.tell(self.modules.surface.awaited, [managed for packed in added for managed in packed.parameters])

    @contextlib.contextmanager
    def random_numbers(self) -> Iterator[None]:
        """Surround the building of a model."""
        with contextlib.ExitStack() as stack:
            for ranks in self._several_ranks():
                stack.enter_context(same_random_numbers(ranks))
            yield

    def _several_ranks(self) -> list[Ranks]:
        """Return the ranks of this rank's pipeline, and those of its stage, where there are several."""
        return [ranks for ranks in (self.ranks.stages, self.ranks) if ranks is not None and ranks.size > 1]

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
        """Return parts for the same ranks in another mesh, once these have stopped; nothing is packed in them yet."""
        return self.origin.make_others(process_group=None, mesh=mesh, before=self)

    def stop(self, reason: str) -> None:
        """Have nothing run any more. What chunks hold stays; `reason` is what those are told who use the manager."""
        if self.memory.store.snapshot is not None:
            self.memory.store.snapshot.read_all()
        self.foreign_steps.remove()
        self.foreign_wrappers.remove()
        self.entry_points.close()
        self.modules.compiled.close()
        if self.memory.pager.closed is None:
            self.controller.close()
            self.modules.access.close()
            self.modules.backward.reset(step=True)
            self.sharding.units.close()
            self.ranks.close()
            self.memory.pager.close(reason)

    # What optimizers see: `chunkmem.optim.host`.

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Know of an optimizer, as long as somebody has it."""
        self.origin.optimizers.append(weakref.ref(optimizer))

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
        require_open(self.memory.pager)

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Surround the backwards of a batch, whose gradients come multiplied by the loss scale."""
        if self.scaler is not None:
            self.scaler.is_used = True
        guard = self.entry_points.make_guard()
        with self.ranks.telling(), guard or contextlib.nullcontext():
            yield

    def together(self, call: str) -> contextlib.AbstractContextManager[None]:
        """Surround a call that all ranks make; see `EntryPoints.together`."""
        return self.entry_points.together(call)

    def step(self, options: str, *, updates: bool) -> contextlib.AbstractContextManager[None]:
        """Surround `step()` and clipping; see `EntryPoints.step`."""
        return self.entry_points.step(options, updates=updates)

    def skip_step(self) -> None:
        """The optimizer's step changes nothing: neither record it nor learn from it."""
        self.controller.excuse_iteration()

    def gradients_given_up(self, params: Iterable[ManagedParameter]) -> None:
        """A user discards gradients; see `EntryPoints.gradients_given_up`."""
        self.entry_points.gradients_given_up(params)


def _agreed_exchanges(
    ranks: Ranks, compute: ComputeDevice, *, saving: bool | None, own: type[ExchangeMethod] | None
) -> Sequence[Exchange]:
    """Return the ways to exchange chunks, the same on all ranks; none with one rank."""
    if ranks.size == 1:
        return ()
    ranks.agree("the exchange method", "chunkmem's" if own is None else f"{own.__module__}.{own.__qualname__}")
    return possible_exchanges(ranks, compute.device, memory_saving=saving, own=own)


def open_memory(tiers: Tiers, backend: StorageBackend) -> Memory:
    """Return chunks in real memory; `backend` has that of DEVICE change hands."""
    tiers.device_pool.maps_slabs = backend.moves_contents
    device = tiers.compute.device

    def make_home(dtype: torch.dtype, tier: Tier) -> BoundChunk:
        if tier is Tier.HOST:
            in_ram = torch.device("cpu")
            return BoundChunk(HostStorage(backend, device=in_ram, dtype=dtype), device=in_ram)
        return BoundChunk(ChunkStorage(backend, device=device, dtype=dtype), device=device)

    store = ChunkStore(tiers.pools, tiers.compute.clock)
    return Memory(tiers.compute, tiers.caps, Pager(store, meter=tiers.meter), make_home)


def _checked(config: object) -> Config:
    if not isinstance(config, Config):
        raise ConfigError(
            f"config is a {type(config).__name__}; pass Config.from_json(path), Config.from_dict(values) or None"
        )
    return config
