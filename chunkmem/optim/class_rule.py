"""The update rule of `torch.optim.Optimizer` classes: their own `step()`, over the slots of a chunk group at a time."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from chunkmem.data.errors import StateError
from chunkmem.data.types import Role
from chunkmem.modules.binding import ManagedParameter
from chunkmem.optim.class_calls import copied, frozen, options_of
from chunkmem.optim.class_trials import ClassTrial, kinds_of
from chunkmem.optim.entries import BlankEntry, Entry, EntryForm, Record, TensorForm
from chunkmem.optim.ops import number_on
from chunkmem.optim.rule import H, StateSpec, UpdateItem, UpdateRule, Views, slots_of
from chunkmem.optim.shaped_state import ShapedState, SlotForm


@dataclass(frozen=True)
class ClassHyper:
    """A parameter group's options."""

    trial: ClassTrial
    """Of the class."""
    key: Hashable
    """The options as what compares by value."""
    options: Mapping[str, Any] = field(compare=False)
    """Copies."""


@cache
def role_of(key: str, dtype: torch.dtype | None) -> Role:
    """Return the role of a state: its key, with the dtype where that is not the one of the weights."""
    name = key if Role(key).is_state else f"{key} state"
    return Role(name if dtype is None else f"{name}.{str(dtype).removeprefix('torch.')}")


