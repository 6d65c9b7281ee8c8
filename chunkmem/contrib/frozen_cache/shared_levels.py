"""Values of samples that the ranks of a machine have together: in memory that all of them map, then in a file.

One rank alone has the same. What one rank has computed, the others find. Values are copied under the lock: while one
rank writes, no other reads, so that none is read by half; any number of them read at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch

from chunkmem.contrib.frozen_cache.kept import AskedSamples, Found, Kept, ValueForm
from chunkmem.contrib.frozen_cache.shared_index import DISK, HOST, SharedIndex
from chunkmem.contrib.frozen_cache.shared_memory import ProcessLock, SharedFile
from chunkmem.data.errors import ConfigError, StateError, TierIOError
from chunkmem.data.layout import ALIGN_NBYTES
from chunkmem.data.types import Role
from chunkmem.runtime.disk_file import DiskFile, round_up
from chunkmem.runtime.disk_pool import DiskSlab, DiskTransfers
from chunkmem.runtime.free_room import Extent
from chunkmem.runtime.host_memory import HostMemory
from chunkmem.runtime.pager import Pager

_ROLE = Role("frozen_cache")


class SharedDisk:
    """The file, in places of one size."""

    def __init__(self, file: DiskFile, nbytes: int) -> None:
        """Use `file`, of which `nbytes` may be taken."""
        self._file = file
        self._nbytes = nbytes
        self._transfers = DiskTransfers(file)

    def room(self, value_nbytes: int) -> int:
        """Return how many values there is room for."""
        return self._nbytes // round_up(value_nbytes, self._file.alignment) if value_nbytes else 0

    def read(self, number: int, target: torch.Tensor) -> None:
        """Fill `target`, 1-D, with a value; raise a TierIOError if that fails."""
        self._place(number, target.nbytes).read(target)

    def write(self, number: int, source: torch.Tensor) -> None:
        """Write a value; raise a TierIOError if that fails."""
        place = self._place(number, source.nbytes)
        self._file.reserve(place.extents[0].start, place.extents[0].nbytes)
        place.write(source)

    def _place(self, number: int, nbytes: int) -> DiskSlab:
        padded_nbytes = round_up(nbytes, self._file.alignment)
        return DiskSlab(self._transfers, nbytes, (Extent(number * padded_nbytes, padded_nbytes),))

    def close(self) -> None:
        """Finish what is read and written, and give the file back."""
        self._transfers.close()


class SharedLevels:
    """Values of one size, by key."""

    def __init__(
        self,
        pager: Pager,
        files: Sequence[SharedFile],
        disk: SharedDisk | None,
        *,
        rank: int,
        num_ranks: int,
        host_nbytes: int,
        timeout_s: float,
    ) -> None:
        """Use what one rank has made, and count this rank's share of it.

        Args:
            pager: makes room on HOST.
            files: for values, for the index, and to lock.
            disk: None: there is one level.
            rank: among those that share, from 0.
            num_ranks: that share.
            host_nbytes: of all ranks together.
            timeout_s: after which a rank that keeps the lock counts as lost.

        Raises:
            CapacityError: HOST has no room for the share.
        """
        values, index, lock = self._files = tuple(files)
        self.num_ranks = num_ranks
        """That have the same copy."""
        self._odd_keys: dict[Hashable, int] = {}
        """Numbers of keys that other processes would not know, where there are none."""
        self._rank = rank
        self._host_nbytes = host_nbytes
        self._disk = disk
        self._bytes = torch.frombuffer(values.map(), dtype=torch.uint8)
        own = self._bytes[: share_of(host_nbytes, rank, num_ranks)]
        self._memory = HostMemory(pager, _ROLE, own.nbytes, reader="chunkmem.FrozenCache", memory=own)
        self._index = SharedIndex(index)
        self._lock = ProcessLock(lock, timeout_s=timeout_s)
        self._abandon = weakref.finalize(self, _give_back, disk, self._files)
        """What happens to it when it is forgotten, or the process ends, without `close`."""

    def find(self, asked: AskedSamples) -> Found:
        """Return how far all of the samples have come, and their values: other ranks may forget them.

        Raises:
            StateError: what is kept of one is of another sample.
            TierIOError: DISK failed.
        """
        names = [self._name(key) for key in asked.keys]
        with self._reading() as is_whole:
            found = self._find(asked, names) if is_whole else None
        if found is None:
            with self._changing():  # a rank has ended in the middle of a change: what it has left is cleared
                return Found(asked)
        if found.depth:
            with self._changing():
                places = map(self._index.find, names)  # by now, some may have been forgotten
                self._index.use([place for place in places if place])
        return found

    def keep(self, asked: AskedSamples, rows: torch.Tensor) -> None:
        """Keep what all modules have made of samples: a row each, on the CPU; the least recently used give way.

        Raises:
            TierIOError: DISK failed.
        """
        form = ValueForm(rows.shape[1:], rows.dtype)
        kept = [Kept(len(asked.tags), crc, asked.tags[-1], self._rank) for crc in asked.crcs]
        for key, one, row in zip(asked.keys, kept, rows, strict=True):
            with self._changing():  # by itself, so that others need not wait for all of them
                if form != self._index.form:
                    on_disk = 0 if self._disk is None else self._disk.room(form.nbytes)
                    self._index.clear(form, self._host_nbytes // form.nbytes if form.nbytes else 0, on_disk)
                self._keep(self._name(key), one, row.reshape(-1).view(torch.uint8))

    def __len__(self) -> int:
        return self._count(HOST) + self._count(DISK)

    @property
    def num_on_disk(self) -> int:
        """Values that are not on HOST."""
        return self._count(DISK)

    def follow(self, pager: Pager) -> None:
        """Know the pager that the memory on HOST is among the chunks of, another one after a repartition."""
        self._memory.follow(pager)

    def close(self) -> None:
        """Give all memory back. Idempotent."""
        if self._abandon.alive:
            self._memory.close()
            del self._bytes, self._index
            self._abandon()

    def _name(self, key: Hashable) -> bytes:
        """Return what stands for an id of a sample in all processes, 16 bytes."""
        try:
            plain = _plain(key)
        except ConfigError:
            if self.num_ranks > 1:
                raise
            plain = "odd", self._odd_keys.setdefault(key, len(self._odd_keys)), "key"
        return hashlib.blake2b(repr(plain).encode(), digest_size=16).digest()

    # Under the lock.

    @contextlib.contextmanager
    def _reading(self) -> Iterator[bool]:
        """Have nobody change anything inside; False: what is there cannot be used."""
        self._require_open()
        with self._lock.held(alone=False):
            is_whole = self._index.is_whole
            if is_whole:
                self._index.begin()
            yield is_whole

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Have nobody else read or change anything inside."""
        self._require_open()
        with self._lock.held(alone=True):
            if self._index.is_whole:
                self._index.begin()
            else:
                self._index.clear(None, 0, 0)
            self._index.mark(is_changing=True)
            try:
                yield
            except TierIOError:  # anything else, as Ctrl-C, leaves the mark: the next one clears what may be wrong
                self._index.mark(is_changing=False)
                raise
            self._index.mark(is_changing=False)

    def _require_open(self) -> None:
        if not self._abandon.alive:
            raise StateError("FrozenCache: it is closed")

    def _count(self, tier: int) -> int:
        if not self._abandon.alive:
            return 0
        with self._reading() as is_whole:
            return self._index.count(tier) if is_whole else 0

    def _find(self, asked: AskedSamples, names: Sequence[bytes]) -> Found:
        places = [self._index.find(name) for name in names]
        kept = [self._index.kept(place) if place else None for place in places]
        depths = {asked.depth_of(number, one) for number, one in enumerate(kept)}
        depth = depths.pop() if len(depths) == 1 else 0
        form = self._index.form
        if not depth or form is None:
            return Found(asked)
        values = form.empty(len(places))
        for row, place in zip(values, places, strict=True):
            self._copy_out(place, row.reshape(-1).view(torch.uint8))
        return Found(asked, depth, values, sum(one is not None and one.rank != self._rank for one in kept))

    def _copy_out(self, place: int, target: torch.Tensor) -> None:
        if self._index.tier(place) == HOST:
            target.copy_(self._at(place, target.nbytes))
        else:
            assert self._disk is not None
            self._disk.read(self._index.number(place), target)

    def _keep(self, name: bytes, kept: Kept, value: torch.Tensor) -> None:
        """Keep a value, 1-D bytes; what was used least recently gives way. Without any room it is not kept."""
        index, place = self._index, self._index.find(name)
        if place and index.tier(place) == HOST:
            index.describe(place, kept)
            index.use([place])
        else:
            if place:
                index.remove(place)
                index.give(place)
            place = self._room_on_host(value.nbytes) or self._room_on_disk()
            if not place:
                return
        try:
            if index.tier(place) == HOST:
                self._at(place, value.nbytes).copy_(value)
            else:
                assert self._disk is not None
                self._disk.write(index.number(place), value)
        except TierIOError:
            index.give(place)
            raise
        if not index.find(name):
            index.put(place, name, kept)

    def _room_on_host(self, nbytes: int) -> int:
        """Return a place on HOST, from which the value used least recently goes to DISK if it had to; 0: none."""
        index = self._index
        place = index.take(HOST) or index.oldest(HOST)
        if not place or place != index.oldest(HOST):
            return place
        there = self._room_on_disk()
        if there:
            assert self._disk is not None
            try:
                self._disk.write(index.number(there), self._at(place, nbytes))
            except TierIOError:
                index.give(there)
                raise
        kept = index.kept(place)
        key = index.remove(place)
        if there:
            index.put(there, key, kept)
        return place

    def _room_on_disk(self) -> int:
        """Return a place on DISK, of which the value used least recently is forgotten if it had to; 0: none."""
        place = self._index.take(DISK)
        if not place and (place := self._index.oldest(DISK)):
            self._index.remove(place)
        return place

    def _at(self, place: int, nbytes: int) -> torch.Tensor:
        return self._bytes.narrow(0, self._index.number(place) * nbytes, nbytes)


