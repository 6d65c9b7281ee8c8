"""Which rank owns which group of chunks, and groups brought together from their owners."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

from chunkmem.comm.exchange import Exchange, Shard, Work
from chunkmem.comm.ranks import Ranks
from chunkmem.runtime.device import runtime_mode
from chunkmem.runtime.executor import DemandExecutor
from chunkmem.runtime.store import Chunk, ChunkStore
from chunkmem.types import ChunkId, Role, Tier

T = TypeVar("T")
_KEPT_ROLES = (Role.PARAM, Role.MASTER, Role.EXP_AVG, Role.EXP_AVG_SQ)
"""Of these only the owner has content between uses; every rank has gradients of its own."""


class Sharing:
    """The chunks of all roles of a group belong to one rank. Others hold its weights while a unit needs them."""

    def __init__(self, ranks: Ranks, exchange: Exchange, executor: DemandExecutor) -> None:
        self.ranks = ranks
        self.exchange = exchange
        self._executor = executor
        self._store: ChunkStore = executor.store

    def owner(self, group: int) -> int:
        """Return the rank that keeps a group and updates it."""
        return group % self.ranks.size

    def owns(self, group: int) -> bool:
        """Tell whether this rank does."""
        return self.owner(group) == self.ranks.rank

    def together(self, groups: Iterable[int]) -> list[list[int]]:
        """Return groups as they are exchanged: each list has at most one of each owner."""
        found: dict[int, list[int]] = {}
        for group in sorted(set(groups)):
            found.setdefault(group // self.ranks.size, []).append(group)
        return list(found.values())

    def let_go_of_others(self, groups: Iterable[int]) -> None:
        """Every rank has built all of these groups: keep the own ones only."""
        for group in groups:
            if not self.owns(group):
                for role in _KEPT_ROLES:
                    chunk = self._store.chunks.get(ChunkId(role, group))
                    if chunk is not None:
                        chunk.is_remote = True
                        for tier in list(chunk.replicas):
                            self._store.drop(chunk, tier)

    def hold(self, groups: Iterable[int], *, reader: object) -> None:
        """Pin the weights of groups on DEVICE: the own ones with their content, the others without any yet.

        Raises:
            CapacityError: they do not fit.
        """
        held: list[Chunk] = []
        try:
            for group in groups:
                chunk = self._weights(group)
                if chunk.is_remote:
                    self._executor.hold_empty(chunk, Tier.DEVICE, reader)
                else:
                    self._executor.pin(chunk, Tier.DEVICE, reader=reader)
                held.append(chunk)
        except BaseException:
            for chunk in held:
                self._executor.unpin(chunk, Tier.DEVICE)
            raise

    def gather(self, groups: Iterable[int], *, reader: object) -> None:
        """Have every rank see the owners' weights of groups that all ranks `hold`. All ranks call it, in one order.

        Raises:
            RankError: a rank is missing, or somewhere else.
        """
        self.arrive(self.send(groups, reader=reader))

    def send(self, groups: Iterable[int], *, reader: object) -> list[tuple[Work, list[Chunk]]]:
        """Begin what `gather` does; `arrive` ends it."""
        found = []
        for together in self.together(groups):
            chunks = [self._weights(group) for group in together]
            with runtime_mode():
                label = f"{reader}: {chunks[0].label}"
                found.append((self.exchange.gather(self._shards(chunks), label=label), chunks))
        return found

    def arrive(self, sent: Iterable[tuple[Work, list[Chunk]]]) -> None:
        """Wait for what `send` has begun; raises what `gather` does."""
        for work, chunks in sent:
            with runtime_mode():
                work.wait()
                for chunk in chunks:
                    if chunk.is_remote:
                        chunk.replicas[Tier.DEVICE].version = chunk.version
                        assert chunk.home is not None
                        chunk.home.bind()

    def fits_beside(self, groups: Iterable[Sequence[int]], *, always: Sequence[int]) -> bool:
        """Tell whether on every rank two lists of groups that follow each other fit DEVICE at a time.

        Beside them `always`, and gradients: those that land, and those that are reduced. All ranks call it.
        """
        lists = [set(each) - set(always) for each in groups]
        pairs = [self._nbytes(one | other) for one, other in pairwise(lists)]
        largest = max((chunk.nbytes for chunk in self._store.chunks.values()), default=0)
        needed = max(pairs, default=0) + self._nbytes(always) + (self.ranks.size + 1) * largest
        fits = needed <= self._store.pools[Tier.DEVICE].ledger.cap_nbytes
        return not any(self.ranks.max_over((float(not fits),), label="room to gather ahead"))

    def _nbytes(self, groups: Iterable[int]) -> int:
        return sum(self._weights(group).nbytes for group in groups)

    def release(self, groups: Iterable[int]) -> None:
        """Undo `hold`; the content of others goes."""
        for group in groups:
            self._executor.unpin(self._weights(group), Tier.DEVICE)

    def reduce(self, chunks: Mapping[int, Chunk], *, reader: object) -> None:
        """Give the owners the means of chunks that are pinned on DEVICE, by group: at most one of each owner.

        Raises:
            RankError: a rank is missing, or somewhere else.
        """
        with runtime_mode():
            self.exchange.reduce(self._shards(list(chunks.values())), label=str(reader)).wait()

    def from_owner(self, group: int, read: Callable[[], T], *, reader: str) -> T:
        """Return what `read` returns on the rank that owns a group, as `pickle` copies it. All ranks call it."""
        return self.ranks.broadcast_object(read() if self.owns(group) else None, label=reader, source=self.owner(group))  # type: ignore[return-value]

    def _shards(self, chunks: Iterable[Chunk]) -> list[Shard]:
        return [Shard(c.id.group, self.owner(c.id.group), c.replicas[Tier.DEVICE].flat) for c in chunks]

    def _weights(self, group: int) -> Chunk:
        return self._store.chunks[ChunkId(Role.PARAM, group)]
