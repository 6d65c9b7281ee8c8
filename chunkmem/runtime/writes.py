"""Have a chunk that a user wrote to on DEVICE where the plan in progress has it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from chunkmem.data.types import TIERS, Tier, neighbor
from chunkmem.runtime.chunk import Chunk
from chunkmem.runtime.store import ChunkStore


@contextmanager
def residency_kept(chunk: Chunk, store: ChunkStore) -> Iterator[None]:
    """Let a chunk and its master copy have the replicas again that the plan in progress has of them.

    A write inside of a step, such as that of `nn.Embedding(max_norm=...)`, comes in each one: without its copy in HOST
    the plan could not be followed any further. Copies have to be over.
    """
    chunks = [each for each in (chunk, chunk.master) if each is not None]
    before = [(each, tier, each.ready(tier)) for each in chunks for tier in TIERS if tier in each.replicas]
    yield
    for each, tier, was_ready in before:  # down the chain: each is filled from the one above
        if was_ready and not each.ready(tier):
            _fill(each, tier, store)
        elif tier not in each.replicas:
            store.take_slab(each, tier)


def _fill(chunk: Chunk, tier: Tier, store: ChunkStore) -> None:
    """Copy the newest version to a tier. What goes to DISK passes HOST; if that has no room, DISK has no copy then."""
    source = chunk.newest_tier()
    assert source is not None
    above = neighbor(tier, store.pools, end=source)
    passes = above is not source
    is_guest = passes and above not in chunk.replicas
    if is_guest and store.pools[above].ledger.free_nbytes < chunk.nbytes:
        return
    if passes and not chunk.ready(above):
        _fill(chunk, above, store)
    if tier not in chunk.replicas:
        store.take_slab(chunk, tier)
    store.copy(chunk, above, tier)
    if is_guest:
        store.drop(chunk, above)
