"""Notice what a user wrote to parameters on DEVICE, which no event tells of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from chunkmem.runtime.chunk import Chunk
from chunkmem.runtime.policy import StepPolicy
from chunkmem.runtime.store import ChunkStore
from chunkmem.types import LINKS, PLACE, TIERS, Tier


def notice_writes(
    chunk: Chunk, store: ChunkStore, policy: StepPolicy, *, is_held: bool, is_outside: bool = False
) -> None:
    """Count what a user wrote to the parameters of `chunk` as a new version; their master copy follows.

    Args:
        chunk: of any role; only PARAM has what a user writes to.
        store: of the chunk.
        policy: of the step that runs; copies are over before the new version counts.
        is_held: somebody may write to its memory past autograd's version counters.
        is_outside: nothing but an operator outside of modules has used it since the last look.
    """
    tier = chunk.compute_tier
    if chunk.home is None or not chunk.ready(tier):
        return
    is_open = is_held or chunk.is_written_past
    with nullcontext() if store.snapshot is None else store.snapshot.noticing():
        if not (chunk.home.was_written() or (is_open and store.may_differ(chunk, tier))):
            return
        policy.drain()  # may raise an error: the next look finds the write again
        chunk.home.take_written()
        chunk.is_written_inside = chunk.is_written_inside or not (is_held or is_outside)
        with _residency_kept(chunk, store) if policy.is_planned else nullcontext():
            store.mark_written(chunk, tier)
            store.follow(chunk, tier)


@contextmanager
def _residency_kept(chunk: Chunk, store: ChunkStore) -> Iterator[None]:
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
    passes = (source, tier) not in LINKS
    above = TIERS[PLACE[tier] - 1]
    is_guest = passes and above not in chunk.replicas
    if is_guest and store.pools[above].ledger.free_nbytes < chunk.nbytes:
        return
    if passes and not chunk.ready(above):
        _fill(chunk, above, store)
    if tier not in chunk.replicas:
        store.take_slab(chunk, tier)
    store.copy(chunk, above if passes else source, tier)
    if is_guest:
        store.drop(chunk, above)
