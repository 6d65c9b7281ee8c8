"""What only an accelerator shows: pinned memory of exact size, device memory given back, activations in the cap."""

from __future__ import annotations

import mmap

import pytest
import torch
from torch import nn

import chunkmem
from chunkmem.data.types import Tier
from chunkmem.plan.model import Lane
from chunkmem.runtime.arena import HostArena
from chunkmem.runtime.device import ComputeDevice
from chunkmem.runtime.kept import reclaimable_on
from chunkmem.runtime.ledger import Ledger
from chunkmem.runtime.pool import DevicePool
from chunkmem.runtime.streams import StreamLanes
from tests.helpers.audit import audit
from tests.helpers.occupied import occupied_nbytes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MIB = 1 << 20


def blocks(num: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(num)))  # 1 MiB and a bias each


def manager_with(cap_nbytes: int) -> chunkmem.ChunkManager:
    config = {"memory": {"device": cap_nbytes}, "default_chunk_size": 512 * 513}
    return chunkmem.ChunkManager(chunkmem.Config.from_dict(config))


def train(manager: chunkmem.ChunkManager, model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    for _ in range(num_steps):
        manager.backward(model(torch.randn(64, 512, device="cuda")).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        audit(manager)


def test_the_arena_is_pinned_and_no_larger_than_asked_for() -> None:
    arena = HostArena(Ledger(Tier.HOST, 64 * MIB, 64 * MIB), ComputeDevice.default())
    arena.expect(12 * MIB)
    slabs = [arena.alloc("param", 3 * MIB) for _ in range(4)]
    assert all(slab.bytes.is_pinned() for slab in slabs)
    assert arena.reserved_nbytes == 12 * MIB
    arena.close()


def test_memory_that_cannot_be_pinned_leaves_no_error_behind() -> None:
    """What is pinned already, the driver refuses. CUDA keeps that error for whoever asks next, as each launch does."""
    compute = ComputeDevice.default()
    region = mmap.mmap(-1, 4 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = torch.frombuffer(region, dtype=torch.uint8)
    assert compute.pin(region, view.data_ptr())
    with pytest.warns(UserWarning, match="refused to pin 4194304 bytes"):
        assert not compute.pin(region, view.data_ptr())
    assert torch.full((8,), 2.0, device="cuda").square().sum().item() == 32.0
    compute.unpin(view.data_ptr())


def test_evicted_chunks_give_device_memory_back() -> None:
    manager = manager_with(occupied_nbytes() + 6 * MIB)
    with manager.init():
        model = blocks(16)
    optimizer = chunkmem.AdamW(model.parameters(), manager=manager)
    train(manager, model, optimizer, 2)
    allocated = torch.cuda.memory_allocated()
    manager.close()
    assert allocated - torch.cuda.memory_allocated() <= 6 * MIB
    del model, optimizer


def test_the_cap_holds_chunks_and_activations() -> None:
    cap = occupied_nbytes() + 24 * MIB
    manager = manager_with(cap)
    with manager.init():
        model = blocks(16)
    optimizer = chunkmem.AdamW(model.parameters(), manager=manager)
    train(manager, model, optimizer, 2)
    torch.cuda.reset_peak_memory_stats()
    train(manager, model, optimizer, 3)
    assert torch.cuda.max_memory_allocated() <= cap
    manager.close()


def test_kept_slabs_are_given_back_where_an_allocation_would_fail() -> None:
    """Half the memory that the tensor needs is kept, and copies may still read it; the rest is free."""
    compute = ComputeDevice.default()
    lanes = StreamLanes(compute)
    pool = DevicePool(Ledger(Tier.DEVICE, 4096 * MIB, 4096 * MIB), compute, capacity=8, wait=lanes.compute_waits)
    pool.reclaimable = reclaimable_on(compute)
    assert pool.reclaimable is not None
    saved = torch.empty(256 * MIB, dtype=torch.uint8, pin_memory=True)
    slabs = [pool.alloc("param", 256 * MIB) for _ in range(8)]
    for slab in slabs:
        slab.bytes.fill_(7)
        slab.used_by(lanes.copy(Lane.D2H, [(saved, slab.bytes)], after=[lanes.compute_event()], label="slab"))
        pool.free("param", slab)
    torch.cuda.empty_cache()
    free_nbytes, _ = torch.cuda.mem_get_info()
    ballast = torch.empty(max(0, free_nbytes - 1024 * MIB), dtype=torch.uint8, device="cuda")
    grown = torch.full((2048 * MIB,), 3, dtype=torch.uint8, device="cuda")
    lanes.drain()
    assert int(saved.min()) == 7, "memory was handed on before the copy had read it"
    assert int(grown[:: 1 << 20].max()) == 3
    del grown, ballast
    again = [pool.alloc("param", 256 * MIB) for _ in range(8)]
    assert all(slab.bytes.untyped_storage().nbytes() == slab.nbytes for slab in again)
    for slab in again:
        pool.free("param", slab)
    pool.close()
    lanes.close()
    assert pool.ledger.total_nbytes == 0
