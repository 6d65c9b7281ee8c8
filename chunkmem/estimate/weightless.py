"""Chunks without memory: everything is counted, nothing is allocated, so that a model of any size can be rehearsed."""

from __future__ import annotations

from typing import Any, cast

import torch

from chunkmem.runtime.ledger import Ledger
from chunkmem.runtime.pool import Slab
from chunkmem.runtime.store import Chunk, ChunkStore, Replica
from chunkmem.types import Tier

_NO_CAP = 2**62


class _Nowhere:
    """Takes what is written to it, as a slot does, and keeps nothing."""

    def copy_(self, value: object) -> None:
        """Forget a first gradient."""

    def add_(self, value: object) -> None:
        """Forget a further gradient."""


class _WeightlessPool:
    """A tier of unlimited size, whose slabs are sizes only."""

    def __init__(self, tier: Tier) -> None:
        self.ledger = Ledger(tier, _NO_CAP, _NO_CAP)
        self.poison = False
        self._nothing = torch.empty(0, dtype=torch.uint8, device="cpu")

    def alloc(self, role: str, nbytes: int) -> Slab:
        self.ledger.charge(role, nbytes)
        return Slab(nbytes, self._nothing)

    def free(self, role: str, slab: Slab) -> None:
        self.ledger.release(role, slab.nbytes)

    def close(self) -> None:
        """Nothing is held."""


class WeightlessStore(ChunkStore):
    """Replicas that are only counted, on a DEVICE where everything stays."""

    def __init__(self) -> None:
        super().__init__({tier: _WeightlessPool(tier) for tier in (Tier.DEVICE, Tier.HOST)})

    def take_slab(self, chunk: Chunk, tier: Tier) -> Replica:
        slab = self.pools[tier].alloc(chunk.id.role.value, chunk.nbytes)
        replica = chunk.replicas[tier] = Replica(slab, slab.bytes)
        self.resident[tier][chunk.id] = chunk
        return replica

    def create(self, chunk: Chunk, tier: Tier, *, zero: bool) -> Replica:
        replica = chunk.replicas.get(tier) or self.take_slab(chunk, tier)
        self.mark_written(chunk, tier)
        return replica

    def views(self, chunk: Chunk, tier: Tier) -> tuple[torch.Tensor, ...]:
        # Gradients are written to slots and never read back.
        return cast(tuple[torch.Tensor, ...], _EVERY_SLOT)


class _EverySlot(tuple[Any, ...]):
    """As many slots as anyone asks for."""

    __slots__ = ()

    def __getitem__(self, position: Any) -> Any:
        return _Nowhere()


_EVERY_SLOT = _EverySlot()


class ParameterHome:
    """Stands for the chunk storage that a parameter would be a view of: here the parameter keeps a (fake) one."""

    is_bound = True

    def __init__(self, param: torch.Tensor) -> None:
        self.device = torch.device("cpu")
        self.storage_id = int(param.untyped_storage()._cdata)
