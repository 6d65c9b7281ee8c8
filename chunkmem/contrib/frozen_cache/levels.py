"""Where a cache keeps its values: in a chunk on HOST, then in a file, least recently used first out."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch

from chunkmem.contrib.frozen_cache.host_memory import ROLE, HostMemory
from chunkmem.contrib.frozen_cache.kept import AskedSamples, Found, Kept, ValueForm
from chunkmem.errors import ConfigError
from chunkmem.layout.spec import ALIGN_NBYTES
from chunkmem.runtime.disk_pool import DiskPool, DiskSlab
from chunkmem.runtime.ledger import Ledger
from chunkmem.runtime.pager import Pager
from chunkmem.types import Tier

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CachedValue(Generic[T]):
    """One value: where it is, and what it is of."""

    place: T
    kept: Kept


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
        self.num_ranks = 1
        self._disk = None
        self._host_nbytes = host_nbytes - host_nbytes % ALIGN_NBYTES
        if folder is not None:
            ledger = Ledger(Tier.DISK, cap_nbytes=disk_nbytes, limit_nbytes=disk_nbytes)
            with disk_errors():
                self._disk = DiskPool(ledger, folder)
        try:
            self._memory = HostMemory(pager, self._host_nbytes)
        except BaseException:
            self._close_disk()
            raise
        self._form: ValueForm | None = None
        self._on_host: OrderedDict[Hashable, CachedValue[int]] = OrderedDict()
        """The least recently used first: places."""
        self._on_disk: OrderedDict[Hashable, CachedValue[DiskSlab]] = OrderedDict()
        """Those that came there, or were used there, first."""
        self._free: list[int] = []
        self._size_nbytes = 0

    def find(self, asked: AskedSamples) -> Found:
        entries = [self._on_host.get(key) or self._on_disk.get(key) for key in asked.keys]
        kept = (None if entry is None else entry.kept for entry in entries)
        depths = {asked.depth_of(number, one) for number, one in enumerate(kept)}
        return Found(depths.pop() if len(depths) == 1 else 0)

    def read(self, keys: Sequence[Hashable]) -> torch.Tensor:
        assert self._form is not None
        batch = self._form.empty(len(keys))
        for row, key in zip(batch, keys, strict=True):
            into = row.reshape(-1).view(torch.uint8)
            if key in self._on_host:
                into.copy_(self._at(self._on_host[key].place))
                self._on_host.move_to_end(key)
            else:
                self._on_disk[key].place.read(into)
                self._on_disk.move_to_end(key)
        return batch

    def keep(self, asked: AskedSamples, rows: torch.Tensor) -> None:
        form = ValueForm(rows.shape[1:], rows.dtype)
        if form != self._form:
            self._form = form
            self._clear(form.nbytes)
        for key, crc, row in zip(asked.keys, asked.crcs, rows, strict=True):
            self._write(key, row.reshape(-1).view(torch.uint8), Kept(len(asked.tags), crc, asked.tags[-1]))

    def __len__(self) -> int:
        return len(self._on_host) + len(self._on_disk)

    @property
    def num_on_disk(self) -> int:
        return len(self._on_disk)

    def _clear(self, size_nbytes: int) -> None:
        """Forget all values; those to come have `size_nbytes` each."""
        self._on_host.clear()
        while self._on_disk:
            self._forget_on_disk()
        self._size_nbytes = size_nbytes
        room = self._host_nbytes // size_nbytes if size_nbytes else 0
        self._free = [place * size_nbytes for place in reversed(range(room))]

    def _write(self, key: Hashable, value: torch.Tensor, kept: Kept) -> None:
        """Keep a value, 1-D bytes on the CPU; what was used least recently gives way. Without any room it is not kept.

        Raises:
            TierIOError: it cannot be written, or what gives way.
        """
        entry = self._on_host.pop(key, None)
        if entry is None and key in self._on_disk:  # what gives way to it may have its place
            self._on_disk.move_to_end(key, last=False)
            self._forget_on_disk()
        place = self._take_place() if entry is None else entry.place
        if place is not None:
            self._at(place).copy_(value)
            self._on_host[key] = CachedValue(place, kept)
        else:
            self._write_to_disk(key, value, kept)

    def _take_place(self) -> int | None:
        """Return a place on HOST; what was used least recently there goes to DISK, if need be. None: there is none."""
        if self._free:
            return self._free.pop()
        if not self._on_host:
            return None
        key, entry = next(iter(self._on_host.items()))
        self._write_to_disk(key, self._at(entry.place), entry.kept)
        del self._on_host[key]
        return entry.place

    def _write_to_disk(self, key: Hashable, value: torch.Tensor, kept: Kept) -> None:
        """Write a value to DISK, for which what came there first gives way; nothing, if there is no room at all."""
        if self._disk is None:
            return
        while self._disk.ledger.free_nbytes < value.nbytes:
            if not self._on_disk:
                return
            self._forget_on_disk()
        slab = self._disk.alloc(ROLE, value.nbytes)
        try:
            slab.write(value)
        except BaseException:
            self._disk.free(ROLE, slab)
            raise
        self._on_disk[key] = CachedValue(slab, kept)

    def _forget_on_disk(self) -> None:
        assert self._disk is not None
        _, entry = self._on_disk.popitem(last=False)
        self._disk.free(ROLE, entry.place)

    def _at(self, place: int) -> torch.Tensor:
        return self._memory.bytes.narrow(0, place, self._size_nbytes)

    def follow(self, pager: Pager) -> None:
        self._memory.follow(pager)

    def close(self) -> None:
        self._on_host.clear()
        self._on_disk.clear()
        self._memory.close()
        self._close_disk()

    def _close_disk(self) -> None:
        disk, self._disk = self._disk, None
        if disk is not None:
            disk.close()


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
