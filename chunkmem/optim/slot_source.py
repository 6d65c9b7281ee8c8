"""Weights and optimizer states in chunks as what lazy tensors are read from."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

import torch

from chunkmem.nn.binding import ManagedParameter
from chunkmem.nn.lazy_tensor import Extent, LazyTensor, Source
from chunkmem.optim.host import OptimizerHost
from chunkmem.optim.rule import StateSpec
from chunkmem.optim.update import GroupUpdater
from chunkmem.runtime.chunk import Chunk
from chunkmem.types import Role

T = TypeVar("T")


class Owners(Protocol):
    """Which rank has the chunks of a parameter."""

    def owns(self, managed: ManagedParameter) -> bool:
        """Tell whether this one does."""
        ...

    def from_owner(self, managed: ManagedParameter, read: Callable[[], T]) -> T:
        """Return on every rank what is read on the owner."""
        ...


class SlotSource(Source):
    """The slot of a parameter in its chunk of one role; for weights, in that of master weights if there is one."""

    def __init__(
        self,
        managed: ManagedParameter,
        role: Role,
        dtype: torch.dtype,
        *,
        updater: GroupUpdater,
        owners: Owners,
        shown: Callable[[torch.Tensor], torch.Tensor] = lambda slot: slot,
    ) -> None:
        """Name a slot.

        Args:
            managed: whose it is.
            role: that it has for who reads it.
            dtype: to read it in.
            updater: has the chunk, on the rank that owns the parameter.
            owners: tells which that is.
            shown: returns the values that stand for what is there.
        """
        self._managed = managed
        self._role = role
        self._dtype = dtype
        self._updater = updater
        self._owners = owners
        self._shown = shown

    @property
    def is_here(self) -> bool:
        return self._owners.owns(self._managed)

    @property
    def place(self) -> str:
        return f"{self._role.value} {self._managed.group}"

    @property
    def chunk(self) -> Chunk:
        """The chunk that has it, on the rank that owns the parameter."""
        is_weight = self._role in (Role.PARAM, Role.MASTER)
        return (
            self._updater.weight_chunk(self._managed) if is_weight else self._updater.state(self._role, self._managed)
        )

    @property
    def position(self) -> int:
        """Index of the slot in its chunk."""
        return self._managed.position

    def read_here(self, start: Extent, shape: Extent) -> torch.Tensor:
        self._updater.pager.require_open()
        return self.part_of(self._updater.read(self.chunk, self._managed), start, shape)

    def part_of(self, slot: torch.Tensor, start: Extent, shape: Extent) -> torch.Tensor:
        """Return what `read_here` would where this is what the slot has: a copy, or all of it."""
        values = self._shown(slot).to(self._dtype)
        if shape == tuple(values.shape):
            return values
        return values[tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))].clone()

    def read(self, start: Extent, shape: Extent) -> torch.Tensor:
        return self._owners.from_owner(self._managed, lambda: self.read_here(start, shape))

    def tensor(self, shape: Extent) -> LazyTensor:
        """Return all of it, lazily; in the shape of what is read."""
        return LazyTensor.of(self, shape, self._dtype)


def lazy_state(host: OptimizerHost, spec: StateSpec, managed: ManagedParameter) -> LazyTensor:
    """Return a state of a parameter, as it is shown, that is read when it is used."""
    form = spec.shown_form(host.updater.weight_form(managed))
    dtype, shown = form.dtype if spec.codes is None else torch.float32, partial(spec.shown, managed=managed)
    return SlotSource(managed, spec.role, dtype, updater=host.updater, owners=host, shown=shown).tensor(form.shape)
