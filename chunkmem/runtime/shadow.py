"""Shadow buffers: slabs that speculative updates write to; see [Note: Speculative updates]."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from chunkmem.plan.ahead import SHADOW
from chunkmem.runtime.pool import Slab, SlabPool


class ShadowBuffers:
    """Slabs of HOST, taken while no plan is followed: what a pool hands out next is part of a plan."""

    def __init__(self, pool: SlabPool) -> None:
        self._pool = pool
        self._idle: dict[int, list[Slab]] = defaultdict(list)
        self._reserved: Counter[int] = Counter()
        """Number of slabs by their size in bytes, idle or in use."""

    @property
    def counts(self) -> dict[int, int]:
        """Slabs by their size in bytes."""
        return {nbytes: count for nbytes, count in self._reserved.items() if count}

    @property
    def reserved_nbytes(self) -> int:
        return sum(nbytes * count for nbytes, count in self._reserved.items())

    def reserve(self, counts: Mapping[int, int]) -> None:
        """Have so many slabs of each size, as far as the tier has room; none may be lent. Copies have to be over."""
        for nbytes in self._reserved:
            while self._reserved[nbytes] > counts.get(nbytes, 0):
                self._reserved[nbytes] -= 1
                self._pool.free(SHADOW, self._idle[nbytes].pop())
        for nbytes, count in sorted(counts.items()):
            missing = min(count - self._reserved[nbytes], self._pool.ledger.free_nbytes // nbytes)
            for num in range(missing, 0, -1):
                self._reserved[nbytes] += 1
                self._idle[nbytes].append(self._pool.alloc(SHADOW, nbytes, num=num))

    def take(self, nbytes: int) -> Slab | None:
        """Lend a slab, contents undefined; None if none of this size is left."""
        idle = self._idle[nbytes]
        return idle.pop() if idle else None

    def give(self, slab: Slab) -> None:
        """Take back what was lent, or another slab of its size."""
        if self._pool.poison:
            slab.poison()
        self._idle[slab.nbytes].append(slab)
