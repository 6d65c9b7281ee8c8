"""An exchange that is as late, and as destructive meanwhile, as its contract allows."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from chunkmem.ranks.exchange import Exchange, Shard, Traffic, Work


@dataclass(eq=False)
class _Late:
    """An exchange that is made when it is waited for."""

    make: Callable[[], Work]
    is_over: bool = False

    def done(self) -> bool:
        return self.is_over

    def wait(self) -> None:
        if not self.is_over:
            self.is_over = True
            self.make().wait()


class LateExchange:
    """Begins some exchanges only when they are waited for, alike on all ranks, and fills what they will write with NaN.

    Whoever reads too early reads NaN; whoever writes or frees too early spoils what is sent.
    """

    def __init__(self, inner: Exchange, *, rank: int, seed: int) -> None:
        self.inner = inner
        self.num_late = 0
        self._rank = rank
        self._random = random.Random(seed)

    @property
    def traffic(self) -> Traffic:
        return self.inner.traffic

    def gather(self, shards: Sequence[Shard], *, label: str) -> Work:
        for shard in shards:
            if shard.owner != self._rank:
                shard.flat.fill_(torch.nan)
        return self._perhaps_late(lambda: self.inner.gather(shards, label=label))

    def reduce(self, shards: Sequence[Shard], *, label: str) -> Work:
        return self._perhaps_late(lambda: self.inner.reduce(shards, label=label))

    def _perhaps_late(self, make: Callable[[], Work]) -> Work:
        if self._random.random() < 0.3:
            return make()
        self.num_late += 1
        return _Late(make)
