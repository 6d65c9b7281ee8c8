"""What a way to exchange chunks has to say, and three of them, by the operations of torch.distributed that they use.

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
was waited for, and twice the bytes on the way. Who wants less passes fewer shards at a time, or has `reduce_dtype` be
bf16: then gradients in bf16 are summed as they are, and others in copies of that dtype, as FSDP2 does.
`PointToPoint` sums in fp32 whatever it sends, so it needs copies only of gradients that are not in bf16 then.

A gradient is reduced to its owner in each replica, and the owners of the same chunk average what they have: each of
them a part of the chunks, which it then sends to the others. So all replicas get the same bits, and only 1 / S of the
gradients goes from replica to replica, where S is the number of shards.

The mean over W = R S ranks is that over R replicas of that over S ranks, in fp32, rounded once to the dtype of the
chunk. So it is not the sum in the order of the ranks that one process has, if R and S are larger than 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import TypeVar

import torch
import torch.distributed as dist

from chunkmem.data.errors import ConfigError, StateError
from chunkmem.data.layout import EACH
from chunkmem.ranks.exchange import (
    Exchange,
    PendingWork,
    Shard,
    Traffic,
    Work,
    has_one_of_each,
    mean_in_order,
    require_exchangeable,
    sum_dtype,
)
from chunkmem.ranks.groups import RankGroup
from chunkmem.ranks.ranks import Ranks

Overlap = Callable[[Callable[[], None]], Callable[[], None]]
"""Does what it is given after all it was given before, overlapped with computing; returns what waits for it."""


class Replicated:
    """An exchange over replicas, made of one within each and one across them, both overlapped with computing.

    What goes across can be issued only once what goes within has arrived. If each rank did that where it waits, one
    that waits early, since a gradient of its own is touched, would wait for others to issue it too; they do where they
    wait, which may be behind an operation that the early one has to join. So nobody issues it where it waits, but
    `overlap` does: in RAM a thread that does nothing else, on accelerators a stream.

        trains    reduce 1 | backward | wait 1, reduce 2 | backward | wait 2 ...
        within         1 --------->            2 --------->
        across                1 ------>               2 ------>

    No rank holds up another. `reduce` issues what goes within, among gathers, in the one order that all ranks have.
    What goes across only `overlap` issues, in the order of the reductions, in a group that nothing else uses. It waits
    for nothing but the same reduction: within, which all ranks of a row have issued, and across, which each rank of a
    column issues after the reductions before it. So by induction over reductions each is over some time after all ranks
    have issued it, whatever the threads that train do meanwhile: wait early, late, or for another rank in another
    operation. To issue it, no rank waits for another: all have just agreed on it. On accelerators no host waits at all,
    and every rank issues the same to each communicator in the same order.
    """

    def __init__(
        self, within: Exchange, across: Exchange, ranks: Ranks, *, reduce_dtype: torch.dtype, overlap: Overlap
    ) -> None:
        """Exchange `within` a replica, and `across` replicas; count both as one."""
        assert ranks.replicate is not None
        self._within = within
        self._across = across
        self._shard = ranks.shard
        self._num_replicas = ranks.replicate.size
        self._reduce_dtype = reduce_dtype
        self._overlap = overlap
        self.traffic = across.traffic = within.traffic

    def gather(self, shards: Sequence[Shard], *, label: str) -> Work:
        """See `Exchange`."""
        return self._within.gather(shards, label=label)

    def reduce(self, shards: Sequence[Shard], *, label: str) -> Work:
        """See `Exchange`."""
        summed = [shard.to(sum_dtype(shard.flat.dtype, self._reduce_dtype)) for shard in shards]
        nbytes = sum(copy.flat.nbytes for shard, copy in zip(shards, summed, strict=True) if copy is not shard)
        self.traffic.buffer(nbytes)
        within = self._within.reduce(summed, label=label)
        wait = self._overlap(partial(self._average, shards, summed, within, label))

        def finish() -> None:
            wait()
            self.traffic.buffer(-nbytes)

        return PendingWork(self._shard, label, [], finish=finish, held=summed)

    def _average(self, shards: Sequence[Shard], summed: Sequence[Shard], within: Work, label: str) -> None:
        """Have the mean over all ranks in own shards, which are `summed` within a replica in copies, or as they are."""
        within.wait()
        own = [pair for pair in zip(shards, summed, strict=True) if pair[0].owner in (self._shard.rank, EACH)]
        parts = [Shard(s.index, at % self._num_replicas, s.flat) for at, (_, s) in enumerate(own)]
        self._across.reduce(parts, label=label).wait()
        self._across.gather(parts, label=label).wait()
        for shard, copy in own:
            if copy is not shard:
                shard.flat.copy_(copy.flat)


_O = TypeVar("_O", "dist.BroadcastOptions", "dist.ReduceOptions")


class ExchangeMethod(ABC):
    """A way to exchange chunks between ranks: an all-gather and a reduce-scatter of whole chunks.

    `ChunkManager(exchange=Mine)` uses a subclass of your own, the same on all ranks. What goes in is a list of shards,
    in the same order on all ranks: `shard.flat` is a 1-D tensor, this rank's memory for a chunk; `shard.owner` a rank,
    counted as `rank` is; `shard.index` is different in each shard of a call, and good for tags. What an exchange raises
    on one rank is a `RankError` on all.

    Every rank issues the same calls in one order. Several may be under way, and each rank waits for them in an order of
    its own: whatever a call sends or receives has to be issued in it.
    """

    reduce_dtype = torch.float32
    """What `distributed.reduce_dtype` says. If it is bf16, `reduce_scatter` and `finish` get shards in bf16."""

    def __init__(self, ranks: RankGroup) -> None:
        """Exchange between `ranks`."""
        self.traffic = Traffic()
        self.rank = ranks.rank
        """Number of this rank among those that exchange, from 0."""
        self.size = ranks.size
        self._ranks = ranks

    @abstractmethod
    def all_gather(self, shards: Sequence[Shard]) -> Sequence[dist.Work]:
        """Begin to copy each chunk from its owner to all ranks; return what to wait for, if anything."""

    @abstractmethod
    def reduce_scatter(self, shards: Sequence[Shard], buffers: Sequence[torch.Tensor]) -> Sequence[dist.Work]:
        """Begin to send each chunk's values to its owner, added up or to be added up by `finish`.

        Args:
            shards: what other ranks than the owner have in them afterwards does not matter.
            buffers: what `buffers` has returned for them.
        """

    @abstractmethod
    def finish(self, shards: Sequence[Shard], buffers: Sequence[torch.Tensor]) -> None:
        """Leave the mean over ranks in each chunk that this rank owns, when a reduce-scatter has arrived."""

    def buffers(self, shards: Sequence[Shard]) -> Sequence[torch.Tensor]:
        """Return the memory that a reduce-scatter of `shards` takes on this rank until it is finished: none.

        It is in the memory report.
        """
        return ()

    def sent_nbytes(self, shard: Shard) -> int:
        """Return the bytes that a rank sends of a chunk to reduce it, if it does not own it."""
        return shard.flat.nbytes

    def group(self, device: torch.device) -> dist.ProcessGroup:
        """Return the group to exchange chunks on a device over; call its own methods, such as `group.broadcast`.

        In RAM it is a gloo group that nothing else uses. Its ranks are counted as `rank` is.
        """
        return self._ranks.group(device)

    def owns(self, shard: Shard) -> bool:
        """Tell whether this rank does."""
        return shard.owner == self.rank

    def gather(self, shards: Sequence[Shard], *, label: str) -> Work:
        """See `Exchange`."""
        require_exchangeable(shards, self._ranks, label)
        shards = [shard.to_copy() for shard in shards]
        self.traffic.count(num_gathers=1)
        if self.size == 1 or not shards:
            return PendingWork(self._ranks, label, [])
        with self._ranks.waiting(label):
            transfers = self.all_gather(shards)
        owned_nbytes, other_nbytes = self._by_owner(shards, [shard.flat.nbytes for shard in shards])
        self._count(transfers, sent=owned_nbytes * (self.size - 1), received=other_nbytes)
        return PendingWork(self._ranks, label, transfers, held=shards)

    def reduce(self, shards: Sequence[Shard], *, label: str) -> Work:
        """See `Exchange`."""
        if shards and shards[0].owner == EACH:
            for shard in shards:
                shard.flat.div_(self.size)
            return PendingWork(self._ranks, label, [])
        require_exchangeable(shards, self._ranks, label, is_copied=False)
        self.traffic.count(num_reductions=1)
        if self.size == 1 or not shards:
            return PendingWork(self._ranks, label, [])
        with self._ranks.waiting(label, is_own=True):  # if there is no memory for it, no other rank is to blame
            summed = [shard.to(self._sum_dtype(shard.flat.dtype)) for shard in shards]
            buffers = self.buffers(summed)
        with self._ranks.waiting(label):
            transfers = self.reduce_scatter(summed, buffers)
        owned_nbytes, other_nbytes = self._by_owner(summed, list(map(self.sent_nbytes, summed)))
        self._count(transfers, sent=other_nbytes, received=owned_nbytes * (self.size - 1))
        copies = [(shard, copy.flat) for shard, copy in zip(shards, summed, strict=True) if copy is not shard]
        nbytes = sum(memory.nbytes for memory in (*buffers, *(copy for _, copy in copies)))
        self.traffic.buffer(nbytes)

        def finish() -> None:
            self.finish(summed, buffers)
            for shard, copy in copies:
                if self.owns(shard):
                    shard.flat.copy_(copy)
            self.traffic.buffer(-nbytes)

        return PendingWork(self._ranks, label, transfers, finish=finish, held=summed)

    def _sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype that chunks of a dtype are reduced in."""
        return dtype if self.reduce_dtype == torch.float32 else sum_dtype(dtype, self.reduce_dtype)

    def _by_owner(self, shards: Sequence[Shard], nbytes: Sequence[int]) -> tuple[int, int]:
        """Return the bytes of the shards that this rank owns, and of the others."""
        owned_nbytes = sum(n for shard, n in zip(shards, nbytes, strict=True) if self.owns(shard))
        return owned_nbytes, sum(nbytes) - owned_nbytes

    def _count(self, transfers: Sequence[dist.Work], *, sent: int, received: int) -> None:
        self.traffic.count(num_operations=len(transfers), sent_nbytes=sent, received_nbytes=received)


