"""Blocks that nothing trains, from the first on: run without what backward needs, or not at all; and when they freeze.

[Note: Frozen prefix] A step begins with the blocks that have no parameter that requires gradients. Their calls are no
regions: autograd saves nothing, so nothing is kept, offloaded or recomputed. With a cache they run for samples that it
does not have, and the weights of blocks that no micro-batch has to run are not fetched:

    depth, of four frozen blocks   4 4 4 4       2 4 4 4       0 4 4 4          by micro-batch
    fetched                        nothing       2, 3          0, 1, 2, 3
    run                            nothing       2, 3 for one  all for one

All that the cache has of a batch is read before anything of it is written there: what is new may take its place. Over
ranks that share chunks, each has samples of its own, and units are gathered by all: all blocks, or none.

[Note: Frozen stages] Over stages, blocks are numbered over all of them, and micro-batches begin with the same one,
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
from collections.abc import Callable, Container, Hashable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from chunkmem.comm.ranks import Ranks
from chunkmem.errors import ChunkmemError, ConfigError, StateError
from chunkmem.nn.values import tensors_in
from chunkmem.pipeline.micro_batches import MicroBatch
from chunkmem.shard.units import Units

_CPU = torch.device("cpu")


class Cache(Protocol):
    """A `chunkmem.FrozenCache`."""

    def follow(
        self, chain: tuple[nn.Module, ...], *, agree: Callable[[int], int], over_stages: bool = False
    ) -> None: ...

    def find(self, x: torch.Tensor, ids: Sequence[Hashable], *, own: Container[int] | None = None) -> Any: ...

    def read(self, samples: Any, device: torch.device) -> torch.Tensor: ...

    def computing(self, x: torch.Tensor) -> AbstractContextManager[None]: ...

    def keep(self, samples: Any, value: Any) -> None: ...

    def __len__(self) -> int: ...


class FrozenBlocks:
    """The frozen blocks that a step begins with, and what a cache has of its micro-batches."""

    def __init__(
        self,
        num: int = 0,
        start: int = 0,
        *,
        cache: Cache | None = None,
        samples: Sequence[Any] = (),
        values: Sequence[torch.Tensor] = (),
    ) -> None:
        """Begin with `num` frozen blocks, of which the first `start` are run on no rank.

        Args:
            num: see there.
            start: see there.
            cache: of this rank.
            samples: what `Cache.find` has returned of each micro-batch, where the cache was asked for them.
            values: what block `start` of a stage is given of each micro-batch, on the CPU: read before the step.
        """
        self.num = num
        self.start = start
        self._cache = cache
        self._samples = samples
        self._values = dict(enumerate(values))

    def depth(self, number: int) -> int:
        """Return the first block that runs for a micro-batch, in one stage."""
        return int(self._samples[number].depth) if self._samples else 0

    def read(self, number: int, device: torch.device) -> torch.Tensor:
        """Return what the first block that runs for a micro-batch is given. Raises a TierIOError if DISK failed."""
        if number in self._values:
            return self._values.pop(number).to(device)
        assert self._cache is not None
        return self._cache.read(self._samples[number], device)

    def running(self, at: int, given: Any) -> AbstractContextManager[None]:
        """Surround a call of block `at`, which is given that; raise a StateError if it could not be cached."""
        if self._cache is None or at >= self.num:
            return contextlib.nullcontext()
        found = next(tensors_in(given), None)
        return contextlib.nullcontext() if found is None else self._cache.computing(found)

    def keep(self, number: int, value: Any, *, name: str) -> None:
        """Keep what the last frozen block, of that name, has made of a micro-batch.

        Raises:
            StateError: it requires gradients.
            ConfigError, TierIOError: what the cache raises.
        """
        if self._cache is None:
            return
        if any(tensor.requires_grad for tensor in tensors_in(value)):
            raise StateError(
                f"pipe.step(): what {name} returns requires gradients although all of its parameters are frozen: it "
                "uses one that it does not have. Leave out the cache"
            )
        self._cache.keep(self._samples[number], value)


class FrozenPrefix:
    """Tells which blocks are frozen, from the first on, and asks the cache about batches."""

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        cache: Cache | None,
        *,
        units: Units,
        ranks: Ranks | None = None,
        owners: Sequence[int] = (),
    ) -> None:
        """Look at `blocks`, of which each is given what the one before returns.

        Args:
            blocks: all but the last one, which runs in any case.
            cache: of this rank.
            units: by which ranks that have the same blocks agree.
            ranks: one of each stage; None: there is one stage.
            owners: of `ranks`, the one that has each block, the last one included.
        """
        self._blocks = tuple(blocks)
        self._cache = cache
        self._units = units
        self._ranks = ranks
        self._owners = owners

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
        cache, ranks = self._cache, self._ranks
        each = [] if cache is None else split_ids(ids, parts)
        num = num_frozen(self._blocks, parts)
        if cache is None or not num:
            return FrozenBlocks(num)
        cache.follow(self._blocks[:num], agree=partial(self._agree, num), over_stages=ranks is not None)
        if ranks is None:
            samples: Sequence[Any] = [cache.find(part.inputs, own) for part, own in zip(parts, each, strict=True)]
            depth = start = min(one.depth for one in samples)
        else:
            samples, depth, start = self._ask(cache, ranks, num, parts, each)
        if self._units.prefetch is not None:
            start = num if self._units.agree("pipe.step(): the cache has all samples", holds=start == num) else 0
        is_read = ranks is not None and 0 < depth == start
        values = [cache.read(one, _CPU) for one in samples] if is_read else []
        return FrozenBlocks(num, start, cache=cache, samples=samples, values=values)

    def _agree(self, wanted: int, least: int) -> int:
        """Return how many of the `wanted` blocks are as they were on all ranks, `least` of them on this one."""
        while not self._units.agree(f"pipe.step(): {wanted} frozen blocks are as they were", holds=least >= wanted):
            wanted -= 1
        if self._ranks is None:
            return wanted
        (found,) = self._ranks.max_over([float(-wanted)], label="pipe.step(): frozen blocks are as they were")
        return -int(found)

    def _ask(
        self, cache: Cache, ranks: Ranks, num: int, parts: Sequence[MicroBatch], each: Sequence[Any]
    ) -> tuple[Sequence[Any], int, int]:
        """Ask the caches of all stages about all micro-batches.

        Returns:
            What that of this rank says; the block that could be given what it has, if this rank has that block, or 0;
            and the same over all ranks.
        """
        own = frozenset(at for at, rank in enumerate(self._owners) if rank == ranks.rank)
        samples: Sequence[Any] = ()
        failed: ChunkmemError | None = None
        if len(cache) or num in own:  # else it has nothing, and gets nothing
            try:
                samples = [cache.find(part.inputs, ids, own=own) for part, ids in zip(parts, each, strict=True)]
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
