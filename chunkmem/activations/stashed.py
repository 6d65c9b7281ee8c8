"""Tensors that nobody needs for a while, as chunks of the role ACTIVATION: what is on its way from block to block.

A region's chunk (see [Note: Regions] in `chunkmem.activations.regions`) begins when the region has been called. Until
then its inputs are the caller's. A caller that runs one block after the other for many micro-batches has as many of
them, and stashes them: their storages become a chunk, which the planner keeps or moves.

    outputs  | block 0 |  stashed | block 1 |             CREATE when a block has returned it, HOLD when the next one
    CREATE             .                                  begins, CONSUME when that is over. The gradients of outputs
    CONSUME                                 .             go the same way back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from chunkmem.activations.region_chunks import RegionChunks, use_up
from chunkmem.activations.saved_storages import SavedStorage, SavedStorages, can_be_emptied, is_plain
from chunkmem.data.types import ChunkId, Tier
from chunkmem.runtime.chunk import Chunk
from chunkmem.runtime.pager import Pager
from chunkmem.runtime.values import storage_id


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a tensor lies in its storage."""

    dtype: torch.dtype
    device: torch.device
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    storage: SavedStorage

    def tensor(self) -> torch.Tensor:
        """Return a new tensor over the storage, which has no history."""
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        return empty.set_(self.storage.storage, self.offset, self.shape, self.stride)


class Stashed:
    """Some tensors without a history, whose memory may be on HOST until `bring`."""

    def __init__(self, owner: StashedTensors, tensors: list[torch.Tensor | _Layout], chunk: Chunk | None) -> None:
        self._owner = owner
        self._tensors = tensors
        self._chunk = chunk

    def bring(self) -> list[torch.Tensor]:
        """Return new tensors over the memory, which stays on the device until `end`.

        Raises:
            CapacityError: it does not fit.
        """
        if self._chunk is not None:
            self._owner.pin(self._chunk)
        return [each.tensor() if isinstance(each, _Layout) else each for each in self._tensors]

    def end(self) -> None:
        """Leave the memory to the tensors that share it by now; without any, it is given back. Idempotent."""
        chunk, self._chunk, self._tensors = self._chunk, None, []
        if chunk is not None:
            self._owner.end(chunk)


class StashedTensors:
    """What is stashed, each as a chunk."""

    def __init__(self, pager: Pager, chunks: RegionChunks, *, device: torch.device) -> None:
        """Begin with nothing; what is on another device than `device` stays there."""
        self._pager = pager
        self._chunks = chunks
        self._device = device
        self._live: dict[ChunkId, bool] = {}
        """Chunks that have content, and whether they are pinned."""

    def stash(self, tensors: list[torch.Tensor], *, name: str, what: str, copies: bool = False) -> Stashed:
        """Take tensors without a history from a list, which is empty afterwards: the caller keeps none of them.

        Args:
            tensors: to be stashed.
            name: of the block that has made them.
            what: "output" or "gradient"; see `chunkmem.data.activations`.
            copies: copy what others hold, too; else it stays as it is.

        Raises:
            CapacityError: they fit no tier.
        """
        found: dict[int, SavedStorage] = {}
        stashed: list[torch.Tensor | _Layout] = []
        while tensors:
            stashed.append(self._layout(tensors.pop(0), found))
        if copies:
            stashed = [self._own(each, found) if isinstance(each, _Layout) else each for each in stashed]
        taken = [each for each in found.values() if not each.is_escaped()]
        found.clear()
        for each in taken:
            for tell in self._pager.events.activation_taken:
                tell(each.storage)
        return Stashed(self, stashed, self._create(taken, name=name, what=what) if taken else None)

    def _own(self, layout: _Layout, found: dict[int, SavedStorage]) -> torch.Tensor | _Layout:
        """Return the same in a storage that nobody else holds, which is one of `found`."""
        return self._layout(layout.tensor().clone(), found) if layout.storage.is_escaped() else layout

    def keep(self, tensors: list[torch.Tensor]) -> Stashed:
        """Return the same for tensors that stay where they are."""
        return Stashed(self, list(tensors), None)

    def _layout(self, tensor: torch.Tensor, found: dict[int, SavedStorage]) -> torch.Tensor | _Layout:
        key = storage_id(tensor)
        if not key or not is_plain(tensor) or tensor.device.type != self._device.type:
            return tensor
        storage = tensor.untyped_storage()
        if not can_be_emptied(storage):
            return tensor
        if key not in found:
            found[key] = SavedStorage(storage)
        return _Layout(
            tensor.dtype, tensor.device, tensor.shape, tensor.stride(), int(tensor.storage_offset()), found[key]
        )

    def _create(self, taken: list[SavedStorage], *, name: str, what: str) -> Chunk:
        saved = SavedStorages()
        chunk = self._chunks.get(f"{what}s of {name}", saved.hold(taken), live=self._live)
        self._live[chunk.id] = False
        try:
            self._pager.create(chunk, Tier.DEVICE, reader=f"{name} {what}", zero=False, saved=saved)
        except BaseException:
            del self._live[chunk.id]
            saved.let_go()
            raise
        return chunk

    def pin(self, chunk: Chunk) -> None:
        """Have a chunk on DEVICE until it ends."""
        if not self._live[chunk.id]:
            self._pager.pin(chunk, Tier.DEVICE, reader=chunk.label)
            self._live[chunk.id] = True

    def end(self, chunk: Chunk) -> None:
        """The content is no chunk any more."""
        is_pinned = self._live.pop(chunk.id)
        assert isinstance(chunk.saved, SavedStorages)
        chunk.saved.let_go()
        if Tier.DEVICE in chunk.replicas:
            # What was passed on is stashed again before a plan frees this replica, and must not seem to be held by it.
            chunk.replicas[Tier.DEVICE].pieces = ()
        if is_pinned:
            self._pager.unpin(chunk, Tier.DEVICE)
        use_up(chunk, self._pager)
