"""Content of activations begins in a chunk that a plan frees, allocates or leaves where it is in that very moment."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from chunkmem.activations.live_chunks import LiveChunks
from chunkmem.activations.region_calls import CallRecord, RegionCall
from chunkmem.activations.region_chunks import RegionChunks
from chunkmem.activations.saved_storages import SavedStorage, SavedStorages
from chunkmem.data.trace import Kind
from chunkmem.data.types import Role, Tier
from chunkmem.runtime.chunk import Chunk
from chunkmem.runtime.policy import OnDemand
from chunkmem.runtime.step_lock import StepLock
from tests.helpers.world import World

NUMEL = 64


class Planned(OnDemand):
    """Does something with the chunk of activations when its content begins."""

    is_planned = True  # type: ignore[assignment]

    def __init__(self, world: World, actions: str) -> None:
        super().__init__()
        self._store = world.store
        self._actions = actions
        self.filled_nbytes = 0

    def event(self, kind: Kind, chunk: Chunk, reader: object) -> None:
        for action in self._actions.split() if kind is Kind.CREATE and Tier.DEVICE in chunk.replicas else ():
            if action == "free":
                self._store.drop(chunk, Tier.DEVICE)
            else:
                self._store.take_slab(chunk, Tier.DEVICE)


def begin(live: LiveChunks, fill: float) -> tuple[Chunk, torch.UntypedStorage, RegionCall]:
    """Have a call of the region save a storage; return its chunk, the storage, and what autograd keeps."""
    values = torch.full((NUMEL,), fill)
    storage = values.untyped_storage()
    call = RegionCall("block", CallRecord("block", "offload", 0, False), weakref.ref(nn.Identity()))
    saved = SavedStorages()
    nbytes = saved.hold([SavedStorage(storage)])
    call.chunk = live.begin(call, saved, nbytes, reader="block forward", what="activations")
    return call.chunk, storage, call


def content(chunk: Chunk) -> list[float]:
    """What a copy to HOST would read."""
    pieces = chunk.replicas[Tier.DEVICE].pieces
    assert pieces is not None
    return [float(value) for _, piece in pieces for value in piece.view(torch.float32)]


@pytest.mark.parametrize("actions", ["", "free", "free alloc"])
def test_new_content_is_not_taken_for_the_old_one(actions: str) -> None:
    world = World([], device=8)
    live = LiveChunks(
        world.pager, StepLock(timeout_s=1, with_hooks=True), RegionChunks(world.store), before_end=lambda: None
    )
    world.pager.policy = Planned(world, actions)
    first, storage, call = begin(live, 1.0)
    assert content(first) == [1.0] * NUMEL
    del storage, call
    live.look_after_gone()  # the plan has it stay on DEVICE, without content
    assert Tier.DEVICE in first.replicas
    second, storage, kept = begin(live, 2.0)
    assert second is first is kept.chunk
    assert storage.nbytes() == 4 * NUMEL
    assert torch.empty(0).set_(storage).tolist() == [2.0] * NUMEL
    assert content(second) == [2.0] * NUMEL
    world.store.take_slab(second, Tier.HOST)
    world.store.copy(second, Tier.DEVICE, Tier.HOST)
    world.store.drop(second, Tier.DEVICE)
    assert second.replicas[Tier.HOST].flat.view(torch.float32).tolist() == [2.0] * NUMEL
    assert world.store.pools[Tier.DEVICE].ledger.now.get(Role.ACTIVATION.value, 0) == 0


def test_memory_that_a_plan_allocates_is_not_that_of_content_that_is_gone() -> None:
    """Else there would be twice as much for a moment, and no cap would know."""
    world = World([], device=8)
    live = LiveChunks(
        world.pager, StepLock(timeout_s=1, with_hooks=True), RegionChunks(world.store), before_end=lambda: None
    )
    world.pager.policy = Planned(world, "")
    chunk, storage, call = begin(live, 1.0)
    del storage, call
    live.look_after_gone()
    assert chunk.saved is not None
    filled = []
    chunk.saved.fill = lambda: filled.append(1) or ()  # type: ignore[method-assign, func-returns-value]
    world.store.drop(chunk, Tier.DEVICE)
    world.store.take_slab(chunk, Tier.DEVICE)
    begin(live, 2.0)
    assert not filled