class PointToPoint(ExchangeMethod):
    """Messages between owners and others, in RAM. Means have the same bits at every run, for every number of ranks."""

    def all_gather(self, shards: Sequence[Shard]) -> list[dist.Work]:
        works = []
        for shard in shards:
            group, tag = self._in_ram(shard), 2 * shard.index
            if self.owns(shard):
                works += [group.send([shard.flat], peer, tag) for peer in self._peers()]
            else:
                works.append(group.recv([shard.flat], shard.owner, tag))
        return works

    def buffers(self, shards: Sequence[Shard]) -> list[torch.Tensor]:
        """Return memory for what each other rank has of each chunk that this one owns."""
        return [torch.empty_like(shard.flat) for shard in shards if self.owns(shard) for _ in self._peers()]

    def reduce_scatter(self, shards: Sequence[Shard], buffers: Sequence[torch.Tensor]) -> list[dist.Work]:
        works, parts = [], iter(buffers)
        for shard in shards:
            group, tag = self._in_ram(shard), 2 * shard.index + 1
            if self.owns(shard):
                works += [group.recv([next(parts)], peer, tag) for peer in self._peers()]
            else:
                works.append(group.send([shard.flat], shard.owner, tag))
        return works

    def finish(self, shards: Sequence[Shard], buffers: Sequence[torch.Tensor]) -> None:
        parts = iter(buffers)
        for shard in filter(self.owns, shards):
            mean_in_order(shard.flat, [shard.flat if rank == self.rank else next(parts) for rank in range(self.size)])

    def _peers(self) -> list[int]:
        """Return the other ranks, in their order."""
        return [rank for rank in range(self.size) if rank != self.rank]

    def _in_ram(self, shard: Shard) -> dist.ProcessGroup:
        if not shard.flat.is_cpu:
            raise StateError(f"chunk {shard.index} is on {shard.flat.device}, and messages are exchanged in RAM only")
        return self.group(shard.flat.device)


