"""Blocks that nothing trains, from the first on: run without what backward needs, or not at all; and when they freeze.

[Note: Frozen prefix] A step begins with the blocks that have no parameter that requires gradients. Their calls are no
regions: autograd saves nothing, so nothing is kept, offloaded or recomputed. With a cache they run for samples that it
does not have, and the weights of blocks that no micro-batch has to run are not fetched:

    depth, of four frozen blocks   4 4 4 4       2 4 4 4       0 4 4 4          by micro-batch
    fetched                        nothing       2, 3          0, 1, 2, 3
    run                            nothing       2, 3 for one  all for one

All that the cache has of a batch is read before anything of it is written there: what is new may take its place. Over
ranks that share chunks, each has samples of its own, and units are gathered by all: all blocks, or none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from chunkmem.errors import ConfigError, StateError
from chunkmem.nn.values import tensors_in
from chunkmem.pipeline.micro_batches import MicroBatch
from chunkmem.shard.units import Units


class Samples(Protocol):
    """A micro-batch that a cache was asked for."""

    @property
    def depth(self) -> int:
        """Modules that it has the value of."""
        ...


class Cache(Protocol):
    """A `chunkmem.FrozenCache`."""

    def follow(
        self, chain: tuple[nn.Module, ...], *, agree: Callable[[int], int], over_stages: bool = False
    ) -> None: ...

    def find(self, x: torch.Tensor, ids: Sequence[Hashable], *, own: Container[int] | None = None) -> Samples: ...

    def read(self, samples: Any, device: torch.device) -> torch.Tensor: ...

    def computing(self, x: torch.Tensor) -> AbstractContextManager[None]: ...

    def keep(self, samples: Any, value: Any) -> None: ...

    def __len__(self) -> int: ...


class FrozenBlocks:
    """The frozen blocks that a step begins with, and what a cache has of its micro-batches."""

    def __init__(
        self, num: int = 0, *, cache: Cache | None = None, samples: Sequence[Samples] = (), start: int = 0
    ) -> None:
        """Begin with `num` frozen blocks, of which the first `start` are run on no rank."""
        self.num = num
        self.start = start
        self._cache = cache
        self._samples = samples

    def depth(self, number: int) -> int:
        """Return the first block that runs for a micro-batch."""
        return self._samples[number].depth if self._samples else 0

    def read(self, number: int, device: torch.device) -> torch.Tensor:
        """Return what that block is given. Raises a TierIOError if DISK failed."""
        assert self._cache is not None
        return self._cache.read(self._samples[number], device)

    def running(self, at: int, given: Any) -> AbstractContextManager[None]:
        """Surround a call of block `at`, which is given that; raise a StateError if it could not be cached."""
        if self._cache is None or at >= self.num:
            return contextlib.nullcontext()
        found = next(tensors_in(given), None)
        return contextlib.nullcontext() if found is None else self._cache.computing(found)

    def returned(self, at: int, number: int, value: Any, *, name: str) -> None:
        """Keep what block `at` has returned for a micro-batch, if it is the last frozen one. Raises what `keep` does.

        Raises:
            StateError: it requires gradients.
        """
        if self._cache is None or at != self.num - 1:
            return
        if any(tensor.requires_grad for tensor in tensors_in(value)):
            raise StateError(
                f"pipe.step(): what {name} returns requires gradients although all of its parameters are frozen: it "
                "uses one that it does not have. Leave out the cache"
            )
        self._cache.keep(self._samples[number], value)


class FrozenPrefix:
    """Tells which blocks are frozen, from the first on, and asks the cache about batches."""

    def __init__(self, blocks: Sequence[nn.Module], cache: Cache | None) -> None:
        """Look at `blocks`, of which each is given what the one before returns."""
        self._blocks = tuple(blocks)
        self._cache = cache

    def begin(self, parts: Sequence[MicroBatch], ids: object, *, units: Units) -> FrozenBlocks:
        """Return what a step with these micro-batches begins with.

        Args:
            parts: of the batch.
            ids: of its samples, for the cache.
            units: by which ranks agree.

        Raises:
            ConfigError: ids are missing, or not one a sample, or a batch cannot be cached.
            StateError: a frozen block cannot be cached, or a sample is not what it was.
        """
        each = [] if self._cache is None else split_ids(ids, parts)
        num = num_frozen(self._blocks, parts)
        if self._cache is None or not num:
            return FrozenBlocks(num)

        def agree(least: int) -> int:
            wanted = num
            while not units.agree(f"pipe.step(): {wanted} frozen blocks are as they were", holds=least >= wanted):
                wanted -= 1
            return wanted

        self._cache.follow(self._blocks[:num], agree=agree)
        samples = [self._cache.find(part.inputs, own) for part, own in zip(parts, each, strict=True)]
        start = min(one.depth for one in samples)
        if units.prefetch is not None:
            start = num if units.agree("pipe.step(): the cache has all samples", holds=start == num) else 0
        return FrozenBlocks(num, cache=self._cache, samples=samples, start=start)


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


def split_ids(ids: Any, parts: Sequence[MicroBatch]) -> list[list[Hashable]]:
    """Return the ids of the samples of each micro-batch.

    Args:
        ids: of the batch: a list, or a 1-D tensor of integers.
        parts: micro-batches.

    Raises:
        ConfigError: there are none, or not one a sample.
    """
    sizes = [next(t.shape[0] for t in tensors_in((part.inputs, part.target)) if t.ndim) for part in parts]
    if ids is None:
        raise ConfigError(
            f"pipe.step(): with a cache, give ids=, one for each of the {sum(sizes)} samples and the same in each epoch"
        )
    keys: list[Hashable] = ids.tolist() if isinstance(ids, torch.Tensor) else list(ids)
    if len(keys) != sum(sizes):
        raise ConfigError(f"pipe.step(): there are {len(keys)} ids for {sum(sizes)} samples; give one each")
    rest = iter(keys)
    return [[next(rest) for _ in range(size)] for size in sizes]
