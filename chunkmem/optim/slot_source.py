"""Weights and optimizer states in chunks as what lazy tensors are read from."""

from __future__ import annotations

from collections.abc import Callable

import torch

from chunkmem.nn.binding import ManagedParameter
from chunkmem.nn.lazy_tensor import Extent, LazyTensor, Source
from chunkmem.types import Role


class SlotSource(Source):
    """The slot of a parameter in its chunk of one role."""

    def __init__(
        self,
        managed: ManagedParameter,
        role: Role,
        read: Callable[[], torch.Tensor],
        *,
        owns: Callable[[ManagedParameter], bool],
        from_owner: Callable[[ManagedParameter, Callable[[], torch.Tensor]], torch.Tensor],
    ) -> None:
        """Name a slot.

        Args:
            managed: whose it is.
            role: of the chunk.
            read: returns a copy of its values, on the rank that owns the parameter.
            owns: tells whether this rank does.
            from_owner: returns on every rank what is read on the owner.
        """
        self._managed = managed
        self._role = role
        self._read = read
        self._owns = owns
        self._from_owner = from_owner

    @property
    def is_here(self) -> bool:
        return self._owns(self._managed)

    @property
    def place(self) -> str:
        return f"{self._role.value} {self._managed.group}"

    def read_here(self, start: Extent, shape: Extent) -> torch.Tensor:
        values = self._read()
        if shape == tuple(values.shape):
            return values
        return values[tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))].clone()

    def read(self, start: Extent, shape: Extent) -> torch.Tensor:
        return self._from_owner(self._managed, lambda: self.read_here(start, shape))

    def tensor(self, shape: Extent, dtype: torch.dtype) -> LazyTensor:
        """Return all of it, lazily; shape and dtype are those of what is read."""
        return LazyTensor.of(self, shape, dtype)
