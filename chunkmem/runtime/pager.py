"""Serve accesses: what a plan has not brought is brought on demand, making room as `plan.demand` decides.

Every access that concerns memory on DEVICE is announced to the step's policy before it is served, and the end of one
after. The policy may bring what it needs: a plan is followed that way, and a trace recorded. What is there then is not
brought again, so that with a policy that does nothing everything works the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from chunkmem.errors import CapacityError, StateError, TierIOError
from chunkmem.plan.ahead import SHADOW
from chunkmem.plan.demand import RoomPlan, Shortage, TierRoom, make_room
from chunkmem.runtime.device import runtime_mode
from chunkmem.runtime.leaving import Leaving
from chunkmem.runtime.ledger import CACHE
from chunkmem.runtime.meter import NonModelMeter
from chunkmem.runtime.policy import NoSpeculativeUpdates, OnDemand, SpeculativeUpdates, StepPolicy
from chunkmem.runtime.shortage import shortage_error
from chunkmem.runtime.store import NO_CONTENT, Chunk, ChunkStore, Replica
from chunkmem.runtime.timestamps import Interval, Timestamp
from chunkmem.trace.model import Kind
from chunkmem.types import TIERS, Role, Tier, neighbor


def lost_error(reader: object, chunk: Chunk) -> TierIOError:
    """Return the error of who reads a chunk that has no content any more."""
    cause, advice = "copy or update", "load what was saved last into a new manager"
    if chunk.id.role in (Role.GRAD, Role.ACTIVATION):
        cause, advice = "copy", "call optimizer.zero_grad(), and repeat the step"
    return TierIOError(f"{reader}: {chunk.label} is lost, as the {cause} that was to save it has failed; {advice}")


class Holder(Protocol):
    """Keeps chunks pinned on DEVICE for those who use their memory in ways that no event tells of."""

    def relieve(self) -> bool:
        """Release what nobody uses any more; False if there is nothing."""
        ...

    def holders(self) -> tuple[str, ...]:
        """Return the names of the parameters whose memory somebody has."""
        ...


class _NoHolder:
    def relieve(self) -> bool:
        return False

    def holders(self) -> tuple[str, ...]:
        return ()


class Pager:
    """Knows no future itself: what is not where it is needed is brought with blocking copies."""

    def __init__(self, store: ChunkStore, *, meter: NonModelMeter | None = None) -> None:
        """Serve the chunks of `store`; `meter` says what else takes room under the cap on DEVICE, None: nothing."""
        self.store = store
        self._meter = meter
        self._leaving = Leaving(store)
        self.pinned_nbytes = dict.fromkeys(store.pools, 0)
        self.required_nbytes = dict.fromkeys(store.pools, 0)
        """The largest sum of pinned and requested bytes so far: the smallest cap known to be needed."""
        self._closed: str | None = None
        self._pid = os.getpid()
        self.holder: Holder = _NoHolder()
        """Asked when room is short."""
        self.held: set[Chunk] = set()
        """Chunks whose memory on DEVICE somebody outside may write to at any time, past autograd's version counters."""
        self.policy: StepPolicy = OnDemand()
        """Of the step that runs."""
        self.speculative: SpeculativeUpdates = NoSpeculativeUpdates()
        store.on_copy = lambda *copy: self.policy.copied(*copy)
        self._clock = 0

    @property
    def closed(self) -> str | None:
        """Why nothing can be served any more; None if it can.

        A process forked from this one has none of the host arena's memory. That is asked here and not set by a hook of
        `os.register_at_fork`, as those cannot be taken away again.
        """
        if self._closed is None and os.getpid() != self._pid:
            return "its manager lives in the parent process; a forked child cannot use it"
        return self._closed

    def close(self, reason: str) -> None:
        """Serve nothing from now on."""
        self._closed = reason

    def pin(self, chunk: Chunk, tier: Tier, *, reader: object, elastic: bool = False) -> Replica:
        """Bring the newest version of `chunk` to `tier` and keep it there until `unpin`.

        Args:
            reader: who needs it; its `str()` begins a message.
            elastic: the access could be served on the other tier as well, so it does not raise `required_nbytes`.

        Raises:
            CapacityError: everything that may leave `tier` is not enough; nothing has been moved.
        """
        replica = chunk.replicas.get(tier)
        if tier is Tier.DEVICE and (replica is None or replica.pins == 0):
            self.policy.event(Kind.HOLD, chunk, reader)
        return self._hold(chunk, tier, reader, elastic)

    def _hold(self, chunk: Chunk, tier: Tier, reader: object, elastic: bool) -> Replica:
        replica = chunk.replicas.get(tier)
        if replica is None or replica.version != chunk.version:
            replica = self._bring(chunk, tier, reader, elastic)
        if tier is Tier.DEVICE and chunk.home is not None and not chunk.home.is_bound:
            with runtime_mode():
                chunk.home.bind()
        self._pin(chunk, tier, elastic=elastic)
        return replica

    def _pin(self, chunk: Chunk, tier: Tier, *, elastic: bool) -> None:
        replica = chunk.replicas[tier]
        self._touch(replica)
        replica.pins += 1
        if replica.pins == 1:
            pinned = self.pinned_nbytes[tier] = self.pinned_nbytes[tier] + chunk.nbytes
            if not elastic:
                self._note_required(tier, pinned)

    def hold_empty(self, chunk: Chunk, tier: Tier, reader: object) -> None:
        """Like `pin`, for a chunk whose content is about to be made again.

        Raises: what `pin` does.
        """
        if tier not in chunk.replicas:
            self._require_open(reader)
            self.policy.before_demand()
            self._make_room(chunk, tier, reader, elastic=True)
            self.store.take_slab(chunk, tier)
        self._pin(chunk, tier, elastic=True)

    def pin_remote(self, chunk: Chunk, *, reader: object) -> None:
        """Like `pin`, for a chunk of another rank, which an exchange is about to bring to DEVICE.

        Raises: what `pin` does.
        """
        replica = chunk.replicas.get(Tier.DEVICE)
        if replica is None or replica.pins == 0:
            self.policy.event(Kind.HOLD, chunk, reader)
        if Tier.DEVICE not in chunk.replicas:
            self._require_open(reader)
            self.policy.before_demand()
            self._make_room(chunk, Tier.DEVICE, reader, elastic=False)
            self.store.take_slab(chunk, Tier.DEVICE)
        self._pin(chunk, Tier.DEVICE, elastic=False)

    def exchange(self, chunks: Sequence[Chunk], *, reader: object) -> None:
        """Announce that chunks, which are pinned on DEVICE, begin to be exchanged with other ranks."""
        for chunk in chunks:
            self.policy.event(Kind.EXCHANGE, chunk, reader)

    def arrive(self, chunks: Sequence[Chunk], wait: Callable[[], None], *, reader: object, issued: Timestamp) -> None:
        """Announce that an exchange is waited for, wait for it, and say how long that took."""
        for chunk in chunks:
            self.policy.event(Kind.ARRIVE, chunk, reader)
        ready = self.store.clock.timestamp()
        with runtime_mode():
            wait()
        arrived = self.store.clock.timestamp()
        for chunk in chunks:
            self.policy.arrived(chunk, issued, Interval(ready, arrived))
            ready = arrived  # all have been waited for at once

    def unpin(self, chunk: Chunk, tier: Tier) -> None:
        """Undo one `pin`."""
        if self._let_go(chunk, tier) and tier is Tier.DEVICE:
            self.policy.event(Kind.RELEASE, chunk, None)
            if chunk.is_remote:
                self.discard_remote(chunk)

    def discard_remote(self, chunk: Chunk) -> None:
        """Drop the memory on DEVICE of a chunk that another rank has now, unless a plan is going to do so."""
        if Tier.DEVICE in chunk.replicas and not self.policy.is_planned:
            self.store.drop(chunk, Tier.DEVICE)

    def _let_go(self, chunk: Chunk, tier: Tier) -> bool:
        """Undo one `_hold`; tell whether it was the last."""
        replica = chunk.replicas[tier]
        assert replica.pins > 0, f"{chunk.label} is not pinned on {tier.value}"
        replica.pins -= 1
        if replica.pins == 0:
            self.pinned_nbytes[tier] -= chunk.nbytes
            if chunk.is_remote:
                replica.version = NO_CONTENT
            self._leaving.announce(chunk, tier)
        return replica.pins == 0

    @contextmanager
    def updating(self, chunks: Sequence[Chunk], *, reader: object, stateless_tier: Tier) -> Iterator[Tier]:
        """Keep what an update of a group needs on the tier it runs on, which is the value.

        Args:
            chunks: PARAM, GRAD, then the states.
            reader: see `pin`.
            stateless_tier: where it runs if there are no states, and no plan says it.

        Raises: what `pin` does.
        """
        self.policy.event(Kind.UPDATE, chunks[0], reader)
        tier = self.policy.update_tier(chunks[0].id.group)
        states = chunks[2:]
        if tier is None and states:
            tier = Tier.DEVICE if all(chunk.ready(Tier.DEVICE) for chunk in states) else Tier.HOST
        elif tier is None:
            tier = stateless_tier
        try:
            self._hold_all(chunks, tier, reader)
        except CapacityError as error:
            if tier is Tier.HOST:
                raise
            tier = Tier.HOST  # where a plan has it on DEVICE, users may hold on to what was to leave
            try:
                self._hold_all(chunks, tier, reader)
            except CapacityError:
                raise error from None
        try:
            yield tier
        finally:
            for chunk in chunks:
                self._let_go(chunk, tier)

    def _hold_all(self, chunks: Sequence[Chunk], tier: Tier, reader: object) -> None:
        """Have all of a group on a tier for its update, or none of it held."""
        held = []
        try:
            for chunk in chunks:
                if chunk.can_be_rounded and chunk.newest_tier() is None:
                    self.hold_empty(chunk, tier, reader)
                else:
                    self._hold(chunk, tier, reader, elastic=True)
                held.append(chunk)
        except BaseException:
            for chunk in held:
                self._let_go(chunk, tier)
            raise

    def consume(self, chunk: Chunk) -> None:
        """The content is used up; see `ChunkStore.consume`."""
        self.policy.event(Kind.CONSUME, chunk, None)
        self.store.consume(chunk)

    def use(self, chunk: Chunk, tier: Tier, *, reader: object) -> Replica:
        """Bring `chunk` to `tier` for a write that is over before the next access: like `pin` and `unpin`."""
        if tier is Tier.DEVICE:
            self.policy.event(Kind.WRITE, chunk, reader)
        replica = chunk.replicas.get(tier)
        if replica is None or replica.version != chunk.version:
            replica = self._bring(chunk, tier, reader, elastic=False)
        elif replica.pins == 0:
            self._note_required(tier, self.pinned_nbytes[tier] + chunk.nbytes)
        self._touch(replica)
        return replica

    def create(self, chunk: Chunk, tier: Tier, *, reader: object, zero: bool, elastic: bool = False) -> Replica:
        """Begin new content of `chunk` on `tier`, making room first; see `ChunkStore.create`."""
        self._require_open(reader)
        if tier is Tier.DEVICE and not elastic:
            self.policy.event(Kind.CREATE, chunk, reader)
        if elastic or tier not in chunk.replicas:
            self.policy.before_demand()
        if tier not in chunk.replicas:
            self._make_room(chunk, tier, reader, elastic)
        elif not elastic:
            self._note_required(tier, self.pinned_nbytes[tier] + chunk.nbytes)
        replica = self.store.create(chunk, tier, zero=zero)
        self._touch(replica)
        return replica

    def place(self, chunk: Chunk, *, reader: object) -> Replica:
        """Begin content on HOST, or on DEVICE where HOST has no room left: how a model is packed."""
        return self.create(chunk, self._tier_with_room(chunk), reader=reader, zero=False, elastic=True)

    def restore(self, chunk: Chunk) -> bool:
        """Make content that was dropped everywhere again, on HOST if there is room; False if there is none."""
        if chunk.newest_tier() is not None or not chunk.can_be_rounded:
            return True
        try:
            self._make_again(chunk, self._tier_with_room(chunk), "resuming", elastic=True)
        except CapacityError:
            return False
        return True

    def notice_writes(self, chunk: Chunk) -> None:
        """Count what a user wrote to parameters as a new version; their master copy follows."""
        if chunk.home is None or not chunk.ready(Tier.DEVICE):
            return
        is_open = chunk in self.held or chunk.is_written_past
        written = chunk.home.take_written() or (is_open and self.store.may_differ(chunk, Tier.DEVICE))
        if written:
            self.policy.drain()
            with self._where_it_was(chunk):
                self.store.mark_written(chunk, Tier.DEVICE)
                self.store.follow(chunk, Tier.DEVICE)

    @contextmanager
    def _where_it_was(self, chunk: Chunk) -> Iterator[None]:
        """If a plan is followed, let a chunk and its master copy have the replicas again that the plan has of them.

        A write inside of a step, such as that of `nn.Embedding(max_norm=...)`, comes in each one: without its copy in
        HOST the plan could not be followed on. Copies have to be over.
        """
        chunks = [each for each in (chunk, chunk.master) if each is not None]
        before = [(each, tier, each.ready(tier)) for each in chunks for tier in each.replicas] * self.policy.is_planned
        yield
        for each, tier, was_ready in before:
            source = each.newest_tier()
            if tier not in each.replicas:
                self.store.take_slab(each, tier)
            if was_ready and source is not None and not each.ready(tier):
                self.store.copy(each, source, tier)

    def _touch(self, replica: Replica) -> None:
        self._clock += 1
        replica.last_use = self._clock

    def _note_required(self, tier: Tier, nbytes: int) -> None:
        if nbytes > self.required_nbytes[tier]:
            self.required_nbytes[tier] = nbytes

    def _bring(self, chunk: Chunk, tier: Tier, reader: object, elastic: bool) -> Replica:
        self._require_open(reader)
        self.policy.before_demand()
        self.notice_writes(chunk)
        source = chunk.newest_tier()
        if source is None and chunk.can_be_rounded:
            return self._make_again(chunk, tier, reader, elastic)
        if source is None and chunk.is_remote:
            raise StateError(
                f"{reader}: {chunk.label} belongs to another rank and is read outside of its unit; read it inside "
                "that module's forward, or inside manager.gather()"
            )
        if source is None:
            raise lost_error(reader, chunk)
        if tier not in chunk.replicas:
            # The source must survive the making of room: it may look like a copy that the tier below can do without.
            chunk.replicas[source].pins += 1
            try:
                self._make_room(chunk, tier, reader, elastic)
            finally:
                chunk.replicas[source].pins -= 1
                self._leaving.announce(chunk, source)
            self.store.take_slab(chunk, tier)
        self.store.copy(chunk, source, tier)
        return chunk.replicas[tier]

    def _make_again(self, chunk: Chunk, tier: Tier, reader: object, elastic: bool) -> Replica:
        """Bring a chunk of which no replica is left: it is rounded from its master copy."""
        if tier not in chunk.replicas:
            self._make_room(chunk, tier, reader, elastic)
            self.store.take_slab(chunk, tier)
        self.store.round(chunk, tier)
        return chunk.replicas[tier]

    def _require_open(self, reader: object) -> None:
        if self.closed is not None:
            raise StateError(f"{reader}: {self.closed}")

    def _make_room(self, chunk: Chunk, tier: Tier, reader: object, elastic: bool) -> None:
        below = neighbor(tier)
        if not elastic:
            self._note_required(tier, self.pinned_nbytes[tier] + chunk.nbytes)
        outcome = make_room(chunk.nbytes, self._room(tier), self._room(below))
        if self.store.pools[Tier.HOST].ledger.now.get(SHADOW) and self._takes_from_host(outcome, tier):
            self.speculative.reserve({})  # speculative updates are a gain: no replica goes, and nothing stops, for them
            outcome = make_room(chunk.nbytes, self._room(tier), self._room(below))
        while isinstance(outcome, RoomPlan) and self._were_written(outcome):
            outcome = make_room(chunk.nbytes, self._room(tier), self._room(below))
        if isinstance(outcome, Shortage):
            # A write that nobody has noticed yet makes a copy on the other tier stale, and its bytes free.
            for place in {Tier.DEVICE, tier}:
                for resident in list(self.store.resident[place].values()):
                    self.notice_writes(resident)
            outcome = make_room(chunk.nbytes, self._room(tier), self._room(below))
        ledger = self.store.pools[tier].ledger
        if isinstance(outcome, Shortage) and ledger.cap_nbytes < ledger.limit_nbytes:
            # The warm-up share is a wish; the largest moment has to fit all the same.
            ledger.cap_nbytes = min(ledger.limit_nbytes, ledger.cap_nbytes + outcome.here_nbytes)
            outcome = make_room(chunk.nbytes, self._room(tier), self._room(below))
        while isinstance(outcome, Shortage) and self.holder.relieve():
            outcome = make_room(chunk.nbytes, self._room(tier), self._room(below))
        if isinstance(outcome, Shortage):
            raise shortage_error(
                chunk,
                tier,
                reader,
                outcome,
                below=below,
                pools=self.store.pools,
                chunks=self.store.chunks.values(),
                pinned_nbytes=self.pinned_nbytes[tier],
                meter=self._meter if tier is Tier.DEVICE else None,
                holders=self.holder.holders(),
            )
        self._evict(outcome, tier, below)

    def shrink(self, tier: Tier, nbytes: int) -> None:
        """Have so many bytes leave a tier, if that is possible: something else is going to need them."""
        below = neighbor(tier)
        need_nbytes = nbytes + self._room(tier).free_nbytes
        outcome = make_room(need_nbytes, self._room(tier), self._room(below))
        while isinstance(outcome, RoomPlan) and self._were_written(outcome):
            outcome = make_room(need_nbytes, self._room(tier), self._room(below))
        if isinstance(outcome, RoomPlan):
            self._evict(outcome, tier, below)

    def _takes_from_host(self, outcome: RoomPlan | Shortage, tier: Tier) -> bool:
        """Tell whether there is too little room, or HOST would lose a replica, for room on `tier`."""
        return isinstance(outcome, Shortage) or bool(
            outcome.drops_below or (tier is Tier.HOST and outcome.evictions_here)
        )

    def _were_written(self, plan: RoomPlan) -> bool:
        """Notice writes to what is about to leave; tell whether there were any, so that it has to be decided again."""
        leaving = (*plan.drops_below, *(eviction.chunk for eviction in plan.evictions_here))
        chunks = [self.store.chunks[key] for key in leaving]
        before = [chunk.version for chunk in chunks]
        for chunk in chunks:
            self.notice_writes(chunk)
        return [chunk.version for chunk in chunks] != before

    def _evict(self, plan: RoomPlan, tier: Tier, below: Tier) -> None:
        store = self.store
        for drop in plan.drops_below:
            store.drop(store.chunks[drop], below)
        for eviction in plan.evictions_here:
            victim = store.chunks[eviction.chunk]
            if eviction.spill:
                if below not in victim.replicas:
                    store.take_slab(victim, below)
                store.copy(victim, tier, below)
            store.drop(victim, tier)

    def _tier_with_room(self, chunk: Chunk) -> Tier:
        """Return the first tier below DEVICE that a chunk fits as it is, else DEVICE, which can make room."""
        fitting = (tier for tier in TIERS[1:] if self.store.pools[tier].ledger.spare_nbytes >= chunk.nbytes)
        return next(fitting, Tier.DEVICE)

    def _free_nbytes(self, tier: Tier) -> int:
        ledger = self.store.pools[tier].ledger
        return ledger.free_nbytes + ledger.now.get(CACHE, 0)

    def _room(self, tier: Tier) -> TierRoom:
        return self._leaving.room(tier, self._free_nbytes(tier))
