"""Serve accesses: what a plan has not brought is brought on demand, making room as `plan.demand` decides.

Every access that concerns memory on DEVICE is announced to the step's policy before it is served, and the end of one
after. The policy may bring what it needs: a plan is followed that way, and a trace recorded. What is there then is not
brought again, so that with a policy that does nothing everything works the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

from chunkmem.data.errors import CapacityError, StateError
from chunkmem.data.trace import Kind
from chunkmem.data.types import MEMORY, TIERS, Tier, neighbor
from chunkmem.plan.model import Lane
from chunkmem.runtime.chunk import NO_CONTENT, Chunk, Replica, SavedMemory
from chunkmem.runtime.device import runtime_mode
from chunkmem.runtime.eviction import Evictor, Holder, NoHolder
from chunkmem.runtime.failed import lost_error
from chunkmem.runtime.interrupts import InterruptGuard
from chunkmem.runtime.meter import NonModelMeter
from chunkmem.runtime.policy import NoSpeculativeUpdates, OnDemand, SpeculativeUpdates, StepPolicy
from chunkmem.runtime.step_events import StepEvents
from chunkmem.runtime.store import ChunkStore
from chunkmem.runtime.timestamps import Interval, Timestamp
from chunkmem.runtime.writes import residency_kept


class Pager:
    """Knows no future itself: what is not where it is needed is brought with blocking copies."""

    def __init__(
        self,
        store: ChunkStore,
        *,
        meter: NonModelMeter | None = None,
        follow_stream: Callable[[], object] = lambda: None,
        speculative: SpeculativeUpdates | None = None,
        interrupts: InterruptGuard | None = None,
    ) -> None:
        """Serve chunks.

        Args:
            store: that has them.
            meter: says what else takes room under the cap on DEVICE; None: nothing.
            follow_stream: called before each access to DEVICE, where several streams may compute. See
                `ComputeDevice.current_stream` in `runtime/device.py`.
            speculative: updates of groups ahead of the step; None: there are none.
            interrupts: holds signals while chunks are moved; None: nothing moves.
        """
        self.store = store
        self.interrupts = interrupts
        self._follow_stream = follow_stream
        self.speculative: SpeculativeUpdates = speculative or NoSpeculativeUpdates()
        self._evictor = Evictor(store, self.notice_writes, self.speculative, meter)
        self.pinned_nbytes = dict.fromkeys(store.pools, 0)
        self.required_nbytes = dict.fromkeys(store.pools, 0)
        """The largest sum of pinned and requested bytes so far: the smallest cap known to be needed."""
        self._closed: str | None = None
        self._pid = os.getpid()
        self.holder: Holder = NoHolder()
        """Asked when room is short."""
        self.held: dict[Chunk, None] = {}
        """Chunks whose memory on DEVICE somebody outside may write to at any time, past autograd's version counters."""
        self.last_updates: dict[int, None] = {}
        """Groups in the order in which they were updated last."""
        self.policy: StepPolicy = OnDemand()
        """Policy of the step that runs."""
        self.events = StepEvents()
        """Listeners of a step."""
        self._is_by_block = False
        """More is pinned at once than has to be: [Note: Blocks as a whole] in `chunkmem.modules.blocks`."""
        self.events.by_block.append(partial(setattr, self, "_is_by_block"))
        store.on_copy = self._copied
        self._clock = 0

    @property
    def closed(self) -> str | None:
        """Why nothing can be served any more; None if it can.

        A process forked from this one has none of the host arena's memory. That is asked here and not set by a hook of
        `os.register_at_fork`, as those cannot be taken away again.
        """
        if self._closed is None and os.getpid() != self._pid:
            return "its manager lives in the parent process; a forked child cannot use it"
        return (self.interrupts is not None and self.interrupts.broken) or self._closed

    @property
    def can_close(self) -> bool:
        """It is not closed yet, but may be broken, and this is not a process that was forked from the manager's."""
        return self._closed is None and os.getpid() == self._pid

    def close(self, reason: str) -> None:
        """Serve nothing from now on."""
        self._closed = reason

    def _failed(self) -> None:
        for tell in self.events.failed:
            tell()

    def pin(self, chunk: Chunk, tier: Tier | None = None, *, reader: object, elastic: bool = False) -> Replica:
        """Bring the newest version of `chunk` to `tier` and keep it there until `unpin`.

        Args:
            chunk: which.
            tier: None: where modules compute with it.
            reader: who needs it; its `str()` begins a message.
            elastic: the access could be served on the other tier as well, so it does not raise `required_nbytes`.

        Raises:
            CapacityError: everything that may leave `tier` is not enough; nothing has been moved.
        """
        self._follow_stream()
        tier = tier or chunk.compute_tier
        replica = chunk.replicas.get(tier)
        if tier is Tier.DEVICE and (replica is None or replica.pins == 0):
            self.policy.event(Kind.HOLD, chunk, reader)
        try:
            return self._hold(chunk, tier, reader, elastic)
        except BaseException:
            self._failed()
            raise

    def _hold(self, chunk: Chunk, tier: Tier, reader: object, elastic: bool) -> Replica:
        replica = chunk.replicas.get(tier)
        if not elastic and (replica is None or replica.pins == 0):
            self._note_required(tier, chunk.nbytes)
        if replica is None or replica.version != chunk.version:
            replica = self._bring(chunk, tier, reader)
        if tier is chunk.compute_tier and chunk.home is not None and not chunk.home.is_bound:
            with runtime_mode():
                chunk.home.bind()
        self._pin(chunk, tier)
        if self.store.snapshot is not None:
            self.store.snapshot.pinned(chunk, tier)
        return replica

    def expose(self, chunk: Chunk) -> None:
        """Somebody outside may write to a chunk that is pinned where modules compute with it, until it is not held."""
        self.held[chunk] = None
        self.store.before_change(chunk)

    def _pin(self, chunk: Chunk, tier: Tier) -> None:
        replica = chunk.replicas[tier]
        self._clock += 1
        replica.last_use = self._clock
        replica.pins += 1
        if replica.pins == 1:
            self.pinned_nbytes[tier] += chunk.nbytes

    def pin_remote(self, chunk: Chunk, *, reader: object) -> None:
        """Like `pin`, for a chunk of another rank, which an exchange is about to bring to DEVICE.

        Raises: what `pin` does.
        """
        self._follow_stream()
        replica = chunk.replicas.get(Tier.DEVICE)
        if replica is None or replica.pins == 0:
            self.policy.event(Kind.HOLD, chunk, reader)
            self._note_required(Tier.DEVICE, chunk.nbytes)
        self._hold_uninitialized(chunk, Tier.DEVICE, reader)

    def _hold_uninitialized(self, chunk: Chunk, tier: Tier, reader: object) -> None:
        if tier not in chunk.replicas:
            self.require_open(reader)
            self.policy.before_demand()
            self._take_slab(chunk, tier, reader)
        self._pin(chunk, tier)

    def exchange(self, chunks: Sequence[Chunk], *, reader: object) -> None:
        """Announce that chunks, which are pinned, begin to be exchanged with other ranks."""
        self._follow_stream()
        for chunk in _on_device(chunks):
            self.policy.event(Kind.EXCHANGE, chunk, reader)

    def arrive(self, chunks: Sequence[Chunk], wait: Callable[[], None], *, reader: object, issued: Timestamp) -> None:
        """Announce that an exchange is waited for, wait for it, and say how long that took."""
        for chunk in _on_device(chunks):
            self.policy.event(Kind.ARRIVE, chunk, reader)
        ready = self.store.clock.timestamp()
        with runtime_mode():
            wait()
        arrived = self.store.clock.timestamp()
        for chunk in _on_device(chunks):
            if (log := self.policy.log()) is not None:
                log.exchanged(chunk, issued, Interval(ready, arrived))
            ready = arrived  # all have been waited for at once

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, COMPUTE waits for another rank."""
        ready = self.store.clock.timestamp()
        yield
        if (log := self.policy.log()) is not None:
            log.waited(Lane.COLLECTIVE, Interval(ready, self.store.clock.timestamp()))

    def _copied(self, chunk: Chunk, source: Tier, target: Tier, taken: Interval) -> None:
        if (log := self.policy.log()) is not None:
            log.served(chunk, source, target, taken)

    def unpin(self, chunk: Chunk, tier: Tier | None = None) -> None:
        """Undo one `pin`."""
        self._follow_stream()
        tier = tier or chunk.compute_tier
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
            self._evictor.orders[tier].announced.add(chunk.id)
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
        self._follow_stream()
        tier: Tier | None = Tier.HOST
        if chunks[0].compute_tier is Tier.DEVICE:
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
            if chunks[0].compute_tier is Tier.HOST:
                raise
            tier = Tier.HOST if tier is Tier.DEVICE else Tier.DEVICE  # what was to leave the first choice may be in use
            try:
                self._hold_all(chunks, tier, reader)
            except CapacityError:
                raise error from None
        group = chunks[0].id.group
        self.last_updates.pop(group, None)
        self.last_updates[group] = None
        try:
            for chunk in chunks:
                self.store.before_change(chunk)
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
                    self._hold_uninitialized(chunk, tier, reader)  # the update makes its content again
                else:
                    self._hold(chunk, tier, reader, elastic=True)
                held.append(chunk)
        except BaseException:
            for chunk in held:
                self._let_go(chunk, tier)
            raise

    def consume(self, chunk: Chunk) -> None:
        """The content is used up, also if this raises what moving other chunks has; see `ChunkStore.consume`."""
        self._follow_stream()
        try:
            if chunk.compute_tier is Tier.DEVICE:
                self.policy.event(Kind.CONSUME, chunk, None)
        finally:
            self.store.consume(chunk)

    def use(self, chunk: Chunk, tier: Tier, *, reader: object) -> Replica:
        """Bring `chunk` to `tier` for a write that is over before the next access: like `pin` and `unpin`."""
        self._follow_stream()
        if tier is Tier.DEVICE:
            self.policy.event(Kind.WRITE, chunk, reader)
        replica = chunk.replicas.get(tier)
        if replica is None or replica.pins == 0:
            self._note_required(tier, chunk.nbytes)
        if replica is None or replica.version != chunk.version:
            try:
                replica = self._bring(chunk, tier, reader)
            except BaseException:
                self._failed()
                raise
        self._clock += 1
        replica.last_use = self._clock
        return replica

    def create(
        self,
        chunk: Chunk,
        tier: Tier,
        *,
        reader: object,
        zero: bool,
        elastic: bool = False,
        is_of_step: bool = True,
        saved: SavedMemory | None = None,
    ) -> Replica:
        """Begin new content of `chunk` on `tier`, making room first; see `ChunkStore.create`.

        Content that is there already is that of `saved`. A plan may free and allocate the chunk until then.
        `is_of_step`: steps to come do the same, and plan for it.
        """
        self.require_open(reader)
        self._follow_stream()
        if tier is Tier.DEVICE and is_of_step:
            self.policy.event(Kind.CREATE, chunk, reader)
        if saved is not None:
            chunk.saved = saved
        if not is_of_step or tier not in chunk.replicas:
            self.policy.before_demand()
        if not elastic:
            self._note_required(tier, chunk.nbytes)
        try:
            if tier not in chunk.replicas:
                self._make_room(chunk, tier, reader)
            replica = self.store.create(chunk, tier, zero=zero)
            if saved is not None:
                replica.pieces = saved.fill()
        except BaseException:
            self._failed()
            raise
        self._clock += 1
        replica.last_use = self._clock
        return replica

    def place(self, chunk: Chunk, *, reader: object) -> Replica:
        """Begin content on HOST, or on DEVICE where HOST has no room left and modules compute with nothing of it there.

        That is how a model is packed. With a disk there is room on HOST.
        """
        is_of_host = chunk.compute_tier is Tier.HOST and not chunk.id.role.kind.stays
        tier = Tier.HOST if is_of_host or self.store.host_is_gateway else self._tier_with_room(chunk)
        return self.create(chunk, tier, reader=reader, zero=False, elastic=True, is_of_step=False)

    def in_memory(self, chunk: Chunk, *, reader: object) -> Tier | None:
        """Return a tier on which the newest content is in memory, to be read or written in place; None: there is none.

        What DISK alone has is brought to HOST.

        Raises: what `pin` does.
        """
        tier = chunk.newest_tier()
        if tier is not None and tier not in MEMORY:
            self._bring(chunk, Tier.HOST, reader)
            return Tier.HOST
        return tier

    def to_write(self, chunk: Chunk, *, reader: object) -> list[Tier]:
        """Return all tiers that have the newest content, for one who changes it on each. A copy on DISK goes.

        Raises: what `pin` does.
        """
        self.in_memory(chunk, reader=reader)
        for tier in chunk.replicas.keys() - {*MEMORY}:
            self.policy.before_demand()
            self.store.drop(chunk, tier)
        return [tier for tier in TIERS if chunk.ready(tier)]

    def keep(self, chunk: Chunk, *, reader: object) -> None:
        """Have a chunk stay where modules compute with it, until `let_go`: no step has to have room for that.

        Raises: what `pin` does.
        """
        self._follow_stream()
        self._hold(chunk, chunk.compute_tier, reader, elastic=True)
        self.begin_spare(chunk)

    def let_go(self, chunk: Chunk) -> None:
        """Undo a `keep`."""
        self.pinned_nbytes[chunk.compute_tier] += chunk.nbytes
        self._let_go(chunk, chunk.compute_tier)

    def begin_spare(self, chunk: Chunk) -> None:
        """A chunk is pinned on, though no step has to have room for that: it does not count in `required_nbytes`."""
        self.pinned_nbytes[chunk.compute_tier] -= chunk.nbytes

    def end_spare(self, chunk: Chunk) -> None:
        """A chunk that was pinned on is in use again."""
        self._note_required(chunk.compute_tier, chunk.nbytes)
        self.pinned_nbytes[chunk.compute_tier] += chunk.nbytes

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Inside, no step needs what is pinned: `required_nbytes` stays what it is."""
        required = dict(self.required_nbytes)
        try:
            yield
        finally:
            self.required_nbytes.update(required)

    @contextmanager
    def staying(self, chunk: Chunk) -> Iterator[None]:
        """Inside, the content of a chunk stays in the memory where it is, whatever else is brought there."""
        tiers = [tier for tier in MEMORY if chunk.ready(tier)]
        for tier in tiers:
            self._pin(chunk, tier)
        try:
            yield
        finally:
            for tier in tiers:
                self._let_go(chunk, tier)

    def restore(self, chunk: Chunk) -> bool:
        """Make content that was dropped everywhere again, below DEVICE if there is room; False if there is none."""
        if chunk.newest_tier() is not None or not chunk.can_be_rounded:
            return True
        try:
            self._make_again(chunk, self._tier_with_room(chunk), "resuming")  # none gives way to it
        except CapacityError:
            return False
        return True

    def notice_writes(self, chunk: Chunk, *, is_outside: bool = False) -> None:
        """Count what a user wrote to the parameters of a chunk as a new version; their master copy follows.

        No event tells of that. Copies are over before the new version counts.

        Args:
            chunk: of any role; only PARAM has what a user writes to.
            is_outside: nothing but an operator outside of modules has used it since the last look.
        """
        store, tier, home = self.store, chunk.compute_tier, chunk.home
        if home is None or not chunk.ready(tier):
            return
        is_held = chunk in self.held
        with nullcontext() if store.snapshot is None else store.snapshot.noticing():
            if not (home.was_written() or ((is_held or chunk.is_written_past) and store.may_differ(chunk, tier))):
                return
            self.policy.drain()  # may raise an error: the next look finds the write again
            home.take_written()
            chunk.is_written_inside = chunk.is_written_inside or not (is_held or is_outside)
            with residency_kept(chunk, store) if self.policy.is_planned else nullcontext():
                store.mark_written(chunk, tier)
                store.follow(chunk, tier)

    def _note_required(self, tier: Tier, more_nbytes: int) -> None:
        """So much is about to be in use on a tier, in addition to what is pinned there."""
        nbytes = self.pinned_nbytes[tier] + more_nbytes
        if nbytes > self.required_nbytes[tier] and not self._is_by_block:
            self.required_nbytes[tier] = nbytes

    def _bring(self, chunk: Chunk, tier: Tier, reader: object) -> Replica:
        self.require_open(reader)
        self.policy.before_demand()
        self.notice_writes(chunk)
        source = chunk.newest_tier()
        if source is None and chunk.can_be_rounded:
            return self._make_again(chunk, tier, reader)
        if source is None and chunk.is_remote:
            raise StateError(
                f"{reader}: {chunk.label} belongs to another rank and is read outside of its unit; read it inside "
                "that module's forward, or inside manager.gather()"
            )
        if source is None:
            raise lost_error(reader, chunk)
        if source is not (gateway := neighbor(tier, self.store.pools, end=source)):
            source = gateway
            self._bring(chunk, source, reader)
        if tier not in chunk.replicas:
            # The source must survive the making of room: it may look like a copy that the tier below can do without.
            chunk.replicas[source].pins += 1
            try:
                self._take_slab(chunk, tier, reader)
            finally:
                chunk.replicas[source].pins -= 1
                self._evictor.announce(chunk, source)
        self.store.copy(chunk, source, tier)
        return chunk.replicas[tier]

    def _make_again(self, chunk: Chunk, tier: Tier, reader: object) -> Replica:
        """Bring a chunk of which no replica is left: it is rounded from its master copy."""
        if tier not in chunk.replicas:
            self._take_slab(chunk, tier, reader)
        self.store.round(chunk, tier)
        return chunk.replicas[tier]

    def require_open(self, reader: object = "this manager cannot be used") -> None:
        """Raise a `StateError` if the manager is closed."""
        if self.closed is not None:
            raise StateError(f"{reader}: {self.closed}")

    def _take_slab(self, chunk: Chunk, tier: Tier, reader: object) -> None:
        self._make_room(chunk, tier, reader)
        self.store.take_slab(chunk, tier)

    def _make_room(self, chunk: Chunk, tier: Tier, reader: object) -> None:
        self._evictor.make_room(chunk, tier, reader=reader, holder=self.holder)

    def shrink(self, tier: Tier, nbytes: int) -> None:
        """Have so many bytes leave a tier, if that is possible: something else is going to need them."""
        self._evictor.shrink(tier, nbytes)

    def _tier_with_room(self, chunk: Chunk) -> Tier:
        """Return the first tier below DEVICE that a chunk fits as it is, else DEVICE, which can make room."""
        pools = self.store.pools
        fitting = (tier for tier in TIERS[1:] if tier in pools and pools[tier].ledger.spare_nbytes >= chunk.nbytes)
        return next(fitting, Tier.DEVICE)


def _on_device(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return those that are computed with on DEVICE: of the others, policies hear nothing."""
    return [chunk for chunk in chunks if chunk.compute_tier is Tier.DEVICE]
