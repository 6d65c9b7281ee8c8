"""The update rule of `torch.optim.Optimizer` classes: their own `step()`, over the slots of a chunk group at a time."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from chunkmem.errors import StateError
from chunkmem.nn.binding import ManagedParameter
from chunkmem.optim.class_calls import NOT_OPTIONS, Entry, copied, frozen
from chunkmem.optim.class_trials import ClassTrial, EntryForm, NumberForm, kinds_of
from chunkmem.optim.ops import number_on
from chunkmem.optim.rule import UpdateItem, UpdateRule, slot_tensors
from chunkmem.optim.shaped_state import ShapedState, SlotForm, TensorForm
from chunkmem.types import Role


class Place(Enum):
    """Where a value of an entry is, if not in the entry."""

    CHUNK = "in a chunk"


@dataclass(eq=False)
class Record:
    """The state of one managed parameter: what `state[param]` of its class has."""

    entry: Entry | None = None
    """`Place.CHUNK` stands for tensors with elements; others are where the last update was. None: there is none."""
    is_new: bool = True
    """It was not updated yet."""
    is_blank: bool = False
    """The entry is there to be loaded into, full of zeros: the class has not made one so far."""


@dataclass(frozen=True)
class ClassHyper:
    """A parameter group's options."""

    index: int
    """Of the class."""
    key: Hashable
    """The options as what compares by value."""
    options: Mapping[str, Any] = field(compare=False)
    """Copies."""


@dataclass(frozen=True)
class ClassItem(UpdateItem):
    """Parameters of one chunk group with their records."""

    records: list[Record] = field(default_factory=list)
    specs: list[Mapping[str, ShapedState]] = field(default_factory=list)
    """Of each parameter, by key: the states that it has a slot for."""
    drafts: list[Record] | None = None
    """Where the new records are kept until the update is taken over; None: in `records`."""


def role_of(key: str, dtype: torch.dtype | None) -> Role:
    """Return the role of a state: its key, with the dtype where that is not the one of the weights."""
    name = key if Role(key).is_state else f"{key} state"
    return Role(name if dtype is None else f"{name}.{str(dtype).removeprefix('torch.')}")


