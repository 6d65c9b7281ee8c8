"""What training is made of, in named groups; an estimate has the same parts made over memory that is only counted.

Each part is made of earlier ones, so that calls can be followed from the last to the first:

memory         tiers, chunks, and who moves them; updates on HOST ahead of the step
shards         which rank owns what
gradients      where they land; `StatePlacement` tells which of them are wanted on HOST next
sharding       exchanges give gradients to their owners
updater        optimizer states, groups updated at the step or ahead of it
modules        parameters packed and served, reads and backwards kept track of
steps          recorded, planned and followed (`chunkmem.assembly.make`)
entry points   a model is called, an optimizer steps (`chunkmem.assembly.entry_points`)

What a part has to tell those that are made after it, it tells by `StepEvents`. One arrow leads back: when room is
short, the pager asks the tracker of accesses who keeps memory.

Decided in ADR 61.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TypeVar

import torch
from torch import nn

from chunkmem.activations.region_chunks import RegionChunks
from chunkmem.activations.region_policies import RegionPolicies
from chunkmem.activations.regions import RegionActivations
from chunkmem.activations.saved_tensors import ChunkHooks
from chunkmem.activations.stashed import StashedTensors
from chunkmem.config import Config
from chunkmem.data.module_policy import ModulePolicies
from chunkmem.data.types import Role, Tier
from chunkmem.modules.access import AccessTracker
from chunkmem.modules.backward import BackwardTracker
from chunkmem.modules.begun import StepLedger
from chunkmem.modules.binding import BoundChunk, ManagedParameter
from chunkmem.modules.compiled import CompiledModules
from chunkmem.modules.copies import ModelCopies
from chunkmem.modules.dtype_casts import DtypeCasts
from chunkmem.modules.fitted import FittedModules
from chunkmem.modules.gradient_hooks import GradientHooks
from chunkmem.modules.gradient_slots import GradientSlots
from chunkmem.modules.gradient_values import GradientValues
from chunkmem.modules.gradients import GradientBook
from chunkmem.modules.guard import declare
from chunkmem.modules.hooks import ModuleHooks, RootCalls
from chunkmem.modules.host_modules import HostModules
from chunkmem.modules.lazy_tensor import LazyTensor
from chunkmem.modules.overrides import ModuleOverrides
from chunkmem.modules.parameter_operators import ParameterOperators
from chunkmem.modules.reduction import OrdinaryGradients, Reduction
from chunkmem.modules.registry import ModelRegistry, PackedModel
from chunkmem.optim.block_adam import adam_states
from chunkmem.optim.kernels import load_kernels
from chunkmem.optim.native import NativeUpdate
from chunkmem.optim.rule import StateSpec
from chunkmem.optim.slot_source import SlotSource
from chunkmem.optim.speculative import SpeculativeUpdater
from chunkmem.optim.state_chunks import StateChunks
from chunkmem.optim.state_placement import StatePlacement
from chunkmem.optim.update import GroupUpdater, UpdateParts
from chunkmem.packing.model_packer import ModelPacker
from chunkmem.packing.packer import Packer
from chunkmem.ranks.agreement import Operation
from chunkmem.ranks.exchange import Exchange
from chunkmem.ranks.ranks import Ranks
from chunkmem.ranks.shards import ShardStore
from chunkmem.ranks.units import Units
from chunkmem.runtime.declared_reads import DeclaredReads
from chunkmem.runtime.device import ComputeDevice, runtime_mode
from chunkmem.runtime.pager import Pager
from chunkmem.runtime.queues import Lanes
from chunkmem.runtime.shadow import ShadowBuffers
from chunkmem.runtime.step_events import StepEvents
from chunkmem.runtime.step_lock import StepLock
from chunkmem.runtime.store import ChunkStore
from chunkmem.runtime.tiers import TierCaps

T = TypeVar("T")
DTYPES = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16})
"""What `precision` of the configuration stands for."""


@dataclass(frozen=True)
class Memory:
    """Where chunks are, and who moves them."""

    compute: ComputeDevice
    caps: TierCaps
    pager: Pager
    make_home: Callable[[torch.dtype, Tier], BoundChunk]
    """Makes the side of a PARAM chunk that parameters are views of, on the tier where modules compute with it."""

    @property
    def store(self) -> ChunkStore:
        """All chunks."""
        return self.pager.store

    def require_open(self) -> None:
        """Raise a `StateError` if the manager is closed; if it is not, hold the signals that there are handlers for."""
        self.pager.require_open()
        if self.pager.interrupts is not None:
            self.pager.interrupts.install()

    def packer(self, states: Sequence[StateSpec], *, shows_progress: bool = False) -> Packer:
        """Return what makes chunks of parameters; `states` are those of the optimizer that the configuration names."""
        return Packer(
            self.pager,
            self.make_home,
            states_nbytes=lambda group: sum(spec.form(group).nbytes for spec in states),
            shows_progress=shows_progress,
        )


@dataclass(frozen=True)
class Sharding:
    """What ranks have of each other."""

    ranks: Ranks
    shards: ShardStore | None
    """None with one rank, as is `reduction`."""
    reduction: Reduction | None
    units: Units
    ordinary: OrdinaryGradients

    @property
    def is_shared(self) -> bool:
        """Several ranks have the chunks, each some."""
        return self.shards is not None

    @contextmanager
    def together(self, call: str, step_lock: StepLock) -> Iterator[None]:
        """Surround a call that all ranks make, by the thread that has `turn`.

        Raises:
            RankError: a rank is missing, or makes another call.
        """
        with step_lock.taken(), self.ranks.telling():
            self.ranks.connection.begin(Operation(call))
            self.units.let_go()  # weights may change in it
            yield

    def owns(self, managed: ManagedParameter) -> bool:
        """Tell whether this rank keeps a parameter and updates it."""
        return self.shards is None or self.shards.owns(managed.group)

    def from_owner(self, managed: ManagedParameter, read: Callable[[], T]) -> T:
        """Return what `read` returns on the rank that owns a parameter; every rank calls it."""
        if self.shards is None:
            return read()
        return self.shards.from_owner(managed.group, read, reader=managed.name)


@dataclass(frozen=True)
class Modules:
    """What models are packed and served by."""

    policies: ModulePolicies
    registry: ModelRegistry
    packer: ModelPacker
    step_lock: StepLock
    access: AccessTracker
    backward: BackwardTracker
    gradients: GradientBook
    gradient_hooks: GradientHooks
    operators: ParameterOperators
    overrides: ModuleOverrides
    dtype_casts: DtypeCasts
    host: HostModules
    declared: DeclaredReads
    saved: ChunkHooks
    units: Units
    regions: RegionActivations
    stashed: StashedTensors
    compiled: CompiledModules
    copies: ModelCopies

    def require_values(self) -> None:
        """Raise a `StateError` if a parameter has no values yet: its model was packed with `skip_init=True`."""
        self.overrides.uninitialized.require()

    def hooks(self, calls: RootCalls, events: StepEvents) -> ModuleHooks:
        """Make what modules are fitted with; `calls` hears of those from outside, and `events` tell what to hear of."""
        return ModuleHooks(
            self.access,
            self.backward,
            policies=self.policies,
            units=self.units,
            regions=self.regions,
            step_lock=self.step_lock,
            saved=self.saved,
            calls=calls,
            events=events,
        )

    def fit(
        self, roots: Sequence[nn.Module], added: Sequence[PackedModel], hooks: ModuleHooks, *, dtype: torch.dtype
    ) -> None:
        """Fit the modules under `roots`, of which those in `added` have been packed, to compute in `dtype`."""
        for root in roots if dtype is not torch.float32 else ():
            self.dtype_casts.fit(root, self.packer.precision.modules, dtype)
        on_host = self.packer.on_host
        for packed in added:
            self.access.add(packed.parameters)
            self.gradients.add(packed.parameters)
            declare(self.declared, packed.parameters, self.access.chunks)
            owned = hooks.fit(packed.root, self.registry.managed_under(packed.root), on_host=on_host)
            self.overrides.fit(packed.root, owned)
            self.gradient_hooks.watch(self.registry.parameters)
            self.operators.add(packed.parameters)
        self.host.fit(on_host)
        for root in roots:
            self.compiled.fit(root, self.dtype_casts.enclose, hooks.enclose)
        self.copies.know(self._fitted(hooks))
        for packed in added:
            self.copies.fit(packed.root)

    def _fitted(self, hooks: ModuleHooks) -> list[FittedModules]:
        """Return what all parts have fitted, the last one first."""
        parts = self.copies, self.compiled, self.host, self.overrides, hooks, self.dtype_casts
        return [part.fitted for part in parts]

    def unfit(self, hooks: ModuleHooks) -> None:
        """Undo `fit` for all models: modules and Parameters are ordinary again, and Parameters have no memory.

        What chunks hold stays. Nothing runs, and nobody keeps references to the memory of parameters.
        """
        for packed in self.registry.models:
            self.operators.remove(packed.parameters)
            self.gradient_hooks.unwatch(packed.parameters)
        hooks.unfit()
        for fitted in self._fitted(hooks):
            fitted.undo()
        with runtime_mode():
            for home in dict.fromkeys(managed.bound for managed in self.registry.parameters):
                home.release()

    def unfit_ordinary(self, hooks: ModuleHooks) -> None:
        """Undo `fit` for modules without managed parameters: other models may have them, and nothing is served."""
        for fitted in self._fitted(hooks):
            fitted.undo(besides={module for module in fitted if self.registry.has_parameter_in(module)})

    def know_as(self, other: Modules) -> None:
        """Know from the beginning what is known there."""
        self.units.backwards.expect_as(other.units.backwards)
        self.regions.inputs.know_as(other.regions.inputs)


def margin_use_ratio(config: Config) -> float:
    """Return how much of the room that weights and gradients leave on DEVICE states may take."""
    return config.client.mem_tracer.margin_use_ratio if config.optimizer.params.use_hybrid_adam else 0.0


def make_update_parts(
    store: ChunkStore, compute: ComputeDevice, lanes: Lanes, *, num_threads: int | None = None
) -> UpdateParts:
    """Return what updates are made of.

    Args:
        store: has the chunks of states.
        compute: that groups on DEVICE are updated by.
        lanes: on which groups are updated ahead of the step.
        num_threads: of each such update; None: as many as the machine has to spare.
    """
    # Compiled when first needed.
    native = NativeUpdate(lambda: load_kernels(with_cuda=compute.runs_cuda_kernels), compute.device)
    state_chunks, landed = StateChunks(store), dict[int, set[ManagedParameter]]()
    ahead = SpeculativeUpdater(
        store,
        lanes,
        ShadowBuffers(store.pools[Tier.HOST]),
        native,
        intent_of=lambda group: state_chunks.intent(landed.get(group, ()), group),
        chunks_of=state_chunks.chunks,
        num_threads=num_threads or compute.num_update_threads(),
    )
    return UpdateParts(native, state_chunks, landed, ahead, StepLedger())


def make_training(
    memory: Memory,
    ranks: Ranks,
    exchanges: Sequence[Exchange],
    parts: UpdateParts,
    *,
    margin_use_ratio: float = 0.0,
    make_slots: Callable[..., GradientSlots] = GradientSlots,
    units: Units | None = None,
) -> tuple[GradientBook, Sharding, GroupUpdater]:
    """Return where gradients land, what ranks have of each other, and what updates weights.

    Args:
        memory: has the chunks.
        ranks: that train together.
        exchanges: by which they give each other chunks, the usual one first; empty: this one has all of them.
        parts: of updates, made for the same store.
        margin_use_ratio: see `first_residents`.
        make_slots: makes them, with the arguments of that class.
        units: what the model is divided into; None: as the ranks need it.
    """
    pager = memory.pager
    shards = ShardStore(ranks, exchanges, pager) if exchanges and ranks.size > 1 else None
    pager.events.has_inner_hooks.append(lambda: shards is not None or ranks.stages is not None)
    state_placement = StatePlacement(memory.store, memory.caps, margin_use_ratio=margin_use_ratio)
    slots = make_slots(pager, updates_on_host=state_placement.updates_on_host, landed=parts.landed)
    values = GradientValues(
        slots,
        pager,
        parts.ledger,
        before_change=parts.ahead.roll_back,
        shards=shards,
        own_share="its pipeline stage" if ranks.stages else "its parts of the parameters" if ranks.parts else "",
    )
    gradients = GradientBook(pager, slots, values)

    def show(managed: ManagedParameter) -> None:
        updater.in_backward.before_mean(managed)
        gradients.show_mean(managed)

    reduction = None if shards is None else Reduction(shards, slots, pager, show=show)
    units = Units(shards, reduction) if units is None else units
    sharding = Sharding(ranks, shards, reduction, units, OrdinaryGradients(shards))
    backwards = None if shards is None else units.backwards
    updater = GroupUpdater(pager, gradients, state_placement=state_placement, parts=parts, backwards=backwards)
    return gradients, sharding, updater


def make_modules(
    config: Config,
    memory: Memory,
    sharding: Sharding,
    gradients: GradientBook,
    updater: GroupUpdater,
    asked: ModulePolicies,
    *,
    is_rehearsal: bool = False,
) -> Modules:
    """Return what models are packed and served by, as users have `asked`; `is_rehearsal`: see `BackwardTracker`."""
    pager, is_accelerator = memory.pager, memory.compute.is_accelerator
    step_lock = StepLock(timeout_s=config.distributed.timeout_s, with_hooks=not is_accelerator)
    declared = DeclaredReads()
    saved = ChunkHooks(declared, pager, step_lock)
    access = AccessTracker(pager, updater.ledger, before_lookup=saved.replace)
    device, is_one_tier, every = memory.compute.device, memory.caps.shared, config.use_cpu_embedding
    host = HostModules(
        access, device, asked, every_embedding=every, is_one_tier=is_one_tier, always_copies=is_rehearsal
    )
    registry = ModelRegistry()
    policies = RegionPolicies(config.activations.policy, asked)
    chunks = RegionChunks(pager.store)
    regions = RegionActivations(
        pager, step_lock, saved, policies=policies, chunks=chunks, device=device, is_rehearsal=is_rehearsal
    )
    backward = BackwardTracker(
        pager, access, sharding.units, step_lock, ordinary=sharding.ordinary, regions=regions, is_rehearsal=is_rehearsal
    )
    operators = ParameterOperators(
        pager, access, backward, step_lock, registry.managed, saved, is_shared=sharding.is_shared
    )
    read = partial(_read, pager, sharding, updater)
    lazy, write = partial(_lazy, sharding, updater), partial(_write, pager, sharding, updater)
    overrides = ModuleOverrides(pager.events, read=read, lazy=lazy, write=write, saving=operators.saving)
    compiled = CompiledModules(pager.events, asked, is_accelerator=is_accelerator, is_rehearsal=is_rehearsal)
    reading = partial(_reading_a_copy, memory, sharding, updater, registry, overrides, step_lock)
    return Modules(
        asked,
        registry,
        _make_packer(registry, config, memory, sharding.ranks, host),
        step_lock,
        access,
        backward,
        gradients,
        GradientHooks(gradients, backward, step_lock, pager.events, access=access, updates=updater.in_backward),
        operators,
        overrides,
        DtypeCasts(is_outermost=access.is_outermost),
        host,
        declared,
        saved,
        sharding.units,
        regions,
        StashedTensors(pager, chunks, device=device),
        compiled,
        ModelCopies(registry, read=read, reading=reading),
    )


def _make_packer(
    registry: ModelRegistry, config: Config, memory: Memory, ranks: Ranks, host: HostModules
) -> ModelPacker:
    size = config.default_chunk_size
    return ModelPacker(
        registry,
        memory.packer(adam_states(config.optimizer.params), shows_progress=ranks.rank == 0),
        choose_on_host=host.among,
        chunk_numel=None if size == "auto" else size,
        device_cap_nbytes=memory.caps.device_nbytes,
        dtype=DTYPES[config.precision],
        master_weights=config.master_weights,
        num_ranks=ranks.shard.size,
    )


@contextmanager
def _reading_a_copy(
    memory: Memory,
    sharding: Sharding,
    updater: GroupUpdater,
    registry: ModelRegistry,
    overrides: ModuleOverrides,
    step_lock: StepLock,
) -> Iterator[None]:
    """Surround the reading of weights by `copy.deepcopy` of a model, which all ranks call."""
    call = "copy.deepcopy() of a managed model"
    memory.require_open()
    overrides.uninitialized.require()
    registry.check()
    updater.ledger.require_over(call)
    with sharding.together(call, step_lock):
        yield


def _read(pager: Pager, sharding: Sharding, updater: GroupUpdater, managed: ManagedParameter) -> torch.Tensor:
    pager.require_open()
    read, shards = partial(updater.read_weight, managed), sharding.shards
    if shards is None:
        return read().to(managed.built_dtype)
    values = torch.empty_strided(managed.shape, managed.stride, dtype=managed.built_dtype, device="cpu")
    return shards.values_from_owner(managed.group, read, values, reader=managed.name)


def _lazy(sharding: Sharding, updater: GroupUpdater, managed: ManagedParameter) -> LazyTensor:
    source = SlotSource(managed, Role.PARAM, managed.built_dtype, updater=updater, owners=sharding)
    return source.tensor(tuple(managed.shape))


def _write(
    pager: Pager, sharding: Sharding, updater: GroupUpdater, managed: ManagedParameter, value: torch.Tensor
) -> None:
    pager.require_open()
    sharding.units.let_go()  # what was gathered before
    if sharding.owns(managed) or updater.is_on_host(managed.group):
        updater.write_weight(managed, value)
    updater.mark_written([managed])
