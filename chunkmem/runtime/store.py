"""Replicas of chunks on tiers: take a slab, fill it, drop it. Who comes and goes is decided elsewhere."""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

import torch

from chunkmem.data.errors import TierIOError
from chunkmem.data.types import MEMORY, TIERS, ChunkId, Role, Tier
from chunkmem.plan.model import LANE_LINKS, LINK_LANES, Lane
from chunkmem.runtime.arena import HostArena
from chunkmem.runtime.chunk import NO_CONTENT, Chunk, Replica, read_slot, slot_views
from chunkmem.runtime.device import runtime_mode
from chunkmem.runtime.events import copy_error
from chunkmem.runtime.issued import IssuedCopy, LeftUpdate
from chunkmem.runtime.pool import DevicePool, Slab, SlabPool
from chunkmem.runtime.snapshot import Snapshot
from chunkmem.runtime.timestamps import Clock, Interval

_MANY_COPIES = 32
"""Number of copies on record at which the finished ones are dropped."""


class ChunkStore:
    """All chunks and their replicas. Keeps `ledger = sum over live replicas` true at any time."""

    def __init__(self, pools: Mapping[Tier, SlabPool], clock: Clock) -> None:
        self.pools = pools
        self.host_is_gateway = not pools.keys() <= {*MEMORY}
        """HOST is the gateway of a tier below it, for which it makes room."""
        self.clock = clock
        """Times what DEVICE computes, and copies that are waited for."""
        self.chunks: dict[ChunkId, Chunk] = {}
        self.resident: dict[Tier, dict[ChunkId, Chunk]] = {tier: {} for tier in pools}
        self.moved: dict[Lane, int] = dict.fromkeys(LANE_LINKS, 0)
        """Bytes copied on each lane since the manager was made."""
        self.issued: deque[IssuedCopy | LeftUpdate] = deque()
        """Copies and updates on lanes that may be under way yet, or have failed; in this order."""
        self.num_outdated = 0
        """Replicas that went because another one was written to: a plan frees them before."""
        self.on_copy: Callable[[Chunk, Tier, Tier, Interval], None] = lambda chunk, source, target, taken: None
        """Called after each copy that was waited for: chunk, source, target, and when COMPUTE did nothing else."""
        self.on_sooner: Callable[[Chunk, Tier], None] = lambda chunk, tier: None
        """Called when a replica may leave, or sooner than before: it has come, awaits its update, or is used up."""
        self.snapshot: Snapshot | None = None
        """Snapshot that another thread reads while chunks change; None: none is taken. See [Note: Snapshots]."""

    def add(self, chunk: Chunk) -> None:
        """Register a chunk; it has no content yet."""
        assert chunk.id not in self.chunks
        self.chunks[chunk.id] = chunk

    @property
    def staying_tier(self) -> Tier:
        """Where chunks are made that stay on one tier: the last of the chain that may hold something."""
        return next(tier for tier in reversed(TIERS) if tier in self.pools and self.pools[tier].ledger.limit_nbytes)

    def weights(self, group: int) -> Chunk:
        """Return the PARAM chunk of a group."""
        return self.chunks[ChunkId(Role.PARAM, group)]

    def empty(self, chunk: Chunk) -> None:
        """Give all memory of a chunk back; its content is lost."""
        self.consume(chunk)
        if chunk.compute_tier in chunk.replicas:
            self.drop(chunk, chunk.compute_tier)

    def remove(self, chunk: Chunk) -> None:
        """Give all memory of a chunk back, and forget it; its content is lost."""
        self.empty(chunk)
        del self.chunks[chunk.id]

    def before_change(self, chunk: Chunk) -> None:
        """Say that what a chunk holds is about to change, and wait until a snapshot of it has that."""
        if self.snapshot is not None:
            self.snapshot.before_change(chunk)

    def take_slab(self, chunk: Chunk, tier: Tier) -> Replica:
        """Give the chunk a replica on `tier`, contents undefined. The caller has made room."""
        if tier is Tier.DEVICE and chunk.saved is not None:
            # What is about to begin has its memory already; that of content that is gone is not wanted back.
            fill = tuple if chunk.version == NO_CONTENT else chunk.saved.fill
            slab, pieces = self._device_pool.admit(chunk.id.role.value, chunk.nbytes, fill)
            return self._enter(chunk, tier, Replica(slab, slab.bytes, pieces=pieces))
        if tier is Tier.HOST and chunk.memory is not None:
            slab = cast(HostArena, self.pools[tier]).admit(chunk.id.role.value, chunk.memory)
        else:
            slab = self.pools[tier].alloc(chunk.id.role.value, chunk.nbytes)
        with runtime_mode():
            if tier is chunk.compute_tier and chunk.home is not None:
                flat = chunk.home.attach(slab)
            else:
                flat = slab.flat(chunk.dtype)
        return self._enter(chunk, tier, Replica(slab, flat))

    def _enter(self, chunk: Chunk, tier: Tier, replica: Replica) -> Replica:
        chunk.replicas[tier] = replica
        self.resident[tier][chunk.id] = chunk
        self.on_sooner(chunk, tier)
        return replica

    def create(self, chunk: Chunk, tier: Tier, *, zero: bool) -> Replica:
        """Begin new content on `tier`: all elements 0, or only the pads (the caller writes every slot)."""
        replica = chunk.replicas.get(tier) or self.take_slab(chunk, tier)
        with runtime_mode():
            if zero:
                replica.flat.zero_()
            else:
                for start, stop in chunk.group.pads:
                    replica.flat[start:stop].zero_()
        self.mark_written(chunk, tier)
        return replica

    def copy(self, chunk: Chunk, source: Tier, target: Tier) -> None:
        """Bring the newest version from `source` to `target`, which has a slab for it, and wait for it.

        Raises:
            TierIOError: it failed; `source` is as it was, and `target` is not valid.
        """
        to, origin = chunk.replicas[target], chunk.replicas[source]
        start = self.clock.timestamp()
        with runtime_mode():
            try:
                self._move(to, origin)
            except Exception as error:
                to.version = NO_CONTENT
                raise copy_error(chunk.label, source, target, error) from error
            if target is Tier.DEVICE and chunk.home is not None:
                chunk.home.bind()
        self.note_copy(chunk, source, target)
        self.on_copy(chunk, source, target, Interval(start, self.clock.timestamp()))

    def _move(self, target: Replica, source: Replica) -> None:
        if (transfer := transfer_of(target, source)) is not None:
            transfer()
            return
        for there, here in target.copied_from(source):
            self.transfer(there, here)

    def transfer(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy the elements of `source`, 1-D, to `target`, and wait for it."""
        target.copy_(source)

    def transfer_slab(self, target: Slab, source: Slab) -> None:
        """Copy all bytes of a slab to another one, whichever chunks have them by now, and wait for it."""
        self._move(*(Replica(slab, self._memory(slab)) for slab in (target, source)))

    def _memory(self, slab: Slab) -> torch.Tensor:
        replicas = (replica for chunk in self.chunks.values() for replica in chunk.replicas.values())
        return next((each.flat.view(torch.uint8) for each in replicas if each.slab is slab), slab.bytes)

    def adopt(self, chunk: Chunk, tier: Tier, slab: Slab) -> None:
        """Let a slab, which has the content of `chunk`, be its replica on `tier`, if nobody needs it who has it now."""
        for other in list(self.resident[tier].values()):
            if other.replicas[tier].slab is slab and not other.ready(tier) and not other.replicas[tier].pins:
                self._give_slab_back(other, tier)
        if not self.pools[tier].take_again(chunk.id.role.value, slab):
            return
        if tier in chunk.replicas:
            self._give_slab_back(chunk, tier)
        with runtime_mode():
            self._enter(chunk, tier, Replica(slab, slab.flat(chunk.dtype), version=chunk.version))

    def round(self, chunk: Chunk, target: Tier) -> None:
        """Make the content of `chunk`, of which there is no replica, again on `target`, which has a slab for it."""
        assert chunk.master is not None
        source = chunk.master.newest_tier()
        assert source is not None, f"{chunk.label} cannot be made again: its master copy has no content"
        to = chunk.replicas[target]
        with runtime_mode():
            to.write(chunk.master.replicas[source].read())
            if target is Tier.DEVICE and chunk.home is not None:
                chunk.home.bind()
        to.version = chunk.version

    def follow(self, chunk: Chunk, tier: Tier) -> None:
        """Let the master copy, if there is one, follow what a user wrote to `chunk` on `tier`.

        Elements that were not written to keep all bits of their master copy.
        """
        master = chunk.master
        place = None if master is None else master.newest_tier()
        if master is None or place is None:
            return
        with runtime_mode():
            low, high = chunk.replicas[tier].flat, master.replicas[place].read()
            written = low.to(high.device)
            changed = high.to(low.dtype) != written
            if changed.any():
                self.before_change(master)
                master.replicas[place].write(torch.where(changed, written.to(high.dtype), high))
                self.mark_written(master, place)

    def may_differ(self, chunk: Chunk, tier: Tier) -> bool:
        """Tell whether the newest replica on `tier` may hold other bytes than one elsewhere, or than its master copy.

        In RAM they are compared. On an accelerator, and with DISK, that would take longer than to suppose so.
        """
        flat = chunk.replicas[tier].flat
        if chunk.master is not None and chunk.master.newest_tier() is not None:
            return True
        other = chunk.newest_besides(tier)
        if other is None:
            return False
        if flat.device.type != "cpu" or other not in MEMORY:
            return True
        with runtime_mode():
            return not torch.equal(flat.view(torch.uint8), chunk.replicas[other].flat.view(torch.uint8))

    def exchange(self, chunk: Chunk, tier: Tier, slab: Slab) -> Slab:
        """Let `slab`, of the same size, be the replica's from now on, with what it holds; return the one it had."""
        assert tier is not Tier.DEVICE, "a storage exchanges its memory in another way"
        replica = chunk.replicas[tier]
        assert replica.slab.nbytes == slab.nbytes
        slab, replica.slab = replica.slab, slab
        with runtime_mode():
            replica.flat = replica.slab.flat(chunk.dtype)
        replica.views = None
        return slab

    def note_copy(self, chunk: Chunk, source: Tier, target: Tier) -> None:
        """The newest version is on its way from `source` to `target`; a reader there waits for it."""
        chunk.replicas[target].version = chunk.replicas[source].version
        self.moved[LINK_LANES[source, target]] += chunk.nbytes

    def note_issued(self, operation: IssuedCopy | LeftUpdate) -> None:
        """Keep account of an operation; once there are many, of none that was over before all others."""
        while len(self.issued) > _MANY_COPIES:
            event = self.issued[0].event
            if event is None or not event.done() or event.failure is not None:
                break
            self.issued.popleft()
        self.issued.append(operation)

    def drop(self, chunk: Chunk, tier: Tier) -> None:
        """Give a replica's slab back. Never a pinned one, never the only one of the newest version."""
        assert chunk.replicas[tier].pins == 0, f"{chunk.label} is pinned on {tier.value}"
        assert not chunk.is_last(tier), f"{chunk.label}: its only newest replica is on {tier.value}"
        self._give_slab_back(chunk, tier)

    def mark_written(self, chunk: Chunk, tier: Tier | None = None) -> None:
        """The replica on `tier`, None: where modules compute, has a version newer than all others, which go."""
        tier = tier or chunk.compute_tier
        if self.snapshot is not None:
            self.snapshot.written(chunk, tier)
        chunk.version += 1
        chunk.replicas[tier].version = chunk.version
        for other in [t for t, r in chunk.replicas.items() if t is not tier and r.pins == 0]:
            self._give_slab_back(chunk, other)
            self.num_outdated += 1

    def mark_for_update(self, chunk: Chunk, *, awaits_update: bool = True) -> None:
        """Say whether the content is complete, and wanted next where it is updated."""
        chunk.awaits_update = awaits_update
        for tier in chunk.replicas if awaits_update else ():
            self.on_sooner(chunk, tier)

    def consume(self, chunk: Chunk) -> None:
        """The content is used up. A slab on the `compute_tier` stays for the next content; on DEVICE it goes first."""
        self.before_change(chunk)
        chunk.version = NO_CONTENT
        chunk.awaits_update = False
        for tier in list(chunk.replicas):
            chunk.replicas[tier].version = NO_CONTENT
            if tier is chunk.compute_tier:
                self.on_sooner(chunk, tier)
            else:
                self._give_slab_back(chunk, tier)

    def views(self, chunk: Chunk, tier: Tier) -> tuple[torch.Tensor, ...]:
        """Return one tensor per slot of the replica on `tier`, in slot order, shaped as the parameters are."""
        replica = chunk.replicas[tier]
        if replica.views is None:
            with runtime_mode():
                replica.views = slot_views(chunk, replica.flat)
        return replica.views

    def read_slot(self, chunk: Chunk, position: int) -> torch.Tensor:
        """Return a CPU copy of a slot of the newest replica, in its parameter's shape; of DISK only it is read.

        Raises:
            TierIOError: it cannot be read.
        """
        tier = chunk.newest_tier()
        assert tier is not None, f"{chunk.label} has no content"
        with runtime_mode():
            return read_slot(chunk, chunk.replicas[tier], position)

    def slot(self, chunk: Chunk, tier: Tier, position: int) -> torch.Tensor:
        """Return a slot of the replica on `tier`, in its parameter's shape, to be read; of DISK a copy."""
        with runtime_mode():
            is_memory = tier in MEMORY
            return self.views(chunk, tier)[position] if is_memory else read_slot(chunk, chunk.replicas[tier], position)

    def kept_nbytes(self, tier: Tier) -> Counter[Role]:
        """Return the bytes, by role, of chunks that are on a tier for good: computed with on HOST, or averages."""
        found = Counter[Role]()
        for chunk in self.resident[tier].values():
            found[chunk.id.role] += chunk.nbytes * chunk.stays
        return +found

    def close(self) -> None:
        """Drop every replica and give all memory back, but for weights that others have references to: it is theirs."""
        self.issued.clear()
        for chunk in self.chunks.values():
            for tier in list(chunk.replicas):
                if not self._leave_to_others(chunk, tier):
                    self._give_slab_back(chunk, tier)
        for pool in self.pools.values():
            pool.close()

    def _leave_to_others(self, chunk: Chunk, tier: Tier) -> bool:
        """Take a replica out of the pool if somebody outside would read its memory; else return False."""
        home, replica = chunk.home, chunk.replicas[tier]
        if home is None or not tier is chunk.compute_tier is Tier.DEVICE:
            return False
        if home.num_foreign_references(besides=len(replica.views or ())) <= 0:
            return False
        with contextlib.suppress(TierIOError):  # the newest values are here, if anywhere
            replica.slab.rest(self._device_pool.wait)
        del chunk.replicas[tier], self.resident[tier][chunk.id]
        with runtime_mode():
            self._device_pool.dismiss(chunk.id.role.value, replica.slab, home.abandon)
        return True

    def _give_slab_back(self, chunk: Chunk, tier: Tier) -> None:
        with contextlib.nullcontext() if self.snapshot is None else self.snapshot.leaving(chunk, tier):
            self._take_replica(chunk, tier)

    def _take_replica(self, chunk: Chunk, tier: Tier) -> None:
        is_saved = tier is Tier.DEVICE and chunk.saved is not None
        if is_saved:  # emptied at once, so what a copy has failed to save is here until then
            chunk.replicas[tier].slab.rest(self._device_pool.wait)
        replica = chunk.replicas.pop(tier)  # one that lived on would keep the memory with its views
        slab, replica.pieces = replica.slab, None
        del self.resident[tier][chunk.id]
        if tier is chunk.compute_tier and chunk.home is not None:
            with runtime_mode():
                chunk.home.detach()
        if is_saved and chunk.saved is not None:
            self._device_pool.dismiss(chunk.id.role.value, slab, chunk.saved.empty)
        else:
            self.pools[tier].free(chunk.id.role.value, slab)

    def hand_over(self, chunk: Chunk, to: ChunkStore) -> None:
        """Have another store over the same tiers know a chunk, with its memory, in place of this one."""
        del self.chunks[chunk.id]
        to.add(chunk)
        for tier in chunk.replicas:
            to.resident[tier][chunk.id] = self.resident[tier].pop(chunk.id)

    @property
    def _device_pool(self) -> DevicePool:
        return cast(DevicePool, self.pools[Tier.DEVICE])


def transfer_of(target: Replica, source: Replica) -> Callable[[], None] | None:
    """Return what copies a chunk to a tier below memory, or back, and waits for it; None if both are memory."""
    if not target.slab.is_memory:
        return partial(target.slab.write, source.flat)
    return None if source.slab.is_memory else partial(source.slab.read, target.flat)
