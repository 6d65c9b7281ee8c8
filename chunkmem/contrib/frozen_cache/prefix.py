"""What a pipeline's steps begin with where a cache has what frozen blocks make of samples.

Frozen blocks run for samples that the cache does not have, and the weights of blocks that no
micro-batch has to run are not fetched:

    depth, of four frozen blocks   4 4 4 4       2 4 4 4       0 4 4 4          by micro-batch
    fetched                        nothing       2, 3          0, 1, 2, 3
    run                            nothing       2, 3 for one  all for one

All that the cache has of a batch is read before anything of it is written there: what is new may take its place. Over
ranks that share chunks, each has samples of its own, and units are gathered by all: all blocks, or none.

Over stages, blocks are numbered over all of them, and micro-batches begin with the same one,
`start`. It is the cache of the rank that has block `start` that says what this is given; blocks behind it run, up to
the first trained one, whose rank keeps what it is given:

    stages          0 1 2 | 3 4 5 | 6 7 8      blocks, of which 0 to 3 are frozen
    nothing cached  0 1 2 > 3 4 5 > 6 7 8      the second rank keeps what block 4 is given
    all cached                4 5 > 6 7 8      it reads that: no message from the first one, which does nothing
    then 4 to 6 are frozen, too
    the first time            4 5 > 6 7 8      the third one keeps what block 7 is given
    from then on                      7 8

The ranks of a pipeline agree before each step: a rank that waited for a message would wait for ever.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Hashable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from chunkmem.data.errors import ChunkmemError, ConfigError, StateError
from chunkmem.pipeline.frozen import FrozenBlocks, FrozenPrefix, num_frozen
from chunkmem.pipeline.micro_batches import MicroBatch
from chunkmem.ranks.ranks import Ranks
from chunkmem.runtime.values import tensors_in

_CPU = torch.device("cpu")


class CachedBlocks(FrozenBlocks):
    """The frozen blocks that a step begins with, and what a cache has of its micro-batches."""

    def __init__(
        self, num: int, start: int, *, cache: StepCache, samples: Sequence[Any], values: Sequence[torch.Tensor]
    ) -> None:
        """Begin with `num` frozen blocks, of which the first `start` are run on no rank.

        Args:
            num: see there.
            start: see there.
            cache: of this rank.
            samples: what `StepCache.find` has returned of each micro-batch, where the cache was asked for them.
            values: what block `start` of a stage is given of each micro-batch, on the CPU: read before the step.
        """
        super().__init__(num)
        self.start = start
        self._cache = cache
        self._samples = samples
        self._values = dict(enumerate(values))

    def depth(self, number: int) -> int:
        return int(self._samples[number].depth) if self._samples else 0

    def read(self, number: int, device: torch.device) -> torch.Tensor:
        if number in self._values:
            return self._values.pop(number).to(device)
        return self._cache.read(self._samples[number], device)

    def running(self, at: int, given: Any) -> AbstractContextManager[None]:
        found = next(tensors_in(given), None) if at < self.num else None
        return contextlib.nullcontext() if found is None else self._cache.computing(found)

    def keep(self, number: int, value: Any, *, name: str) -> None:
        if any(tensor.requires_grad for tensor in tensors_in(value)):
            raise StateError(
                f"pipe.step(): what {name} returns requires gradients although all of its parameters are frozen: it "
                "uses one that it does not have. Leave out the cache"
            )
        self._cache.keep(self._samples[number], value)


class StepCache(ABC):
    """A cache that a pipeline asks in each step; what the methods do is said in `chunkmem.FrozenCache`."""

    @abstractmethod
    def follow(
        self, chain: tuple[nn.Module, ...], *, agree: Callable[[int], int], over_stages: bool = False
    ) -> None: ...

    @abstractmethod
    def find(self, x: torch.Tensor, ids: Sequence[Hashable], *, own: Container[int] | None = None) -> Any: ...

    @abstractmethod
    def read(self, samples: Any, device: torch.device) -> torch.Tensor: ...

    @abstractmethod
    def computing(self, x: torch.Tensor) -> AbstractContextManager[None]: ...

    @abstractmethod
    def keep(self, samples: Any, value: Any) -> None: ...

    @abstractmethod
    def __len__(self) -> int: ...

    def begin_step(self, prefix: FrozenPrefix, parts: Sequence[MicroBatch], ids: object) -> FrozenBlocks:
        """Do what `FrozenPrefix.begin` says."""
        ranks, each, num = prefix.ranks, split_ids(ids, parts), num_frozen(prefix.blocks, parts)
        if not num:
            return FrozenBlocks()
        chain = tuple(prefix.blocks[:num])
        self.follow(chain, agree=partial(_agree, prefix, num), over_stages=ranks is not None)
        if ranks is None:
            samples: Sequence[Any] = [self.find(part.inputs, own) for part, own in zip(parts, each, strict=True)]
            depth = start = min(one.depth for one in samples)
        else:
            own = frozenset(at for at, rank in enumerate(prefix.owners) if rank == ranks.rank)
            samples, depth, start = self._ask(ranks, num, own, parts, each)
        if prefix.units.prefetch is not None:
            start = num if prefix.units.agree("pipe.step(): the cache has all samples", holds=start == num) else 0
        is_read = ranks is not None and 0 < depth == start
        values = [self.read(one, _CPU) for one in samples] if is_read else []
        return CachedBlocks(num, start, cache=self, samples=samples, values=values)

    def _ask(
        self, ranks: Ranks, num: int, own: Container[int], parts: Sequence[MicroBatch], each: Sequence[Any]
    ) -> tuple[Sequence[Any], int, int]:
        """Ask the caches of all stages about all micro-batches; this rank has the blocks `own`.

        Returns:
            What that of this rank says; the block that could be given what it has, if this rank has that block, or 0;
            and the same over all ranks.
        """
        samples: Sequence[Any] = ()
        failed: ChunkmemError | None = None
        if len(self) or num in own:  # else it has nothing, and gets nothing
            try:
                samples = [self.find(part.inputs, ids, own=own) for part, ids in zip(parts, each, strict=True)]
            except ChunkmemError as error:  # for the other stages to hear of it
                failed = error
        depths = {one.depth for one in samples}
        depth = depths.pop() if len(depths) == 1 else 0
        start, any_failed = ranks.max_over([depth, float(failed is not None)], label="pipe.step(): what the cache has")
        if failed is not None:
            raise failed
        if any_failed:
            raise StateError("pipe.step(): the cache of another stage refuses the batch; its rank says why")
        return samples, depth, int(start)


def _agree(prefix: FrozenPrefix, wanted: int, least: int) -> int:
    """Return how many of the `wanted` blocks are as they were on all ranks, `least` of them on this one."""
    while not prefix.units.agree(f"pipe.step(): {wanted} frozen blocks are as they were", holds=least >= wanted):
        wanted -= 1
    if prefix.ranks is None:
        return wanted
    (found,) = prefix.ranks.max_over([float(-wanted)], label="pipe.step(): frozen blocks are as they were")
    return -int(found)


def split_ids(ids: Any, parts: Sequence[MicroBatch]) -> list[list[Hashable]]:
    """Return the ids of the samples of each micro-batch.

    Args:
        ids: of the batch: a list, or a 1-D tensor of integers.
        parts: micro-batches.

    Raises:
        ConfigError: there are none, or not one a sample.
    """
    sizes = [part.num_samples for part in parts]
    if ids is None:
        raise ConfigError(
            f"pipe.step(): with a cache, give ids=, one for each of the {sum(sizes)} samples and the same in each epoch"
        )
    keys: list[Hashable] = ids.tolist() if isinstance(ids, torch.Tensor) else list(ids)
    if len(keys) != sum(sizes):
        raise ConfigError(f"pipe.step(): there are {len(keys)} ids for {sum(sizes)} samples; give one each")
    rest = iter(keys)
    return [[next(rest) for _ in range(size)] for size in sizes]
