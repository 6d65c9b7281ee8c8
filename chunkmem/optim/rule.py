"""What an update rule is: the states it keeps, the options it reads, and the update itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, TypeVar

import torch

from chunkmem.data.layout import ALIGN_NBYTES, Group, MasterCopy, Slot
from chunkmem.data.types import ChunkId, Role
from chunkmem.modules.binding import ManagedParameter
from chunkmem.modules.lazy_tensor import copy_values
from chunkmem.optim.codes import BlockCodes
from chunkmem.optim.entries import FIRST_UPDATE, NO_UPDATES, Entry, EntryForm, NumberForm, Record, TensorForm
from chunkmem.runtime.chunk import Chunk, SlotForms
from chunkmem.runtime.device import runtime_mode

H = TypeVar("H", bound=Hashable)
Views = Mapping[Role, Sequence[torch.Tensor]]
"""Of the slots in each chunk of a group."""


@dataclass(frozen=True)
class StateSpec:
    """A state that a rule keeps for each parameter; those of a chunk group are a chunk of their own."""

    role: Role
    """Its name, by which `optimizer.state[param]` has it, too."""
    dtype: torch.dtype | None = None
    """None: that of the weights the rule updates, which is float32 where there are master weights."""
    codes: BlockCodes | None = None
    """What chunks hold, as uint8, in place of float32 values in the parameter's shape, which is what everyone else
    sees. None: chunks hold the values."""

    @property
    def key(self) -> str:
        """By which `optimizer.state[param]` has it."""
        return self.role.value

    def shown_form(self, weights: TensorForm) -> TensorForm:
        """Return the form in which a parameter's state is shown, given that of the parameter in an update."""
        if self.dtype is None or self.codes is not None:
            return weights
        return replace(weights, dtype=self.dtype)

    def at(self, position: int) -> StateSpec:
        """Return what a parameter claims that is in another place of its group now."""
        return self

    def shown(self, stored: torch.Tensor, managed: ManagedParameter) -> torch.Tensor:
        """Return what a slot stands for: the slot itself, unless it holds codes."""
        if self.codes is None:
            return stored
        with runtime_mode():
            return self.codes.decode(stored, managed.shape.numel()).as_strided(managed.shape, managed.stride)

    def stored(self, value: torch.Tensor, managed: ManagedParameter) -> torch.Tensor:
        """Return what a slot holds for a value in the parameter's shape; the inverse of `shown`, up to rounding."""
        if self.codes is None:
            return value
        with runtime_mode():
            flat = torch.empty(managed.shape.numel(), dtype=torch.float32, device="cpu")
            copy_values(flat.as_strided(managed.shape, managed.stride), value)
            return self.codes.encode(flat)

    def numels(self, weights: Group) -> Sequence[int] | None:
        """Return the elements of each slot, for PARAM chunk `weights`; None: as many, at the same offsets."""
        return None if self.codes is None else [self.codes.numel_of(slot.numel) for slot in weights.slots]

    def form(self, weights: Group) -> Group:
        """Return what a chunk of this state is made of, for the group of PARAM chunk `weights`."""
        group, numels = self.elements_of(weights), self.numels(weights)
        if numels is None:
            return group
        align, end, slots = ALIGN_NBYTES // group.itemsize, 0, list[Slot]()
        for slot, numel in zip(weights.slots, numels, strict=True):
            slots.append(Slot(slot.tensor, slot.group, end, numel))
            end = -(-slots[-1].end // align) * align
        if self.codes is not None:  # groups of one size have chunks of one size, although their slots differ
            step = -(-weights.numel // (32 * align)) * align
            end = -(-end // step) * step
        return replace(group, num_slabs=1, numel=max(end, align), slots=tuple(slots))

    def elements_of(self, weights: Group) -> Group:
        """Return a group in the dtype of this state."""
        group = weights if weights.master is MasterCopy.NONE else weights.in_float32()
        if self.dtype is None:
            return group
        return replace(group, dtype=str(self.dtype).removeprefix("torch."), itemsize=self.dtype.itemsize)

    def chunk(self, param: Chunk) -> Chunk:
        """Return a new chunk for the states of the parameters in the PARAM chunk `param`."""
        key, form = ChunkId(self.role, param.id.group), self.form(param.group)
        label = f"{key}{param.label.removeprefix(str(param.id))}"
        return Chunk(key, form, getattr(torch, form.dtype), label, self.slot_forms(param, form))

    def slot_forms(self, param: Chunk, form: Group) -> SlotForms:
        """Return the shape and strides of each slot in the chunk `form` for the PARAM chunk `param`."""
        return param.forms if self.codes is None else tuple((torch.Size([slot.numel]), (1,)) for slot in form.slots)


@dataclass(frozen=True)
class SlotUpdate:
    """What one update is given: parallel lists, one entry a parameter, of views of slots, all on one device."""

    weights: list[torch.Tensor]
    """What is updated: float32 master weights where there are some."""
    grads: list[torch.Tensor]
    states: Mapping[Role, list[torch.Tensor]]
    rounded: list[torch.Tensor]
    """The weights that are rounded from master weights; empty if there are none."""
    steps: Sequence[torch.Tensor]
    """The number of each one's update, from 1: 0-dim float32, on the CPU."""
    hyper: Any
    """What the rule's `hyper` has read."""
    multiplier: float | None
    """Of the gradients; None: they are taken as they are."""
    numbers: Sequence[int] = ()
    """Of the parameters in the optimizer; empty where they are in no chunk."""

    def scaled_grads(self) -> list[torch.Tensor]:
        """Return the gradients times `multiplier`, in float32 if there are master weights: themselves, or copies."""
        if self.rounded:
            return [grad.float().mul(1.0 if self.multiplier is None else self.multiplier) for grad in self.grads]
        return self.grads if self.multiplier is None else [grad.mul(self.multiplier) for grad in self.grads]

    def round_(self) -> None:
        """Let the weights in less than float32 be those of the master weights."""
        for low, full in zip(self.rounded, self.weights, strict=True) if self.rounded else ():
            low.copy_(full)


@dataclass(frozen=True)
class UpdateItem:
    """Parameters of one chunk group that have the options of one parameter group."""

    hyper: Any
    """What the rule's `hyper` has read."""
    params: list[ManagedParameter]
    steps: list[torch.Tensor]
    """The number of each one's update, from 1: 0-dim float32, on the CPU."""
    numbers: list[int] = field(default_factory=list)
    """Each one's place in the parameter groups of the optimizer, as in its `state_dict`: the same on all ranks."""
    records: list[Record] = field(default_factory=list)
    drafts: list[Record] | None = None
    """Where new records are kept until the update is taken over; None: in `records`."""

    def add(self, managed: ManagedParameter, number: int, record: Record) -> None:
        """Add a parameter to what is updated; a new record is that of one without a state."""
        self.params.append(managed)
        if self.records and record.count is self.records[-1].count:  # they have been updated together
            self.steps.append(self.steps[-1])
        else:
            self.steps.append(FIRST_UPDATE if record.count is NO_UPDATES else record.count + 1)
        self.numbers.append(number)
        self.records.append(record)
        if self.drafts is not None:
            self.drafts.append(Record())

    @property
    def positions(self) -> list[int]:
        """Indices of slots."""
        return [managed.position for managed in self.params]


@dataclass(frozen=True)
class ChunkMemory:
    """The memory of one chunk of a group."""

    flat: torch.Tensor  # 1D
    views: Sequence[torch.Tensor]
    """One tensor a slot."""
    layout: Group


class UpdateRule(ABC, Generic[H]):
    """How an optimizer updates parameters. It has no state itself; `H` are its hyper-parameters, as plain numbers."""

    name: ClassVar[str]
    """For messages."""
    options: ClassVar[tuple[str, ...]] = ()
    """What every parameter group has to say."""
    all_states: ClassVar[tuple[StateSpec, ...]] = ()
    """Every state it may keep, as far as that is known."""
    counts_steps: ClassVar[bool] = True
    """`optimizer.state[param]` has the number of updates, as "step"."""
    can_be_blank: ClassVar[bool] = True
    """It is known before the first update which states there will be: states to load into can be made."""
    begins_at_zero: ClassVar[bool] = True
    """States are zeros before the first update; else that makes them, and there are none before."""

    @property
    def title(self) -> str:
        """What is shown of it before the options."""
        return ""

    def required(self, group: Mapping[str, Any]) -> tuple[str, Collection[str]]:
        """Return the name of what updates a parameter group, and the options that it has to have."""
        return self.name, self.options

    @abstractmethod
    def check(self, group: Mapping[str, Any]) -> None:
        """Check a parameter group's options.

        Raises:
            ConfigError: one is not a number, out of range, or not available.
        """

    @abstractmethod
    def hyper(self, group: Mapping[str, Any]) -> H:
        """Return a parameter group's options with the values that they have now: schedulers change them in place."""

    def adopt(self, group: dict[str, Any]) -> None:
        """A parameter group was loaded: change what is not for the saved state to decide."""

    def states(self, hyper: H) -> tuple[StateSpec, ...]:
        """Return the states that an update with `hyper` needs."""
        return self.all_states

    def needs(self, hyper: H) -> Hashable:
        """Return what the states of parameters with `hyper` depend on."""
        return self.states(hyper)

    def is_stateless(self, hyper: H) -> bool:
        """Tell whether parameters with `hyper` are updated without any state, and updates are not counted."""
        return not self.states(hyper)

    def form(self, hyper: H, weights: TensorForm, *, name: str) -> EntryForm:
        """Return what `optimizer.state` may have of a parameter; `name` is for messages.

        Raises:
            ConfigError: such a parameter cannot be updated.
        """
        numbers = {"step": NumberForm(torch.float32, follows=True)} if self.counts_steps else {}
        tensors = {spec.key: spec.shown_form(weights) for spec in self.all_states}
        keys = (*numbers, *tensors)
        return EntryForm(keys, keys if self.counts_steps else (), tensors, numbers)

    def specs(self, hyper: H, weights: TensorForm, managed: ManagedParameter) -> tuple[StateSpec, ...]:
        """Return the states that a parameter needs in an update with `hyper`.

        Raises:
            ConfigError: it cannot be updated.
        """
        return self.states(hyper)

    def to_load(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is loaded of a parameter's saved state."""
        keys = (*(("step",) if self.counts_steps else ()), *(spec.key for spec in self.all_states))
        return {key: state[key] for key in keys if state.get(key) is not None}

    def update_(self, slots: SlotUpdate) -> None:
        """Update weights and states by `scaled_grads`; gradients stay. States are zeros at first; see `begins_at_zero`.

        torch's kernels work tensor by tensor, so a list of views of slots gives the bits that the same parameters give
        in plain PyTorch; one call over a whole flat chunk does not, as its vector loop ends elsewhere.

        Raises:
            NotImplementedError: the rule has neither this nor an `update_item_` of its own.
        """
        raise NotImplementedError(f"{type(self).__name__} has no update_(), nor an update_item_() of its own")

    def apply_(self, slots: SlotUpdate) -> None:
        """Update in place, and round master weights."""
        self.update_(slots)
        slots.round_()

    def update_item_(self, views: Views, item: UpdateItem, *, multiplier: float | None) -> None:
        """Update the parameters of an item in place: `apply_` on their slots, of which there are `views` by role."""
        self.apply_(slots_of(views, item, multiplier))

    def update_excluded(
        self,
        params: Sequence[torch.Tensor],
        states: MutableMapping[torch.Tensor, Any],
        hyper: H,
        *,
        multiplier: float | None,
    ) -> None:
        """Update parameters that no chunk holds as torch's own optimizer does, with their own `.grad`.

        Args:
            params: of one parameter group; each has a gradient.
            states: by parameter, as torch.optim keeps them; made where there is none.
            hyper: what `hyper` has returned.
            multiplier: of the gradients; None: they are taken as they are.
        """
        roles = [spec.role for spec in self.states(hyper)]
        steps = dict.fromkeys(params, FIRST_UPDATE)
        for param in params if roles else ():
            if not (state := states.get(param)):
                state = states[param] = excluded_zeros(self.form(hyper, TensorForm.of(param), name=""), param)
            elif not self.counts_steps:
                steps[param] = FIRST_UPDATE + 1
            if self.counts_steps:
                state["step"] += 1
                steps[param] = state["step"]
        for dtype in dict.fromkeys(param.dtype for param in params):
            alike = [param for param in params if param.dtype == dtype]
            grads = [grad for param in alike if (grad := param.grad) is not None]
            columns = {role: [states[param][role.value] for param in alike] for role in roles}
            self.apply_(SlotUpdate(alike, grads, columns, [], [steps[p] for p in alike], hyper, multiplier))

    def take_over(self, items: Sequence[UpdateItem]) -> None:
        """What `update_into` has made of `items` is what their chunks hold from now on."""

    def can_update_into(self, dtype: torch.dtype, *, is_master: bool) -> bool:
        """Tell whether `update_into` has the bits of `apply_` for weights of a dtype, which may be master weights."""
        return True

    def update_into(
        self,
        old: Mapping[Role, ChunkMemory],
        new: Mapping[Role, ChunkMemory],
        items: Sequence[UpdateItem],
        *,
        multiplier: float | None,
        num_threads: int,
    ) -> None:
        """Write a group's chunks as they are after an update to other memory; what is not updated is copied.

        Args:
            old: by role, what is read, on HOST: all but weights that are rounded from master weights.
            new: by role, what is written: all but gradients.
            items: what to update.
            multiplier: of the gradients.
            num_threads: of a kernel that has threads of its own.
        """
        for role, memory in new.items():
            memory.flat.copy_(old[role if role in old else Role.MASTER].flat)
        for item in items:
            views = {role: memory.views for role, memory in {**new, Role.GRAD: old[Role.GRAD]}.items()}
            self.update_item_(views, item, multiplier=multiplier)


def excluded_zeros(form: EntryForm, param: torch.Tensor) -> Entry:
    """Return a state of zeros for a parameter that no chunk holds."""
    tensors = {key: tensor.empty(param.device).zero_() for key, tensor in form.tensors.items()}
    return form.zeros(tensors, device=param.device)


def slots_of(views: Views, item: UpdateItem, multiplier: float | None) -> SlotUpdate:
    """Return the slots that an update touches in the chunks of a group, of which there are `views` by role."""
    columns = {role: [slots[i] for i in item.positions] for role, slots in views.items()}
    params, grads = columns.pop(Role.PARAM), columns.pop(Role.GRAD)
    masters = columns.pop(Role.MASTER, None)
    weights, rounded = (params, []) if masters is None else (masters, params)
    return SlotUpdate(weights, grads, columns, rounded, item.steps, item.hyper, multiplier, item.numbers)


def fill(to: torch.Tensor, of: torch.Tensor, layout: Group, *, besides: Iterable[int]) -> None:
    """Copy all slots of a chunk, and zero its pads, but leave out the slots at some positions."""
    left_out = set(besides)
    for position, slot in enumerate(layout.slots):
        if position not in left_out:
            to[slot.offset : slot.end].copy_(of[slot.offset : slot.end])
    for start, stop in layout.pads:
        to[start:stop].zero_()
