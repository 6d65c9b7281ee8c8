"""Hybrid sharding: chunks are gathered within a replica of the model, gradients averaged over all replicas.

A gradient is reduced to its owner in each replica, and the owners of the same chunk average what they have: each of
them a part of the chunks, which it then sends to the others. So all replicas get the same bits, and only 1 / S of the
gradients goes from replica to replica, where S is the number of shards.

The mean over W = R S ranks is that over R replicas of that over S ranks, in fp32, rounded once to the dtype of the
chunk. So it is not the sum in the order of the ranks that one process has, if R and S are larger than 1.
"""

from __future__ import annotations

from collections.abc import Sequence

from chunkmem.comm.exchange import Exchange, PendingWork, Shard, Work, sum_dtype
from chunkmem.comm.ranks import Ranks


class Replicated:
    """An exchange over replicas, made of one within each and one across them."""

    def __init__(self, within: Exchange, across: Exchange, ranks: Ranks) -> None:
        """Exchange `within` a replica, and `across` replicas; count both as one."""
        assert ranks.replicate is not None
        self._within = within
        self._across = across
        self._shard = ranks.shard
        self._num_replicas = ranks.replicate.size
        self.traffic = across.traffic = within.traffic

    def gather(self, shards: Sequence[Shard], *, label: str) -> Work:
        """See `Exchange`."""
        return self._within.gather(shards, label=label)

    def reduce(self, shards: Sequence[Shard], *, label: str) -> Work:
        """See `Exchange`; returns when it is over.

        What goes across is issued when what goes within has arrived. If the ranks did that when they wait, one that
        waits early would block another that has not come to it: see [Note: Order of exchanges].
        """
        wide = [Shard(shard.index, shard.owner, shard.flat.to(sum_dtype(shard.flat.dtype))) for shard in shards]
        pairs = list(zip(shards, wide, strict=True))
        nbytes = sum(copy.flat.nbytes for shard, copy in pairs if copy.flat is not shard.flat)
        self.traffic.buffer(nbytes)
        try:
            self._within.reduce(wide, label=label).wait()
            own = [(shard, copy) for shard, copy in pairs if shard.owner == self._shard.rank]
            parts = [Shard(s.index, at % self._num_replicas, s.flat) for at, (_, s) in enumerate(own)]
            self._across.reduce(parts, label=label).wait()
            self._across.gather(parts, label=label).wait()
            for shard, copy in own:
                if copy.flat is not shard.flat:
                    shard.flat.copy_(copy.flat)
        finally:
            self.traffic.buffer(-nbytes)
        return PendingWork(self._shard, label, [])
