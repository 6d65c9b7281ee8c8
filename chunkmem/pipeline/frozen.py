"""Blocks that nothing trains, from the first on: run without what backward needs, or not at all.

A step begins with the blocks that have no parameter that requires gradients. Their calls are no regions: autograd saves
nothing, so nothing is kept, offloaded or recomputed. With a cache (`chunkmem.contrib.frozen_cache.prefix`) they run for
samples that it does not have, and the weights of blocks that no micro-batch has to run are not fetched. Over stages,
blocks are numbered over all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from chunkmem.pipeline.micro_batches import MicroBatch
from chunkmem.ranks.ranks import Ranks
from chunkmem.ranks.units import Units
from chunkmem.runtime.values import tensors_in


class FrozenBlocks:
    """The frozen blocks that a step begins with; here all of them run."""

    start = 0
    """Blocks before it are run on no rank."""

    def __init__(self, num: int = 0) -> None:
        """Begin with `num` frozen blocks."""
        self.num = num

    def depth(self, number: int) -> int:
        """Return the first block that runs for a micro-batch, in one stage."""
        return 0

    def read(self, number: int, device: torch.device) -> torch.Tensor:
        """Return what the first block that runs for a micro-batch is given. Raises a TierIOError if DISK failed.

        Not called where that is the first of all.
        """
        raise NotImplementedError

    def running(self, at: int, given: Any) -> AbstractContextManager[None]:
        """Surround a call of block `at`, which is given that; raise a StateError if it could not be cached."""
        return contextlib.nullcontext()

    def keep(self, number: int, value: Any, *, name: str) -> None:
        """Keep what the last frozen block, of that name, has made of a micro-batch.

        Raises:
            StateError: it requires gradients.
            ConfigError, TierIOError: what the cache raises.
        """


class Cache(Protocol):
    """A `chunkmem.FrozenCache`."""

    def begin_step(self, prefix: FrozenPrefix, parts: Sequence[MicroBatch], ids: object) -> FrozenBlocks:
        """Do what `prefix.begin` says."""
        ...


@dataclass(frozen=True)
class FrozenPrefix:
    """Tells which blocks are frozen, from the first on, and asks the cache about batches."""

    blocks: Sequence[nn.Module]
    """All but the last one, which runs in any case; each is given what the one before returns."""
    cache: Cache | None
    """The rank's cache; None: there is none."""
    units: Units
    """Units, over which ranks with the same blocks agree."""
    ranks: Ranks | None = None
    """One of each stage; None: there is one stage."""
    owners: Sequence[int] = ()
    """By block, the last one included: the index in `ranks` of the rank that has it."""

    def begin(self, parts: Sequence[MicroBatch], ids: object) -> FrozenBlocks:
        """Return what a step with these micro-batches begins with.

        Args:
            parts: of the batch.
            ids: of its samples, for the cache.

        Raises:
            ConfigError: ids are missing, or not one a sample, or a batch cannot be cached.
            StateError: a frozen block cannot be cached, or a sample is not what it was.
            RankError: a rank is missing.
        """
        if self.cache is not None:
            return self.cache.begin_step(self, parts, ids)
        return FrozenBlocks(num_frozen(self.blocks, parts))


def num_frozen(blocks: Sequence[nn.Module], parts: Sequence[MicroBatch]) -> int:
    """Return how many blocks are frozen, from the first on, up to the last of them that has parameters."""
    if any(tensor.requires_grad for part in parts for tensor in tensors_in(part.inputs)):
        return 0
    num = 0
    for at, block in enumerate(blocks, start=1):
        trained = [param.requires_grad for param in block.parameters()]
        if any(trained):
            break
        num = at if trained else num
    return num
