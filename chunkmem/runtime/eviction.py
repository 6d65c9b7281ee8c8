"""Make room on a tier as `plan.demand` decides: duplicates are dropped, and replicas evicted to the tier below."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from chunkmem.plan.ahead import SHADOW
from chunkmem.plan.demand import RoomPlan, Shortage, make_room
from chunkmem.runtime.chunk import Chunk
from chunkmem.runtime.leaving import Leaving
from chunkmem.runtime.ledger import CACHE
from chunkmem.runtime.meter import NonModelMeter
from chunkmem.runtime.policy import SpeculativeUpdates
from chunkmem.runtime.shortage import shortage_error
from chunkmem.runtime.store import ChunkStore
from chunkmem.types import PLACE, ChunkId, Tier, neighbor


class Holder(Protocol):
    """Keeps chunks pinned on DEVICE for those who use their memory in ways that no event tells of."""

    def relieve(self) -> bool:
        """Release what nobody uses any more; False if there is nothing."""
        return False

    def holders(self) -> tuple[str, ...]:
        """Return the names of the parameters whose memory somebody has."""
        return ()


class NoHolder(Holder):
    """Nobody keeps chunks pinned."""


class Evictor:
    """Makes room with blocking copies."""

    def __init__(
        self,
        store: ChunkStore,
        leaving: Leaving,
        *,
        notice_writes: Callable[[Chunk], None],
        meter: NonModelMeter | None,
    ) -> None:
        """Make room in `store`.

        Args:
            store: of all chunks.
            leaving: its replicas that are not pinned.
            notice_writes: counts what a user wrote to a chunk as a new version.
            meter: of what else takes room under the cap on DEVICE; None: nothing does.
        """
        self._store = store
        self._leaving = leaving
        self._notice_writes = notice_writes
        self._meter = meter

    def make_room(
        self, chunk: Chunk, tier: Tier, *, reader: object, holder: Holder, speculative: SpeculativeUpdates
    ) -> None:
        """Have enough replicas leave `tier` for `chunk`.

        Args:
            chunk: is about to take a slab.
            tier: where.
            reader: who needs it; its `str()` begins a message.
            holder: is asked to release what it keeps pinned, where everything else is too little.
            speculative: gives its shadow buffers back before a replica leaves HOST for them.

        Raises:
            CapacityError: everything that may leave `tier` is not enough; nothing has been moved.
        """
        ledger = self._store.pools[tier].ledger
        outcome = self._decide(chunk.nbytes, tier)
        if self._store.pools[Tier.HOST].ledger.now.get(SHADOW) and _takes_from_host(outcome, tier):
            speculative.reserve({})  # speculative updates are a gain: no replica goes, and nothing stops, for them
            outcome = self._decide(chunk.nbytes, tier)
        outcome = self._without_unnoticed(outcome, chunk.nbytes, tier)
        if isinstance(outcome, Shortage):
            # A write that nobody has noticed yet makes a copy on the other tier stale, and its bytes free.
            for place in {Tier.DEVICE, tier}:
                for resident in list(self._store.resident[place].values()):
                    self._notice_writes(resident)
            outcome = self._decide(chunk.nbytes, tier)
        if isinstance(outcome, Shortage) and ledger.cap_nbytes < ledger.limit_nbytes:
            # The warm-up share is a wish; the largest moment has to fit all the same.
            ledger.cap_nbytes = min(ledger.limit_nbytes, ledger.cap_nbytes + outcome.here_nbytes)
            outcome = self._decide(chunk.nbytes, tier)
        while isinstance(outcome, Shortage) and self._passes_on(outcome, tier):
            outcome = self._decide(chunk.nbytes, tier)
        while isinstance(outcome, Shortage) and holder.relieve():
            outcome = self._decide(chunk.nbytes, tier)
        if isinstance(outcome, Shortage):
            raise shortage_error(
                chunk,
                tier,
                reader,
                outcome,
                below=self._below(tier),
                pools=self._store.pools,
                chunks=self._store.chunks.values(),
                pinned_nbytes=sum(c.nbytes for c in self._store.resident[tier].values() if c.replicas[tier].pins),
                meter=self._meter if tier is Tier.DEVICE else None,
                holders=holder.holders(),
            )
        self._evict(outcome, tier)

    def shrink(self, tier: Tier, nbytes: int) -> bool:
        """Have `nbytes` leave a tier if that is possible; tell whether it was."""
        need_nbytes = nbytes + self._free_nbytes(tier)
        outcome = self._without_unnoticed(self._decide(need_nbytes, tier), need_nbytes, tier)
        if isinstance(outcome, RoomPlan):
            self._evict(outcome, tier)
        return isinstance(outcome, RoomPlan)

    def _passes_on(self, shortage: Shortage, tier: Tier) -> bool:
        """Have what is in the way on the tier below leave for the one below that; False if nothing was, or can."""
        below = self._below(tier)
        is_gateway = PLACE[tier] < PLACE[below] < PLACE[self._below(below)]
        return is_gateway and shortage.below_nbytes is not None and self.shrink(below, shortage.below_nbytes)

    def _below(self, tier: Tier) -> Tier:
        return neighbor(tier, self._store.pools)

    def _decide(self, nbytes: int, tier: Tier) -> RoomPlan | Shortage:
        here, below = (self._leaving.room(each, self._free_nbytes(each)) for each in (tier, self._below(tier)))
        return make_room(nbytes, here, below)

    def _free_nbytes(self, tier: Tier) -> int:
        ledger = self._store.pools[tier].ledger
        return ledger.free_nbytes + ledger.now.get(CACHE, 0)

    def _without_unnoticed(self, outcome: RoomPlan | Shortage, nbytes: int, tier: Tier) -> RoomPlan | Shortage:
        """Decide again until nothing that is about to leave has writes that were not noticed."""
        noticed: set[ChunkId] = set()
        while isinstance(outcome, RoomPlan) and self._were_written(outcome, noticed):
            outcome = self._decide(nbytes, tier)
        return outcome

    def _were_written(self, plan: RoomPlan, noticed: set[ChunkId]) -> bool:
        """Notice writes to what is about to leave, once each; tell whether there were any.

        Where nothing tells of writes, a chunk with master weights is taken for written whenever it is looked at.
        """
        leaving = (*plan.drops_below, *(eviction.chunk for eviction in plan.evictions_here))
        leaving = tuple(key for key in leaving if key not in noticed)
        noticed.update(leaving)
        chunks = [self._store.chunks[key] for key in leaving]
        before = [chunk.version for chunk in chunks]
        for chunk in chunks:
            self._notice_writes(chunk)
        return [chunk.version for chunk in chunks] != before

    def _evict(self, plan: RoomPlan, tier: Tier) -> None:
        store, below = self._store, self._below(tier)
        for drop in plan.drops_below:
            store.drop(store.chunks[drop], below)
        for eviction in plan.evictions_here:
            victim = store.chunks[eviction.chunk]
            if eviction.spill:
                if below not in victim.replicas:
                    store.take_slab(victim, below)
                store.copy(victim, tier, below)
            store.drop(victim, tier)


def _takes_from_host(outcome: RoomPlan | Shortage, tier: Tier) -> bool:
    """Tell whether there is too little room, or HOST would lose a replica, for room on `tier`."""
    return isinstance(outcome, Shortage) or bool(outcome.drops_below or (tier is Tier.HOST and outcome.evictions_here))
