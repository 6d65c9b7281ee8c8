"""What stands for the other ranks in a rehearsal: they say what this one says, and what goes to them is counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from chunkmem.comm.agreement import Operation
from chunkmem.comm.exchange import Shard, Traffic, Work
from chunkmem.comm.ranks import Ranks
from chunkmem.layout.spec import Layout

_FP32_NBYTES = 4


class UnisonRanks(Ranks):
    """One of several ranks that all say the same, so that nobody has to be asked."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(None, timeout_s=1.0)
        self.rank, self.size = rank, size

    def begin(self, operation: Operation) -> bool:
        """Tell whether all can do it: they are all in the same place of the program."""
        return operation.can

    def _exchanged(self, mine: torch.Tensor, label: str) -> list[torch.Tensor]:
        return [mine]

    def _broadcast(self, tensor: torch.Tensor, source: int, label: str) -> torch.Tensor:
        return tensor


class _Counted:
    """An exchange that is over as soon as it is waited for."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish
        self._is_over = False

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._finish()


class CountedExchange:
    """Exchanges nothing, and counts what `chunkmem.comm.methods` would: `PointToPoint` in RAM, else `Grouped`.

    Of the two that an accelerator has, `Grouped` is used until both were timed, and it is the one that needs memory.
    """

    def __init__(self, ranks: Ranks, layout: Layout, *, is_accelerator: bool, on_buffer: Callable[[int], None]) -> None:
        """Begin with nothing exchanged; `on_buffer` hears of non-model bytes that exchanges take and give back."""
        self.traffic = Traffic()
        self._ranks = ranks
        self._groups = {group.id: group for group in layout.groups}
        self._is_accelerator = is_accelerator
        self._on_buffer = on_buffer

    def gather(self, shards: Sequence[Shard], *, label: str) -> Work:
        """Count a gather."""
        self.traffic.num_gathers += 1
        nbytes = [self._groups[shard.index].nbytes for shard in shards]
        owned, others = self._by_owner(shards, nbytes)
        self._count(nbytes, sent=owned * (self._ranks.size - 1), received=others)
        return self._buffered(sum(nbytes) if self._is_grouped(shards) else 0)

    def reduce(self, shards: Sequence[Shard], *, label: str) -> Work:
        """Count a reduction."""
        self.traffic.num_reductions += 1
        nbytes = [self._summed_nbytes(shard) for shard in shards]
        owned, others = self._by_owner(shards, nbytes)
        self._count(nbytes, sent=others, received=owned * (self._ranks.size - 1))
        if not self._is_accelerator:
            return self._buffered(owned * (self._ranks.size - 1))
        chunks = [self._groups[shard.index].nbytes for shard in shards]
        copies = sum(n for n, own in zip(nbytes, chunks, strict=True) if n != own)
        return self._buffered(copies + (sum(nbytes) if self._is_grouped(shards) else 0))

    def _summed_nbytes(self, shard: Shard) -> int:
        """Return the bytes that are sent of a gradient: over libraries in float32 at least."""
        group = self._groups[shard.index]
        is_low = self._is_accelerator and group.itemsize < _FP32_NBYTES
        return group.numel * _FP32_NBYTES if is_low else group.nbytes

    def _is_grouped(self, shards: Sequence[Shard]) -> bool:
        """Tell whether the library gets one chunk of each rank, all alike, which it copies."""
        alike = {(self._groups[s.index].nbytes, self._groups[s.index].dtype) for s in shards}
        owners = sorted(shard.owner for shard in shards)
        return self._is_accelerator and len(alike) == 1 and owners == list(range(self._ranks.size))

    def _by_owner(self, shards: Sequence[Shard], nbytes: Sequence[int]) -> tuple[int, int]:
        owned = sum(n for shard, n in zip(shards, nbytes, strict=True) if shard.owner == self._ranks.rank)
        return owned, sum(nbytes) - owned

    def _count(self, nbytes: Sequence[int], *, sent: int, received: int) -> None:
        """Count bytes of content: messages as they go; in libraries every rank passes on all but one rank's part."""
        if self._is_accelerator:
            sent = received = sum(nbytes) * (self._ranks.size - 1) // self._ranks.size
        self.traffic.sent_nbytes += sent
        self.traffic.received_nbytes += received

    def _buffered(self, nbytes: int) -> Work:
        def change(by_nbytes: int) -> None:
            self.traffic.buffer(by_nbytes)
            self._on_buffer(by_nbytes)

        change(nbytes)
        return _Counted(lambda: change(-nbytes))