class ClassRule(UpdateRule[ClassHyper]):
    """Several classes, of which each updates the parameter groups that were made with it.

    States begin as the class makes them: in the first update of a parameter it finds none, and what it has made is
    copied to the slots. Parameters are updated one by one then, so that there are never more such copies than of one.
    """

    name = "chunkmem.Optimizer"
    options = ()
    all_states = ()
    counts_steps = False

    def __init__(self, trials: Sequence[ClassTrial]) -> None:
        """Make the rule of classes that were looked at."""
        self.trials = list(trials)
        self.index_of: dict[int, int] = {}
        """By the identity of a parameter: its class."""

    def check(self, group: Mapping[str, Any]) -> None:
        """Check nothing: classes have checked options when they were tried."""

    def hyper(self, group: Mapping[str, Any]) -> ClassHyper:
        index = next((self.index_of[id(param)] for param in group["params"]), 0)
        options = {key: value for key, value in group.items() if key not in NOT_OPTIONS}
        return ClassHyper(index, frozen(options), copied(options))

    def needs(self, hyper: ClassHyper) -> Hashable:
        """Return what states depend on."""
        return hyper.index, kinds_of(hyper.options)

    def entry_form(self, hyper: ClassHyper, form: TensorForm, *, name: str) -> EntryForm:
        """Return the states of a parameter; see `ClassTrial.entry_form`."""
        return self.trials[hyper.index].entry_form(form, hyper.options, name=name)

    def specs_of(self, form: EntryForm, weights: TensorForm, position: int) -> tuple[ShapedState, ...]:
        """Return what a parameter at a position of its group claims."""
        found = []
        for key, tensor in form.tensors.items():
            dtype = None if tensor.dtype is weights.dtype else tensor.dtype
            slot = SlotForm(position, tensor.shape, tensor.stride)
            found.append(ShapedState(role_of(key, dtype), dtype, key=key, forms=(slot,)))
        return tuple(found)

    def update_(
        self,
        weights: list[torch.Tensor],
        grads: list[torch.Tensor],
        states: Mapping[Role, list[torch.Tensor]],
        steps: Sequence[torch.Tensor],
        hyper: ClassHyper,
    ) -> None:
        raise AssertionError("a class is stepped by update_item_, which knows its records")

    def update_item_(
        self, views: Mapping[Role, Sequence[torch.Tensor]], item: UpdateItem, *, multiplier: float | None
    ) -> None:
        assert isinstance(item, ClassItem)
        slots = slot_tensors(views, item)
        grads = slots.scaled_grads(multiplier)
        if item.drafts is not None and grads is slots.grads and self.trials[item.hyper.index].writes_gradients:
            grads = [grad.clone() for grad in grads]  # the step may have to use them again
        entries = [self._entry_of(item, at, views, slots.weights[at].device) for at in range(len(item.params))]
        known = [at for at, record in enumerate(item.records) if not record.is_new]
        for batch in ([known] if known else []) + [[at] for at in range(len(entries)) if item.records[at].is_new]:
            results = self.step(
                [slots.weights[at] for at in batch],
                [grads[at] for at in batch],
                [entries[at] for at in batch],
                item.hyper,
            )
            for at, result in zip(batch, results, strict=True):
                self._keep(item, at, result, views)
        slots.round_()

    def step(
        self,
        weights: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        entries: Sequence[Entry | None],
        hyper: ClassHyper,
    ) -> list[Entry | None]:
        """Step a class over weights, in place, and return their entries; see `ClassCall`."""
        leaves = []
        for weight, grad in zip(weights, grads, strict=True):
            leaf = torch.nn.Parameter(weight.detach())
            leaf.grad = grad
            leaves.append(leaf)
        results = self.trials[hyper.index].call(leaves, entries, hyper.options)
        for leaf, weight in zip(leaves, weights, strict=True):
            if not leaf.is_set_to(weight):  # the class has assigned `.data`
                weight.copy_(leaf)
        return results

    def _entry_of(
        self, item: ClassItem, at: int, views: Mapping[Role, Sequence[torch.Tensor]], device: torch.device
    ) -> Entry | None:
        """Return the entry of a parameter as its class sees it, with the slots of its states."""
        record, specs = item.records[at], item.specs[at]
        if record.entry is None or record.is_blank:
            return None
        following, options = self.trials[item.hyper.index].following, item.hyper.options
        has_steps_there = bool(options.get("fused") or options.get("capturable"))  # as torch.optim decides it
        found: Entry = {}
        for key, value in record.entry.items():
            if value is Place.CHUNK:
                found[key] = views[specs[key].role][item.positions[at]].detach()
            elif isinstance(value, torch.Tensor):
                copy = value.clone() if item.drafts is not None else value
                is_there = key in following or (key == "step" and has_steps_there)
                found[key] = copy if not is_there else number_on(device, copy) if copy.is_cpu else copy.to(device)
            else:
                found[key] = value
        return found

    def _keep(
        self, item: ClassItem, at: int, result: Entry | None, views: Mapping[Role, Sequence[torch.Tensor]]
    ) -> None:
        """Keep what a class has made of a parameter's entry: tensors in slots, the rest in its record."""
        entry: Entry | None = None if result is None else {}
        for key, value in (result or {}).items():
            assert entry is not None
            if not isinstance(value, torch.Tensor) or value.dim() == 0:
                entry[key] = value.detach() if isinstance(value, torch.Tensor) else value
                if isinstance(value, torch.Tensor) and not value.is_cpu:
                    self.trials[item.hyper.index].following.add(key)
                continue
            spec = item.specs[at].get(key)
            slot = None if spec is None else views[spec.role][item.positions[at]]
            if slot is None or slot.shape != value.shape:
                room = "none" if slot is None else f"one of {tuple(slot.shape)}"
                raise StateError(
                    f"{self.trials[item.hyper.index].made.name} has made a state {key!r} of shape {tuple(value.shape)} "
                    f"for parameter {item.params[at].name}, for which there is {room}: trial steps showed no such state"
                )
            if not value.is_set_to(slot):
                slot.copy_(value)
            entry[key] = Place.CHUNK
        to = item.records[at] if item.drafts is None else item.drafts[at]
        to.entry, to.is_new, to.is_blank = entry, False, False

    def take_over(self, items: Sequence[UpdateItem]) -> None:
        for item in items:
            assert isinstance(item, ClassItem)
            assert item.drafts is not None
            for record, draft in zip(item.records, item.drafts, strict=True):
                record.entry, record.is_new, record.is_blank = draft.entry, draft.is_new, draft.is_blank

    def update_excluded(
        self,
        params: Collection[torch.Tensor],
        states: MutableMapping[torch.Tensor, Any],
        hyper: ClassHyper,
        *,
        multiplier: float | None,
    ) -> None:
        """Update parameters that no chunk holds, with their own `.grad`.

        Args:
            params: of one parameter group; each has a gradient.
            states: by parameter, as torch.optim keeps them.
            hyper: the options of the group.
            multiplier: of the gradients; None: they are taken as they are.
        """
        if not params:
            return
        grads = [grad for param in params if (grad := param.grad) is not None]
        grads = grads if multiplier is None else [grad.mul(multiplier) for grad in grads]
        results = self.step(list(params), grads, [states.get(param) for param in params], hyper)
        states.update({param: entry for param, entry in zip(params, results, strict=True) if entry is not None})


def to_number(value: Any, form: NumberForm | None) -> Any:
    """Return a saved value that has no elements as its class keeps it; as it is if that is not known."""
    is_tensor = isinstance(value, torch.Tensor)
    if form is not None and form.dtype is None and is_tensor:
        return value.item()
    if is_tensor:
        return value.to("cpu", copy=True)
    return value if form is None or form.dtype is None else torch.tensor(value, dtype=form.dtype, device="cpu")


def new_item(hyper: ClassHyper, *, ahead: bool) -> ClassItem:
    """Return an item without parameters."""
    return ClassItem(hyper, [], [], drafts=[] if ahead else None)


def add_to(
    item: UpdateItem, managed: ManagedParameter, step: torch.Tensor, record: Record, specs: Mapping[str, ShapedState]
) -> None:
    """Add a parameter to an item."""
    assert isinstance(item, ClassItem)
    item.params.append(managed)
    item.steps.append(step)
    item.records.append(record)
    item.specs.append(specs)
    if item.drafts is not None:
        item.drafts.append(Record())
