"""What a failed copy leaves of chunks: [Note: After a failed copy] in `runtime.actions`."""

from __future__ import annotations

import contextlib

import torch

from chunkmem.runtime.device import runtime_mode
from chunkmem.runtime.events import Lanes
from chunkmem.runtime.pool import Slab
from chunkmem.runtime.store import NO_CONTENT, ChunkStore


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
    for copy in failed:
        if copy.replica is not None:
            copy.replica.version = NO_CONTENT
        for slab in (copy.source, copy.target):
            if slab.busy is not None and slab.busy.failure is not None:
                slab.busy = None
    for copy in failed:
        chunk, replica = copy.chunk, copy.replica
        if replica is not None and chunk.newest_tier() is None and not chunk.can_be_rounded:
            with contextlib.suppress(Exception), runtime_mode():
                store.transfer(replica.flat.view(torch.uint8), _memory(copy.source, store))
                replica.version = copy.version


def _memory(slab: Slab, store: ChunkStore) -> torch.Tensor:
    """Return the bytes of a slab, which another chunk may have by now."""
    replicas = (replica for chunk in store.chunks.values() for replica in chunk.replicas.values())
    return next((each.flat.view(torch.uint8) for each in replicas if each.slab is slab), slab.bytes)