def _give_back(disk: SharedDisk | None, files: Sequence[SharedFile]) -> None:
    if disk is not None:
        disk.close()
    for file in files:
        file.close()


@contextlib.contextmanager
def disk_errors() -> Iterator[None]:
    """Have a ConfigError of what is raised inside name the arguments of a cache."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"chunkmem.FrozenCache: {said_of_disk(error)}") from None


def said_of_disk(error: Exception) -> str:
    """Return what an error of DISK says, by the names that a cache has for its options."""
    return str(error).replace("memory.disk.capacity", "disk_capacity").replace("memory.disk.path", "disk")


def share_of(nbytes: int, rank: int, num_ranks: int) -> int:
    """Return what a rank counts of so many bytes that ranks have together: equal shares, and the first one the rest."""
    share_nbytes = nbytes // num_ranks // ALIGN_NBYTES * ALIGN_NBYTES
    return share_nbytes if rank else nbytes - share_nbytes * (num_ranks - 1)


def _plain(key: Any) -> Any:
    if isinstance(key, tuple):
        return tuple(map(_plain, key))
    if isinstance(key, str | bytes) or key is None:
        return key
    if hasattr(key, "__index__"):
        return key.__index__()
    raise ConfigError(
        f"FrozenCache: sample {key!r} is a {type(key).__name__}; over ranks, ids are whole numbers, strings, bytes or "
        "tuples of them, which are the same in every process"
    )
