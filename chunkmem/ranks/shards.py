"""Which rank owns which group of chunks, and groups brought together from their owners."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from heapq import nlargest
from itertools import pairwise
from typing import TypeVar

import torch

from chunkmem.data.layout import EACH
from chunkmem.data.types import ChunkId, Role, Tier
from chunkmem.ranks.agreement import Operation
from chunkmem.ranks.exchange import Exchange, Shard, Work
from chunkmem.ranks.ranks import Ranks
from chunkmem.runtime.chunk import Chunk
from chunkmem.runtime.device import runtime_mode
from chunkmem.runtime.pager import Pager
from chunkmem.runtime.store import ChunkStore

T = TypeVar("T")
_JOINING = "taking part in what other ranks exchange"


class ShardStore:
    """The chunks of all roles of a group belong to one rank. Others hold its weights while a unit needs them."""

    def __init__(self, ranks: Ranks, exchanges: Sequence[Exchange], pager: Pager) -> None:
        """Share nothing yet; the first of `exchanges` is used until `measure_exchanges` has compared them."""
        self.ranks = ranks
        self.exchange = exchanges[0]
        self.exchanges = exchanges
        """The ways that there are to exchange."""
        self._pager = pager
        self._store: ChunkStore = pager.store
        self._holds: Counter[int] = Counter()
        """By group: how often it is held; equal on all ranks."""
        self._spare: Counter[int] = Counter()
        """By group: how many of its holds nothing has to have room for; equal on all ranks."""
        self._present: set[int] = set()
        """Held groups that were gathered since they are held; equal on all ranks."""
        self._under_way: dict[int, tuple[list[Chunk], Callable[..., None]]] = {}
        """By group that is being gathered: the chunks of its exchange, and the callable that waits for it."""

    @property
    def buffered_nbytes(self) -> tuple[int, int]:
        """Non-model memory of exchanges: now, and at the peak."""
        traffics = [exchange.traffic for exchange in self.exchanges]
        return sum(t.buffered_nbytes for t in traffics), max(t.peak_buffered_nbytes for t in traffics)

    def owner(self, group: int) -> int:
        """Return the rank that keeps a group and updates it, counted within its replica: see `Group`."""
        found = self._store.weights(group).group.owner
        return self.ranks.shard.rank if found == EACH else found

    def is_each_ranks(self, group: int) -> bool:
        """Tell whether each rank has a group of its own there, which is not exchanged."""
        return self._store.weights(group).group.owner == EACH

    def owns(self, group: int) -> bool:
        """Tell whether this rank does."""
        return self.owner(group) == self.ranks.shard.rank

    def together(self, groups: Iterable[int]) -> list[list[int]]:
        """Return groups as they are exchanged: each list has at most one of each owner, all on the same tier.

        What is each rank's own is not.
        """
        found: list[list[int]] = []
        seen: set[int] = set()
        was_on_host = False
        shared = {group for group in groups if not self.is_each_ranks(group)}
        for group in sorted(shared, key=lambda group: (self._is_on_host(group), group)):
            owner, is_on_host = self.owner(group), self._is_on_host(group)
            if not found or owner in seen or is_on_host is not was_on_host:
                found.append([])
                seen.clear()
            found[-1].append(group)
            seen.add(owner)
            was_on_host = is_on_host
        return found

    def drop_unowned(self, groups: Iterable[int]) -> None:
        """Every rank has built all of these groups: keep the own ones only, and weights computed with on HOST."""
        for group in groups:
            if not self.owns(group):
                # Every rank has gradients of its own, though.
                weights = self._store.weights(group)
                weights.is_copy = weights.compute_tier is Tier.HOST
                for chunk in (None if weights.is_copy else weights, weights.master):
                    if chunk is not None:
                        chunk.is_remote = True
                        for tier in list(chunk.replicas):
                            self._store.drop(chunk, tier)

    def hold(self, groups: Iterable[int], *, reader: object) -> None:
        """Pin the weights of groups on DEVICE: the own ones with their content, the others for an exchange to fill.

        All ranks hold and release the same, in one order.

        Raises:
            CapacityError: they do not fit.
        """
        held: list[int] = []
        try:
            for group in groups:
                chunk = self._store.weights(group)
                if chunk.is_remote:
                    self._pager.pin_remote(chunk, reader=reader)
                else:
                    self._pager.pin(chunk, Tier.DEVICE, reader=reader)
                if self._is_spare(group):
                    self._pager.end_spare(chunk)
                self._holds[group] += 1
                held.append(group)
        except BaseException:
            self.release(held)
            raise

    def release(self, groups: Iterable[int]) -> None:
        """Undo `hold`; with the last one, the content of others goes."""
        for group in groups:
            self._holds[group] -= 1
            if not self._holds[group]:
                del self._holds[group]
                self._present.discard(group)
            elif self._is_spare(group):
                self._pager.begin_spare(self._store.weights(group))
            self._pager.unpin(self._store.weights(group), Tier.DEVICE)

    def hold_spare(self, groups: Iterable[int]) -> None:
        """Go on holding groups though nothing uses them now; `hold_in_use` or `release_spare` ends it."""
        for group in groups:
            self._spare[group] += 1
            if self._is_spare(group):
                self._pager.begin_spare(self._store.weights(group))

    def hold_in_use(self, groups: Iterable[int]) -> None:
        """Use groups again that were held all the while."""
        for group in groups:
            if self._is_spare(group):
                self._pager.end_spare(self._store.weights(group))
            self._spare[group] -= 1

    def release_spare(self, groups: Sequence[int]) -> None:
        """Undo `hold_spare`, and `hold` with it."""
        self.hold_in_use(groups)
        self.release(groups)

    def _is_spare(self, group: int) -> bool:
        """Tell whether a group is held, and nothing has to have room for it."""
        return 0 < self._spare[group] == self._holds[group]

    def send(self, groups: Iterable[int], *, reader: object, can: bool = True) -> bool:
        """Begin to have every rank see the owners' weights of groups that all ranks `hold`; `arrive` ends it.

        What is there since it was first held is not sent again. All ranks call it, in one order.

        Args:
            groups: of weights.
            reader: who wants them; the same text on all ranks.
            can: false: this rank has no room to hold them.

        Returns:
            Whether all ranks can; else nothing was begun.

        Raises:
            RankError: a rank is missing, or somewhere else.
        """
        lists = self.together(set(groups) - self._present)
        if not lists:
            return can
        chunks = [self._store.weights(group) for together in lists for group in together]
        operation = Operation(f"{reader}: gather of {_listed(chunks)}", joinable=("gather", lists), can=can)
        if not self.ranks.connection.begin(operation):
            return False
        for together in lists:
            self._issue(together, reader=reader)
            self._present.update(together)
        return True

    def agree(self, question: str, *, holds: bool) -> bool:
        """Tell whether something holds on all ranks; those that only wait for the others have no say in it.

        Raises:
            RankError: a rank is missing, or somewhere else.
        """
        return self.ranks.connection.begin(Operation(question, joinable=("gather", []), can=holds))

    def join_gather(self, lists: Iterable[Sequence[int]]) -> None:
        """Take part in a gather that other ranks have begun and this one has no use for. Raises what `hold` does."""
        for together in lists:
            self.hold(together, reader=_JOINING)
            try:
                self._issue(together, reader=_JOINING)
                self.arrive(together, reader=_JOINING)
            finally:
                self.release(together)

    def _issue(self, together: Sequence[int], *, reader: object) -> None:
        chunks = [self._store.weights(group) for group in together]
        label = f"{reader}: {chunks[0].label}"
        wait = self._begin(self.exchange.gather, chunks, reader=reader, label=label, then=self._bind)
        self._under_way.update(dict.fromkeys(together, (chunks, wait)))

    def _begin(
        self,
        exchange: Callable[..., Work],
        chunks: Sequence[Chunk],
        *,
        reader: object,
        label: str,
        then: Callable[[Sequence[Chunk]], None] = lambda chunks: None,
    ) -> Callable[..., None]:
        """Begin an exchange of chunks that are pinned; return what waits for it, given a `reader`, and does `then`."""
        self._pager.exchange(chunks, reader=reader)
        issued = self._store.clock.timestamp()
        with runtime_mode():
            work = exchange(self._shards(chunks), label=label)

        def finish() -> None:
            work.wait()
            then(chunks)

        return partial(self._pager.arrive, chunks, finish, issued=issued)

    def arrive(self, groups: Iterable[int], *, reader: object) -> None:
        """Wait for what `send` has begun; raises what it does."""
        for group in sorted(set(groups)):
            if group in self._under_way:
                chunks, wait = self._under_way[group]
                for chunk in chunks:
                    del self._under_way[chunk.id.group]
                wait(reader=reader)

    @staticmethod
    def _bind(chunks: Sequence[Chunk]) -> None:
        """The owners' weights are there."""
        for chunk in chunks:
            if chunk.is_remote:
                chunk.replicas[Tier.DEVICE].version = chunk.version
                assert chunk.home is not None
                chunk.home.bind()

    def gather(self, groups: Iterable[int], *, reader: object, can: bool = True) -> bool:
        """Send and arrive, if all ranks `can`."""
        found = list(groups)
        is_sent = self.send(found, reader=reader, can=can)
        if is_sent:
            self.arrive(found, reader=reader)
        return is_sent

    def gather_chunks(self, chunks: Iterable[Chunk], *, reader: object) -> None:
        """Have every rank see what the owners have in other chunks than weights on DEVICE; all ranks have pinned them.

        Raises what `send` does.
        """
        by_group = {chunk.id.group: chunk for chunk in chunks if not self.is_each_ranks(chunk.id.group)}
        lists = self.together(by_group)
        if lists:
            self.ranks.connection.begin(Operation(f"{reader}: gather of {_listed(by_group.values())}"))
        for together in lists:
            some = [by_group[group] for group in together]
            with runtime_mode():
                self.exchange.gather(self._shards(some), label=f"{reader}: {some[0].label}").wait()

    def send_on_host(self, groups: Iterable[int] | None = None, *, reader: object) -> None:
        """Have every rank's weights that modules compute with on HOST be the owners', of all groups or of these.

        Raises what `send` does.
        """
        wanted = None if groups is None else set(groups)
        sent = [
            chunk
            for chunk in self._store.chunks.values()
            if chunk.id.role.kind.is_weights
            and chunk.compute_tier is Tier.HOST
            and (wanted is None or chunk.id.group in wanted)
        ]
        self.gather_chunks(sent, reader=reader)
        for chunk in sent:
            if not self.owns(chunk.id.group):
                self._store.mark_written(chunk, Tier.HOST)

    def renew(self, groups: Iterable[int]) -> None:
        """Owners may have written to their weights: have them sent again by the next `send`, though they are held."""
        self._present.difference_update(groups)

    def fits_beside(self, groups: Iterable[Sequence[int]], *, always: Sequence[int]) -> bool:
        """Tell whether two lists of groups that follow each other fit this rank's DEVICE at a time.

        Beside them `always`, and gradients: those of the first list, which are reduced, and one that lands. All that
        the rank owns has to fit the tiers together, too.
        """
        lists = [set(each) - set(always) for each in groups]
        pairs = [self.nbytes(one | other) + self.nbytes(one) for one, other in pairwise(lists)]
        in_use = max(pairs, default=0) + self.nbytes(always)
        limits = [pool.ledger.limit_nbytes for pool in self._store.pools.values()]
        packed = [c for c in self._store.chunks.values() if c.id.group >= 0 and not c.id.role.kind.is_of_call]
        owned_nbytes = sum(chunk.nbytes for chunk in packed if self.owns(chunk.id.group))
        return self._fits(in_use) and in_use + owned_nbytes + self._largest_nbytes() <= sum(limits)

    def spare_nbytes(self) -> int:
        """Return the bytes of this rank's DEVICE that are left if all that it owns is there, and a gradient lands."""
        owned = [c.nbytes for c in self._on_device() if self.owns(c.id.group) and c.id.role is not Role.GRAD]
        return self._cap_nbytes() - sum(owned) - self._largest_nbytes()

    def num_that_stay(self, units: Sequence[Sequence[int]], *, spare_nbytes: int) -> int:
        """Return how many units can be held from forward to backward on every rank, the last ones of forward first.

        There is room for all gradients at once then, and for the two largest units beside those that stay.

        Args:
            units: the groups of each, in the order of forward.
            spare_nbytes: `spare_nbytes` of the rank that has least.
        """
        gradients = sum(chunk.nbytes for chunk in self._on_device() if chunk.id.role is Role.GRAD)
        left_nbytes = spare_nbytes - gradients - sum(nlargest(2, map(self.nbytes, units)))
        staying: set[int] = set()
        for count, unit in enumerate(reversed(units)):
            staying.update(unit)
            if self.nbytes(staying) > left_nbytes:
                return count
        return len(units)

    def _on_device(self) -> Iterator[Chunk]:
        chunks = self._store.chunks.values()
        return (c for c in chunks if c.compute_tier is Tier.DEVICE and not c.id.role.kind.is_of_call)

    def fits_together(self, lists: Sequence[Sequence[int]], *, always: Iterable[int]) -> bool:
        """Tell whether lists of groups fit this rank's DEVICE together, with what comes while they are in use.

        That is `always`, the gradients of the largest of the lists, another one that is gathered ahead, and a gradient
        that lands. What all ranks hold already fits.
        """
        wanted = set().union(*lists)
        if self._present.issuperset(lists[0]):
            return True
        return self._fits(self.nbytes(wanted | set(always)) + 2 * max(map(self.nbytes, lists)))

    def _fits(self, nbytes: int) -> bool:
        """Tell whether so many bytes of weights and gradients fit this rank's DEVICE, and a gradient that lands."""
        return nbytes + self._largest_nbytes() <= self._cap_nbytes()

    def _largest_nbytes(self) -> int:
        return max((chunk.nbytes for chunk in self._store.chunks.values()), default=0)

    def _cap_nbytes(self) -> int:
        return self._store.pools[Tier.DEVICE].ledger.cap_nbytes

    def nbytes(self, groups: Iterable[int]) -> int:
        """Return the bytes of the weights of groups."""
        return sum(self._store.weights(group).nbytes for group in groups)

    def agree_to_reduce(self, groups: Iterable[int], *, reader: object, can: bool) -> bool:
        """Return once all ranks are about to reduce gradients of the same groups, and whether all of them can.

        Raises what `send` does.
        """
        lists = self.together(groups)
        if not lists:
            return can
        chunks = [self._store.chunks[ChunkId(Role.GRAD, group)] for together in lists for group in together]
        return self.ranks.connection.begin(
            Operation(f"{reader}: {_listed(chunks)}", joinable=("reduce", lists), can=can)
        )

    def begin_reduction(self, chunks: Sequence[Chunk], *, reader: object) -> Callable[[], None]:
        """Begin to give the owners the means of chunks that are pinned on DEVICE; return what waits for it.

        Args:
            chunks: at most one of each owner.
            reader: who wants it.

        Raises:
            RankError: a rank is missing, or somewhere else; what waits raises it, too.
        """
        return partial(self._begin(self.exchange.reduce, chunks, reader=reader, label=str(reader)), reader=reader)

    def from_owner(self, group: int, read: Callable[[], T], *, reader: str) -> T:
        """Return what `read` returns on the rank that owns a group, as `pickle` copies it. All ranks call it."""
        if self.is_each_ranks(group):
            return read()
        return self.ranks.broadcast_object(read() if self.owns(group) else None, label=reader, source=self.owner(group))  # type: ignore[return-value]

    def values_from_owner(
        self, group: int, read: Callable[[], torch.Tensor], into: torch.Tensor, *, reader: str
    ) -> torch.Tensor:
        """Return on all ranks what `read` does on the one that owns a group, in the dtype and strides of `into`.

        All ranks call it. `into` is a dense tensor in RAM, which may be written to, and be what is returned.
        """
        if self.is_each_ranks(group):
            return read()
        self.ranks.connection.begin(Operation(reader))
        own = read() if self.owns(group) else None
        with runtime_mode():
            if own is not None:  # as it is, if it is laid out alike: a second copy of a large weight would not be free
                is_alike = (own.dtype, own.stride()) == (into.dtype, into.stride())
                into = own if is_alike else into.copy_(own)
            flat = into.as_strided((into.numel(),), (1,)).view(torch.uint8)
            self.ranks.connection.broadcast(flat, self.owner(group), reader)
        return into

    def _shards(self, chunks: Iterable[Chunk]) -> list[Shard]:
        return [Shard(c.id.group, self.owner(c.id.group), c.replicas[c.compute_tier].flat) for c in chunks]

    def _is_on_host(self, group: int) -> bool:
        chunk = self._store.chunks.get(ChunkId(Role.PARAM, group))
        return chunk is not None and chunk.compute_tier is Tier.HOST


def _listed(chunks: Iterable[Chunk]) -> str:
    """Return ``"param chunks 4, 5"``."""
    found = sorted(chunks, key=lambda chunk: chunk.id.group)
    return f"{found[0].id.role.value} chunks {', '.join(str(chunk.id.group) for chunk in found)}"
