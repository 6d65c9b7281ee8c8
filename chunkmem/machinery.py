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
from typing import Any, TypeVar

import torch
from torch import nn

from chunkmem.comm.agreement import Operation
from chunkmem.comm.methods import possible_exchanges
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
from chunkmem.nn.sharing import Sharing
from chunkmem.nn.surface import ModuleSurface
from chunkmem.nn.turn import Turn
from chunkmem.nn.units import Units
from chunkmem.nn.wrappers import WrapperCheck
from chunkmem.optim.ahead import UpdatesAhead
from chunkmem.optim.foreign import ForeignStepCheck
from chunkmem.optim.kernels import load_kernels
from chunkmem.optim.native import NativeUpdate
from chunkmem.optim.scaler import LossScaler
from chunkmem.optim.update import GroupUpdater
from chunkmem.plan.machine import Machine
from chunkmem.plan.placement import GroupBytes, place_states
from chunkmem.plan.planner import PlanOptions
from chunkmem.runtime.device import ComputeDevice
from chunkmem.runtime.events import Lanes
from chunkmem.runtime.executor import DemandExecutor
from chunkmem.runtime.lanes import open_lanes
from chunkmem.runtime.measure import cached_machine
from chunkmem.runtime.storage import default_backend
from chunkmem.runtime.store import ChunkStore
from chunkmem.runtime.tiers import Tiers, undo_log_nbytes
from chunkmem.runtime.undo import UndoLog
from chunkmem.steps.conductor import Conductor
from chunkmem.steps.trial import AheadTrial
from chunkmem.tracing.watch import Watch
from chunkmem.types import ChunkId, Role, Tier

T = TypeVar("T")
_DTYPES = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16})


