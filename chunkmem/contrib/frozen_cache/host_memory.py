"""Memory on HOST that belongs to no parameters: a chunk that stays there."""

from __future__ import annotations

import torch

from chunkmem.layout.spec import Group, Slot
from chunkmem.runtime.chunk import Chunk
from chunkmem.runtime.pager import Pager
from chunkmem.types import ChunkId, Role, Tier

ROLE = Role("frozen_cache")


class HostMemory:
    """A chunk that stays on HOST, in no group of a layout."""

    def __init__(self, pager: Pager, memory: torch.Tensor) -> None:
        """Have HOST count it from now on.

        Args:
            pager: makes room for it.
            memory: 1-D bytes; what this rank counts of what ranks have together.

        Raises:
            CapacityError: HOST has no room for it.
        """
        self._pager = pager
        number, nbytes = min(0, *(key.group for key in pager.store.chunks), 0) - 1, memory.nbytes  # layouts' are from 0
        group = Group(number, "uint8", 1, 1, nbytes, (Slot(0, number, 0, nbytes),), is_on_host=True)
        key = ChunkId(ROLE, number)
        chunk = Chunk(key, group, torch.uint8, str(key), ((torch.Size([nbytes]), (1,)),), memory=memory)
        pager.store.add(chunk)
        try:
            pager.create(chunk, Tier.HOST, reader="chunkmem.FrozenCache", zero=False, elastic=True, is_of_step=False)
        except BaseException:
            del pager.store.chunks[key]
            raise
        self.chunk = chunk

    def follow(self, pager: Pager) -> None:
        """Know that its manager has another pager by now, which was handed the chunk over."""
        self._pager = pager

    def close(self) -> None:
        """Give it back. Idempotent."""
        if self.chunk.id in self._pager.store.chunks and self._pager.closed is None:
            self._pager.store.remove(self.chunk)
        self.chunk.memory = None  # else what is shared would be here as long as anybody has this
