"""The composition root: wires tiers, chunks, hooks and updates together, and is what a user holds."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from chunkmem.comm.methods import possible_exchanges
from chunkmem.comm.ranks import Ranks
from chunkmem.config import Config, flattened, unavailable_keys
from chunkmem.errors import ConfigError, LayoutError, StateError
from chunkmem.layout.spec import digest
from chunkmem.memory import MemoryReport
from chunkmem.nn.access import AccessTracker, in_backward
from chunkmem.nn.autocast import AutocastCache
from chunkmem.nn.backward import BackwardTracker
from chunkmem.nn.binding import ManagedParameter
from chunkmem.nn.built import HERE, Built
from chunkmem.nn.collect import Collector
from chunkmem.nn.gather import gathered, parameters_in
from chunkmem.nn.gradients import GradientBook
from chunkmem.nn.guard import AccessGuard, DeclaredReads
from chunkmem.nn.hooks import ModuleHooks
from chunkmem.nn.packing import PackedModel, Packer, move_ordinary_tensors
from chunkmem.nn.precision import cast_at_borders
from chunkmem.nn.reduction import Reduction
from chunkmem.nn.registry import ModelRegistry, check_fits
from chunkmem.nn.released import BuiltOverRanks
from chunkmem.nn.sharing import Sharing
from chunkmem.nn.surface import ModuleSurface
from chunkmem.nn.units import Units
from chunkmem.optim.ahead import UpdatesAhead
from chunkmem.optim.kernels import load_kernels
from chunkmem.optim.native import NativeUpdate
from chunkmem.optim.scaler import LossScaler
from chunkmem.optim.update import GroupUpdater
from chunkmem.plan.machine import Machine
from chunkmem.plan.model import Plan
from chunkmem.plan.placement import GroupBytes, place_states
from chunkmem.plan.planner import PlanOptions
from chunkmem.plan.timeline import Timeline
from chunkmem.runtime.device import ComputeDevice, give_back_freed_ram
from chunkmem.runtime.events import Lanes
from chunkmem.runtime.executor import DemandExecutor
from chunkmem.runtime.lanes import open_lanes
from chunkmem.runtime.measure import cached_machine
from chunkmem.runtime.report import memory_report
from chunkmem.runtime.storage import default_backend
from chunkmem.runtime.store import ChunkStore
from chunkmem.runtime.tiers import Tiers, undo_log_nbytes
from chunkmem.runtime.undo import UndoLog
from chunkmem.steps.conductor import Conductor
from chunkmem.steps.trial import AheadTrial
from chunkmem.trace.model import Trace
from chunkmem.tracing.watch import Watch
from chunkmem.types import ChunkId, Role, Tier

T = TypeVar("T")
_DTYPES = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16})


class ChunkManager:
    """Owns the tiers and the chunks of one process. Several can live side by side.

    Args:
        config: see `Config`; None is all defaults.
        process_group: the ranks that train a model together; None is torch.distributed's default group, or one process.
        device_index: which CUDA device to compute on; None is the current one.
        machine: speeds that plans are made for; None measures this machine, once, and remembers.
        make_lanes: makes what copies beside computing; None is threads, or streams on CUDA.

    Raises:
        ConfigError: a key is set whose feature this version does not have.
    """

    def __init__(
        self,
        config: Config | None = None,
        *,
        process_group: Any = None,
        device_index: int | None = None,
        machine: Machine | None = None,
        make_lanes: Callable[[ComputeDevice], Lanes] | None = None,
    ) -> None:
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
        self._registry = ModelRegistry(
            Packer(self._executor, backend, self._compute.device, expect_nbytes=self._tiers.host_pool.expect),
            chunk_numel=None if size == "auto" else size,
            device_cap_nbytes=self._tiers.caps.device_nbytes,
            dtype=self._dtype,
            num_ranks=self._ranks.size,
        )
        opts = self.config.client.opts
        blocking = not (opts.with_async_move and backend.moves_contents)
        self._lanes = (make_lanes or partial(open_lanes, blocking=blocking))(self._compute)
        self._undo_log_nbytes = 0 if blocking else undo_log_nbytes(opts, self._compute, self._tiers.caps)
        self._sharing = self._share() if self._ranks.size > 1 else None
        self._units = Units(self._sharing, self._the_reduction)
        self._access = AccessTracker(self._executor)
        self._backward = BackwardTracker(self._executor, self._access, self._units)
        self._gradients = GradientBook(
            self._executor, settles=lambda group: self._updater.settles(group), then=self._backward.landed
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
        self._executor.begin_update = self._updater.ahead.begin
        self._executor.reserve_log = self._updater.ahead.reserve
        self._autocast_cache = AutocastCache(self._compute.device.type, precision=self.config.precision)
        self._hooks = ModuleHooks(
            self._access, self._backward, units=self._units, on_root=self._begin_root, make_guard=self._make_guard
        )
        self._surface = ModuleSurface(read=self._read, write=self._write)
        self._declared = DeclaredReads()
        self._collector: Collector | None = None
        self._stepping = False
        self._gathers_open = 0
        self._averaged: list[nn.Parameter] = []
        """Of excluded modules, those whose gradients are averaged over ranks."""
        self._has_landed = False
        """A rank had a gradient when the step began."""
        self._exchange_Bps = inf
        self._conductor = self._make_conductor(machine)
        self._trial = self._make_trial()
        self._executor.close_in_children()

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

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise StateError("a manager cannot be copied or pickled: make another from its config")

    def __enter__(self) -> ChunkManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def init(self) -> Iterator[None]:
        """Pack the modules built inside into chunks when the block ends.

        Raises:
            LayoutError: a parameter cannot be packed; the modules are as they were built.
            CapacityError: the weights fit no tier; likewise.
            StateError: over ranks, a parameter was written or read after its module had been attached to its parent
                (see `release_after_init`). Whatever is raised there, the modules are lost: no rank has all values.
        """
        self._require_open()
        if self._collector is not None:
            raise StateError(
                "manager.init() inside manager.init(): build all modules in one block, or in blocks in turn"
            )
        collector = self._collector = Collector()
        built = HERE
        if self._sharing is not None and not self.config.release_after_init:
            built = BuiltOverRanks(self._sharing, collector)
        try:
            with collector.watching(), built.watching():
                yield
        finally:
            self._collector = None
        self._add(collector.roots(), collector.excluded(), kept=collector.not_reduced(), built=built)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Pack the parameters of a model that exists; return the same object. Raises what `init` does."""
        self._require_open()
        if not isinstance(model, nn.Module):
            raise LayoutError(f"manager.wrap() takes a torch.nn.Module, not a {type(model).__name__}")
        self._add([model], [])
        return model

    @contextlib.contextmanager
    def exclude(self, reduce: bool = True) -> Iterator[None]:
        """Leave the modules built inside ordinary PyTorch on the compute device. Use it inside `init()`.

        `reduce` tells whether their gradients are averaged over ranks; with one process there is nothing to average.
        """
        if self._collector is None:
            raise StateError("manager.exclude() belongs inside manager.init()")
        with self._collector.excluding(reduce=reduce):
            yield

    def unit(self, module: nn.Module) -> nn.Module:
        """Make a module one unit of exchange between ranks; call it before it is packed. Returns the same object.

        By default, units are the children of ModuleList and Sequential. With one process it changes nothing.
        """
        self._require_open()
        if not isinstance(module, nn.Module):
            raise LayoutError(f"manager.unit() takes a torch.nn.Module, not a {type(module).__name__}")
        self._units.mark(module)
        return module

    def backward(self, loss: torch.Tensor, *, last: bool | None = None, **kwargs: Any) -> None:
        """Run `loss.backward(**kwargs)`; in fp16, of the loss times the loss scale.

        `last` tells whether `step()` comes next; it decides when gradients are exchanged, so with one process it
        changes nothing. None: as many backwards a step as `accumulate` declares, or as the step before had; a
        wrong guess costs traffic, never a wrong sum.
        """
        self._require_open()
        if not isinstance(loss, torch.Tensor):
            raise StateError(f"manager.backward() takes the loss as a tensor, not a {type(loss).__name__}")
        self._units.declared = last
        guard = self._make_guard()
        with guard or contextlib.nullcontext():
            self._scaled(loss).backward(**kwargs)

    def accumulate(self, num_backwards: int) -> None:
        """Declare how many backwards there are before each `step()`; see `backward`."""
        self._require_open()
        if not isinstance(num_backwards, int) or isinstance(num_backwards, bool) or num_backwards < 1:
            raise StateError(f"manager.accumulate() takes a number of backwards of at least 1, not {num_backwards!r}")
        self._units.accumulate(num_backwards)

    @property
    def loss_scale(self) -> float:
        """What `backward` multiplies the loss by: 1 but in fp16."""
        return 1.0 if self._scaler is None else self._scaler.scale

    @property
    def num_skipped_steps(self) -> int:
        """Steps that changed nothing because a gradient had overflowed; only fp16 has them."""
        return 0 if self._scaler is None else self._scaler.num_skipped

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        if self._scaler is None:
            return loss
        self._scaler.is_used = True
        return loss.float() * self._scaler.scale

    @contextlib.contextmanager
    def gather(self, params: Any = None, *, grads: bool = False) -> Iterator[None]:
        """Make parameters (a Parameter, a Module, or several; default all) present and writable inside the block.

        With `grads`, their gradients are in `.grad` meanwhile, over several ranks their means. Writes are kept; over
        several ranks, those of the parameter's owner are, so write the same on all.

        Raises:
            CapacityError: they do not fit DEVICE together.
        """
        self._require_open()
        wanted = self._registry.parameters if params is None else map(self._lookup, parameters_in(params))
        managed = dict.fromkeys(m for m in wanted if m is not None)
        self._registry.check()
        self._gathers_open += 1
        try:
            with gathered(
                managed,
                grads=grads,
                executor=self._executor,
                gradients=self._gradients,
                take_up=self._updater.take_up,
                reduction=self._reduction,
            ):
                yield
        finally:
            self._gathers_open -= 1
            self._access.let_go({m.group for m in managed})

    def state_dict(self, model: nn.Module | None = None, *, rank0_only: bool = False) -> dict[str, Any]:
        """Return the keys, order, shapes and dtypes of `model.state_dict()`: CPU copies, never views.

        `model` may be left out if the manager has one. Over ranks, all have to call it; with `rank0_only` only the
        first one gets it, and the others an empty dict.
        """
        self._require_open()
        self._registry.check()
        state = self._surface.state_dict(self._registry.only_root(model))
        return {} if rank0_only and self._ranks.rank > 0 else state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], model: nn.Module | None = None, strict: bool = True
    ) -> _IncompatibleKeys:
        """Load values by name; see `torch.nn.Module.load_state_dict`.

        Raises:
            CheckpointError: keys are missing or unexpected (`strict`), or shapes differ. All are named, and nothing
                has been changed.
        """
        self._require_open()
        self._registry.check()
        root = self._registry.only_root(model)
        check_fits(state_dict, self._surface.expected_state(root), strict=strict)
        keys: _IncompatibleKeys = root.load_state_dict(state_dict, strict=strict)
        return keys

    def memory(self) -> MemoryReport:
        """Return bytes by tier and role, now and at the peak, and what has been moved. `str()` is a table."""
        return memory_report(self._tiers, self._executor, padding_nbytes=self._registry.padding_nbytes)

    @property
    def trace(self) -> Trace | None:
        """The training step as it was recorded; None before one was. Set one that was saved to spare the recording.

        Raises:
            TraceError: what is set is of another model or layout.
        """
        return self._conductor.trace

    @trace.setter
    def trace(self, trace: Trace) -> None:
        self._require_open()
        self._conductor.adopt_trace(trace)

    @property
    def plan(self) -> Plan | None:
        """The plan that training follows; None before there is one. Set one that was saved, after its trace.

        Raises:
            PlanError: what is set is of another trace or for other caps.
        """
        return self._conductor.plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        self._require_open()
        self._conductor.adopt_plan(plan)

    def timeline(self) -> Timeline | None:
        """Return what happened in the last step that is over; `str()` is one line. None before the first."""
        return self._conductor.timeline()

    def record(self, directory: str | os.PathLike[str]) -> None:
        """Write a run directory: `trace.json`, `plan.json`, and the last training step as `timeline.json`.

        The directory is made if it is not there; files of an earlier run are replaced, each as a whole.

        Raises:
            StateError: there is no plan yet, or the directory cannot be made.
            TraceError, PlanError: a file cannot be written.
        """
        self._require_open()
        trace, plan, timeline = self.trace, self.plan, self._conductor.training_timeline()
        if trace is None or plan is None or timeline is None:
            raise StateError("there is nothing to record yet: the first step is traced and the second one planned")
        folder = Path(directory)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StateError(f"{folder} cannot be made: {error.strerror}; name another directory") from None
        trace.save(folder / "trace.json")
        plan.save(folder / "plan.json")
        timeline.save(folder / "timeline.json")

    def close(self) -> None:
        """Free every slab. The models cannot be used afterwards: take `state_dict()` before. Idempotent."""
        if self._executor.closed is None:
            self._conductor.close()
            self._access.reset(step=True)
            self._backward.reset(step=True)
            self._units.close()
            self._ranks.close()
            self._executor.closed = "its manager is closed; take manager.state_dict() before manager.close()"
            self._store.close()
            give_back_freed_ram()

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
        for root in roots if self._dtype is not torch.float32 else ():
            cast_at_borders(root, self._dtype, besides=excluded)
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

    def _lookup(self, param: torch.Tensor) -> ManagedParameter | None:
        return self._registry.lookup(param)

    def _write(self, managed: ManagedParameter, value: torch.Tensor) -> None:
        self._require_open()
        if self._owns(managed):
            self._updater.write_weight(managed, value)

    def _read(self, managed: ManagedParameter) -> torch.Tensor:
        self._require_open()
        return self._from_owner(managed, lambda: self._updater.read_weight(managed))

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

    def _begin_root(self) -> None:
        """A model is called from outside: drop what an interrupted call left, and look the parameters over."""
        self._require_open()
        self._autocast_cache.switch_off()
        self._access.reset(step=False)
        self._backward.reset(step=False)
        self._units.reset()
        self._conductor.begin_root(grad_enabled=torch.is_grad_enabled())
        self._registry.check()
        self._gradients.watch(self._registry.parameters)

    def _make_guard(self) -> AccessGuard | None:
        """Steps that are recorded run under a check; it would cost too much in every one."""
        if not self._conductor.is_recording:
            return None
        watch = self._conductor.watch
        run = None if watch is None else watch.run_operator
        return AccessGuard(self._declared.undeclared, lambda: self._phase, run=run)

    @contextlib.contextmanager
    def _step(self, *, updates: bool) -> Iterator[None]:
        """Surround `step()` and clipping: backward is over, and what users wrote counts."""
        self._require_open()
        if self._gathers_open:
            raise StateError("optimizer.step() inside manager.gather(): leave the block first, its writes count then")
        self._access.reset(step=True)
        self._backward.reset(step=True)
        self._units.reset()
        self._registry.check()
        for chunk in self._access.chunks.values():
            self._executor.notice_writes(chunk)
        if self._conductor.plan is None and not self._conductor.is_recording:
            self._tiers.leave_room_for_activations()
        self._stepping = True
        try:
            self._gradients.take_assigned(m for m in self._registry.parameters if m.param.grad is not None)
            if self._reduction is not None:
                self._units.attend()
                landed = self._reduction.reduce(list(self._registry.parameters))
                self._has_landed = landed | self._reduction.reduce_excluded(self._averaged)
            yield
            if updates:
                self._conductor.end_step()
                self._units.end_step()
                if self._trial is not None:
                    self._trial.end_step()
        finally:
            self._stepping = False

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
