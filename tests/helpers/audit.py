"""Re-derive what has to hold between two steps, from the objects themselves rather than from the counters."""

from __future__ import annotations

from collections import Counter

import torch

from chunkmem import ChunkManager
from chunkmem.nn.binding import BoundChunk
from chunkmem.runtime.ledger import CACHE
from chunkmem.runtime.store import NO_CONTENT
from chunkmem.types import Tier


def audit(manager: ChunkManager) -> None:
    """Assert: no pins, ledgers equal live replicas and stay in their caps, evicted chunks hold nothing, pads are 0."""
    audit_pins(manager)
    audit_ledgers(manager)
    for chunk in manager._store.chunks.values():
        for replica in chunk.replicas.values():
            if replica.version == chunk.version != NO_CONTENT:
                for start, stop in chunk.group.pads:
                    assert not replica.flat[start:stop].any(), f"{chunk.label}: pads are not 0"
        if isinstance(chunk.home, BoundChunk):
            audit_binding(chunk.home, present=Tier.DEVICE in chunk.replicas, nbytes=chunk.nbytes)


def audit_pins(manager: ChunkManager) -> None:
    """Assert that nothing is pinned."""
    assert manager._access.pinning == (), [str(frame) for frame in manager._access.pinning]
    assert manager._backward.pinning == ()
    for chunk in manager._store.chunks.values():
        assert all(replica.pins == 0 for replica in chunk.replicas.values()), f"{chunk.label} is pinned"
    assert set(manager._executor.pinned_nbytes.values()) == {0}


def audit_ledgers(manager: ChunkManager) -> None:
    """Assert that each ledger is the sum over live replicas and kept slabs, and within its cap."""
    for tier, pool in manager._store.pools.items():
        ledger = pool.ledger
        live: Counter[str] = Counter()
        for chunk in manager._store.chunks.values():
            if tier in chunk.replicas:
                assert chunk.replicas[tier].flat.untyped_storage().nbytes() >= chunk.nbytes
                live[chunk.id.role.value] += chunk.nbytes
        live[CACHE] += sum(slab.nbytes for slab in getattr(pool, "_kept", ()))
        assert {r: n for r, n in ledger.now.items() if n} == {r: n for r, n in live.items() if n}, tier
        assert ledger.total_nbytes == live.total()
        assert ledger.total_nbytes <= ledger.cap_nbytes <= ledger.limit_nbytes
        assert ledger.peak_nbytes <= ledger.limit_nbytes


def audit_binding(home: BoundChunk, *, present: bool, nbytes: int) -> None:
    """Assert that parameters stand in their chunk, or on placeholders while it holds no memory at all."""
    assert home._storage.storage.nbytes() == (nbytes if present else 0)
    for managed in home.parameters:
        assert managed.param.grad is None
        if present:
            assert managed.param.untyped_storage()._cdata == home.storage_id
        else:
            assert torch.isnan(managed.param).all() or not managed.param.is_floating_point()