class Chunkwise(ExchangeMethod):
    """Collectives of one chunk each, which need no extra memory."""

    def all_gather(self, shards: Sequence[Shard]) -> list[dist.Work]:
        options = [_rooted(dist.BroadcastOptions(), shard.owner) for shard in shards]
        return [self.group(s.flat.device).broadcast([s.flat], o) for s, o in zip(shards, options, strict=True)]

    def reduce_scatter(self, shards: Sequence[Shard], buffers: Sequence[torch.Tensor]) -> list[dist.Work]:
        return [self.group(s.flat.device).reduce([s.flat], _rooted(dist.ReduceOptions(), s.owner)) for s in shards]

    def finish(self, shards: Sequence[Shard], buffers: Sequence[torch.Tensor]) -> None:
        for shard in filter(self.owns, shards):
            shard.flat.div_(self.size)

    def _sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return sum_dtype(dtype, self.reduce_dtype)


class Grouped(Chunkwise):
    """Collectives of as many equal chunks as there are ranks, one owned by each; others go chunk by chunk."""

    def all_gather(self, shards: Sequence[Shard]) -> list[dist.Work]:
        if not has_one_of_each(shards, self.size):
            return super().all_gather(shards)
        flats = _by_rank(shards)
        options = dist.distributed_c10d.AllgatherOptions()  # type: ignore[attr-defined]
        options.asyncOp = True
        return [self.group(flats[0].device).allgather([flats], [flats[self.rank]], options)]

    def reduce_scatter(self, shards: Sequence[Shard], buffers: Sequence[torch.Tensor]) -> list[dist.Work]:
        if not has_one_of_each(shards, self.size):
            return super().reduce_scatter(shards, buffers)
        totals = _by_rank(shards)
        options = dist.ReduceScatterOptions()
        options.asyncOp = True
        return [self.group(totals[0].device).reduce_scatter([totals[self.rank]], [totals], options)]


