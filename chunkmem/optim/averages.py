"""Chunks of averages of weights: where they live, and how they are read and written there.

[Note: Averages] A chunk of averages belongs to a group, as one of optimizer states, but no update touches it. So it is
in no trace, and no plan moves it: it stays where it was made (on HOST, with a disk on DISK), and is read and written
there, between steps. Plans leave it its room: `ChunkStore.kept_nbytes` tells how much that is. Where DEVICE and HOST
are one piece of RAM it is on DEVICE, like everything else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch

from chunkmem.optim.claims import Claims
from chunkmem.optim.rule import StateSpec
from chunkmem.runtime.chunk import Chunk, slot_views
from chunkmem.runtime.device import runtime_mode
from chunkmem.runtime.disk_pool import DiskSlab
from chunkmem.runtime.failed import lost_error
from chunkmem.runtime.pager import Pager
from chunkmem.types import ChunkId, Role, Tier

EMA = "ema"
_READER = "averages of weights"


class AverageChunks:
    """The averages of some groups that this rank owns."""

    def __init__(self, pager: Pager, claims: Claims, groups: Collection[int], role: Role) -> None:
        """Have chunks, without content so far.

        Args:
            pager: of the chunks.
            claims: tell which groups are trained.
            groups: of the weights.
            role: the same on all ranks; see `averages_number`.

        Raises:
            CapacityError: the tiers have no room for them; nothing has been made.
        """
        self._pager = pager
        self._store = store = pager.store
        self.role = role
        self.tier = _tier(pager)
        new = [self._new(store.chunks[ChunkId(Role.PARAM, group)]) for group in groups]
        claims.require_room({}, kept={self.tier: sum(chunk.nbytes for chunk in new)}, name="averages")
        self._of: dict[int, Chunk] = {}
        """By group."""
        for chunk in new:
            store.add(chunk)
            self._of[chunk.id.group] = chunk

    def begin(self) -> None:
        """Begin with zeros.

        Raises:
            CapacityError: as the constructor.
        """
        try:
            for chunk in self._of.values():
                self._pager.create(chunk, self.tier, reader=_READER, zero=True, elastic=True, is_of_step=False)
                slab = chunk.replicas[self.tier].slab
                if isinstance(slab, DiskSlab):
                    slab.write(torch.zeros(chunk.group.numel, dtype=chunk.dtype, device="cpu"))
        except BaseException:
            self.close()
            raise

    def come_home(self) -> None:
        """Have content that has arrived from other ranks where averages stay.

        Raises:
            CapacityError: there is no room for it.
        """
        for chunk in self._of.values():
            for tier in [tier for tier in chunk.replicas if tier is not self.tier]:
                self._pager.pin(chunk, self.tier, reader=_READER, elastic=True)
                self._pager.unpin(chunk, self.tier)
                self._store.drop(chunk, tier)

    def _new(self, param: Chunk) -> Chunk:
        chunk = StateSpec(self.role).chunk(param)
        chunk.is_kept = True
        chunk.group = replace(chunk.group, is_on_host=self.tier is not Tier.DEVICE)
        return chunk

    def of(self, group: int) -> Chunk:
        """Return the chunk of a group."""
        return self._of[group]

    def close(self) -> None:
        """Give the memory back."""
        for chunk in self._of.values():
            self._store.remove(chunk)
        self._of = {}

    @contextmanager
    def opened(self, group: int, *, writes: bool) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield one tensor a slot, to be read or, with `writes`, to be written, too; of DISK they are a copy meanwhile.

        Raises:
            TierIOError: DISK cannot be read or written.
        """
        chunk, store = self._of[group], self._store
        if writes:
            store.before_change(chunk)
        if not chunk.ready(self.tier):
            raise lost_error(_READER, chunk)
        slab = chunk.replicas[self.tier].slab
        if not isinstance(slab, DiskSlab):
            yield store.views(chunk, self.tier)
        else:
            with runtime_mode():
                flat = torch.empty(chunk.group.numel, dtype=chunk.dtype, device="cpu")
                slab.read(flat)
                slots = slot_views(chunk, flat)
            yield slots
            if writes:
                slab.write(flat)
        if writes:
            store.mark_written(chunk, self.tier)

    def read(self, group: int, position: int) -> torch.Tensor:
        """Return a CPU copy of a slot."""
        return self._store.read_slot(self._of[group], position)


def averages_number(known: Collection[ChunkId]) -> int:
    """Return a number whose role no chunk has: over ranks, the largest one is free on all of them."""
    roles = {key.role for key in known}
    return 1 + max((number for number in range(1, len(roles) + 1) if averages_role(number) in roles), default=0)


def averages_role(number: int) -> Role:
    """Return the role of averages of this number: another one where some weights are averaged twice."""
    return Role(EMA if number == 1 else f"{EMA}_{number}")


def _tier(pager: Pager) -> Tier:
    limits: Mapping[Tier, int] = {tier: pool.ledger.limit_nbytes for tier, pool in pager.store.pools.items()}
    if pager.store.has_disk:
        return Tier.DISK
    return Tier.HOST if limits[Tier.HOST] else Tier.DEVICE
