"""Optimizer states of which each parameter of a chunk group has a shape of its own, or none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from chunkmem.data.errors import ConfigError
from chunkmem.data.layout import Group
from chunkmem.modules.binding import ManagedParameter
from chunkmem.optim.entries import TensorForm
from chunkmem.optim.rule import StateSpec
from chunkmem.runtime.chunk import Chunk, SlotForms


class SlotForm(NamedTuple):
    """The state of one parameter."""

    position: int
    """Of the parameter among the slots of its group."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """Dense: the state takes as many elements as it has."""


@dataclass(frozen=True)
class ShapedState(StateSpec):
    """A state that has slots for some parameters of a group only, in the shapes that they need.

    A rule claims it for a parameter with the form of that one; the chunk of a group has those of all.
    """

    key: str = ""
    """By which `optimizer.state[param]` has it; the role tells dtypes apart, too."""
    forms: tuple[SlotForm, ...] = ()
    """In ascending position."""

    def shown_form(self, weights: TensorForm) -> TensorForm:
        (form,) = self.forms
        return TensorForm(form.shape, form.stride, weights.dtype if self.dtype is None else self.dtype)

    def at(self, position: int) -> ShapedState:
        return replace(self, forms=tuple(form._replace(position=position) for form in self.forms))

    def numels(self, weights: Group) -> Sequence[int]:
        found = {position: torch.Size(shape).numel() for position, shape, _ in self.forms}
        return [found.get(at, 0) for at in range(len(weights.slots))]

    def slot_forms(self, param: Chunk, form: Group) -> SlotForms:
        found = {position: (torch.Size(shape), stride) for position, shape, stride in self.forms}
        return tuple(found.get(at, (torch.Size([0]), (1,))) for at in range(len(form.slots)))


def merged(state_chunks: Sequence[tuple[ManagedParameter, StateSpec]]) -> StateSpec:
    """Return what a group has of one role, given what each of its parameters claims of that.

    Raises:
        ConfigError: two of them claim states of different dtypes.
    """
    (_, first), *others = state_chunks
    if not any(isinstance(spec, ShapedState) for _, spec in state_chunks):
        return state_chunks[-1][1]
    for managed, spec in others:
        if spec.dtype != first.dtype:
            raise ConfigError(
                f"state {spec.role.value} of parameter {managed.name} is {_words(spec)}, and that of "
                f"{state_chunks[0][0].name} in the same chunk is {_words(first)}: one optimizer of chunkmem's and one "
                "of chunkmem.Optimizer(...) name their states alike; use chunkmem.Optimizer for both"
            )
    return ShapedState(first.role, first.dtype, forms=tuple(sorted(_forms(state_chunks))))


def _forms(state_chunks: Iterable[tuple[ManagedParameter, StateSpec]]) -> Iterable[SlotForm]:
    for managed, spec in state_chunks:
        if isinstance(spec, ShapedState):
            yield from spec.forms
        elif spec.codes is None:
            yield SlotForm(managed.position, tuple(managed.shape), managed.stride)
        else:
            yield SlotForm(managed.position, (spec.codes.numel_of(managed.slot.numel),), (1,))


def _words(spec: StateSpec) -> str:
    return "of the dtype of the weights" if spec.dtype is None else str(spec.dtype)
