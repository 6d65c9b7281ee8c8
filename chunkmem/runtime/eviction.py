"""Make room on a tier as `plan.demand` decides, or say why there is none.

Duplicates are dropped, and replicas evicted to the tier below.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from chunkmem.data.errors import CapacityError
from chunkmem.data.sizes import format_nbytes
from chunkmem.data.types import PLACE, ChunkId, Role, Tier, neighbor
from chunkmem.plan.ahead import SHADOW
from chunkmem.plan.demand import RoomPlan, Shortage, TierRoom, make_room
from chunkmem.plan.machine import cap_key
from chunkmem.plan.victims import LeavingOrder, Resident, Standing
from chunkmem.runtime.chunk import Chunk
from chunkmem.runtime.ledger import CACHE
from chunkmem.runtime.meter import NonModelMeter
from chunkmem.runtime.policy import SpeculativeUpdates
from chunkmem.runtime.store import ChunkStore


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


@dataclass(eq=False)
class Evictor:
    """Knows the replicas that are not pinned, tier by tier, and makes room with blocking copies."""

    store: ChunkStore
    notice_writes: Callable[[Chunk], None]
    """Counts what a user wrote to a chunk as a new version."""
    speculative: SpeculativeUpdates
    """Gives its shadow buffers back before a replica leaves HOST for them."""
    meter: NonModelMeter | None
    """Of what else takes room under the cap on DEVICE; None: nothing does."""

    def __post_init__(self) -> None:
        self.orders = {tier: LeavingOrder(partial(self._look, tier)) for tier in self.store.pools}
        for tier, resident in self.store.resident.items():
            for chunk in resident.values():
                self.announce(chunk, tier)
        self.store.on_sooner = self.announce

    def announce(self, chunk: Chunk, tier: Tier) -> None:
        """A replica may leave from now on, or sooner than it could before."""
        self.orders[tier].announced.add(chunk.id)

    def room(self, tier: Tier, free_nbytes: int) -> TierRoom:
        """Return a tier as a decision sees it."""
        return TierRoom(free_nbytes, partial(self._scan, tier), self.orders[tier].first)

    def _scan(self, tier: Tier) -> Iterator[Resident]:
        for key in self.store.resident[tier]:
            resident = self._look(tier, key)
            if resident is not None:
                yield resident

    def _look(self, tier: Tier, key: ChunkId) -> Resident | None:
        chunk = self.store.resident[tier].get(key)
        if chunk is None or chunk.stays or (replica := chunk.replicas[tier]).pins > 0:
            return None
        return Resident(key, chunk.nbytes, replica.last_use, _standing(chunk, tier), chunk.is_last(tier))

    def make_room(self, chunk: Chunk, tier: Tier, *, reader: object, holder: Holder) -> None:
        """Have enough replicas leave `tier` for `chunk`.

        Args:
            chunk: is about to take a slab.
            tier: where.
            reader: who needs it; its `str()` begins a message.
            holder: is asked to release what it keeps pinned, where everything else is too little.

        Raises:
            CapacityError: everything that may leave `tier` is not enough; nothing has been moved.
        """
        ledger, decide = self.store.pools[tier].ledger, partial(self._decide, chunk.nbytes, tier)
        outcome = decide()
        if self.store.pools[Tier.HOST].ledger.now.get(SHADOW) and _takes_from_host(outcome, tier):
            self.speculative.reserve({})  # speculative updates are a gain: no replica goes, and nothing stops, for them
            outcome = decide()
        outcome = self._without_unnoticed(outcome, chunk.nbytes, tier)
        if isinstance(outcome, Shortage):
            # A write that nobody has noticed yet makes a copy on the other tier stale, and its bytes free.
            for place in {Tier.DEVICE, tier}:
                for resident in list(self.store.resident[place].values()):
                    self.notice_writes(resident)
            outcome = decide()
        if isinstance(outcome, Shortage) and ledger.cap_nbytes < ledger.limit_nbytes:
            # The warm-up share is a wish; the largest moment has to fit all the same.
            ledger.cap_nbytes = min(ledger.limit_nbytes, ledger.cap_nbytes + outcome.here_nbytes)
            outcome = decide()
        while isinstance(outcome, Shortage) and self._passes_on(outcome, tier):
            outcome = decide()
        while isinstance(outcome, Shortage) and holder.relieve():
            outcome = decide()
        if isinstance(outcome, Shortage):
            meter = self.meter if tier is Tier.DEVICE else None
            raise _shortage_error(chunk, tier, reader, outcome, self.store, meter=meter, holders=holder.holders())
        self._evict(outcome, tier)

    def shrink(self, tier: Tier, nbytes: int) -> bool:
        """Have `nbytes` leave a tier if that is possible; tell whether it was."""
        need_nbytes = nbytes + self._free_nbytes(tier)
        outcome = self._without_unnoticed(self._decide(need_nbytes, tier), need_nbytes, tier)
        if isinstance(outcome, Shortage):
            return self._passes_on(outcome, tier) and self.shrink(tier, nbytes)
        self._evict(outcome, tier)
        return True

    def _passes_on(self, shortage: Shortage, tier: Tier) -> bool:
        """Have what is in the way on the tier below leave for the one below that; False if nothing was, or can."""
        below = self._below(tier)
        is_gateway = PLACE[tier] < PLACE[below] < PLACE[self._below(below)]
        return is_gateway and shortage.below_nbytes is not None and self.shrink(below, shortage.below_nbytes)

    def _below(self, tier: Tier) -> Tier:
        return neighbor(tier, self.store.pools)

    def _decide(self, nbytes: int, tier: Tier) -> RoomPlan | Shortage:
        here, below = (self.room(each, self._free_nbytes(each)) for each in (tier, self._below(tier)))
        return make_room(nbytes, here, below)

    def _free_nbytes(self, tier: Tier) -> int:
        ledger = self.store.pools[tier].ledger
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
        chunks = [self.store.chunks[key] for key in leaving]
        before = [chunk.version for chunk in chunks]
        for chunk in chunks:
            self.notice_writes(chunk)
        return [chunk.version for chunk in chunks] != before

    def _evict(self, plan: RoomPlan, tier: Tier) -> None:
        store, below = self.store, self._below(tier)
        for drop in plan.drops_below:
            store.drop(store.chunks[drop], below)
        for eviction in plan.evictions_here:
            victim = store.chunks[eviction.chunk]
            if eviction.spill:
                if below not in victim.replicas:
                    store.take_slab(victim, below)
                store.copy(victim, tier, below)
            store.drop(victim, tier)


def _standing(chunk: Chunk, tier: Tier) -> Standing:
    if not chunk.ready(tier):
        return Standing.DEAD
    if chunk.awaits_update:
        return Standing.AWAITS_UPDATE
    return Standing.ACTIVE if chunk.id.role in (Role.PARAM, Role.GRAD) else Standing.STATE


def _takes_from_host(outcome: RoomPlan | Shortage, tier: Tier) -> bool:
    """Tell whether there is too little room, or HOST would lose a replica, for room on `tier`."""
    return isinstance(outcome, Shortage) or bool(outcome.drops_below or (tier is Tier.HOST and outcome.evictions_here))


# What a user is told when room cannot be made.


def _shortage_error(
    chunk: Chunk,
    tier: Tier,
    reader: object,
    shortage: Shortage,
    store: ChunkStore,
    *,
    meter: NonModelMeter | None,
    holders: Sequence[str],
) -> CapacityError:
    """Return the error that names what needs `chunk` on `tier`, both numbers, and the cap that would do.

    Args:
        shortage: what is missing, where.
        store: of all chunks.
        meter: of what else the cap on `tier` covers: a cap that does has room for what is there now, and one that is
            certain to do, for the most that was there so far.
        holders: parameters whose memory somebody keeps: a view, `.data`, an array, a graph that was not run.
    """
    below, chunks = neighbor(tier, store.pools), store.chunks.values()
    cap, below_cap = (store.pools[each].ledger.cap_nbytes for each in (tier, below))
    needed = cap + shortage.here_nbytes
    wanted = f"{reader}: {format_nbytes(chunk.nbytes)} more needed"
    for_all = sum(each.nbytes for each in chunks)  # with that on HOST, anything can leave DEVICE at any time
    may_grow = any(each.id.role.kind.is_of_call for each in chunks)
    free = format_nbytes(chunk.nbytes - shortage.here_nbytes)
    if below_cap == 0:
        enough = max(needed, for_all)
        text = (
            f"{wanted} for {chunk.label}, and {free} of {format_nbytes(cap)} RAM is left; raise memory.host (or "
            f"client.mem_tracer.overall_cpu_mem_ratio) to at least {_exact(needed)}{_also(needed, enough, may_grow)}"
        )
    elif shortage.below_nbytes is not None:
        below_needed = below_cap + shortage.below_nbytes
        enough = max(below_needed, for_all)
        text = (
            f"{wanted} on {tier.name} for {chunk.label}, but what would leave it finds no room on {below.name}, which "
            f"is {format_nbytes(shortage.below_nbytes)} short; raise {cap_key(below)} from "
            f"{format_nbytes(below_cap)} to {_exact(below_needed)}{_also(below_needed, enough, may_grow)}, "
            f"or {cap_key(tier)} from {format_nbytes(cap)} to {format_nbytes(needed)}"
        )
        tier, needed, cap = below, below_needed, below_cap
    else:
        enough = max(needed, _enough_for_access(chunks) if tier is Tier.DEVICE else for_all)
        pinned_nbytes = sum(c.nbytes for c in store.resident[tier].values() if c.replicas[tier].pins)
        others = ""
        if meter is not None and (now_nbytes := meter.now_nbytes):
            needed, enough = needed + now_nbytes, enough + max(now_nbytes, meter.highest_nbytes)
            others, may_grow = f" next to {format_nbytes(now_nbytes)} of activations", True
        text = (
            f"{wanted} on {tier.name} for {chunk.label}, only {free} can be made free "
            f"({format_nbytes(pinned_nbytes)} in use{others}){_advice(holders)} raise {cap_key(tier)} from "
            f"{format_nbytes(cap)} to at least {_exact(needed)}{_also(needed, enough, may_grow)}, or lower "
            "default_chunk_size"
        )
    return CapacityError(text, needed_nbytes=needed, cap_nbytes=cap, enough_nbytes=enough, tier=tier)


def _exact(nbytes: int) -> str:
    return f"{format_nbytes(nbytes)} ({nbytes} bytes)"


def _advice(holders: Sequence[str]) -> str:
    if not holders:
        return ";"
    kept = ", ".join(holders[:3]) + (f" and {len(holders) - 3} more" if len(holders) > 3 else "")
    return f". The memory of {kept} is kept by a tensor, an array or a graph that is alive: delete it, or"


def _enough_for_access(chunks: Collection[Chunk]) -> int:
    """Return a cap on DEVICE, in bytes, that no access of a step passes: all weights, and one chunk more.

    What is pinned are weights, and while a gradient lands its chunk. Updates run on HOST where DEVICE has no room.
    What is kept of calls for backward may be pinned, too, and counts as far as there is any by now.
    """
    kept = (each.nbytes for each in chunks if each.id.role.kind.is_weights or each.id.role.kind.is_of_call)
    return sum(kept) + max(each.nbytes for each in chunks)


def _also(needed_nbytes: int, enough_nbytes: int, may_grow: bool) -> str:
    if may_grow:
        return f" now; {_exact(enough_nbytes)} is certain to do for all chunks, unless activations grow"
    if enough_nbytes == needed_nbytes:
        return ", which is enough for every step"
    return f" now, and later accesses may need more; {_exact(enough_nbytes)} is certain to do"
