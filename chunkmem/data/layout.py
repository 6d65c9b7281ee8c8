"""Where every tensor of a model sits: slots, groups, the layout. Plain frozen data, no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from math import prod

ALIGN_NBYTES = 64
"""Every slot starts on such a boundary: a cache line, and one AVX-512 register."""


class MasterCopy(Enum):
    """Whether there is a float32 copy of weights, which updates go to and low-precision weights are rounded from."""

    NONE = "none"
    """No: weights are updated as they are."""
    PACKED = "packed"
    """From packing on, with the values that were built."""
    WHEN_TRAINED = "when trained"
    """From the first update on: the weights are frozen, and exact in the dtype they compute in."""


EACH = -1
"""As an owner: each rank has its own part of a parameter there, which the others have not."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to be packed: what the packer needs to know of a parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Name of the dtype, e.g. ``"float32"``; tensors of different dtypes never share a group."""
    itemsize: int
    """Bytes an element."""
    master: MasterCopy = MasterCopy.NONE
    """A group's tensors have this in common, too."""
    is_frozen: bool = field(default=False, repr=False)
    """And this: a group with a single trainable tensor has gradients and optimizer states for all. Not in the `digest`,
    as the groups show it."""
    is_on_host: bool = field(default=False, repr=False)
    """And this: their modules compute on HOST. In the `digest` by the groups."""
    is_each_ranks: bool = field(default=False, repr=False)
    """And this: each of the ranks that share the layout has a tensor of its own. In the `digest` by the groups."""

    @property
    def kind(self) -> str:
        """What the tensors of a group have in common."""
        kind = self.dtype if self.master is MasterCopy.NONE else f"{self.dtype}, master copy {self.master.value}"
        kind = f"{kind}, frozen" if self.is_frozen else kind
        kind = f"{kind}, each rank's own" if self.is_each_ranks else kind
        return f"{kind}, on HOST" if self.is_on_host else kind

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one tensor sits: elements ``[offset, offset + numel)`` of every chunk of its group."""

    tensor: int
    """Index into `Layout.tensors`."""
    group: int
    offset: int
    numel: int

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class Group:
    """A run of parameters that move together; one chunk of `numel` elements in each role."""

    id: int
    dtype: str
    itemsize: int
    num_slabs: int
    """Slabs a chunk of this group takes: 1, or more if a single tensor is larger than a slab."""
    numel: int
    """Elements a chunk holds, pads included: ``num_slabs * slab_nbytes // itemsize``."""
    slots: tuple[Slot, ...]
    """In ascending offset, disjoint, each aligned to `ALIGN_NBYTES`."""
    master: MasterCopy = MasterCopy.NONE
    is_on_host: bool = field(default=False, repr=False)
    """Modules compute with it on HOST: its chunks are never anywhere else, and no plan knows of them."""
    owner: int = field(default=0, repr=False)
    """Which of the ranks that share the layout keeps it and updates it; `EACH`: each does its own."""

    @classmethod
    def of_bytes(cls, number: int, nbytes: int) -> Group:
        """Return one of bytes that stay on HOST and are no parameters."""
        return cls(number, "uint8", 1, 1, nbytes, (Slot(0, number, 0, nbytes),), is_on_host=True)

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    def in_float32(self) -> Group:
        """Return the group with as many elements in float32: what its master weights are."""
        return replace(self, dtype="float32", itemsize=4)

    @cached_property
    def pads(self) -> tuple[tuple[int, int], ...]:
        """Element ranges ``[start, stop)`` that no slot covers. They are 0 in every role."""
        gaps = []
        at = 0
        for slot in self.slots:
            if slot.offset > at:
                gaps.append((at, slot.offset))
            at = slot.end
        if at < self.numel:
            gaps.append((at, self.numel))
        return tuple(gaps)


def digest(layouts: Iterable[Layout]) -> str:
    """Return the identity of layouts: names, shapes and dtypes of tensors, and where each is."""
    layouts = list(layouts)
    text = repr([(layout.slab_nbytes, layout.tensors, layout.groups) for layout in layouts])
    if on_host := [group.id for layout in layouts for group in layout.groups if group.is_on_host]:
        text += f" on HOST: {on_host}"
    if own := [group.id for layout in layouts for group in layout.groups if group.owner == EACH]:
        text += f" of each rank: {own}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Layout:
    """All groups and slots of a model; never changes once made."""

    slab_nbytes: int
    tensors: tuple[TensorSpec, ...]
    groups: tuple[Group, ...]

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """The slot of every tensor, in the order of `tensors`."""
        return tuple(sorted((slot for group in self.groups for slot in group.slots), key=lambda slot: slot.tensor))

    @cached_property
    def payload_nbytes(self) -> int:
        """Bytes of the tensors themselves, in one role."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @cached_property
    def chunk_nbytes(self) -> int:
        """Bytes of all chunks, in one role."""
        return sum(group.nbytes for group in self.groups)

    @property
    def padding_nbytes(self) -> int:
        """Bytes lost to alignment and to the ends of chunks, in one role."""
        return self.chunk_nbytes - self.payload_nbytes
