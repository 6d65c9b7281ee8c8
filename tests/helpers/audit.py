"""Re-derive what has to hold between two steps, from the objects themselves rather than from the counters."""

from __future__ import annotations

from collections import Counter

import torch

from chunkmem import ChunkManager
from chunkmem.data.types import ChunkId, Role, Tier
from chunkmem.modules.binding import BoundChunk, serves_itself
from chunkmem.modules.lazy_gradient import LazyGradient
from chunkmem.modules.parameter_reads import ParameterReads
from chunkmem.plan.ahead import SHADOW
from chunkmem.plan.model import Lane
from chunkmem.plan.simulate import simulate
from chunkmem.plan.timeline import Timeline, differences
from chunkmem.plan.victims import in_leaving_order
from chunkmem.runtime.chunk import NO_CONTENT
from chunkmem.runtime.disk_pool import DiskSlab
from chunkmem.runtime.ledger import CACHE
from chunkmem.runtime.pager import Pager
from chunkmem.runtime.store import ChunkStore
from tests.helpers.pins import pinned_by_backward, pinned_by_calls


def audit(manager: ChunkManager) -> None:
    """Assert: no pins, ledgers equal live replicas and stay in their caps, evicted chunks hold nothing, pads are 0."""
    audit_pins(manager)
    audit_hooks(manager)
    audit_ledgers(manager.runtime.memory.store, log_nbytes=manager.runtime.updater.ahead.log.reserved_nbytes)
    audit_leaving(manager.runtime.memory.pager)
    audit_declared(manager)
    manager.runtime.memory.pager.policy.drain()  # what a plan has prefetched may be under way
    for chunk in manager.runtime.memory.store.chunks.values():
        assert chunk.compute_tier is Tier.DEVICE or Tier.DEVICE not in chunk.replicas, f"{chunk.label} is on DEVICE"
        for replica in chunk.replicas.values():
            if replica.version == chunk.version != NO_CONTENT:
                flat = replica.flat
                if isinstance(replica.slab, DiskSlab):
                    flat = torch.empty(chunk.group.numel, dtype=chunk.dtype)
                    replica.slab.read(flat)
                for start, stop in chunk.group.pads:
                    assert not flat[start:stop].any(), f"{chunk.label}: pads are not 0"
        if isinstance(chunk.home, BoundChunk):
            stays = chunk in manager.runtime.modules.access.resident
            audit_binding(chunk.home, present=chunk.compute_tier in chunk.replicas, nbytes=chunk.nbytes, stays=stays)


def audit_pins(manager: ChunkManager) -> None:
    """Assert that nothing is pinned but, once, weights that stay on DEVICE: [Note: Resident models]."""
    assert pinned_by_calls(manager) == ()
    assert pinned_by_backward(manager) == ()
    for chunk in manager.runtime.memory.store.chunks.values():
        stays = chunk in manager.runtime.modules.access.resident
        pins = {tier: replica.pins for tier, replica in chunk.replicas.items() if replica.pins}
        assert pins == ({Tier.DEVICE: 1} if stays else {}), f"{chunk.label} is pinned"
    assert set(manager.runtime.memory.pager.pinned_nbytes.values()) == {0}


def audit_hooks(manager: ChunkManager) -> None:
    """Assert that all modules are heard of, but those inside of resident models and of blocks heard of as a whole."""
    hooks, controller = manager.runtime.hooks, manager.runtime.controller
    is_resident, blocks = controller.residence.is_on, hooks._blocks.values() if controller._blocks.is_on else ()
    inside = {module for block in blocks for module in block.inside}
    for module, handles in hooks.fitted._handles.items():
        heard = [handle.id in (handle.hooks_dict_ref() or {}) for handle in handles]
        heard += [type(own) is ParameterReads] if isinstance(own := module._parameters, ParameterReads) else []
        is_hooked = module not in inside and (module in hooks._roots or not is_resident)
        assert set(heard) <= {is_hooked}, f"{type(module).__name__}: {heard} where {is_hooked} is expected"


def audit_declared(manager: ChunkManager) -> None:
    """Assert that chunk memory is known by the storages that parameters are in now: others are tensors of a user."""
    modules = manager.runtime.modules
    expected = {m.storage_id: modules.access.chunks[m.group] for m in manager.runtime.registry.parameters}
    assert modules.declared._chunks == expected


