"""Chunks, and their replicas on tiers: data, which the store changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from chunkmem.data.layout import EACH, Group
from chunkmem.data.types import TIERS, ChunkId, Tier
from chunkmem.plan.semantics import ReplicaState, Residency
from chunkmem.runtime.pool import Slab

NO_CONTENT = -1
"""The version of a chunk, or of a replica, that holds nothing."""
FIRST_CONTENT = NO_CONTENT + 1
"""The version of a chunk that was written to once."""
SlotForms = tuple[tuple[torch.Size, tuple[int, ...]], ...]
"""Shape and strides of each slot's tensor."""


class ChunkHome(Protocol):
    """What a PARAM chunk's slab becomes part of on DEVICE: the storage its parameters are views of."""

    is_bound: bool
    """The parameters point into the slab."""

    def attach(self, slab: Slab) -> torch.Tensor:
        """Take the slab's memory; return the chunk as 1-D elements, contents undefined."""
        ...

    def bind(self) -> None:
        """The contents are there: point the parameters at them."""
        ...

    def detach(self) -> None:
        """Point the parameters at their placeholders and give the memory back to the slab."""
        ...

    def abandon(self) -> None:
        """Point the parameters at their placeholders, and leave the memory to those who have references to it."""
        ...

    def num_foreign_references(self, *, besides: int) -> int:
        """Return how many references others have to the memory; the caller knows of `besides` views."""
        ...

    def take_written(self) -> bool:
        """Tell, once, whether a user has written to a bound parameter since the last time this was asked."""
        ...

    def was_written(self) -> bool:
        """Tell what `take_written` is going to, in any thread."""
        ...


class SavedMemory(Protocol):
    """What an ACTIVATION chunk is on DEVICE: storages whose tensors autograd has saved, each at its offset."""

    def fill(self) -> Sequence[tuple[int, torch.Tensor]]:
        """Give storages that are empty memory, contents undefined; return the bytes of all, 1-D, with their offsets."""
        ...

    def empty(self) -> None:
        """Give their memory back to the allocator. They stay, and so do the tensors."""
        ...