def _by_rank(shards: Sequence[Shard]) -> list[torch.Tensor]:
    return [shard.flat for shard in sorted(shards, key=attrgetter("owner"))]


def _rooted(options: _O, owner: int) -> _O:
    """Return the options of a collective from, or to, one rank that is not waited for where it is issued."""
    options.rootRank = owner
    options.asyncOp = True
    return options


def require_method(own: object) -> None:
    """Raise a `ConfigError` unless a user's exchange is a subclass of `ExchangeMethod`, or None."""
    if own is not None and not (isinstance(own, type) and issubclass(own, ExchangeMethod)):
        raise ConfigError(f"exchange is {own!r}; pass a subclass of chunkmem.ExchangeMethod")


def possible_exchanges(
    ranks: Ranks,
    device: torch.device,
    *,
    memory_saving: bool | None,
    reduce_dtype: torch.dtype = torch.float32,
    overlap: Overlap,
    own: type[ExchangeMethod] | None = None,
) -> list[Exchange]:
    """Return the exchanges that a configuration leaves to choose from, the usual one first.

    Args:
        ranks: between whom.
        device: where the tensors are.
        memory_saving: `with_mem_saving_comm`: true is chunk by chunk, false is over groups. None is point to point in
            RAM, where that is faster and means have the same bits at every run; elsewhere it is one of the two others.
        reduce_dtype: float32 or bfloat16, see `ExchangeMethod.reduce_dtype`.
        overlap: overlaps exchanges across replicas with computing.
        own: the user's, which then is the only one.
    """

    def made(method: type[ExchangeMethod], group: RankGroup) -> ExchangeMethod:
        exchange = method(group)
        exchange.reduce_dtype = reduce_dtype
        return exchange

    if own is not None:
        methods: list[type[ExchangeMethod]] = [own]
    elif memory_saving is None and device.type == "cpu":
        methods = [PointToPoint]
    else:
        methods = [Grouped, Chunkwise] if memory_saving is None else [(Grouped, Chunkwise)[memory_saving]]
    if ranks.replicate is None:
        return [made(method, ranks.shard) for method in methods]
    pairs = [(made(method, ranks.shard), made(method, ranks.replicate)) for method in methods]
    return [Replicated(*pair, ranks, reduce_dtype=reduce_dtype, overlap=overlap) for pair in pairs]
