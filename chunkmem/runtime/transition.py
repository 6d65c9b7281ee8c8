"""From the current residency to the one that a plan expects: found by `plan.resync`, gone with blocking copies."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from chunkmem.errors import PlanError
from chunkmem.plan.model import Action, Alloc, Copy, Free
from chunkmem.plan.resync import resync
from chunkmem.plan.semantics import Residency
from chunkmem.runtime.chunk import residency
from chunkmem.runtime.pager import Pager
from chunkmem.runtime.store import ChunkStore
from chunkmem.types import ChunkId, Tier


def actions_to(
    wanted: Residency,
    pager: Pager,
    *,
    own: Container[ChunkId],
    peak_nbytes: Mapping[Tier, int],
    keep_duplicates: bool,
) -> list[Action]:
    """Return the actions that lead from the current residency to `wanted`. Copies have to be over.

    The arguments are those of `resync`, and `own`, the chunks that the plan knows. What the plan wants and nobody has
    any more is rounded again on the way.

    Raises:
        PlanError: that is not possible; says what is in the way.
    """
    store = pager.store
    chunks = [chunk for chunk in store.chunks.values() if not chunk.stays]
    for chunk in chunks:
        pager.notice_writes(chunk)
        if wanted.has_content(chunk.id) and not pager.restore(chunk):
            raise PlanError(f"{chunk.id} takes {chunk.nbytes} bytes to be rounded again, and neither tier has them")
    return resync(
        residency(chunks),
        wanted,
        held=frozenset((c.id, t) for c in chunks for t, r in c.replicas.items() if r.pins > 0),
        chunk_nbytes={chunk.id: chunk.nbytes for chunk in chunks},
        free_nbytes={t: pool.ledger.limit_nbytes - pool.ledger.chunk_nbytes for t, pool in store.pools.items()},
        peak_nbytes=peak_nbytes,
        keep_duplicates=keep_duplicates,
        rounded=frozenset(c.id for c in chunks if c.can_be_rounded and c.id in own),
    )


def go(actions: Iterable[Action], store: ChunkStore) -> None:
    """Do what `actions_to` returned, one after the other."""
    for action in actions:
        if isinstance(action, Alloc):
            store.take_slab(store.chunks[action.chunk], action.tier)
        elif isinstance(action, Copy):
            store.copy(store.chunks[action.chunk], action.source, action.target)
        elif isinstance(action, Free):
            store.drop(store.chunks[action.chunk], action.tier)