def audit_ledgers(store: ChunkStore, *, log_nbytes: int = 0) -> None:
    """Assert that each ledger is the sum over live replicas, kept slabs and the shadow buffers, and within its cap."""
    for tier, pool in store.pools.items():
        ledger = pool.ledger
        live: Counter[str] = Counter()
        for chunk in store.chunks.values():
            if tier in chunk.replicas:
                replica = chunk.replicas[tier]  # pieces: activations, whose memory a user may have got hold of
                in_memory = replica.flat.untyped_storage().nbytes()
                if tier is Tier.DISK:
                    assert in_memory == 0
                else:
                    is_elsewhere = chunk.memory is not None and chunk.memory.stride() == (0,)  # counted alone
                    assert replica.pieces is not None or is_elsewhere or in_memory >= chunk.nbytes
                live[chunk.id.role.value] += chunk.nbytes
        live[CACHE] += sum(slab.nbytes for slab in getattr(pool, "_kept", ()))
        if tier is Tier.HOST:
            live[SHADOW] += log_nbytes
        assert {r: n for r, n in ledger.now.items() if n} == {r: n for r, n in live.items() if n}, tier
        assert ledger.total_nbytes == live.total()
        assert ledger.total_nbytes <= ledger.cap_nbytes <= ledger.limit_nbytes
        assert ledger.peak_nbytes <= ledger.limit_nbytes


def audit_leaving(pager: Pager) -> None:
    """Assert that who leaves a tier first is who a look at all of its replicas would find."""
    for tier in pager.store.pools:
        room = pager._evictor.room(tier, 0)
        assert room.first is not None
        residents = list(room.residents())
        assert room.first(sum(resident.nbytes for resident in residents)) == in_leaving_order(residents)


def audit_binding(home: BoundChunk, *, present: bool, nbytes: int, stays: bool = False) -> None:
    """Assert that parameters stand in their chunk, or on placeholders while it holds no memory, or is prefetched."""
    assert present or not stays
    assert home._storage.storage.nbytes() == (nbytes if present else 0)
    assert present or not home.is_bound
    with torch._C.DisableTorchFunctionSubclass():
        for managed in home.parameters:
            assert serves_itself(managed.param) != stays, f"{managed} does not serve itself"
            assert stays or managed.param.grad is None or isinstance(managed.param.grad, LazyGradient)
            assert managed.param.is_set_to(managed.view if home.is_bound else managed.placeholder)


def assert_as_predicted(manager: ChunkManager) -> None:
    """Assert that the last step followed its plan to the end, and moved and held what the simulator predicts."""
    plan, trace, happened = manager.plan, manager.trace, manager.timeline()
    assert plan is not None
    assert trace is not None
    assert happened is not None
    assert happened.plan_misses == 0
    predicted = simulate(plan, trace, iterations=1)
    if manager.runtime.controller.residence.is_on:  # nobody has heard of its moments, in which nothing moves
        assert plan.moves_nothing
        if any(chunk.role is Role.ACTIVATION for chunk in trace.chunk_nbytes):  # of a pipeline: autograd has them
            assert happened.peak_nbytes[Tier.DEVICE] < predicted.peak_nbytes[Tier.DEVICE]
            happened.peak_nbytes[Tier.DEVICE] = predicted.peak_nbytes[Tier.DEVICE]
        assert differences(predicted, happened) == []
        return
    assert differences(predicted, happened) == []
    assert len(happened.device_nbytes) == len(trace.moments), "the step ended before the plan did"
    assert happened.device_nbytes == predicted.device_nbytes
    assert copies_of(happened) == copies_of(predicted)


def copies_of(timeline: Timeline) -> Counter[tuple[int, Lane, ChunkId | None]]:
    """What was moved: (the moment it was issued in, over which link, the chunk)."""
    return Counter((span.moment, span.lane, span.chunk) for span in timeline.spans if span.nbytes)


def kind_of_step(manager: ChunkManager) -> str:
    """Return what the last step was: recorded, planned or on demand, and how often it missed its plan."""
    now = manager.runtime.controller.now
    is_planned = now.plan_executor is not None or manager.runtime.controller.residence.is_on
    kind = "recorded" if now.recorder else "planned" if is_planned else "on demand"
    misses = 0 if now.plan_executor is None else now.plan_executor.step_log.plan_misses
    return f"{kind}, {misses} misses" if misses else kind
