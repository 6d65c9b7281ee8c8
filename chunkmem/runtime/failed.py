"""What a failed copy, or update, leaves of chunks: [Note: After a failed copy] in `runtime.actions`."""

from __future__ import annotations

import contextlib
from collections import Counter, deque

from chunkmem.data.errors import TierIOError
from chunkmem.data.types import Tier
from chunkmem.runtime.chunk import NO_CONTENT, Chunk
from chunkmem.runtime.device import runtime_mode
from chunkmem.runtime.issued import IssuedCopy, LeftUpdate
from chunkmem.runtime.pool import Slab
from chunkmem.runtime.queues import Lanes
from chunkmem.runtime.store import ChunkStore


def lost_error(reader: object, chunk: Chunk) -> TierIOError:
    """Return the error for `reader`, which needs a chunk that has no content any more."""
    cause, advice = "copy or update", "load what was saved last into a new manager"
    if chunk.id.role.kind.is_of_step:
        cause, advice = (
            "copy",
            "call optimizer.zero_grad(), and repeat the step; where that is refused, load what was saved last",
        )
    return TierIOError(f"{reader}: {chunk.label} is lost, as the {cause} that was to save it has failed; {advice}")


def drain(lanes: Lanes, store: ChunkStore) -> None:
    """Wait for everything that was issued. If some of it has failed, nothing that it was to fill is valid then.

    Raises:
        TierIOError: it has.
    """
    try:
        lanes.drain()
    finally:
        _Repair(store).run()


class _Repair:
    """Does again, one after the other, what has failed, and what a failure on its lane has kept from running.

    All of it is over, and none of it has touched its slabs, but what failed itself: that did part of its work. So in
    the order of issue each finds what it would have found. A copy is made again only if its chunk has no other replica
    of that version. Bytes that it cannot save stay in their slab, and are the chunk's there again; what was to be
    written over them fails, too.
    """

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self._bad: set[Slab] = set()
        """Slabs that do not have what they should."""
        self._awaited: Counter[Slab] = Counter()
        """Slabs that are to be filled by what has failed, and comes yet."""
        self._unsaved: list[IssuedCopy] = []
        """Copies that cannot be made, of bytes that are as they should be: their sources must not be overwritten."""

    def run(self) -> None:
        issued, self._store.issued = self._store.issued, deque()
        failed = [each for each in issued if each.event is not None and each.event.failure is not None]
        for each in failed:
            for slab in each.slabs:
                slab.events = ()  # all is over
            self._awaited.update(each.written_slabs)
        with runtime_mode():
            for each in failed:
                self._awaited.subtract(each.written_slabs)
                if isinstance(each, IssuedCopy):
                    self._copy(each)
                else:
                    self._update(each)
            if not failed:
                return
            for replica in (replica for chunk in self._store.chunks.values() for replica in chunk.replicas.values()):
                if replica.slab in self._bad:
                    replica.version = NO_CONTENT
            for copy in self._unsaved:
                self._keep(copy)

    def _copy(self, copy: IssuedCopy) -> None:
        chunk = copy.chunk
        is_of_autograd = chunk.saved is not None and Tier.DEVICE in (copy.origin, copy.tier)
        if self._is_elsewhere(copy) or is_of_autograd or copy.source in self._bad:
            self._bad.add(copy.target)
            return
        try:
            if any(copy.target is each.source for each in self._unsaved):
                raise TierIOError(f"{chunk.label}: its slab on {copy.tier.name} has what could not be saved")
            self._store.transfer_slab(copy.target, copy.source)
        except Exception:  # whoever waited for it was told
            self._bad.add(copy.target)
            self._unsaved.append(copy)
        else:
            self._bad.discard(copy.target)

    def _is_elsewhere(self, copy: IssuedCopy) -> bool:
        """Tell whether the chunk has, or can make, what was copied without the copy."""
        chunk = copy.chunk
        others = (replica for tier, replica in chunk.replicas.items() if tier is not copy.tier)
        sound = (each for each in others if each.slab not in self._bad and not self._awaited[each.slab])
        has_other = any(each.version == copy.version for each in sound)
        return chunk.version == copy.version and (has_other or chunk.can_be_rounded)

    def _update(self, update: LeftUpdate) -> None:
        if not update.has_begun and self._bad.isdisjoint(update.slabs):
            with contextlib.suppress(TierIOError):
                update.run()
                return
        self._bad.update(update.written_slabs)

    def _keep(self, copy: IssuedCopy) -> None:
        """Let a chunk that has no content any more have the slab again that its copy was to read."""
        chunk = copy.chunk
        is_lost = chunk.newest_tier() is None and chunk.version == copy.version and not chunk.can_be_rounded
        if is_lost and copy.origin is not Tier.DEVICE:
            self._store.adopt(chunk, copy.origin, copy.source)
