"""Where a cache keeps its values: in a chunk on HOST, then in a file, least recently used first out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path

import torch

from chunkmem.errors import ConfigError
from chunkmem.layout.spec import ALIGN_NBYTES, Group, Slot
from chunkmem.runtime.chunk import Chunk
from chunkmem.runtime.disk_pool import DiskPool, DiskSlab
from chunkmem.runtime.ledger import Ledger
from chunkmem.runtime.pager import Pager
from chunkmem.types import ChunkId, Role, Tier

ROLE = Role("frozen_cache")


@dataclass(slots=True)
class Entry:
    """One value: on HOST at a place, or on DISK."""

    place: int | None
    slab: DiskSlab | None = None


class Levels:
    """Values of one size, by key."""

    def __init__(self, pager: Pager, host_nbytes: int, folder: Path | None, disk_nbytes: int) -> None:
        """Take all of the bytes on HOST now.

        Args:
            pager: makes room for them.
            host_nbytes: one chunk, which stays there.
            folder: for a file without a name; None: there is one level.
            disk_nbytes: the most that file may have.

        Raises:
            CapacityError: HOST has no room for them.
            ConfigError: the folder cannot be used, or its file system has less room.
        """
        self._pager = pager
        self._disk = None
        self._host_nbytes = host_nbytes - host_nbytes % ALIGN_NBYTES
        if folder is not None:
            ledger = Ledger(Tier.DISK, cap_nbytes=disk_nbytes, limit_nbytes=disk_nbytes)
            try:
                self._disk = DiskPool(ledger, folder)
            except ConfigError as error:
                said = str(error).replace("memory.disk.capacity", "disk_capacity").replace("memory.disk.path", "disk")
                raise ConfigError(f"chunkmem.FrozenCache: {said}") from None
        number = 1 + max((key.group for key in pager.store.chunks), default=0)
        slots = (Slot(0, number, 0, self._host_nbytes),)
        group = Group(number, "uint8", 1, 1, self._host_nbytes, slots, is_on_host=True)
        key = ChunkId(ROLE, number)
        self._chunk = Chunk(key, group, torch.uint8, str(key), ((torch.Size([self._host_nbytes]), (1,)),))
        pager.store.add(self._chunk)
        try:
            pager.create(self._chunk, Tier.HOST, reader="chunkmem.FrozenCache", zero=False, elastic=True)
        except BaseException:
            del pager.store.chunks[key]
            self._close_disk()
            raise
        self._entries: OrderedDict[Hashable, Entry] = OrderedDict()
        """The least recently used first."""
        self._free: list[int] = []
        self._size_nbytes = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_on_disk(self) -> int:
        """Values that are not on HOST."""
        return sum(entry.slab is not None for entry in self._entries.values())

    def clear(self, size_nbytes: int = 0) -> None:
        """Forget all values; those to come have `size_nbytes` each."""
        for entry in self._entries.values():
            self._free_slab(entry)
        self._entries.clear()
        self._size_nbytes = size_nbytes
        room = self._host_nbytes // size_nbytes if size_nbytes else 0
        self._free = [place * size_nbytes for place in reversed(range(room))]

    @property
    def size_nbytes(self) -> int:
        return self._size_nbytes

    def read(self, key: Hashable, into: torch.Tensor) -> None:
        """Copy a value, which is there, to the CPU tensor `into`, 1-D bytes.

        Raises:
            TierIOError: it cannot be read.
        """
        entry = self._entries[key]
        if entry.slab is not None:
            entry.slab.read(into)
        else:
            assert entry.place is not None
            into.copy_(self._at(entry.place))
        self._entries.move_to_end(key)

    def write(self, key: Hashable, value: torch.Tensor) -> bool:
        """Keep a value, 1-D bytes on the CPU; what was used least recently gives way. False: there is no room at all.

        Raises:
            TierIOError: what gives way cannot be written.
        """
        entry = self._entries.get(key)
        if entry is None or entry.place is None:
            place = self._take_place(besides=key)
            if place is None:
                return self._write_to_disk(key, value)
            if entry is not None:
                self._free_slab(entry)
            entry = self._entries[key] = Entry(place)
        assert entry.place is not None
        self._at(entry.place).copy_(value)
        self._entries.move_to_end(key)
        return True

    def forget(self, key: Hashable) -> None:
        """Let go of a value, if it is there."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._free_slab(entry)
            if entry.place is not None:
                self._free.append(entry.place)

    def _take_place(self, *, besides: Hashable) -> int | None:
        if self._free:
            return self._free.pop()
        oldest = next((k for k, entry in self._entries.items() if entry.place is not None and k != besides), None)
        if oldest is None:
            return None
        entry = self._entries[oldest]
        assert entry.place is not None
        place = entry.place
        slab = self._take_slab(besides=oldest)
        if slab is None:
            del self._entries[oldest]
            return place
        try:
            slab.write(self._at(place))
        except BaseException:
            assert self._disk is not None
            self._disk.free(ROLE, slab)
            raise
        entry.place, entry.slab = None, slab
        return place

    def _write_to_disk(self, key: Hashable, value: torch.Tensor) -> bool:
        """HOST has no room for one value."""
        slab = self._take_slab(besides=key)
        if slab is None:
            return False
        slab.write(value)
        self.forget(key)
        self._entries[key] = Entry(None, slab)
        return True

    def _take_slab(self, *, besides: Hashable) -> DiskSlab | None:
        """Return room on DISK, for which what was used least recently there gives way; None if there is none."""
        if self._disk is None:
            return None
        while self._disk.ledger.free_nbytes < self._size_nbytes:
            oldest = next((k for k, entry in self._entries.items() if entry.slab is not None and k != besides), None)
            if oldest is None:
                return None
            self.forget(oldest)
        return self._disk.alloc(ROLE, self._size_nbytes)

    def _free_slab(self, entry: Entry) -> None:
        if entry.slab is not None:
            assert self._disk is not None
            self._disk.free(ROLE, entry.slab)
            entry.slab = None

    def _at(self, place: int) -> torch.Tensor:
        return self._chunk.replicas[Tier.HOST].flat.narrow(0, place, self._size_nbytes)

    def close(self) -> None:
        """Give all memory back. Idempotent."""
        self._entries.clear()
        if self._chunk.id in self._pager.store.chunks and self._pager.closed is None:
            self._pager.store.remove(self._chunk)
        self._close_disk()

    def _close_disk(self) -> None:
        disk, self._disk = self._disk, None
        if disk is not None:
            disk.close()
