"""What stands for the other ranks in a rehearsal: they say what this one says, and what goes to them is counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from chunkmem.comm.agreement import Operation
from chunkmem.comm.connection import Connection
from chunkmem.comm.exchange import PendingWork, Shard, Traffic, Work, by_owner, has_one_of_each, sum_dtype
from chunkmem.comm.groups import RankGroup
from chunkmem.comm.ranks import Ranks


class Unison(Connection):
    """Of one of several ranks that all say the same, so that nobody has to be asked."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(None, timeout_s=1.0)
        self.rank, self.size = rank, size

    def part(self, name: str, members: Sequence[int], elsewhere: object) -> RankGroup:
        """Return all of them, who exchange nothing."""
        return RankGroup(self.rank, self.size, in_ram=None, elsewhere=None, waiting=self.waiting)

    def begin(self, operation: Operation) -> bool:
        """Tell whether all can do it: they are all in the same place of the program."""
        return operation.can

    def exchange(self, mine: torch.Tensor, label: str) -> list[torch.Tensor]:
        return [mine]

    def broadcast(self, tensor: torch.Tensor, source: int, label: str) -> torch.Tensor:
        return tensor


class CountedExchange:
    """Exchanges nothing, and counts what `chunkmem.comm.methods` would: `PointToPoint` in RAM, else `Grouped`.

    Of the two that an accelerator has, `Grouped` is used until both were timed, and it is the one that needs memory.
    """

    def __init__(self, ranks: Ranks, *, is_accelerator: bool, on_buffer: Callable[[int], None]) -> None:
        """Begin with nothing exchanged; `on_buffer` hears of non-model bytes that exchanges take and give back."""
        self.traffic = Traffic()
        self._ranks = ranks
        self._is_accelerator = is_accelerator
        self._on_buffer = on_buffer

    def gather(self, shards: Sequence[Shard], *, label: str) -> Work:
        """Count a gather."""
        self.traffic.num_gathers += 1
        nbytes = [shard.flat.nbytes for shard in shards]
        owned, others = by_owner(shards, nbytes, self._ranks.rank)
        self._count(nbytes, sent=owned * (self._ranks.size - 1), received=others)
        return self._buffered(sum(nbytes) if self._is_grouped(shards) else 0, label)

    def reduce(self, shards: Sequence[Shard], *, label: str) -> Work:
        """Count a reduction."""
        self.traffic.num_reductions += 1
        nbytes = [self._summed_nbytes(shard.flat) for shard in shards]
        owned, others = by_owner(shards, nbytes, self._ranks.rank)
        self._count(nbytes, sent=others, received=owned * (self._ranks.size - 1))
        if not self._is_accelerator:
            return self._buffered(owned * (self._ranks.size - 1), label)
        copies = sum(n for n, shard in zip(nbytes, shards, strict=True) if n != shard.flat.nbytes)
        return self._buffered(copies + (sum(nbytes) if self._is_grouped(shards) else 0), label)

    def _summed_nbytes(self, flat: torch.Tensor) -> int:
        """Return the bytes that are sent of a gradient: over libraries as they sum it."""
        return flat.numel() * (sum_dtype(flat.dtype) if self._is_accelerator else flat.dtype).itemsize

    def _is_grouped(self, shards: Sequence[Shard]) -> bool:
        """Tell whether the library gets one chunk of each rank, all alike, which it copies."""
        return self._is_accelerator and has_one_of_each(shards, self._ranks.size)

    def _count(self, nbytes: Sequence[int], *, sent: int, received: int) -> None:
        """Count bytes of content: messages as they go; in libraries every rank passes on all but one rank's part."""
        if self._is_accelerator:
            sent = received = sum(nbytes) * (self._ranks.size - 1) // self._ranks.size
        self.traffic.sent_nbytes += sent
        self.traffic.received_nbytes += received

    def _buffered(self, nbytes: int, label: str) -> Work:
        def change(by_nbytes: int) -> None:
            self.traffic.buffer(by_nbytes)
            self._on_buffer(by_nbytes)

        change(nbytes)
        return PendingWork(self._ranks.shard, label, [], finish=lambda: change(-nbytes))