class RuleOfClasses(UpdateRule[H]):
    """That of classes which nothing but their code is known of: what they keep is found out, or loaded."""

    name = "chunkmem.Optimizer"
    counts_steps = False
    begins_at_zero = False

    def check(self, group: Mapping[str, Any]) -> None:
        """Check nothing: classes do."""

    def is_stateless(self, hyper: H) -> bool:
        return False  # whether a parameter has an entry is for its class to say

    def to_load(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return dict(state)


class ClassRule(RuleOfClasses[ClassHyper]):
    """Several classes, of which each updates the parameter groups that were made with it.

    States begin as the class makes them: in the first update of a parameter it finds none, and what it has made is
    copied to the slots. Parameters are updated one by one then, so that there are never more such copies than of one.
    """

    def __init__(self, trials: Sequence[ClassTrial]) -> None:
        """Make the rule of classes that were looked at."""
        self.trials = list(trials)
        self.trial_of: dict[int, ClassTrial] = {}
        """By the identity of a parameter: its class."""

    @property
    def title(self) -> str:
        return f"{', '.join(trial.name for trial in self.trials)}: "

    def required(self, group: Mapping[str, Any]) -> tuple[str, Collection[str]]:
        trial = self._trial(group)
        return trial.name, trial.defaults

    def _trial(self, group: Mapping[str, Any]) -> ClassTrial:
        return next((self.trial_of[id(param)] for param in group["params"]), self.trials[0])

    def hyper(self, group: Mapping[str, Any]) -> ClassHyper:
        options = options_of(group)
        return ClassHyper(self._trial(group), frozen(options), copied(options))

    def needs(self, hyper: ClassHyper) -> Hashable:
        return hyper.trial, kinds_of(hyper.options)

    def form(self, hyper: ClassHyper, weights: TensorForm, *, name: str) -> EntryForm:
        return hyper.trial.entry_form(weights, hyper.options, name=name)

    def specs(self, hyper: ClassHyper, weights: TensorForm, managed: ManagedParameter) -> tuple[StateSpec, ...]:
        found = []
        for key, tensor in self.form(hyper, weights, name=managed.name).tensors.items():
            dtype = None if tensor.dtype is weights.dtype else tensor.dtype
            slot = SlotForm(managed.position, tensor.shape, tensor.stride)
            found.append(ShapedState(role_of(key, dtype), dtype, key=key, forms=(slot,)))
        return tuple(found)

    def update_item_(self, views: Views, item: UpdateItem, *, multiplier: float | None) -> None:
        slots = slots_of(views, item, multiplier)
        grads = slots.scaled_grads()
        if item.drafts is not None and grads is slots.grads and item.hyper.trial.writes_gradients:
            grads = [grad.clone() for grad in grads]  # the step may have to use them again
        entries = [self.entry_of(item, at, views, slots.weights[at].device) for at in range(len(item.params))]
        known = [at for at, record in enumerate(item.records) if not record.is_new]
        for batch in ([known] if known else []) + [[at] for at in range(len(entries)) if item.records[at].is_new]:
            results = self.step(
                [slots.weights[at] for at in batch],
                [grads[at] for at in batch],
                [entries[at] for at in batch],
                item.hyper,
            )
            for at, result in zip(batch, results, strict=True):
                record = item.records[at] if item.drafts is None else item.drafts[at]
                record.become(self._kept(item, at, result, views, slots.weights[at].dtype))
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
        results = hyper.trial.call(leaves, entries, hyper.options)
        for leaf, weight in zip(leaves, weights, strict=True):
            if not leaf.is_set_to(weight):  # the class has assigned `.data`
                weight.copy_(leaf)
        return results

    def entry_of(self, item: UpdateItem, at: int, views: Views, device: torch.device) -> Entry | None:
        """Return the entry of a parameter as its class sees it, with the slots of its states."""
        record = item.records[at]
        if record.entry is None or record.is_new:
            return None
        following, options = item.hyper.trial.following, item.hyper.options
        has_steps_there = bool(options.get("fused") or options.get("capturable"))  # as torch.optim decides it
        found: Entry = {}
        for key, value in record.entry.items():
            if isinstance(value, Role):
                found[key] = views[value][item.params[at].position].detach()
            elif isinstance(value, torch.Tensor):
                copy = value.clone() if item.drafts is not None else value
                is_there = key in following or (key == "step" and has_steps_there)
                found[key] = copy if not is_there else number_on(device, copy) if copy.is_cpu else copy.to(device)
            else:
                found[key] = value
        return found

    def _kept(
        self,
        item: UpdateItem,
        at: int,
        result: Entry | None,
        views: Views,
        dtype: torch.dtype,
    ) -> Record:
        """Return the record of what a class has made of an entry, tensors of which go to the parameter's slots.

        `dtype` is that of the weights.
        """
        trial, entry = item.hyper.trial, Entry()
        for key, value in (result or {}).items():
            if not isinstance(value, torch.Tensor):
                entry[key] = value
                continue
            if value.dim() == 0:
                entry[key] = value.detach()
                trial.following |= set() if value.is_cpu else {key}
                continue
            role = role_of(key, None if value.dtype is dtype else value.dtype)
            slot = views[role][item.params[at].position] if role in views else None
            if slot is None or slot.shape != value.shape:
                room = "none" if slot is None or not slot.numel() else f"one of {tuple(slot.shape)}"
                raise StateError(
                    f"{trial.name} has made a state {key!r} of shape {tuple(value.shape)} for parameter "
                    f"{item.params[at].name}, for which there is {room}: trial steps showed no such state"
                )
            if not value.is_set_to(slot):
                slot.copy_(value)
            entry[key] = role
        return Record(entry=None if result is None else entry, is_new=False)

    def take_over(self, items: Sequence[UpdateItem]) -> None:
        for item in items:
            for record, draft in zip(item.records, item.drafts or (), strict=True):
                record.become(draft)

    def update_excluded(
        self,
        params: Sequence[torch.Tensor],
        states: MutableMapping[torch.Tensor, Any],
        hyper: ClassHyper,
        *,
        multiplier: float | None,
    ) -> None:
        for param in params:
            if isinstance(states.get(param), BlankEntry):
                del states[param]
            self.form(hyper, TensorForm.of(param), name="outside of chunks")  # the class may not have been tried so far
        grads = [grad for param in params if (grad := param.grad) is not None]
        grads = grads if multiplier is None else [grad.mul(multiplier) for grad in grads]
        results = self.step(params, grads, [states.get(param) for param in params], hyper)
        states.update({param: entry for param, entry in zip(params, results, strict=True) if entry is not None})
