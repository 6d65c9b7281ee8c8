"""Frozen blocks over stages: what they need not keep, and which stages have nothing to do.

[Note: Frozen stages] Blocks are numbered over all stages. Those in front of the first trained one are frozen, and of
them those in front of `start` are not run, as a cache has what comes out of them. It is the cache of the rank that has
block `start`; blocks behind it run, up to the first trained one, whose rank keeps what it is given:

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
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from chunkmem.comm.ranks import Ranks
from chunkmem.errors import ChunkmemError, StateError
from chunkmem.nn.values import tensors_in
from chunkmem.pipeline.frozen import Cache, Samples, num_frozen, split_ids
from chunkmem.pipeline.micro_batches import MicroBatch
from chunkmem.shard.units import Units

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class FrozenPart:
    """What one stage has to know of a micro-batch; blocks are counted from its first one."""

    num: int = 0
    """Blocks that are frozen, as are all before."""
    start: int = 0
    """The first block that runs."""
    given: torch.Tensor | None = None
    """What that is given; None: the stage before sends it, or it is the input."""
    keep: Callable[[Any], None] | None = None
    """To be given what block `num` is given."""
    computing: Callable[[Any], AbstractContextManager[None]] | None = None
    """Surrounds the call of a frozen block, if what it returns is going to be kept."""

    def running(self, value: Any) -> AbstractContextManager[None]:
        """Surround the call of a frozen block with that."""
        found = next(tensors_in(value), None)
        return contextlib.nullcontext() if self.computing is None or found is None else self.computing(found)


class FrozenStep:
    """Which blocks of a pipeline are frozen in a step, and which are not run."""

    def __init__(
        self,
        num: int = 0,
        start: int = 0,
        *,
        cache: Cache | None = None,
        samples: Sequence[Samples] = (),
        values: Sequence[torch.Tensor] = (),
    ) -> None:
        """Begin with `num` frozen blocks, of which the first `start` are not run.

        Args:
            num: see there.
            start: see there.
            cache: of this rank.
            samples: of each micro-batch, where it is asked for them.
            values: what block `start` is given of each micro-batch, on the rank that has the block, on the CPU.
        """
        self.num = num
        self.start = start
        self._cache = cache
        self._samples = samples
        self._values = dict(enumerate(values))

    def part(self, first: int, size: int, number: int, *, device: torch.device) -> FrozenPart:
        """Return what the stage with blocks `first` to `first + size` has to know of a micro-batch."""
        num, start = (min(max(at - first, 0), size) for at in (self.num, self.start))
        if self._cache is None:
            return FrozenPart(num)
        keep = None
        if first <= self.num < first + size and self.start < self.num:
            keep = partial(self._cache.keep, self._samples[number])
        given = self._values.pop(number).to(device) if self.reads(first, size) else None
        return FrozenPart(num, start, given, keep, self._cache.computing)

    def reads(self, first: int, size: int) -> bool:
        """Tell whether the first block that runs is in that stage, and is given what the cache has."""
        return self.start > 0 and first <= self.start < first + size


class FrozenStages:
    """Tells which blocks of a pipeline are frozen, and has its ranks agree on which of them are not run."""

    def __init__(
        self, stages: Sequence[Sequence[nn.Module]], cache: Cache | None, *, ranks: Ranks, units: Units
    ) -> None:
        """Look at the blocks of all stages.

        Args:
            stages: of each, its blocks.
            cache: of this rank.
            ranks: one of each stage; stage k is on rank k modulo their number.
            units: by which ranks that share a stage agree.
        """
        self._blocks = [block for stage in stages for block in stage]
        self._ranks = ranks
        self._units = units
        self._cache = cache
        self._rank_of = [number % ranks.size for number, stage in enumerate(stages) for _ in stage]
        self._own = frozenset(at for at, rank in enumerate(self._rank_of) if rank == ranks.rank)
        """Blocks of this rank."""

    def begin(self, parts: Sequence[MicroBatch], ids: object) -> FrozenStep:
        """Return what a step with these micro-batches begins with. Arguments and errors are those of `FrozenPrefix`.

        Raises:
            RankError: a rank is missing.
        """
        each = [] if self._cache is None else split_ids(ids, parts)
        num = min(num_frozen(self._blocks, parts), len(self._blocks) - 1)
        if self._cache is None or not num:
            return FrozenStep(num)
        samples, depth, failed = self._ask(self._cache, num, parts, each)
        start, any_failed = map(
            int, self._ranks.max_over([depth, float(failed is not None)], label="pipe.step(): what the cache has")
        )
        if failed is not None:
            raise failed
        if any_failed:
            raise StateError("pipe.step(): the cache of another stage refuses the batch; its rank says why")
        if self._units.prefetch is not None:
            start = num if self._units.agree("pipe.step(): the cache has all samples", holds=start == num) else 0
        values = [self._cache.read(one, _CPU) for one in samples] if 0 < depth == start else []
        return FrozenStep(num, start, cache=self._cache, samples=samples, values=values)

    def _ask(
        self, cache: Cache, num: int, parts: Sequence[MicroBatch], each: Sequence[Any]
    ) -> tuple[Sequence[Samples], int, ChunkmemError | None]:
        """Ask the cache about all micro-batches.

        Returns:
            What it says; the block that could be given what it has, if this rank has that block, or 0; and what it has
            raised, for the other stages to hear of it.
        """

        def agree(least: int) -> int:
            wanted = num
            while not self._units.agree(f"pipe.step(): {wanted} frozen blocks are as they were", holds=least >= wanted):
                wanted -= 1
            (found,) = self._ranks.max_over([float(-wanted)], label="pipe.step(): frozen blocks are as they were")
            return -int(found)

        cache.follow(tuple(self._blocks[:num]), agree=agree, over_stages=True)
        if not len(cache) and self._rank_of[num] != self._ranks.rank:
            return (), 0, None  # it has nothing, and gets nothing
        try:
            samples = [cache.find(part.inputs, own, own=self._own) for part, own in zip(parts, each, strict=True)]
        except ChunkmemError as error:
            return (), 0, error
        depths = {one.depth for one in samples}
        return samples, depths.pop() if len(depths) == 1 else 0, None
