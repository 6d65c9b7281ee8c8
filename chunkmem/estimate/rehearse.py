"""Run one training step without memory and without hardware, and write down the trace it would leave.

The model runs under torch's fake tensors, and everything that listens to it is what listens in training: the same
hooks, the same frames, the same pager. Only chunks have no memory, copies are none, and operators take the time that
a clock says. What is asked of the pager is logged, and replayed for each rank with what ranks train with and the
same recorder (`chunkmem.estimate.rank_stage`). So the moments are those that `manager.trace` would have.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode

from chunkmem.assembly.parts import DTYPES, make_modules, make_training, make_update_parts
from chunkmem.config import Config
from chunkmem.data.errors import ChunkmemError, LayoutError, TraceError
from chunkmem.data.layout import Layout
from chunkmem.data.layout_pack import dealt
from chunkmem.data.module_policy import ModulePolicies
from chunkmem.data.trace import Trace
from chunkmem.data.types import Role
from chunkmem.estimate.calls import (
    CallLog,
    LoggedEvents,
    LoggedOptimizer,
    LoggedSlots,
    LoggedUnits,
    Measured,
    StepCalls,
)
from chunkmem.estimate.hardware import HARDWARE, Hardware
from chunkmem.estimate.mesh import ALONE, RankMesh
from chunkmem.estimate.model import Model, checkpointed
from chunkmem.estimate.needs import gradient_peak_nbytes
from chunkmem.estimate.operators import HostOperators, OperatorClock, with_workspace
from chunkmem.estimate.optimizers import BUILT_IN, states_kept
from chunkmem.estimate.peers import Unison
from chunkmem.estimate.rank_stage import RankStage, RankSteps
from chunkmem.estimate.tensor_parallel import make_local
from chunkmem.estimate.weightless import ANYTHING, NO_CAP_NBYTES, counted_memory, uncapped
from chunkmem.modules.binding import ManagedParameter
from chunkmem.modules.guard import only_makes_a_view
from chunkmem.optim.block_adam import adam_states
from chunkmem.optim.rule import StateSpec
from chunkmem.packing.built import Built
from chunkmem.packing.tiling import tile_linears
from chunkmem.ranks.ranks import Ranks
from chunkmem.runtime.lanes import BlockingLanes
from chunkmem.steps.probe import LiveStorageProbe

_NOT_THE_USERS = (Path(torch.__file__).parent, Path(__file__).parents[1])
_DEVICE = torch.ops.prim.device.default
_UNKNOWABLE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How the model would be trained, and on what."""

    hardware: Hardware = HARDWARE["h100"]
    device_nbytes: int = 2**40
    """Cap on DEVICE; the search for a chunk size looks at it."""
    precision: str = "fp32"
    """Of weights and gradients; other than fp32, a float32 master copy of the weights comes with the states."""
    states: str = "fp32"
    """`optimizer.params.states` of the configuration."""
    master: str = "fp32"
    """`optimizer.params.master`; "weights": that copy is left out, as by `master_weights` of the configuration."""
    in_backward: bool = False
    """`optimizer.params.in_backward`."""
    reduce_dtype: str = "fp32"
    """`distributed.reduce_dtype`."""
    optimizer: str = "adamw"
    """Of `BUILT_IN`, or a name of `class_named`."""
    checkpointing: bool = False
    """Recompute each block in backward, by torch's checkpoint."""
    activations: str | None = None
    """`activations.policy` of the configuration."""
    chunk_numel: int | None = None
    """`default_chunk_size`, in elements; None searches the size that wastes least."""
    tile_numel: int | None = None
    """`with_tiling_linear`, in elements; None tiles nothing."""
    cpu_embedding: bool = False
    """`use_cpu_embedding` of the configuration."""
    mesh: RankMesh = ALONE
    """Ranks. With several shards, the model has units; the search for a chunk size looks at them, too."""

    @property
    def sent_share(self) -> float:
        """Bytes sent for each byte of a gradient that libraries sum."""
        return DTYPES[self.reduce_dtype].itemsize / self.dtype.itemsize

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and gradients."""
        return DTYPES[self.precision]

    def config(self) -> Config:
        """Return the configuration of such a training."""
        values: dict[str, Any] = {
            "precision": self.precision,
            "master_weights": self.master != "weights",
            "use_cpu_embedding": self.cpu_embedding,
            "optimizer": {"params": {"states": self.states, "master": "none" if self.master == "none" else "fp32"}},
        }
        values |= {"default_chunk_size": self.chunk_numel or "auto", "activations": {"policy": self.activations}}
        return Config.from_dict(values)


@dataclass(frozen=True)
class Rehearsal:
    """One step that was not run."""

    step: StepCalls
    num_params: int
    """Elements of distinct parameters of the whole model."""
    flop: int
    """Floating-point operations of a rank's forward and backward, recomputation included."""
    tokens: int
    exchange_s: float
    """That exchanges of activations take, which computing waits for."""
    _replayed: dict[tuple[int, int, bool, bool, int], RankSteps] = field(
        default_factory=dict, repr=False, compare=False
    )
    """By the arguments of `over`: results that were asked for, as the same ones are many times."""

    @property
    def layout(self) -> Layout:
        return self.step.layout

    @property
    def trace(self) -> Trace:
        """The trace of one process that has all chunks."""
        return self.over(1).first.trace

    def over(
        self,
        world: int,
        *,
        rank: int = 0,
        is_accelerator: bool = True,
        is_accumulating: bool = False,
        device_nbytes: int = NO_CAP_NBYTES,
    ) -> RankSteps:
        """Return the steps of one of `world` ranks; see `RankStage`.

        Several have units, so the model has to have been rehearsed for several. `device_nbytes`, the cap on DEVICE,
        decides whether they try to gather ahead.
        """
        assert world == 1 or self.step.units, "the model was rehearsed alone"
        if world == 1:
            rank, is_accelerator, is_accumulating, device_nbytes = 0, True, False, NO_CAP_NBYTES
        key = world, rank, is_accelerator, is_accumulating, device_nbytes
        if key not in self._replayed:
            ledgers = uncapped(device_nbytes, has_host=any(group.is_on_host for group in self.layout.groups))
            stage = RankStage(
                self.step,
                rank,
                world,
                counted_memory(ledgers),
                is_accelerator=is_accelerator,
                is_accumulating=is_accumulating,
            )
            self._replayed[key] = stage.steps()
        return self._replayed[key]

    def fullest_ranks(self, world: int) -> list[int]:
        """Return those of `world` ranks that own something, the one with most bytes first."""
        owned = Counter({0: 0})
        groups = {group.id: group for group in dealt(self.layout, num_ranks=world).groups}
        for chunk, nbytes in self.trace.chunk_nbytes.items():
            if not chunk.role.kind.is_of_call:
                owned[groups[chunk.group].owner] += nbytes
        for group in groups.values():
            owned[group.owner] += group.nbytes if group.is_on_host else 0
        return sorted(owned, key=lambda rank: (-owned[rank], rank))

    @property
    def activation_nbytes(self) -> int:
        """Peak bytes of non-model data: activations, gradients under way, temporaries."""
        return self.trace.non_model_peak_nbytes

    @property
    def role_nbytes(self) -> Mapping[Role, int]:
        """Bytes of the chunks in each role, pads included; of gradients with `in_backward`, those at one time."""
        found = Counter(self.over(1).first.on_host_nbytes)
        for chunk, nbytes in self.trace.chunk_nbytes.items():
            found[chunk.role] += nbytes
        if self.step.in_backward:
            found[Role.GRAD] = gradient_peak_nbytes(self.trace)
        return {role: found[role] for role in sorted(found, key=lambda role: role.order)}


