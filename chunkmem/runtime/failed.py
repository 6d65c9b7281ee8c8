"""What a failed copy, or update, leaves of chunks: [Note: After a failed copy] in `runtime.actions`."""

from __future__ import annotations

import contextlib

import torch

from chunkmem.errors import TierIOError
from chunkmem.runtime.chunk import NO_CONTENT, Chunk
from chunkmem.runtime.device import runtime_mode
from chunkmem.runtime.events import Lanes
from chunkmem.runtime.pool import Slab
from chunkmem.runtime.store import ChunkStore
from chunkmem.types import Role


def lost_error(reader: object, chunk: Chunk) -> TierIOError:
    """Return the error for `reader`, which needs a chunk that has no content any more."""
    cause, advice = "copy or update", "load what was saved last into a new manager"
    if chunk.id.role in (Role.GRAD, Role.ACTIVATION):
        cause, advice = "copy", "call optimizer.zero_grad(), and repeat the step"
    return TierIOError(f"{reader}: {chunk.label} is lost, as the {cause} that was to save it has failed; {advice}")


def drain(lanes: Lanes, store: ChunkStore) -> None:
    """Wait for every copy that was issued. If some have failed, no target of theirs is valid when this raises.

    Raises:
        TierIOError: one has failed.
    """
    try:
        lanes.drain()
    finally:
        _undo_failed(store)


def _undo_failed(store: ChunkStore) -> None:
    """Let no target of a failed copy be valid, and bring the bytes that no replica has any more. All are over."""
    failed = [copy for copy in store.issued if copy.event.failure is not None]
    store.issued.clear()
    _complete_updates(store)
    for copy in failed:
        if copy.replica is not None:
            copy.replica.version = NO_CONTENT
        for slab in (copy.source, copy.target):
            if slab.busy is not None and slab.busy.failure is not None:
                slab.busy = None
    for copy in failed:
        chunk, replica = copy.chunk, copy.replica
        if replica is not None and chunk.newest_tier() is None and chunk.saved is None and not chunk.can_be_rounded:
            with contextlib.suppress(Exception), runtime_mode():
                store.transfer(replica.flat.view(torch.uint8), _memory(copy.source, store))
                replica.version = copy.version


def _complete_updates(store: ChunkStore) -> None:
    """Do what an earlier failure on its lane has kept from running, and let no chunk of half an update be valid.

    What an update reads is as it was: whatever overwrites that comes after it on another lane, and has not run either.
    """
    failed = [update for update in store.left_updates if update.has_failed]
    store.left_updates.clear()
    for update in failed:
        if not update.has_begun:
            with contextlib.suppress(TierIOError), runtime_mode():
                update.run()
                continue
        for chunk, version in update.written.items():
            for replica in chunk.replicas.values() if chunk.version == version else ():
                replica.version = NO_CONTENT


def _memory(slab: Slab, store: ChunkStore) -> torch.Tensor:
    """Return the bytes of a slab, which another chunk may have by now."""
    replicas = (replica for chunk in store.chunks.values() for replica in chunk.replicas.values())
    return next((each.flat.view(torch.uint8) for each in replicas if each.slab is slab), slab.bytes)
