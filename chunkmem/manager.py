"""The composition root: wires tiers, chunks, hooks and updates together, and is what a user holds."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from chunkmem.comm import require_one_process
from chunkmem.config import Config, unavailable_keys
from chunkmem.errors import ConfigError, StateError
from chunkmem.memory import MemoryHistory, MemoryReport
from chunkmem.nn.access import AccessTracker, in_backward
from chunkmem.nn.backward import BackwardTracker
from chunkmem.nn.binding import ManagedParameter
from chunkmem.nn.collect import Collector
from chunkmem.nn.gather import gathered, parameters_in
from chunkmem.nn.gradients import GradientBook
from chunkmem.nn.guard import AccessGuard, DeclaredReads
from chunkmem.nn.hooks import ModuleHooks
from chunkmem.nn.packing import PackedModel, Packer
from chunkmem.nn.registry import ModelRegistry, check_fits
from chunkmem.nn.surface import ModuleSurface
from chunkmem.optim.update import GroupUpdater
from chunkmem.plan.placement import GroupBytes, place_states
from chunkmem.runtime.device import ComputeDevice
from chunkmem.runtime.executor import DemandExecutor
from chunkmem.runtime.report import memory_report, recording
from chunkmem.runtime.storage import default_backend
from chunkmem.runtime.store import ChunkStore
from chunkmem.runtime.tiers import Tiers
from chunkmem.types import ChunkId, Role, Tier


class ChunkManager:
    """Owns the tiers and the chunks of one process. Several can live side by side.

    Args:
        config: see `Config`; None is all defaults.
        process_group: a group of one process; more are not available in this version.
        device_index: which CUDA device to compute on; None is the current one.

    Raises:
        ConfigError: a key is set whose feature this version does not have.
    """

    def __init__(
        self, config: Config | None = None, *, process_group: Any = None, device_index: int | None = None
    ) -> None:
        self.config = Config() if config is None else config
        if keys := unavailable_keys(self.config):
            raise ConfigError(f"{', '.join(keys)}: not available in this version; leave out or set to the default")
        require_one_process(process_group)
        self._compute = ComputeDevice.default(device_index)
        self._tiers = Tiers(self.config, self._compute)
        self._store = ChunkStore({Tier.DEVICE: self._tiers.device_pool, Tier.HOST: self._tiers.host_pool})
        self._executor = DemandExecutor(self._store)
        size = self.config.default_chunk_size
        self._registry = ModelRegistry(
            Packer(self._executor, default_backend(), self._compute.device, expect_nbytes=self._tiers.host_pool.expect),
            chunk_numel=None if size == "auto" else size,
            device_cap_nbytes=self._tiers.caps.device_nbytes,
        )
        self._access = AccessTracker(self._executor)
        self._backward = BackwardTracker(self._executor, self._access)
        self._gradients = GradientBook(self._executor, settles=lambda group: self._updater.settles(group))
        self._updater = GroupUpdater(self._executor, self._gradients, self._compute, place=self._place_states)
        self._hooks = ModuleHooks(self._access, self._backward, on_root=self._begin_root, make_guard=self._make_guard)
        self._surface = ModuleSurface(export=self._export, gather=self._gather)
        self._declared = DeclaredReads()
        self._collector: Collector | None = None
        self._exported: dict[ManagedParameter, torch.Tensor] | None = None
        self._stepping = False
        self._steps_done = 0
        _close_in_children(self)

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
        """
        self._require_open()
        if self._collector is not None:
            raise StateError(
                "manager.init() inside manager.init(): build all modules in one block, or in blocks in turn"
            )
        collector = self._collector = Collector()
        try:
            with collector.watching():
                yield
        finally:
            self._collector = None
        self._add(collector.roots(), collector.excluded())

    def wrap(self, model: nn.Module) -> nn.Module:
        """Pack the parameters of a model that exists; return the same object. Raises what `init` does."""
        self._require_open()
        self._add([model], [])
        return model

    @contextlib.contextmanager
    def exclude(self, reduce: bool = True) -> Iterator[None]:
        """Leave the modules built inside ordinary PyTorch on the compute device. Use it inside `init()`.

        `reduce` tells whether their gradients are averaged over ranks; with one process there is nothing to average.
        """
        if self._collector is None:
            raise StateError("manager.exclude() belongs inside manager.init()")
        with self._collector.excluding():
            yield

    def backward(self, loss: torch.Tensor, *, last: bool | None = None, **kwargs: Any) -> None:
        """Run `loss.backward(**kwargs)`.

        `last` tells whether `step()` comes next; it decides when gradients are exchanged, so with one process it
        changes nothing.
        """
        self._require_open()
        guard = self._make_guard()
        with guard or contextlib.nullcontext():
            loss.backward(**kwargs)

    @contextlib.contextmanager
    def gather(self, params: Any = None, *, grads: bool = False) -> Iterator[None]:
        """Make parameters (a Parameter, a Module, or several; default all) present and writable inside the block.

        With `grads`, their gradients are in `.grad` meanwhile. Writes are kept.

        Raises:
            CapacityError: they do not fit DEVICE together.
        """
        self._require_open()
        wanted = self._registry.parameters if params is None else map(self._lookup, parameters_in(params))
        managed = dict.fromkeys(m for m in wanted if m is not None)
        with gathered(managed, grads=grads, executor=self._executor, gradients=self._gradients):
            yield

    def state_dict(self, model: nn.Module | None = None, *, rank0_only: bool = False) -> dict[str, Any]:
        """Return the keys, order, shapes and dtypes of `model.state_dict()`: CPU copies, never views.

        `model` may be left out if the manager has one. `rank0_only` matters with several processes only.
        """
        self._require_open()
        root = self._registry.only_root(model)
        self._exported = {}
        try:
            state = root.state_dict()
            copies = {id(tensor) for tensor in self._exported.values()}
        finally:
            self._exported = None
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and id(value) not in copies:
                state[key] = value.detach().to("cpu", copy=True)
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], model: nn.Module | None = None, strict: bool = True
    ) -> _IncompatibleKeys:
        """Load values by name; see `torch.nn.Module.load_state_dict`.

        Raises:
            CheckpointError: keys are missing or unexpected (`strict`), or shapes differ. All are named, and nothing
                has been changed.
        """
        self._require_open()
        root = self._registry.only_root(model)
        self._surface.exporting = False
        try:
            expected = root.state_dict()
        finally:
            self._surface.exporting = True
        check_fits(state_dict, expected, strict=strict)
        keys: _IncompatibleKeys = root.load_state_dict(state_dict, strict=strict)
        return keys

    def memory(self) -> MemoryReport:
        """Return bytes by tier and role, now and at the peak, and what has been moved. `str()` is a table."""
        return memory_report(self._tiers, self._executor, padding_nbytes=self._registry.padding_nbytes)

    @contextlib.contextmanager
    def memory_history(self) -> Iterator[MemoryHistory]:
        """Record the bytes on every tier after each change inside the block."""
        with recording(self._tiers, label=lambda: self._phase) as history:
            yield history

    def close(self) -> None:
        """Free every slab. The models cannot be used afterwards: take `state_dict()` before. Idempotent."""
        if self._executor.closed is None:
            self._executor.closed = "its manager is closed; take manager.state_dict() before manager.close()"
            self._store.close()

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

    def _add(self, roots: Sequence[nn.Module], excluded: Sequence[nn.Module]) -> None:
        for packed in self._registry.add(roots, excluded):
            self._fit(packed)
        for module in (*roots, *excluded):
            _move_ordinary_tensors(module, excluded, self._compute.device)

    def _fit(self, packed: PackedModel) -> None:
        for managed in packed.parameters:
            self._access.chunks[managed.group] = self._store.chunks[ChunkId(Role.PARAM, managed.group)]
        self._gradients.add(packed.parameters)
        self._declared.add(packed.parameters, self._access.chunks)
        owned = self._hooks.fit(packed)
        self._surface.fit(packed.root, owned)
        self._watch_gradients()

    def _watch_gradients(self) -> None:
        for managed in self._registry.parameters:
            if managed.gradient_hook is None and managed.param.requires_grad:
                self._gradients.watch(managed, self._backward.landed)

    def _lookup(self, param: torch.Tensor) -> ManagedParameter | None:
        return self._registry.lookup(param)

    def _gather(self, managed: list[ManagedParameter]) -> contextlib.AbstractContextManager[None]:
        return gathered(managed, grads=False, executor=self._executor, gradients=self._gradients)

    def _export(self, managed: ManagedParameter) -> torch.Tensor:
        known = self._exported if self._exported is not None else {}
        if managed not in known:  # tied names share one copy, as they share one tensor in the model
            known[managed] = self._updater.read(self._access.chunks[managed.group], managed)
        return known[managed]

    def _begin_root(self) -> None:
        """A model is called from outside: drop what an interrupted call left, and look the parameters over."""
        self._require_open()
        self._access.reset(step=False)
        self._backward.reset(step=False)
        self._registry.check()
        self._watch_gradients()

    def _make_guard(self) -> AccessGuard | None:
        """The first step runs under a check; it would cost too much in every one."""
        if self._steps_done > 0:
            return None
        return AccessGuard(self._declared.undeclared, lambda: self._phase)

    def _begin_step(self) -> None:
        self._require_open()
        self._access.reset(step=True)
        self._backward.reset(step=True)
        self._registry.check()
        for chunk in self._access.chunks.values():
            self._executor.notice_writes(chunk)
        self._tiers.leave_room_for_activations()
        self._stepping = True

    def _end_step(self) -> None:
        self._stepping = False
        self._steps_done += 1

    def _place_states(self, sizes: Sequence[GroupBytes]) -> frozenset[int]:
        if self._tiers.caps.shared:
            return frozenset(size.group for size in sizes)
        params = self.config.optimizer.params
        ratio = self.config.client.mem_tracer.margin_use_ratio if params.use_hybrid_adam else 0.0
        taken = self._updater.device_nbytes(besides={size.group for size in sizes})
        return place_states(sizes, cap_nbytes=self._tiers.device.cap_nbytes - taken, margin_use_ratio=ratio)


def _move_ordinary_tensors(module: nn.Module, excluded: Sequence[nn.Module], device: torch.device) -> None:
    """Put buffers, and the parameters of excluded modules, on the compute device."""
    for child in module.modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.device != device:
                child._buffers[name] = buffer.to(device)
    for child in excluded:
        for param in child.parameters(recurse=False):
            param.data = param.data.to(device)


def _close_in_children(manager: ChunkManager) -> None:
    """Mark the manager closed in forked children: a child has none of the host arena's memory."""
    ref = weakref.ref(manager)

    def after_fork() -> None:
        alive = ref()
        if alive is not None:
            alive._executor.closed = "its manager lives in the parent process; a forked child cannot use it"

    os.register_at_fork(after_in_child=after_fork)
