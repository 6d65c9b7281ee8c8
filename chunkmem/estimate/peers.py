"""What stands for the other ranks in a rehearsal: they say what this one says, and what goes to them is counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from chunkmem.ranks.agreement import Operation
from chunkmem.ranks.connection import Connection
from chunkmem.ranks.exchange import PendingWork, Shard, has_one_of_each
from chunkmem.ranks.groups import RankGroup
from chunkmem.ranks.methods import ExchangeMethod, Grouped, PointToPoint


class Unison(Connection):
    """Of one of several ranks that all say the same, so that nobody has to be asked."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(None, timeout_s=1.0)
        self.rank, self.size = rank, size

    def part(self, name: str, members: Sequence[int], elsewhere: object, *, is_rare: bool = False) -> RankGroup:
        """Return all of them, who exchange nothing."""
        return RankGroup(self.rank, self.size, in_ram=None, elsewhere=None, waiting=self.waiting)

    def begin(self, operation: Operation) -> bool:
        """Tell whether all can do it: they are all in the same place of the program."""
        return operation.can

    def over_ranks(
        self, mine: torch.Tensor, combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], label: str
    ) -> torch.Tensor:
        return mine

    def exchange(self, mine: torch.Tensor, label: str) -> list[torch.Tensor]:
        return [mine]

    def count_alike(self, text: str, label: str) -> int:
        """Return how many ranks are known to say the same of their machines: this one."""
        return 1

    def broadcast(self, tensor: torch.Tensor, source: int, label: str) -> torch.Tensor:
        return tensor


class _Counted(ExchangeMethod):
    """Exchanges nothing; what a method would exchange, and the memory that it takes, is counted as in training."""

    def all_gather(self, shards: Sequence[Shard]) -> list[Any]:
        return []

    def reduce_scatter(self, shards: Sequence[Shard], buffers: Sequence[torch.Tensor]) -> list[Any]:
        return []

    def finish(self, shards: Sequence[Shard], buffers: Sequence[torch.Tensor]) -> None:
        return


class CountedInRam(_Counted, PointToPoint):
    """What ranks in RAM exchange by."""


class CountedOverLibrary(_Counted, Grouped):
    """What accelerators exchange by until both ways were timed; of the two it is the one that needs memory.

    Every rank passes on all but one rank's part. What the library copies is counted, too.
    """

    def gather(self, shards: Sequence[Shard], *, label: str) -> PendingWork:
        """Count a gather."""
        super().gather(shards, label=label)
        nbytes = sum(shard.flat.nbytes for shard in shards) if has_one_of_each(shards, self.size) else 0
        self.traffic.buffer(nbytes)
        return PendingWork(self._ranks, label, [], finish=lambda: self.traffic.buffer(-nbytes))

    def buffers(self, shards: Sequence[Shard]) -> list[torch.Tensor]:
        """Return what a reduction takes in all."""
        copied = shards if has_one_of_each(shards, self.size) else ()
        return [
            *super().buffers(shards),
            *(torch.empty(self.sent_nbytes(shard), dtype=torch.uint8, device="meta") for shard in copied),
        ]

    def _by_owner(self, shards: Sequence[Shard], nbytes: Sequence[int]) -> tuple[int, int]:
        return 0, sum(nbytes) * (self.size - 1) // self.size

    def _count(self, transfers: Sequence[Any], *, sent: int, received: int) -> None:
        super()._count(transfers, sent=sent + received, received=sent + received)  # one of them is 0