class Machinery:
    """The parts of one manager. `ChunkManager` is what a user holds of them."""

    def __init__(
        self,
        config: Config | None = None,
        *,
        process_group: Any = None,
        device_index: int | None = None,
        machine: Machine | None = None,
        make_lanes: Callable[[ComputeDevice], Lanes] | None = None,
    ) -> None:
        """Wire the parts together; see `ChunkManager`."""
        self.config = Config() if config is None else config
        if not isinstance(self.config, Config):
            raise ConfigError(
                f"config is a {type(config).__name__}; pass Config.from_json(path), Config.from_dict(values) or None"
            )
        if keys := unavailable_keys(self.config):
            raise ConfigError(f"{', '.join(keys)}: not available in this version; leave out or set to the default")
        self._compute = ComputeDevice.default(device_index)
        self._ranks = Ranks(process_group, timeout_s=self.config.distributed.timeout_s)
        for path, value in flattened(self.config.to_dict()).items() if self._ranks.size > 1 else ():
            self._ranks.agree(f"{path} of the configuration", json.dumps(value))
        self._dtype = _DTYPES[self.config.precision]
        self._scaler = LossScaler(self.config.fp16) if self._dtype is torch.float16 else None
        self._tiers = Tiers(self.config, self._compute, num_local=self._ranks.num_local)
        self._store = ChunkStore({Tier.DEVICE: self._tiers.device_pool, Tier.HOST: self._tiers.host_pool})
        self._executor = DemandExecutor(self._store)
        size = self.config.default_chunk_size
        backend = default_backend()
        self._tiers.device_pool.maps_slabs = backend.moves_contents
        self._registry = ModelRegistry(
            Packer(self._executor, backend, self._compute.device, expect_nbytes=self._tiers.host_pool.expect),
            chunk_numel=None if size == "auto" else size,
            device_cap_nbytes=self._tiers.caps.device_nbytes,
            dtype=self._dtype,
            master_weights=self.config.master_weights,
            num_ranks=self._ranks.size,
        )
        opts = self.config.client.opts
        blocking = not (opts.with_async_move and backend.moves_contents)
        self._lanes = (make_lanes or partial(open_lanes, blocking=blocking))(self._compute)
        self._undo_log_nbytes = 0 if blocking else undo_log_nbytes(opts, self._compute, self._tiers.caps)
        self._sharing = self._share() if self._ranks.size > 1 else None
        self._units = Units(self._sharing, self._the_reduction)
        self._access = AccessTracker(self._executor)
        self._turn = Turn(timeout_s=self.config.distributed.timeout_s, with_hooks=not self._compute.is_accelerator)
        self._backward = BackwardTracker(self._executor, self._access, self._units, self._turn)
        self._server = ParameterServer(
            self._executor, self._access, self._backward, self._turn, is_shared=self._sharing is not None
        )
        self._gradients = GradientBook(
            self._executor,
            settles=lambda group: self._updater.settles(group),
            then=self._backward.landed,
            turn=self._turn,
        )
        self._reduction = None if self._sharing is None else Reduction(self._sharing, self._gradients, self._executor)
        native = NativeUpdate(lambda: load_kernels(with_cuda=self._compute.is_accelerator))
        self._updater = GroupUpdater(
            self._executor,
            self._gradients,
            self._compute,
            place=self._place_states,
            expect_nbytes=self._tiers.host_pool.expect,
            native=native,
            make_ahead=lambda intent_of: UpdatesAhead(
                self._store,
                self._lanes,
                UndoLog(self._tiers.host_pool),
                native,
                intent_of=intent_of,
                num_threads=opts.update_threads or self._compute.num_update_threads(),
            ),
        )
        self._gradients.before_change = self._updater.ahead.mistaken
        self._executor.begin_update = self._updater.ahead.begin
        self._executor.reserve_log = self._updater.ahead.reserve
        self._autocast_cache = AutocastCache(self._compute.device.type, precision=self.config.precision)
        self._hooks = ModuleHooks(
            self._access,
            self._backward,
            units=self._units,
            turn=self._turn,
            on_root=self._begin_root,
            on_error=self._ranks.note_error,
            make_guard=self._make_guard,
        )
        self._borders = Borders(is_outermost=lambda root: not self._access.stack or self._access.is_stale(root))
        self._surface = ModuleSurface(read=self._read, write=self._write, saving=self._server.saving)
        self._declared = DeclaredReads()
        self._collector: Collector | None = None
        self._stepping = False
        self._has_given_up = False
        """Gradients were discarded since the last step."""
        self._gathers_open = 0
        self._ordinary = OrdinaryTensors(self._ranks)
        self._averaged: list[nn.Parameter] = []
        """Of excluded modules, those whose gradients are averaged over ranks."""
        self._exchange_Bps = inf
        self._conductor = self._make_conductor(machine)
        self._trial = self._make_trial()
        self._foreign_steps = ForeignStepCheck(self._registry, self._gradients)
        self._foreign_wrappers = WrapperCheck(self._registry)
        self._is_new = True
        self._collect_abandoned()

    def _collect_abandoned(self) -> None:
        """Free what managers hold that nobody can reach any more, if there are any.

        A notebook cell that is run again rebinds the names of a model and its manager, which refer to each other.
        Python looks for such cycles by the number of new objects, whatever memory they hold: too late for these. So it
        is told to look when a manager is made, for that of the run before the last one, and after the first step, when
        the names of the last run are rebound, too.
        """
        if not self._foreign_steps.is_alone():
            gc.collect()

    def _share(self) -> Sharing:
        ways = possible_exchanges(
            self._ranks, self._compute.device, memory_saving=self.config.client.opts.with_mem_saving_comm
        )
        return Sharing(self._ranks, ways, self._executor)

    def _make_conductor(self, machine: Machine | None) -> Conductor:
        caps, compute = self._tiers.caps, self._compute
        tracer = self.config.client.mem_tracer
        share = int(caps.device_nbytes * tracer.warmup_gpu_chunk_mem_ratio)
        hybrid = self.config.optimizer.params.use_hybrid_adam
        return Conductor(
            self._executor,
            self._tiers,
            self._lanes,
            machine=lambda: replace(
                cached_machine(compute, caps) if machine is None else machine,
                # The speeds are the user's, the caps are the configuration's.
                device_nbytes=caps.device_nbytes,
                host_nbytes=caps.host_nbytes,
                undo_log_nbytes=self._undo_log_nbytes,
                exchange_Bps=self._exchange_Bps,
            ),
            options=PlanOptions(
                margin_use_ratio=tracer.margin_use_ratio if hybrid else 0.0,
                static_nbytes=share if tracer.with_static_partition else None,
            ),
            layout=self._layout_digest,
            is_lone=self._sharing is None,
            trainable=lambda: bytes(managed.requires_grad for managed in self._registry.parameters),
            num_backwards=lambda: self._backward.num_ended,
            watch=lambda: Watch(self._tiers, is_chunk=self._declared.is_chunk, sample=tracer.use_async_mem_monitor),
        )

    def _layout_digest(self) -> str:
        found = digest(model.layout for model in self._registry.models)
        return found if self._sharing is None else f"{found} on rank {self._ranks.rank} of {self._ranks.size}"

    def _make_trial(self) -> AheadTrial | None:
        course = self._units.course
        return None if course is None else AheadTrial(course, self._conductor, self._ranks, measure=self._measure_links)

    def _measure_links(self, groups: tuple[int, ...]) -> None:
        assert self._sharing is not None
        if groups:
            self._exchange_Bps = self._sharing.measure(groups, time_s=self._compute.time_s)

    @property
    def _phase(self) -> str:
        if self._stepping:
            return "step"
        if in_backward():
            return "backward"
        return "forward" if self._access.stack else ""

    def _require_open(self) -> None:
        if self._executor.closed is not None:
            raise StateError(f"this manager cannot be used: {self._executor.closed}")

    def _add(
        self,
        roots: Sequence[nn.Module],
        excluded: Sequence[nn.Module],
        *,
        kept: Sequence[nn.Module] = (),
        built: Built = HERE,
    ) -> None:
        """Pack; gradients of `kept` modules, which are excluded, are not averaged over ranks."""
        self._conductor.forget()
        self._trial = self._make_trial()
        added = self._registry.add(roots, excluded, built)
        reduced = [module for module in excluded if module not in kept]
        self._averaged += [param for module in reduced for param in module.parameters(recurse=False)]
        if self._sharing is not None:
            self._ranks.agree("the layout of the chunks", digest(packed.layout for packed in added))
            for packed in added:
                self._sharing.let_go_of_others(group.id for group in packed.layout.groups)
            self._ordinary.add(roots, excluded, kept=kept)
        for root in roots if self._dtype is not torch.float32 else ():
            self._borders.fit(root, self._registry.precision.modules, self._dtype)
        for packed in added:
            self._fit(packed)
        for module in (*roots, *excluded):
            move_ordinary_tensors(module, excluded, self._compute.device)

    def _fit(self, packed: PackedModel) -> None:
        for managed in packed.parameters:
            self._access.chunks[managed.group] = self._store.chunks[ChunkId(Role.PARAM, managed.group)]
        self._gradients.add(packed.parameters)
        self._declared.add(packed.parameters, self._access.chunks)
        owned = self._hooks.fit(packed.root, self._registry.managed_under(packed.root))
        self._surface.fit(packed.root, owned)
        self._gradients.watch(self._registry.parameters)
        self._server.add(packed.parameters)

    def _lookup(self, param: torch.Tensor) -> ManagedParameter | None:
        return self._registry.lookup(param)

    def _write(self, managed: ManagedParameter, value: torch.Tensor) -> None:
        self._require_open()
        if self._owns(managed):
            self._updater.write_weight(managed, value)

    def _read(self, managed: ManagedParameter) -> torch.Tensor:
        self._require_open()
        return self._from_owner(managed, lambda: self._updater.read_weight(managed).to(managed.built_dtype))

    def _the_reduction(self) -> Reduction:
        assert self._reduction is not None
        return self._reduction

    def _owns(self, managed: ManagedParameter) -> bool:
        return self._sharing is None or self._sharing.owns(managed.group)

    def _from_owner(self, managed: ManagedParameter, read: Callable[[], T]) -> T:
        """Return what `read` returns on the rank that owns a parameter; every rank calls it."""
        if self._sharing is None:
            return read()
        return self._sharing.from_owner(managed.group, read, reader=managed.name)

    def _begin_root(self, root: nn.Module) -> None:
        """A model is called from outside: drop what an interrupted call left, and look the parameters over."""
        self._require_open()
        self._autocast_cache.switch_off()
        self._access.reset(step=False)
        self._backward.reset(step=False)
        self._units.reset()
        grad_enabled = torch.is_grad_enabled()
        self._units.begin_root(grad_enabled=grad_enabled)
        self._state_frozen()
        self._conductor.begin_root(id(root), grad_enabled=grad_enabled, before_lap=self._gradients.discard_unset)
        self._registry.check()
        self._surface.check_copies()
        self._gradients.watch(self._registry.parameters)

    @contextlib.contextmanager
    def _together(self, call: str) -> Iterator[None]:
        """Surround a call that all ranks make, by this thread alone.

        Raises:
            RankError: a rank is missing, or makes another call.
        """
        with self._turn.taken(), self._ranks.telling():
            self._ranks.begin(Operation(call))
            yield

    def _random_numbers(self) -> contextlib.AbstractContextManager[None]:
        """Surround the building of a model."""
        return contextlib.nullcontext() if self._sharing is None else same_random_numbers(self._ranks)

    def _state_frozen(self) -> None:
        """Have the ranks compare which parameters are frozen."""
        if self._sharing is not None:
            frozen = (managed for managed in self._registry.parameters if not managed.requires_grad)
            facts = {f"parameter {managed} is frozen" for managed in frozen}
            if self._has_given_up:
                facts.add("gradients were given up since the last step")
            self._ranks.know(frozenset(facts))

    def _give_up(self, params: Iterable[ManagedParameter]) -> None:
        """A user discards gradients; over ranks, those that wait for their step are given up on all or on none."""
        self._has_given_up = self._has_given_up or self._gradients.any_landed(params)

    def _make_guard(self) -> AccessGuard | None:
        """Steps that are recorded run under a check; it would cost too much in every one."""
        if not self._conductor.is_recording:
            return None
        watch = self._conductor.watch
        run = None if watch is None else watch.run_operator
        return AccessGuard(
            self._declared.undeclared, lambda: self._phase, note_write=self._declared.note_write, run=run
        )

    @contextlib.contextmanager
    def _step(self, options: str, *, updates: bool) -> Iterator[None]:
        """Surround `step()` and clipping: backward is over, and what users wrote counts.

        All ranks come here with the same `options`, such as learning rates: each of them updates its own chunks.
        """
        self._require_open()
        label = f"{'optimizer.step()' if updates else 'clipping of gradients'} with {options}"
        with self._turn.taken(), self._ranks.telling(), self._bracket(label, updates=updates):
            yield

    @contextlib.contextmanager
    def _bracket(self, label: str, *, updates: bool) -> Iterator[None]:
        if self._gathers_open:
            raise StateError("optimizer.step() inside manager.gather(): leave the block first, its writes count then")
        self._access.reset(step=True)
        self._backward.reset(step=True)
        self._units.reset()
        self._registry.check()
        self._surface.check()
        self._surface.check_copies()
        for chunk in self._access.chunks.values():
            self._executor.notice_writes(chunk)
        if self._conductor.plan is None and not self._conductor.is_recording:
            self._tiers.leave_room_for_activations()
        self._stepping = True
        self._has_given_up = self._has_given_up or self._gradients.any_unset()
        try:
            self._gradients.settle(self._registry.parameters)
            if self._reduction is not None:
                self._state_frozen()
                if self._scaler is not None and not self._gradients.any_landed(self._registry.parameters):
                    self._scaler.is_used = True  # what this rank adds is 0 at any scale
                self._units.attend(label)
                self._reduction.reduce(list(self._registry.parameters))
                self._reduction.reduce_excluded(self._averaged)
            yield
            self._access.refresh_held()
            if updates:
                self._ordinary.follow()
                self._conductor.end_step()
                self._units.end_step()
                self._has_given_up = False
                if self._trial is not None:
                    self._trial.end_step()
        finally:
            self._stepping = False
        if updates and self._is_new:
            self._is_new = False
            self._collect_abandoned()

    def _skip_step(self) -> None:
        """The optimizer's step changes nothing: neither record it nor learn from it."""
        self._conductor.excuse_lap()

    def _place_states(self, sizes: Sequence[GroupBytes]) -> frozenset[int]:
        if self._tiers.caps.shared:
            return frozenset(size.group for size in sizes)
        params = self.config.optimizer.params
        ratio = self.config.client.mem_tracer.margin_use_ratio if params.use_hybrid_adam else 0.0
        taken = self._updater.device_nbytes(besides={size.group for size in sizes})
        return place_states(sizes, cap_nbytes=self._tiers.device.cap_nbytes - taken, margin_use_ratio=ratio)