@dataclass(eq=False, slots=True)
class Replica:
    """A chunk's copy on one tier: `NEWEST` if its version is the chunk's, else `EMPTY`; see `plan.semantics`."""

    slab: Slab
    flat: torch.Tensor
    """1-D, all elements of the chunk; of activations on DEVICE none."""
    version: int = NO_CONTENT
    pins: int = 0
    last_use: int = 0
    views: tuple[torch.Tensor, ...] | None = None
    """One tensor per slot, made when first asked for."""
    pieces: Sequence[tuple[int, torch.Tensor]] | None = None
    """Pieces of an activation chunk's content on DEVICE; see `SavedMemory.fill`."""

    def copied_from(self, source: Replica) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        """Return what is copied to what when `source` is copied here, one after the other."""
        if self.pieces is not None:
            return [(piece, source.flat.narrow(0, at, piece.numel())) for at, piece in self.pieces]
        if source.pieces is None:
            return [(self.flat, source.flat)]
        return [(self.flat.narrow(0, at, piece.numel()), piece) for at, piece in source.pieces]

    def read(self) -> torch.Tensor:
        """Return all elements, 1-D: of DISK a copy, which `write` takes back."""
        if self.slab.is_memory:
            return self.flat
        values = torch.empty(self.slab.nbytes // self.flat.itemsize, dtype=self.flat.dtype, device="cpu")
        self.slab.read(values)
        return values

    def write(self, values: torch.Tensor) -> None:
        """Let all elements be those of `values`, if it is not the replica's own memory."""
        if not self.slab.is_memory:
            self.slab.write(values.to("cpu", self.flat.dtype))
        elif values is not self.flat:
            self.flat.copy_(values)


@dataclass(eq=False, slots=True)
class Chunk:
    """One chunk: its newest version and where copies of it are."""

    id: ChunkId
    group: Group
    dtype: torch.dtype
    label: str
    """Name in messages: the role, the number and the parameters inside."""
    forms: SlotForms
    home: ChunkHome | None = None
    memory: torch.Tensor | None = None
    """1-D memory on HOST, in bytes, that several processes share, outside of every pool; None: a pool's slab is
    used."""
    saved: SavedMemory | None = None
    """Saved tensors of an ACTIVATION chunk; None for other roles."""
    master: Chunk | None = None
    """The float32 chunk that this one is rounded from: what is lost of this one can be made again."""
    is_remote: bool = False
    """Another rank owns it: here it has content only while it is pinned on DEVICE."""
    is_copy: bool = False
    """Another rank owns it, and sends its content to this one's HOST, where modules compute with it."""
    version: int = NO_CONTENT
    is_written_past: bool = False
    """Modules write to it in a way that autograd's version counters do not tell of (`self.weight.data.clamp_()`)."""
    is_written_inside: bool = False
    """Modules have written to it while they ran, in a way that nothing tells of before."""
    awaits_update: bool = False
    """Complete, and wanted next where it is updated, not on DEVICE."""
    replicas: dict[Tier, Replica] = field(default_factory=dict)
    nbytes: int = field(init=False)
    compute_tier: Tier = field(init=False)
    """Tier on which modules compute with the chunk and gradients land in it; also its `home`."""

    def __post_init__(self) -> None:
        self.nbytes = self.group.nbytes
        self.compute_tier = Tier.HOST if self.group.is_on_host else Tier.DEVICE

    @property
    def stays(self) -> bool:
        """It never leaves the tier where it was made: plans do not move it, and leave it its room."""
        return self.group.is_on_host or self.id.role.kind.stays

    @property
    def is_exchanged(self) -> bool:
        """Over ranks, its owner gives its weights to the others when they are read."""
        return self.compute_tier is Tier.DEVICE and self.group.owner != EACH

    def on(self, tier: Tier) -> ReplicaState:
        """What there is of it on a tier, as plans see it."""
        if tier not in self.replicas:
            return ReplicaState.ABSENT
        return ReplicaState.NEWEST if self.ready(tier) else ReplicaState.EMPTY

    def ready(self, tier: Tier) -> bool:
        """Whether `tier` holds the newest version."""
        replica = self.replicas.get(tier)
        return replica is not None and replica.version == self.version != NO_CONTENT

    def newest_tier(self) -> Tier | None:
        """The first tier of the chain that holds the newest version; None if the chunk has no content."""
        return next((tier for tier in TIERS if self.ready(tier)), None)

    @property
    def can_be_rounded(self) -> bool:
        """Whether its content may be dropped everywhere, since it can be made again from `master`."""
        return self.master is not None and not self.is_remote and self.master.newest_tier() is not None

    def newest_besides(self, tier: Tier) -> Tier | None:
        """A tier other than `tier` that holds the newest version."""
        return next((other for other in self.replicas if other is not tier and self.ready(other)), None)

    def is_last(self, tier: Tier) -> bool:
        """Whether its content goes with the replica on `tier`: no other one has it, and it cannot be made again."""
        can_be_had = self.can_be_rounded or self.is_remote
        return self.ready(tier) and self.newest_besides(tier) is None and not can_be_had


def slot_views(chunk: Chunk, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return one tensor per slot of `flat`, which is laid out as the chunk, in slot order and as the chunk's forms."""
    start = flat.storage_offset()
    views = [
        flat.as_strided(shape, stride, start + slot.offset)
        for slot, (shape, stride) in zip(chunk.group.slots, chunk.forms, strict=True)
    ]
    return tuple(views)


def read_slot(
    chunk: Chunk,
    replica: Replica,
    position: int,
    read: Callable[[torch.Tensor, torch.Tensor], object] = torch.Tensor.copy_,
) -> torch.Tensor:
    """Return a CPU copy of a slot, in its parameter's shape, which `read` makes of memory; of DISK, no more is read.

    Raises:
        TierIOError: it cannot be read.
    """
    slot, (shape, stride) = chunk.group.slots[position], chunk.forms[position]
    values = torch.empty(slot.numel, dtype=chunk.dtype, device="cpu")
    if replica.slab.is_memory:
        read(values, replica.flat[slot.offset : slot.end])
    else:
        replica.slab.read(values, at=slot.offset * chunk.dtype.itemsize)
    return values.as_strided(shape, stride)


def residency(chunks: Iterable[Chunk]) -> Residency:
    """Return what there is of some chunks, as plans see it."""
    return Residency({(chunk.id, tier): chunk.ready(tier) for chunk in chunks for tier in chunk.replicas})
