"""Which replicas may leave a tier, as decisions on plain data see them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from chunkmem.plan.demand import TierRoom
from chunkmem.plan.semantics import NEWEST
from chunkmem.plan.victims import LeavingOrder, Resident, Standing
from chunkmem.runtime.chunk import Chunk
from chunkmem.runtime.store import ChunkStore
from chunkmem.types import ChunkId, Role, Tier


class Leaving:
    """The replicas of a store that are not pinned, tier by tier."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self.orders = {tier: LeavingOrder(partial(self._look, tier)) for tier in store.pools}
        for tier, resident in store.resident.items():
            for chunk in resident.values():
                self.announce(chunk, tier)
        store.on_sooner = self.announce

    def announce(self, chunk: Chunk, tier: Tier) -> None:
        """A replica may leave from now on, or sooner than it could before."""
        self.orders[tier].announced.add(chunk.id)

    def room(self, tier: Tier, free_nbytes: int) -> TierRoom:
        """Return a tier as a decision sees it."""
        return TierRoom(free_nbytes, partial(self._scan, tier), self.orders[tier].first)

    def _scan(self, tier: Tier) -> Iterator[Resident]:
        for chunk in self._store.resident[tier].values():
            resident = _resident(chunk, tier)
            if resident is not None:
                yield resident

    def _look(self, tier: Tier, key: ChunkId) -> Resident | None:
        chunk = self._store.resident[tier].get(key)
        return None if chunk is None else _resident(chunk, tier)


def _resident(chunk: Chunk, tier: Tier) -> Resident | None:
    replica = chunk.replicas[tier]
    if replica.pins > 0 or chunk.stays:
        return None
    return Resident(chunk.id, chunk.nbytes, replica.last_use, _standing(chunk, tier), chunk.is_last(tier))


def _standing(chunk: Chunk, tier: Tier) -> Standing:
    if chunk.on(tier) is not NEWEST:
        return Standing.DEAD
    if chunk.settled:
        return Standing.SETTLED
    return Standing.ACTIVE if chunk.id.role in (Role.PARAM, Role.GRAD) else Standing.STATE
