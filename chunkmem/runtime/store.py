"""Replicas of chunks on tiers: take a slab, fill it, drop it. Who comes and goes is decided elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from chunkmem.errors import TierIOError
from chunkmem.runtime.chunk import NO_CONTENT, Chunk, Replica, slot_views
from chunkmem.runtime.device import runtime_mode
from chunkmem.runtime.events import Event, copy_error
from chunkmem.runtime.pool import DevicePool, Slab, SlabPool
from chunkmem.runtime.timestamps import Clock, Interval
from chunkmem.types import LINKS, ChunkId, Link, Role, Tier

_MANY_COPIES = 32
"""So many are kept account of before those that are done are looked for."""


@dataclass(frozen=True, slots=True, eq=False)
class IssuedCopy:
    """A copy on a lane, as it was when it was issued. Slabs, not replicas: views of those would count as in use."""

    chunk: Chunk
    version: int
    """Of the chunk."""
    source: Slab
    tier: Tier
    target: Slab
    """On `tier`."""
    event: Event

    @property
    def replica(self) -> Replica | None:
        """What it was to fill, if that has its slab yet, and this is the newest version yet."""
        replica = self.chunk.replicas.get(self.tier)
        is_current = replica is not None and replica.slab is self.target and self.chunk.version == self.version
        return replica if is_current else None


@dataclass(eq=False, slots=True)
class LeftUpdate:
    """An update that `step()` has left to HOST_UPDATE."""

    work: Callable[[], object]
    written: Mapping[Chunk, int]
    """The chunks it writes, with the versions that are its results."""
    event: Event | None = None
    """Once it is issued."""
    has_begun: bool = False

    def run(self) -> None:
        """Do it.

        Raises:
            TierIOError: it fails; what it writes is half an update.
        """
        self.has_begun = True
        group = next(iter(self.written)).id.group
        try:
            self.work()
        except Exception as error:
            raise TierIOError(
                f"the update of group {group}, which step() had left to its lane, has failed: {error!r}; load what was "
                "saved last into a new manager"
            ) from error

    @property
    def has_failed(self) -> bool:
        return self.event is not None and self.event.failure is not None


class ChunkStore:
    """All chunks and their replicas. Keeps `ledger = sum over live replicas` true at any time."""

    def __init__(self, pools: Mapping[Tier, SlabPool], clock: Clock) -> None:
        self.pools = pools
        self.clock = clock
        """Times what DEVICE computes, and copies that are waited for."""
        self.chunks: dict[ChunkId, Chunk] = {}
        self.resident: dict[Tier, dict[ChunkId, Chunk]] = {tier: {} for tier in pools}
        self.moved: dict[Link, int] = dict.fromkeys(LINKS, 0)
        """Bytes copied over each link since the manager was made."""
        self.issued: list[IssuedCopy] = []
        """Copies on lanes that may be under way yet, or have failed; in this order."""
        self.left_updates: list[LeftUpdate] = []
        """Updates that may be under way yet, or have failed."""
        self.num_outdated = 0
        """Replicas that went because another one was written to: a plan frees them before."""
        self.on_copy: Callable[[Chunk, Tier, Tier, Interval], None] = lambda chunk, source, target, taken: None
        """Called after each copy that was waited for: chunk, source, target, and when COMPUTE did nothing else."""
        self.on_sooner: Callable[[Chunk, Tier], None] = lambda chunk, tier: None
        """Called when a replica may leave, or sooner than before: it has come, settles, or its content is used up."""

    def add(self, chunk: Chunk) -> None:
        """Register a chunk; it has no content yet."""
        assert chunk.id not in self.chunks
        self.chunks[chunk.id] = chunk

    def remove(self, chunk: Chunk) -> None:
        """Give all memory of a chunk back, and forget it; its content is lost."""
        self.consume(chunk)
        if chunk.compute_tier in chunk.replicas:
            self.drop(chunk, chunk.compute_tier)
        del self.chunks[chunk.id]

    def take_slab(self, chunk: Chunk, tier: Tier) -> Replica:
        """Give the chunk a replica on `tier`, contents undefined. The caller has made room."""
        if tier is Tier.DEVICE and chunk.saved is not None:
            slab, pieces = self._device_pool.admit(chunk.id.role.value, chunk.nbytes, chunk.saved.fill)
            return self._enter(chunk, tier, Replica(slab, slab.bytes, pieces=pieces))
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
                for there, here in to.copied_from(origin):
                    self.transfer(there, here)
            except Exception as error:
                to.version = NO_CONTENT
                raise copy_error(chunk.label, source, target, error) from error
            if target is Tier.DEVICE and chunk.home is not None:
                chunk.home.bind()
        self.note_copy(chunk, source, target)
        self.on_copy(chunk, source, target, Interval(start, self.clock.timestamp()))

    def transfer(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy the elements of `source`, 1-D, to `target`, and wait for it."""
        target.copy_(source)

    def round(self, chunk: Chunk, target: Tier) -> None:
        """Make the content of `chunk`, of which there is no replica, again on `target`, which has a slab for it."""
        assert chunk.master is not None
        source = chunk.master.newest_tier()
        assert source is not None, f"{chunk.label} cannot be made again: its master copy has no content"
        to = chunk.replicas[target]
        with runtime_mode():
            to.flat.copy_(chunk.master.replicas[source].flat)
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
        low, high = chunk.replicas[tier].flat, master.replicas[place].flat
        with runtime_mode():
            written = low.to(high.device)
            changed = high.to(low.dtype) != written
            if changed.any():
                high.copy_(torch.where(changed, written.to(high.dtype), high))
                self.mark_written(master, place)

    def may_differ(self, chunk: Chunk, tier: Tier) -> bool:
        """Tell whether the newest replica on `tier` may hold other bytes than one elsewhere, or than its master copy.

        In RAM they are compared. On an accelerator that would take longer than to suppose so.
        """
        flat = chunk.replicas[tier].flat
        if chunk.master is not None and chunk.master.newest_tier() is not None:
            return True
        other = chunk.newest_besides(tier)
        if other is None:
            return False
        if flat.device.type != "cpu":
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
        self.moved[source, target] += chunk.nbytes

    def forget_done_copies(self) -> None:
        """Keep no account of copies that are done, once there are many."""
        if len(self.left_updates) > _MANY_COPIES:
            self.left_updates = [
                update
                for update in self.left_updates
                if update.event is None or not update.event.done() or update.has_failed
            ]
        if len(self.issued) > _MANY_COPIES:
            self.issued = [copy for copy in self.issued if not copy.event.done() or copy.event.failure is not None]

    def drop(self, chunk: Chunk, tier: Tier) -> None:
        """Give a replica's slab back. Never a pinned one, never the only one of the newest version."""
        assert chunk.replicas[tier].pins == 0, f"{chunk.label} is pinned on {tier.value}"
        assert not chunk.is_last(tier), f"{chunk.label}: its only newest replica is on {tier.value}"
        self._give_slab_back(chunk, tier)

    def mark_written(self, chunk: Chunk, tier: Tier) -> None:
        """The replica on `tier` now holds a version newer than all others; replicas of older versions go."""
        chunk.version += 1
        chunk.replicas[tier].version = chunk.version
        for other in [t for t, r in chunk.replicas.items() if t is not tier and r.pins == 0]:
            self._give_slab_back(chunk, other)
            self.num_outdated += 1

    def settle(self, chunk: Chunk, *, is_settled: bool = True) -> None:
        """Say whether the content is complete, and wanted next where it is updated."""
        chunk.settled = is_settled
        for tier in chunk.replicas if is_settled else ():
            self.on_sooner(chunk, tier)

    def consume(self, chunk: Chunk) -> None:
        """The content is used up. A slab on the `compute_tier` stays for the next content; on DEVICE it goes first."""
        chunk.version = NO_CONTENT
        chunk.settled = False
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

    def on_host_nbytes(self) -> Counter[Role]:
        """Return the bytes, by role, of chunks that are computed with on HOST: they are there for good."""
        found = Counter[Role]()
        for chunk in self.resident[Tier.HOST].values():
            if chunk.compute_tier is Tier.HOST:
                found[chunk.id.role] += chunk.nbytes
        return found

    def close(self) -> None:
        """Drop every replica and give all memory back."""
        self.issued.clear()
        for chunk in self.chunks.values():
            for tier in list(chunk.replicas):
                self._give_slab_back(chunk, tier)
        for pool in self.pools.values():
            pool.close()

    def _give_slab_back(self, chunk: Chunk, tier: Tier) -> None:
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

    @property
    def _device_pool(self) -> DevicePool:
        pool = self.pools[Tier.DEVICE]
        assert isinstance(pool, DevicePool)
        return pool
