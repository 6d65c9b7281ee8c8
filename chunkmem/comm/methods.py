"""Three ways to exchange chunks, by the operations of torch.distributed that they use.

===============  =======================  =======================  ======================================
way              gather                   reduce                   extra memory, on each rank
===============  =======================  =======================  ======================================
`Grouped`        one all-gather           one reduce-scatter       up to a copy of all shards, in the library
`Chunkwise`      a broadcast for each     a reduce for each        none
`PointToPoint`   its owner sends to each  each sends to its owner  W - 1 copies of each shard that the rank
                                                                   owns, while they are reduced
===============  =======================  =======================  ======================================

Libraries sum in the dtype that they are given. So that bf16 and fp16 are rounded once, and a sum whose mean is small
does not overflow, `Grouped` and `Chunkwise` give them fp32 copies: 4 bytes an element of all shards until the reduction
was waited for, and twice the bytes on the way. Who wants less passes fewer shards at a time. `PointToPoint` sends what
there is, and needs no such copies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from operator import itemgetter
from typing import TypeVar

import torch
import torch.distributed as dist

from chunkmem.comm.exchange import (
    Exchange,
    PendingWork,
    Shard,
    Traffic,
    Work,
    mean_in_order,
    require_exchangeable,
    sum_dtype,
)
from chunkmem.comm.ranks import Ranks
from chunkmem.errors import StateError

_O = TypeVar("_O", "dist.BroadcastOptions", "dist.ReduceOptions")


def possible_exchanges(ranks: Ranks, device: torch.device, *, memory_saving: bool | None) -> list[Exchange]:
    """Return the exchanges that a configuration leaves to choose from, the usual one first.

    Args:
        ranks: between whom.
        device: where the tensors are.
        memory_saving: `with_mem_saving_comm`: true is chunk by chunk, false is over groups. None is point to point in
            RAM, where that is faster and means have the same bits at every run; elsewhere it is one of the two others.
    """
    if memory_saving is None and device.type == "cpu":
        return [PointToPoint(ranks)]
    both: list[Exchange] = [Grouped(ranks), Chunkwise(ranks)]
    return both if memory_saving is None else both[memory_saving:][:1]


class _Method(ABC):
    """What all ways have in common: checks, counts, and what one rank alone does."""

    def __init__(self, ranks: Ranks) -> None:
        self.traffic = Traffic()
        self._ranks = ranks

    def gather(self, shards: Sequence[Shard], *, label: str) -> Work:
        require_exchangeable(shards, self._ranks, label)
        self.traffic.num_gathers += 1
        if self._ranks.size == 1 or not shards:
            return PendingWork(self._ranks, label, [])
        with self._ranks.waiting(label):
            transfers = self._issue_gather(shards)
        owned_nbytes, other_nbytes = self._by_owner([(shard, shard.flat) for shard in shards])
        self._count(transfers, sent=owned_nbytes * (self._ranks.size - 1), received=other_nbytes)
        return PendingWork(self._ranks, label, transfers, held=shards)

    def reduce(self, shards: Sequence[Shard], *, label: str) -> Work:
        require_exchangeable(shards, self._ranks, label)
        self.traffic.num_reductions += 1
        if self._ranks.size == 1 or not shards:
            return PendingWork(self._ranks, label, [])
        # Outside of `waiting`: if there is no memory for it, no other rank is to blame.
        memory = self._memory(shards)
        with self._ranks.waiting(label):
            transfers = self._issue_reduce(shards, memory)
        sent = [(shard, self._sent(shard, parts)) for shard, parts in zip(shards, memory, strict=True)]
        owned_nbytes, other_nbytes = self._by_owner(sent)
        self._count(transfers, sent=other_nbytes, received=owned_nbytes * (self._ranks.size - 1))
        pairs = zip(shards, memory, strict=True)
        nbytes = sum(part.nbytes for shard, parts in pairs for part in parts if part is not shard.flat)
        self.traffic.buffer(nbytes)

        def finish() -> None:
            self._finish(shards, memory)
            self.traffic.buffer(-nbytes)

        return PendingWork(self._ranks, label, transfers, finish=finish, held=shards)

    @abstractmethod
    def _issue_gather(self, shards: Sequence[Shard]) -> list[dist.Work]:
        """Ask torch.distributed for a gather."""

    @abstractmethod
    def _memory(self, shards: Sequence[Shard]) -> list[list[torch.Tensor]]:
        """Return the extra memory that reducing takes, for each of them."""

    @abstractmethod
    def _sent(self, shard: Shard, parts: list[torch.Tensor]) -> torch.Tensor:
        """Return what a rank that does not own a shard sends for it."""

    @abstractmethod
    def _issue_reduce(self, shards: Sequence[Shard], memory: list[list[torch.Tensor]]) -> list[dist.Work]:
        """Ask torch.distributed for a reduction."""

    @abstractmethod
    def _finish(self, shards: Sequence[Shard], memory: list[list[torch.Tensor]]) -> None:
        """Turn what has arrived into means."""

    def _group(self, shard: Shard) -> dist.ProcessGroup:
        return self._ranks.group(shard.flat.device)

    def _is_mine(self, shard: Shard) -> bool:
        return shard.owner == self._ranks.rank

    def _by_owner(self, sent: Sequence[tuple[Shard, torch.Tensor]]) -> tuple[int, int]:
        """Return the bytes of the shards that this rank owns, and of the others."""
        owned_nbytes = sum(tensor.nbytes for shard, tensor in sent if self._is_mine(shard))
        return owned_nbytes, sum(tensor.nbytes for _, tensor in sent) - owned_nbytes

    def _count(self, transfers: list[dist.Work], *, sent: int, received: int) -> None:
        self.traffic.num_operations += len(transfers)
        self.traffic.sent_nbytes += sent
        self.traffic.received_nbytes += received


class PointToPoint(_Method):
    """Messages between owners and others, in RAM. Means have the same bits at every run, for every number of ranks."""

    def hand_over(self, shard: Shard, to: int, *, label: str) -> Work:
        """Begin to copy the content of a chunk from its owner to one other rank. These two call it, nobody else does.

        Raises:
            RankError: an exchange failed before, or this one cannot begin.
            StateError: the shard cannot be exchanged.
        """
        require_exchangeable([shard], self._ranks, label)
        is_mine, tag = self._is_mine(shard), 2 * shard.index
        with self._ranks.waiting(label):
            group = self._group(shard)
            transfer = group.send([shard.flat], to, tag) if is_mine else group.recv([shard.flat], shard.owner, tag)
        nbytes = shard.flat.nbytes
        self._count([transfer], sent=nbytes if is_mine else 0, received=0 if is_mine else nbytes)
        return PendingWork(self._ranks, label, [transfer], held=[shard])

    def _issue_gather(self, shards: Sequence[Shard]) -> list[dist.Work]:
        works = []
        for shard in shards:
            group, tag = self._group(shard), 2 * shard.index
            if self._is_mine(shard):
                works += [group.send([shard.flat], peer, tag) for peer in self._peers()]
            else:
                works.append(group.recv([shard.flat], shard.owner, tag))
        return works

    def _memory(self, shards: Sequence[Shard]) -> list[list[torch.Tensor]]:
        return [[torch.empty_like(s.flat) for _ in self._peers()] if self._is_mine(s) else [] for s in shards]

    def _sent(self, shard: Shard, parts: list[torch.Tensor]) -> torch.Tensor:
        return shard.flat

    def _issue_reduce(self, shards: Sequence[Shard], memory: list[list[torch.Tensor]]) -> list[dist.Work]:
        works = []
        for shard, parts in zip(shards, memory, strict=True):
            group, tag = self._group(shard), 2 * shard.index + 1
            if self._is_mine(shard):
                works += [group.recv([part], peer, tag) for part, peer in zip(parts, self._peers(), strict=True)]
            else:
                works.append(group.send([shard.flat], shard.owner, tag))
        return works

    def _finish(self, shards: Sequence[Shard], memory: list[list[torch.Tensor]]) -> None:
        for shard, parts in zip(shards, memory, strict=True):
            if self._is_mine(shard):
                parts.insert(shard.owner, shard.flat)
                mean_in_order(shard.flat, parts)

    def _peers(self) -> list[int]:
        """Return the other ranks, in their order."""
        return [rank for rank in range(self._ranks.size) if rank != self._ranks.rank]

    def _group(self, shard: Shard) -> dist.ProcessGroup:
        if not shard.flat.is_cpu:
            raise StateError(f"chunk {shard.index} is on {shard.flat.device}, and messages are exchanged in RAM only")
        return super()._group(shard)


class Chunkwise(_Method):
    """Collectives of one chunk each, which need no extra memory."""

    def _issue_gather(self, shards: Sequence[Shard]) -> list[dist.Work]:
        return [self._group(s).broadcast([s.flat], _rooted(dist.BroadcastOptions(), s.owner)) for s in shards]

    def _memory(self, shards: Sequence[Shard]) -> list[list[torch.Tensor]]:
        """Return what the library sums: the chunks themselves, or copies of them in fp32."""
        return [[shard.flat.to(sum_dtype(shard.flat.dtype))] for shard in shards]

    def _sent(self, shard: Shard, parts: list[torch.Tensor]) -> torch.Tensor:
        return parts[0]

    def _issue_reduce(self, shards: Sequence[Shard], memory: list[list[torch.Tensor]]) -> list[dist.Work]:
        pairs = zip(shards, memory, strict=True)
        return [self._group(s).reduce(total, _rooted(dist.ReduceOptions(), s.owner)) for s, total in pairs]

    def _finish(self, shards: Sequence[Shard], memory: list[list[torch.Tensor]]) -> None:
        for shard, (total,) in zip(shards, memory, strict=True):
            if self._is_mine(shard):
                total.div_(self._ranks.size)
                if total is not shard.flat:
                    shard.flat.copy_(total)


class Grouped(Chunkwise):
    """Collectives of as many equal chunks as there are ranks, one owned by each; others go chunk by chunk."""

    def _issue_gather(self, shards: Sequence[Shard]) -> list[dist.Work]:
        if not self._is_whole(shards):
            return super()._issue_gather(shards)
        flats = self._by_rank(shards, [shard.flat for shard in shards])
        options = dist.distributed_c10d.AllgatherOptions()  # type: ignore[attr-defined]
        options.asyncOp = True
        return [self._group(shards[0]).allgather([flats], [flats[self._ranks.rank]], options)]

    def _issue_reduce(self, shards: Sequence[Shard], memory: list[list[torch.Tensor]]) -> list[dist.Work]:
        if not self._is_whole(shards):
            return super()._issue_reduce(shards, memory)
        totals = self._by_rank(shards, [total for (total,) in memory])
        options = dist.ReduceScatterOptions()
        options.asyncOp = True
        return [self._group(shards[0]).reduce_scatter([totals[self._ranks.rank]], [totals], options)]

    def _is_whole(self, shards: Sequence[Shard]) -> bool:
        owners = sorted(shard.owner for shard in shards)
        kinds = {(shard.flat.numel(), shard.flat.dtype) for shard in shards}
        return owners == list(range(self._ranks.size)) and len(kinds) == 1

    @staticmethod
    def _by_rank(shards: Sequence[Shard], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        owners = [shard.owner for shard in shards]
        return [tensor for _, tensor in sorted(zip(owners, tensors, strict=True), key=itemgetter(0))]


def _rooted(options: _O, owner: int) -> _O:
    """Return the options of a collective from, or to, one rank that is not waited for where it is issued."""
    options.rootRank = owner
    options.asyncOp = True
    return options
