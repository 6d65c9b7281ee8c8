"""Memory on HOST that belongs to no group of parameters: a chunk that stays there."""

from __future__ import annotations

import torch

from chunkmem.data.layout import Group
from chunkmem.data.types import ChunkId, Role, Tier
from chunkmem.runtime.chunk import Chunk
from chunkmem.runtime.pager import Pager


class HostMemory:
    """A chunk of bytes that stays on HOST, in no group of a layout."""

    def __init__(
        self, pager: Pager, role: Role, nbytes: int, *, reader: object, memory: torch.Tensor | None = None
    ) -> None:
        """Have HOST count it from now on; where both tiers are one piece of RAM, DEVICE does.

        Args:
            pager: makes room for it.
            role: under which ledgers count it.
            nbytes: its size.
            reader: who needs it; its `str()` begins the message of an error.
            memory: 1-D bytes that are there already, such as those that ranks share, or of stride 0 if they are in many
                places; None: HOST gives some.

        Raises:
            CapacityError: there is no room for it.
        """
        self._pager = pager
        tier = Tier.HOST if pager.store.pools[Tier.HOST].ledger.limit_nbytes else Tier.DEVICE
        number = min(0, *(key.group for key in pager.store.chunks), 0) - 1  # layouts' are from 0
        key = ChunkId(role, number)
        chunk = Chunk(
            key, Group.of_bytes(number, nbytes), torch.uint8, str(key), ((torch.Size([nbytes]), (1,)),), memory=memory
        )
        pager.store.add(chunk)
        try:
            pager.create(chunk, tier, reader=reader, zero=False, elastic=True, is_of_step=False)
        except BaseException:
            del pager.store.chunks[key]
            raise
        self.chunk = chunk

    @property
    def flat(self) -> torch.Tensor:
        """1-D bytes, as long as it is not closed; who keeps them keeps what is shared."""
        (replica,) = self.chunk.replicas.values()
        return replica.flat

    def follow(self, pager: Pager) -> None:
        """Know that its manager has another pager by now, which was handed the chunk over."""
        self._pager = pager

    def close(self) -> None:
        """Give it back. Idempotent."""
        if self.chunk.id in self._pager.store.chunks and self._pager.closed is None:
            self._pager.store.remove(self.chunk)
        self.chunk.memory = None  # else what is shared would be here as long as anybody has this