def rehearse(model: Model, setting: Setting, *, kept: frozenset[int] = frozenset()) -> Rehearsal:
    """Return the trace, the layout and the arithmetic of one training step of `model`.

    Under the activations policy "auto", `kept` are the calls that are not recomputed, by number.

    Raises:
        LayoutError: the model has no parameters, or none that can be packed.
        TraceError: the step needs values, which fake tensors do not have; names the module and the operator. Or the
            model's own code raised something.
    """
    hardware = setting.hardware
    clock = OperatorClock(
        flop_per_s=hardware.eager_share * hardware.flop_rate(setting.dtype),
        memory_Bps=hardware.eager_share * hardware.memory_Bps,
    )
    fake = FakeTensorMode()
    try:
        with fake:
            module, num_params = _build(model, setting, clock)
        stage = _Stage(module, setting, clock, kept)
        with fake, stage:
            loss = model.loss(module)
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                raise TraceError(f"the step of {model.name} returned {shape_of(loss)} instead of a loss of one element")
            loss.backward()
            del loss
    except (ChunkmemError, MemoryError):
        raise
    except Exception as error:  # the user's code may raise anything
        raise TraceError(f"{model.name} raised {type(error).__name__}: {error} ({place_of(error)})") from error
    return Rehearsal(
        stage.step(),
        num_params=num_params,
        flop=clock.flop,
        tokens=model.tokens,
        exchange_s=clock.exchange_s,
    )


def _build(model: Model, setting: Setting, clock: OperatorClock) -> tuple[nn.Module, int]:
    """Return a rank's part of the model, and how many parameters the whole has."""
    module = model.build()
    num_params = sum(param.numel() for param in module.parameters())
    module.train()
    if (tp := setting.mesh.tp) > 1:
        seconds_a_byte = (tp - 1) / tp / setting.hardware.exchange_Bps(tp)
        make_local(module, tp, exchange=lambda nbytes: clock.exchange(seconds_a_byte * nbytes))
    if setting.tile_numel is not None:
        tile_linears(module, max_numel=setting.tile_numel)
    if setting.checkpointing and not checkpointed(module):
        raise LayoutError(
            f"{model.name} has no nn.ModuleList or nn.Sequential, whose children could be recomputed; leave out "
            "checkpointing, or call torch.utils.checkpoint in the model"
        )
    return module, num_params


