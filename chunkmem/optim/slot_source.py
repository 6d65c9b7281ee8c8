"""Weights and optimizer states in chunks as what lazy tensors are read from."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from chunkmem.nn.binding import ManagedParameter
from chunkmem.nn.lazy_tensor import Extent, LazyTensor, Source
from chunkmem.optim.host import OptimizerHost
from chunkmem.optim.rule import StateSpec
from chunkmem.runtime.chunk import Chunk
from chunkmem.types import Role


class SlotSource(Source):
    """The slot of a parameter in its chunk of one role."""

    def __init__(
        self,
        managed: ManagedParameter,
        role: Role,
        dtype: torch.dtype,
        *,
        find: Callable[[], Chunk],
        read: Callable[[], torch.Tensor],
        shown: Callable[[torch.Tensor], torch.Tensor] = lambda slot: slot,
        owns: Callable[[ManagedParameter], bool],
        from_owner: Callable[[ManagedParameter, Callable[[], torch.Tensor]], torch.Tensor],
    ) -> None:
        """Name a slot.

        Args:
            managed: whose it is.
            role: that it has for who reads it.
            dtype: to read it in.
            find: returns the chunk that has it, on the rank that owns the parameter.
            read: returns a copy of what is there.
            shown: returns the values that stand for what is there.
            owns: tells whether this rank owns a parameter.
            from_owner: returns on every rank what is read on the owner.
        """
        self._managed = managed
        self._role = role
        self._dtype = dtype
        self._find = find
        self._read = read
        self._shown = shown
        self._owns = owns
        self._from_owner = from_owner

    @property
    def is_here(self) -> bool:
        return self._owns(self._managed)

    @property
    def place(self) -> str:
        return f"{self._role.value} {self._managed.group}"

    @property
    def chunk(self) -> Chunk:
        """The chunk that has it, on the rank that owns the parameter."""
        return self._find()

    @property
    def position(self) -> int:
        """Index of the slot in its chunk."""
        return self._managed.position

    def read_here(self, start: Extent, shape: Extent) -> torch.Tensor:
        return self.part_of(self._read(), start, shape)

    def part_of(self, slot: torch.Tensor, start: Extent, shape: Extent) -> torch.Tensor:
        """Return what `read_here` would where this is what the slot has: a copy, or all of it."""
        values = self._shown(slot).to(self._dtype)
        if shape == tuple(values.shape):
            return values
        return values[tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))].clone()

    def read(self, start: Extent, shape: Extent) -> torch.Tensor:
        return self._from_owner(self._managed, lambda: self.read_here(start, shape))

    def tensor(self, shape: Extent) -> LazyTensor:
        """Return all of it, lazily; in the shape of what is read."""
        return LazyTensor.of(self, shape, self._dtype)


def lazy_state(host: OptimizerHost, spec: StateSpec, managed: ManagedParameter) -> LazyTensor:
    """Return a state of a parameter, as it is shown, that is read when it is used."""
    updater = host.updater
    form = spec.shown_form(updater.weight_form(managed))

    def read() -> torch.Tensor:
        host.require_open()
        return updater.read(updater.state(spec.role, managed), managed)

    source = SlotSource(
        managed,
        spec.role,
        form.dtype if spec.codes is None else torch.float32,
        find=partial(updater.state, spec.role, managed),
        read=read,
        shown=partial(spec.shown, managed=managed),
        owns=host.owns,
        from_owner=host.from_owner,
    )
    return source.tensor(form.shape)
