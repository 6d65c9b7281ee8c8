"""The runtime of a manager: the record of its parts, which `chunkmem.assembly.make` makes."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.utils.hooks import RemovableHandle

from chunkmem.assembly.built_models import BuiltModels
from chunkmem.assembly.entry_points import EntryPoints
from chunkmem.assembly.parts import (
    DTYPES,
    Memory,
    Modules,
    Sharding,
)
from chunkmem.assembly.speeds import Links
from chunkmem.config import Config
from chunkmem.data.errors import StateError
from chunkmem.data.module_policy import ModulePolicies
from chunkmem.modules.binding import ManagedParameter, move_to
from chunkmem.modules.gradients import GradientBook
from chunkmem.modules.hooks import ModuleHooks
from chunkmem.modules.registry import ModelRegistry, check_fits
from chunkmem.optim.chunk_states import StateHolder
from chunkmem.optim.foreign import ForeignStepCheck
from chunkmem.optim.optimizer import RuleOptimizer
from chunkmem.optim.scaler import LossScaler
from chunkmem.optim.update import GroupUpdater
from chunkmem.plan.machine import Machine
from chunkmem.ranks.mesh import end_groups
from chunkmem.ranks.methods import ExchangeMethod
from chunkmem.ranks.ranks import Ranks
from chunkmem.runtime.device import ComputeDevice
from chunkmem.runtime.disk_file import SystemCalls
from chunkmem.runtime.queues import Lanes
from chunkmem.runtime.tiers import Tiers
from chunkmem.steps.controller import StepController

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
    calls: SystemCalls | None
    asked: ModulePolicies = field(default_factory=ModulePolicies)
    """What users have asked for modules."""
    groups: list[Any] = field(default_factory=list)
    """Process groups that were made for the mesh, and end with it: the user has made another one."""


@dataclass(frozen=True, eq=False)
class Runtime:
    """The parts of one manager, which has it; made once, as `assembly/parts.py` says."""

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
    foreign_wrappers: RemovableHandle
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
            check_fits(state, self.modules.overrides.expected_state(root), strict=strict)
            keys: _IncompatibleKeys = root.load_state_dict(state, strict=strict)
            self.send_on_host("manager.load_state_dict()")
        return keys

    def stop(self, reason: str) -> bool:
        """Have nothing run any more. What chunks hold stays; `reason` is what those are told who use the manager.

        Returns:
            Whether something ran until now, and not in the process that this one was forked from.
        """
        memory, modules = self.memory, self.modules
        if memory.store.snapshot is not None:
            memory.store.snapshot.read_all()
        self.foreign_steps.remove()
        self.foreign_wrappers.remove()
        self.entry_points.close()
        modules.compiled.close()
        stops = memory.pager.can_close
        if stops:
            self.controller.close()
            self.updater.ahead.forget()
            modules.access.close()
            modules.backward.reset(step=True)
            self.sharding.units.close()
            self.ranks.close()
            memory.pager.close(reason)
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
        """Take in those parameters that were added to models after these were packed, as rank 0 has them.

        Over ranks, their gradients are averaged.

        Raises:
            RankError: a rank is missing, or has added others.
        """
        added = self.registry.adopt(params)
        for param in added:
            if param.device != self.device:
                move_to(param, param.data.to(self.device))
        if added and self.sharding.shards is not None:
            self.ranks.broadcast_tensors(added, label="parameters that were added to models")
            self.sharding.ordinary.parameters.extend(added)

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

    def require_several_backwards(self, call: str) -> None:
        """Raise a `StateError` if an optimizer updates in the first backward of a step; `call` needs more of them."""
        self.updater.in_backward.require_none(call)

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
        """Surround a call that all ranks make; see `Sharding.together`.

        Raises:
            StateError: in addition, if a step has begun and is not over.
        """
        self.updater.ledger.require_over(call)
        return self.sharding.together(call, self.modules.step_lock)

    def step(self, options: str, *, updates: bool, goes_on: bool = False) -> contextlib.AbstractContextManager[None]:
        """Surround `step()` and clipping; see `EntryPoints.step`."""
        return self.entry_points.step(options, updates=updates, goes_on=goes_on)

    def skip_step(self) -> None:
        """The optimizer's step changes nothing: neither record it nor learn from it."""
        self.controller.excuse_iteration()
