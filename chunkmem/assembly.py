"""What a manager is made of: tiers, chunks, hooks and updates wired together, and what happens inside of its calls."""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from chunkmem.comm.agreement import Operation
from chunkmem.comm.mesh import mesh_of
from chunkmem.comm.methods import ExchangeMethod, possible_exchanges, require_method
from chunkmem.comm.ranks import Ranks
from chunkmem.config import Config, flattened, unavailable_keys
from chunkmem.errors import ConfigError, StateError
from chunkmem.layout.spec import digest
from chunkmem.nn.access import AccessTracker, in_backward
from chunkmem.nn.autocast import AutocastCache
from chunkmem.nn.backward import BackwardTracker
from chunkmem.nn.binding import ManagedParameter
from chunkmem.nn.borders import Borders
from chunkmem.nn.built import HERE, Built
from chunkmem.nn.collect import Collector
from chunkmem.nn.gradients import GradientBook
from chunkmem.nn.guard import AccessGuard, DeclaredReads
from chunkmem.nn.hooks import ModuleHooks
from chunkmem.nn.ordinary import OrdinaryTensors, same_random_numbers
from chunkmem.nn.packing import PackedModel, Packer, move_ordinary_tensors
from chunkmem.nn.reduction import Reduction
from chunkmem.nn.registry import ModelRegistry
from chunkmem.nn.served import ParameterServer
from chunkmem.nn.surface import ModuleSurface
from chunkmem.nn.turn import Turn
from chunkmem.nn.wrappers import WrapperCheck
from chunkmem.optim.adam import AdamRule
from chunkmem.optim.foreign import ForeignStepCheck
from chunkmem.optim.kernels import load_kernels
from chunkmem.optim.native import NativeUpdate
from chunkmem.optim.scaler import LossScaler
from chunkmem.optim.speculative import SpeculativeUpdater
from chunkmem.optim.update import GroupUpdater
from chunkmem.plan.machine import Machine
from chunkmem.plan.placement import GroupBytes, place_states
from chunkmem.plan.planner import PlanOptions
from chunkmem.runtime.device import ComputeDevice
from chunkmem.runtime.events import Lanes
from chunkmem.runtime.lanes import open_lanes
from chunkmem.runtime.measure import cached_machine
from chunkmem.runtime.pager import Pager
from chunkmem.runtime.shadow import ShadowBuffers
from chunkmem.runtime.storage import default_backend
from chunkmem.runtime.store import ChunkStore
from chunkmem.runtime.tiers import Tiers, shadow_nbytes
from chunkmem.shard.shards import ShardStore
from chunkmem.shard.units import Units
from chunkmem.steps.controller import StepController
from chunkmem.steps.trial import AheadTrial
from chunkmem.tracing.watch import Watch
from chunkmem.types import ChunkId, Role, Tier

T = TypeVar("T")
_DTYPES = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16})


