"""Weights and optimizer states in chunks as what lazy tensors are read from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from chunkmem.data.types import Role
from chunkmem.modules.binding import ManagedParameter
from chunkmem.modules.lazy_tensor import Extent, LazyTensor, Source
from chunkmem.optim.host import OptimizerHost, Owners
from chunkmem.optim.rule import StateSpec
from chunkmem.optim.update import GroupUpdater
from chunkmem.runtime.chunk import Chunk


@dataclass(eq=False)
class SlotSource(Source):
    """The slot of a parameter in its chunk of one role; for weights, in that of master weights if there is one."""

    managed: ManagedParameter
    """Whose it is."""
    role: Role
    """That it has for who reads it."""
    dtype: torch.dtype
    """To read it in."""
    updater: GroupUpdater
    """Has the chunk, on the rank that owns the parameter."""
    owners: Owners
    """Tell which that is."""
    shown: Callable[[torch.Tensor], torch.Tensor] = lambda slot: slot
    """Returns the values that stand for what is there."""

    @property
    def is_here(self) -> bool:
        return self.owners.owns(self.managed)

    @property
    def place(self) -> str:
        return f"{self.role.value} {self.managed.group}"

    @property
    def chunk(self) -> Chunk:
        """The chunk that has it, on the rank that owns the parameter."""
        is_weight = self.role in (Role.PARAM, Role.MASTER)
        return self.updater.weight_chunk(self.managed) if is_weight else self.updater.state(self.role, self.managed)

    @property
    def position(self) -> int:
        """Index of the slot in its chunk."""
        return self.managed.position

    def read_here(self, start: Extent, shape: Extent) -> torch.Tensor:
        self.updater.pager.require_open()
        return self.part_of(self.updater.read(self.chunk, self.managed), start, shape)

    def part_of(self, slot: torch.Tensor, start: Extent, shape: Extent) -> torch.Tensor:
        """Return what `read_here` would where this is what the slot has: a copy, or all of it."""
        values = self.shown(slot).to(self.dtype)
        if shape == tuple(values.shape):
            return values
        return values[tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))].clone()

    def read(self, start: Extent, shape: Extent) -> torch.Tensor:
        return self.owners.from_owner(self.managed, lambda: self.read_here(start, shape))

    def tensor(self, shape: Extent) -> LazyTensor:
        """Return all of it, lazily; in the shape of what is read."""
        return LazyTensor.of(self, shape, self.dtype)


def lazy_state(host: OptimizerHost, spec: StateSpec, managed: ManagedParameter) -> LazyTensor:
    """Return a state of a parameter, as it is shown, that is read when it is used."""
    form = spec.shown_form(host.updater.weight_form(managed))
    dtype, shown = form.dtype if spec.codes is None else torch.float32, partial(spec.shown, managed=managed)
    return SlotSource(managed, spec.role, dtype, updater=host.updater, owners=host, shown=shown).tensor(form.shape)