def place_of(error: Exception) -> str:
    """Return the user's file and line that raised an error, or called what did."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not any(map(Path(frame.filename).is_relative_to, _NOT_THE_USERS))]
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"


def shape_of(value: object) -> str:
    """Say what a step returned in the place of a loss."""
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


class _Fake(Built):
    """What was built has no values."""

    has_memory = False

    def is_released(self, param: nn.Parameter) -> bool:
        return True

    def take(self, param: nn.Parameter, group: int, *, name: str) -> torch.Tensor:
        return ANYTHING


class _Stage(TorchDispatchMode):
    """A model fitted as for training, over chunks that are only counted; what it asks of them is logged.

    Inside, the time and the memory of every operator are counted.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare every operator a wrapper that keeps torch's compiler out, which never comes here."""
        return False

    def __init__(self, module: nn.Module, setting: Setting, clock: OperatorClock, kept: frozenset[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._clock = clock
        self._host_clock = OperatorClock(flop_per_s=inf, memory_Bps=setting.hardware.host_memory_Bps)
        self._module, self._setting, self._log = module, setting, CallLog(self._measure)
        ledgers = uncapped(setting.device_nbytes, has_host=setting.cpu_embedding)
        memory = counted_memory(ledgers)
        self._units = LoggedUnits(self._log, is_alone=setting.mesh.shard == 1)
        gradients, sharding, self._updater = make_training(
            memory,
            Ranks(Unison(0, setting.mesh.shard)),
            (),
            make_update_parts(memory.store, memory.compute, BlockingLanes(memory.compute)),
            make_slots=partial(LoggedSlots, self._log),
            units=self._units,
        )
        self._modules = make_modules(
            setting.config(), memory, sharding, gradients, self._updater, ModulePolicies(), is_rehearsal=True
        )
        added = self._modules.packer.add([module], [], _Fake())
        if not added:
            raise LayoutError("the model has no parameters, so there is nothing to train")
        self._hooks = self._modules.hooks(self, memory.pager.events)
        self._modules.fit([module], added, self._hooks, dtype=setting.dtype)
        self._on_host = HostOperators(self._modules.packer.on_host)
        (self._packed,) = added
        parameters = self._packed.parameters
        self._owner = LoggedOptimizer(self._log, in_backward=setting.in_backward)
        self._updater.claim(dict.fromkeys(parameters, ()), self._owner, forget_plans=lambda: None)
        if setting.in_backward:
            self._updater.in_backward.optimizers.add(ref(self._owner))
        self._probe = LiveStorageProbe({managed.storage_id for managed in parameters}.__contains__)
        memory.pager.events.activation_taken.append(self._probe.leave_out)
        memory.pager.policy = LoggedEvents(self._log)
        self._modules.regions.begin_iteration(kept, lambda: len(self._log.calls))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # three of four calls, all from torch itself
            return args[0].fake_device
        kwargs = kwargs or {}
        if self._on_host.is_running:
            result = func(*args, **kwargs)
            self._host_clock.count(func, args, kwargs, result)
            return result
        if only_makes_a_view(func):
            return func(*args, **kwargs)
        try:
            result = self._probe.run(partial(with_workspace, func), args, kwargs)
        except _UNKNOWABLE:
            stack = self._modules.access.stack
            where = str(stack[-1]) if stack else "the step, outside of any module"
            raise TraceError(
                f"{where}: operator {func} needs values, which an estimate does not have; train one step under "
                "manager.record(DIR), then ask chunkmem plan DIR"
            ) from None
        self._clock.count(func, args, kwargs, result)
        return result

    def step(self) -> StepCalls:
        """Drop leftovers, as `optimizer.step()` does first, and return what the whole step has asked for."""
        self._modules.access.reset(step=True)
        self._modules.backward.reset(step=True)
        self._log.add("end_step")
        return StepCalls(
            self._packed.layout,
            tuple(self._log.calls),
            self._units.found,
            self._packed.parameters,
            self._setting.hardware.host_memory_Bps,
            self._modules.regions.recorded(),
            self._states(),
            self._setting.in_backward,
            DTYPES[self._setting.reduce_dtype],
        )

    def _states(self) -> Mapping[ManagedParameter, Sequence[StateSpec]]:
        if self._setting.optimizer in BUILT_IN:
            return dict.fromkeys(self._packed.parameters, adam_states(self._setting.config().optimizer.params))
        forms = {managed: self._updater.weight_form(managed) for managed in self._packed.parameters}
        return states_kept(self._setting.optimizer, self._module, forms)

    def begin_root(self, root: nn.Module) -> None:
        """Drop what an interrupted call left."""
        self._modules.access.reset(step=False)
        self._modules.backward.reset(step=False)

    def make_guard(self) -> None:
        """Nobody looks for undeclared uses of memory that is none."""

    def note_error(self, error: BaseException) -> None:
        """There are no other ranks to be told."""

    def _measure(self) -> Measured:
        passed_s = self._clock.take_s() + self._host_clock.take_s()
        return Measured(passed_s, self._probe.take_peak_nbytes(), self._probe.take_peak_nbytes())