class Runtime:
    """The parts of one manager, which has it; see `ChunkManager`."""

    def __init__(
        self,
        config: Config,
        *,
        process_group: Any,
        mesh: object,
        exchange: type[ExchangeMethod] | None,
        device_index: int | None,
        machine: Machine | None,
        make_lanes: Callable[[ComputeDevice], Lanes] | None,
    ) -> None:
        """Wire the parts together; the arguments are those of `ChunkManager`."""
        self.config = config
        if not isinstance(self.config, Config):
            raise ConfigError(
                f"config is a {type(config).__name__}; pass Config.from_json(path), Config.from_dict(values) or None"
            )
        if keys := unavailable_keys(self.config):
            raise ConfigError(f"{', '.join(keys)}: not available in this version; leave out or set to the default")
        self.compute = ComputeDevice.default(device_index)
        require_method(exchange)
        rows = mesh_of(mesh, process_group=process_group)
        self.ranks = Ranks(process_group, mesh=rows, timeout_s=self.config.distributed.timeout_s)
        for path, value in flattened(self.config.to_dict()).items() if self.ranks.size > 1 else ():
            self.ranks.agree(f"{path} of the configuration", json.dumps(value))
        self.dtype = _DTYPES[self.config.precision]
        self.scaler = LossScaler(self.config.fp16) if self.dtype is torch.float16 else None
        self.tiers = Tiers(self.config, self.compute, num_local=self.ranks.num_local)
        self.store = ChunkStore({Tier.DEVICE: self.tiers.device_pool, Tier.HOST: self.tiers.host_pool})
        self.pager = Pager(self.store)
        size = self.config.default_chunk_size
        backend = default_backend()
        self.tiers.device_pool.maps_slabs = backend.moves_contents
        self.registry = ModelRegistry(
            Packer(
                self.pager,
                backend,
                self.compute.device,
                expect_nbytes=self.tiers.host_pool.expect,
                # Packing comes before any optimizer, and the configuration names Adam or AdamW.
                states_nbytes=lambda group: sum(spec.form(group).nbytes for spec in AdamRule.all_states),
            ),
            chunk_numel=None if size == "auto" else size,
            device_cap_nbytes=self.tiers.caps.device_nbytes,
            dtype=self.dtype,
            master_weights=self.config.master_weights,
            num_ranks=self.ranks.shard.size,
        )
        opts = self.config.client.opts
        blocking = not (opts.with_async_move and backend.moves_contents)
        self._lanes = (make_lanes or partial(open_lanes, blocking=blocking))(self.compute)
        self._shadow_nbytes = 0 if blocking else shadow_nbytes(opts, self.compute, self.tiers.caps)
        self.shards = self._share(exchange) if self.ranks.size > 1 else None
        self.units = Units(self.shards, self._the_reduction)
        self.access = AccessTracker(self.pager)
        self._turn = Turn(timeout_s=self.config.distributed.timeout_s, with_hooks=not self.compute.is_accelerator)
        self.backward = BackwardTracker(self.pager, self.access, self.units, self._turn)
        self._server = ParameterServer(
            self.pager, self.access, self.backward, self._turn, is_shared=self.shards is not None
        )
        self.gradients = GradientBook(
            self.pager,
            settles=lambda group: self.updater.updates_on_host(group),
            then=self.backward.landed,
            turn=self._turn,
        )
        self.reduction = None if self.shards is None else Reduction(self.shards, self.gradients, self.pager)
        native = NativeUpdate(lambda: load_kernels(with_cuda=self.compute.is_accelerator))
        self.updater = GroupUpdater(
            self.pager,
            self.gradients,
            self.compute,
            place=self._place_states,
            expect_nbytes=self.tiers.host_pool.expect,
            native=native,
            forget_plans=self._forget_plans,
            make_ahead=lambda intent_of, chunks_of: SpeculativeUpdater(
                self.store,
                self._lanes,
                ShadowBuffers(self.tiers.host_pool),
                native,
                intent_of=intent_of,
                chunks_of=chunks_of,
                num_threads=opts.update_threads or self.compute.num_update_threads(),
            ),
        )
        self.gradients.before_change = self.updater.ahead.roll_back
        self.pager.speculative = self.updater.ahead
        self._autocast_cache = AutocastCache(self.compute.device.type, precision=self.config.precision)
        self.hooks = ModuleHooks(
            self.access,
            self.backward,
            units=self.units,
            turn=self._turn,
            on_root=self._begin_root,
            on_error=self.ranks.note_error,
            make_guard=self.make_guard,
        )
        self._borders = Borders(is_outermost=lambda root: not self.access.stack or self.access.is_stale(root))
        self.surface = ModuleSurface(read=self._read, write=self._write, saving=self._server.saving)
        self.declared = DeclaredReads()
        self.collector: Collector | None = None
        self._stepping = False
        self._has_given_up = False
        """Gradients were discarded since the last step."""
        self.gathers_open = 0
        self.ordinary = OrdinaryTensors(self.ranks)
        self._averaged: list[nn.Parameter] = []
        """Of excluded modules, those whose gradients are averaged over ranks."""
        self.exchange_Bps = inf
        self.controller = self._make_controller(machine)
        self._trial = self._make_trial()
        self.foreign_steps = ForeignStepCheck(self.registry, self.gradients)
        self.foreign_wrappers = WrapperCheck(self.registry)
        self._is_new = True
        self._collect_abandoned()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise StateError("what a manager has cannot be copied or pickled: make another manager from its config")

    def _collect_abandoned(self) -> None:
        """Free what managers hold that nobody can reach any more, if there are any.

        A notebook cell that is run again rebinds the names of a model and its manager, which refer to each other.
        Python looks for such cycles by the number of new objects, whatever memory they hold: too late for these. So it
        is told to look when a manager is made, for that of the run before the last one, and after the first step, when
        the names of the last run are rebound, too.
        """
        if not self.foreign_steps.is_alone():
            gc.collect()

    def _share(self, own: type[ExchangeMethod] | None) -> ShardStore:
        self.ranks.agree("the exchange method", "chunkmem's" if own is None else f"{own.__module__}.{own.__qualname__}")
        saving = self.config.client.opts.with_mem_saving_comm
        ways = possible_exchanges(self.ranks, self.compute.device, memory_saving=saving, own=own)
        return ShardStore(self.ranks, ways, self.pager)

    def _make_controller(self, machine: Machine | None) -> StepController:
        caps, compute = self.tiers.caps, self.compute
        tracer = self.config.client.mem_tracer
        share = int(caps.device_nbytes * tracer.warmup_gpu_chunk_mem_ratio)
        hybrid = self.config.optimizer.params.use_hybrid_adam
        return StepController(
            self.pager,
            self.tiers,
            self._lanes,
            machine=lambda: replace(
                cached_machine(compute, caps) if machine is None else machine,
                # The speeds are the user's, the caps are the configuration's.
                device_nbytes=caps.device_nbytes,
                host_nbytes=caps.host_nbytes,
                shadow_nbytes=self._shadow_nbytes,
                exchange_Bps=self.exchange_Bps,
            ),
            options=PlanOptions(
                margin_use_ratio=tracer.margin_use_ratio if hybrid else 0.0,
                static_nbytes=share if tracer.with_static_partition else None,
            ),
            layout=self._layout_digest,
            is_lone=self.shards is None,
            trainable=lambda: bytes(managed.requires_grad for managed in self.registry.parameters),
            num_backwards=lambda: self.backward.num_ended,
            watch=lambda: Watch(self.tiers, is_chunk=self.declared.is_chunk, sample=tracer.use_async_mem_monitor),
        )

    def _layout_digest(self) -> str:
        found = digest(model.layout for model in self.registry.models)
        return found if self.shards is None else f"{found} on rank {self.ranks.shard.rank} of {self.ranks.shard.size}"

    def _make_trial(self) -> AheadTrial | None:
        prefetch = self.units.prefetch
        return (
            None if prefetch is None else AheadTrial(prefetch, self.controller, self.ranks, measure=self._measure_links)
        )

    def _measure_links(self, groups: tuple[int, ...]) -> None:
        assert self.shards is not None
        if groups:
            self.exchange_Bps = self.shards.measure(groups, time_s=self.compute.time_s)

    @property
    def phase(self) -> str:
        if self._stepping:
            return "step"
        if in_backward():
            return "backward"
        return "forward" if self.access.stack else ""

    def require_open(self) -> None:
        if self.pager.closed is not None:
            raise StateError(f"this manager cannot be used: {self.pager.closed}")

    def add(
        self,
        roots: Sequence[nn.Module],
        excluded: Sequence[nn.Module],
        *,
        kept: Sequence[nn.Module] = (),
        built: Built = HERE,
    ) -> None:
        """Pack; gradients of `kept` modules, which are excluded, are not averaged over ranks."""
        self._forget_plans()
        added = self.registry.add(roots, excluded, built)
        reduced = [module for module in excluded if module not in kept]
        self._averaged += [param for module in reduced for param in module.parameters(recurse=False)]
        if self.shards is not None:
            self.ranks.agree("the layout of the chunks", digest(packed.layout for packed in added))
            for packed in added:
                self.shards.drop_unowned(group.id for group in packed.layout.groups)
            self.ordinary.add(roots, excluded, kept=kept)
        for root in roots if self.dtype is not torch.float32 else ():
            self._borders.fit(root, self.registry.precision.modules, self.dtype)
        for packed in added:
            self._fit(packed)
        for module in (*roots, *excluded):
            move_ordinary_tensors(module, excluded, self.compute.device)

    def _forget_plans(self) -> None:
        """There are other chunks than in the steps that were recorded."""
        self.controller.forget()
        self._trial = self._make_trial()

    def _fit(self, packed: PackedModel) -> None:
        for managed in packed.parameters:
            self.access.chunks[managed.group] = self.store.chunks[ChunkId(Role.PARAM, managed.group)]
        self.gradients.add(packed.parameters)
        self.declared.add(packed.parameters, self.access.chunks)
        owned = self.hooks.fit(packed.root, self.registry.managed_under(packed.root))
        self.surface.fit(packed.root, owned)
        self.gradients.watch(self.registry.parameters)
        self._server.add(packed.parameters)

    @property
    def device(self) -> torch.device:
        """That computes."""
        return self.compute.device

    @property
    def is_lowered(self) -> bool:
        """Weights are computed with in bf16 or fp16."""
        return self.dtype is not torch.float32

    @property
    def is_shared(self) -> bool:
        """Several ranks train together."""
        return self.shards is not None

    def _write(self, managed: ManagedParameter, value: torch.Tensor) -> None:
        self.require_open()
        if self.owns(managed):
            self.updater.write_weight(managed, value)

    def _read(self, managed: ManagedParameter) -> torch.Tensor:
        self.require_open()
        return self.from_owner(managed, lambda: self.updater.read_weight(managed).to(managed.built_dtype))

    def _the_reduction(self) -> Reduction:
        assert self.reduction is not None
        return self.reduction

    def owns(self, managed: ManagedParameter) -> bool:
        return self.shards is None or self.shards.owns(managed.group)

    def from_owner(self, managed: ManagedParameter, read: Callable[[], T]) -> T:
        """Return what `read` returns on the rank that owns a parameter; every rank calls it."""
        if self.shards is None:
            return read()
        return self.shards.from_owner(managed.group, read, reader=managed.name)

    def _begin_root(self, root: nn.Module) -> None:
        """A model is called from outside: drop what an interrupted call left, and look the parameters over."""
        self.require_open()
        self._autocast_cache.switch_off()
        self.access.reset(step=False)
        self.backward.reset(step=False)
        self.units.reset()
        grad_enabled = torch.is_grad_enabled()
        self.units.begin_root(grad_enabled=grad_enabled)
        self._state_frozen()
        self.controller.begin_root(id(root), grad_enabled=grad_enabled, before_iteration=self.gradients.discard_unset)
        self.registry.check()
        self.surface.check_copies()
        self.gradients.watch(self.registry.parameters)

    @contextlib.contextmanager
    def together(self, call: str) -> Iterator[None]:
        """Surround a call that all ranks make, by this thread alone.

        Raises:
            RankError: a rank is missing, or makes another call.
        """
        with self._turn.taken(), self.ranks.telling():
            self.ranks.begin(Operation(call))
            yield

    def random_numbers(self) -> contextlib.AbstractContextManager[None]:
        """Surround the building of a model."""
        return contextlib.nullcontext() if self.shards is None else same_random_numbers(self.ranks)

    def _state_frozen(self) -> None:
        """Have the ranks compare which parameters are frozen."""
        if self.shards is not None:
            frozen = (managed for managed in self.registry.parameters if not managed.requires_grad)
            facts = {f"parameter {managed} is frozen" for managed in frozen}
            if self._has_given_up:
                facts.add("gradients were given up since the last step")
            self.ranks.know(frozenset(facts))

    def gradients_given_up(self, params: Iterable[ManagedParameter]) -> None:
        """A user discards gradients; over ranks, those that wait for their step are given up on all or on none."""
        self._has_given_up = self._has_given_up or self.gradients.any_landed(params)

    def make_guard(self) -> AccessGuard | None:
        """Steps that are recorded run under a check; it would cost too much in every one."""
        if not self.controller.is_recording:
            return None
        watch = self.controller.watch
        run = None if watch is None else watch.run_operator
        return AccessGuard(self.declared.undeclared, lambda: self.phase, note_write=self.declared.note_write, run=run)

    @contextlib.contextmanager
    def step(self, options: str, *, updates: bool) -> Iterator[None]:
        """Surround `step()` and clipping: backward is over, and what users wrote counts.

        All ranks come here with the same `options`, such as learning rates: each of them updates its own chunks.
        """
        self.require_open()
        label = f"{'optimizer.step()' if updates else 'clipping of gradients'} with {options}"
        with self._turn.taken(), self.ranks.telling(), self._bracket(label, updates=updates):
            yield

    @contextlib.contextmanager
    def _bracket(self, label: str, *, updates: bool) -> Iterator[None]:
        if self.gathers_open:
            raise StateError("optimizer.step() inside manager.gather(): leave the block first, its writes count then")
        self.access.reset(step=True)
        self.backward.reset(step=True)
        self.units.reset()
        self.registry.check()
        self.surface.check()
        self.surface.check_copies()
        for chunk in self.access.chunks.values():
            self.pager.notice_writes(chunk)
        if self.controller.plan is None and not self.controller.is_recording:
            self.tiers.leave_room_for_activations()
        self._stepping = True
        self._has_given_up = self._has_given_up or self.gradients.any_unset()
        try:
            self.gradients.settle(self.registry.parameters)
            if self.reduction is not None:
                self._state_frozen()
                if self.scaler is not None and not self.gradients.any_landed(self.registry.parameters):
                    self.scaler.is_used = True  # what this rank adds is 0 at any scale
                self.units.replay_without_batch(label)
                self.reduction.reduce(list(self.registry.parameters))
                self.reduction.reduce_excluded(self._averaged)
            yield
            self.access.refresh_held()
            if updates:
                self.ordinary.follow()
                self.controller.end_step()
                self.units.end_step()
                self._has_given_up = False
                if self._trial is not None:
                    self._trial.end_step()
        finally:
            self._stepping = False
        if updates and self._is_new:
            self._is_new = False
            self._collect_abandoned()

    def skip_step(self) -> None:
        """The optimizer's step changes nothing: neither record it nor learn from it."""
        self.controller.excuse_iteration()

    def _place_states(self, sizes: Sequence[GroupBytes]) -> frozenset[int]:
        if self.tiers.caps.shared:
            return frozenset(size.group for size in sizes)
        params = self.config.optimizer.params
        ratio = self.config.client.mem_tracer.margin_use_ratio if params.use_hybrid_adam else 0.0
        taken = self.updater.device_nbytes(besides={size.group for size in sizes})
        return place_states(sizes, cap_nbytes=self.tiers.device.cap_nbytes - taken, margin_use_ratio=ratio)
