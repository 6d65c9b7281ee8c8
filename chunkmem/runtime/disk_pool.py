"""Slabs of DISK: extents of a file, which are read and written."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch

from chunkmem.errors import StateError, TierIOError
from chunkmem.runtime.device import runtime_mode
from chunkmem.runtime.disk_calls import SYSTEM_CALLS, DiskCalls
from chunkmem.runtime.disk_file import DiskFile, is_full, round_up
from chunkmem.runtime.disk_transfer import DiskTransfers, StoredBytes
from chunkmem.runtime.free_room import Extent, FreeRoom
from chunkmem.runtime.ledger import Ledger
from chunkmem.runtime.pool import CutPool, Slab

BLOCK_NBYTES, DEPTH = 16 << 20, 4
"""Large blocks, as a thread needs Python's lock for each; the system cuts them into pieces that move at once."""
_POISON = 0xFF
"""Repeated, this byte is NaN in every floating dtype."""


class DiskSlab(Slab):
    """A slab of DISK. It has no memory, so `bytes` is empty; `start` is its offset in the file."""

    __slots__ = ("_stored", "_transfers")

    def __init__(self, stored: StoredBytes, transfers: DiskTransfers) -> None:
        with runtime_mode():
            empty = torch.empty(0, dtype=torch.uint8, device="cpu")
        super().__init__(stored.nbytes, empty, start=stored.extents[0].start if stored.extents else 0)
        self._stored = stored
        self._transfers = transfers

    @property
    def extents(self) -> tuple[Extent, ...]:
        """Where in the file it is, padding included: mostly in one place."""
        return self._stored.extents

    def read(self, target: torch.Tensor, at: int = 0) -> None:
        """Fill `target`, 1-D and contiguous in RAM, with as many bytes of the slab from byte `at` on; wait for it.

        Any thread may call, and several at once. Memory at any address will do; that of HOST is moved without a copy.

        Raises:
            TierIOError: they could not be read, or with `checks` are not what was written; `target` has some of them.
            StateError: `target` is something else or too large, the pool is closed or belongs to another process.
        """
        self._transfers.read(self._stored, target, start=at)

    def write(self, source: torch.Tensor, at: int = 0) -> None:
        """Write `source` to the slab from byte `at` on; wait until the system has it. Otherwise as `read`.

        Not while another thread reads or writes the same slab. After an error the slab holds some of both contents.
        """
        self._transfers.write(self._stored, source, start=at)

    def poison(self) -> None:
        """Fill it with NaN, unless a copy still reads it, or failed to."""
        if not self.uses:
            with runtime_mode():
                self.write(torch.full((self.nbytes,), _POISON, dtype=torch.uint8, device="cpu"))


class DiskPool(CutPool):
    """Slabs of DISK: extents of one file without a name, read and written by threads of its own.

    The file grows up to the cap, padding aside. Then freed slabs of other sizes make room, if need be in several
    places for one slab, so that it grows beyond only by the padding of each slab to the file's alignment.
    """

    def __init__(
        self,
        ledger: Ledger,
        directory: str | Path,
        *,
        block_nbytes: int = BLOCK_NBYTES,
        depth: int = DEPTH,
        checks: bool = False,
        calls: DiskCalls = SYSTEM_CALLS,
    ) -> None:
        """Make the file in `directory`, which is made if it is not there.

        Args:
            ledger: its cap is what the file system needs to have left.
            directory: on the disk to use.
            block_nbytes: what a thread moves at a time.
            depth: how many threads do.
            checks: keep a checksum of each block in RAM, and compare it whenever the block is read.
            calls: the system calls; see `chunkmem.testing.disk` for others.

        Raises:
            StateError: `block_nbytes` or `depth` is not positive.
            ConfigError: `directory` cannot be used, or its file system has less room than the cap.
            TierIOError: the first bytes could not be written or read.
        """
        super().__init__(ledger)
        self._file = DiskFile(Path(directory), nbytes=ledger.limit_nbytes, calls=calls)
        try:
            self._transfers = DiskTransfers(self._file, block_nbytes=block_nbytes, depth=depth, checks=checks)
        except BaseException:
            self._file.close()
            raise
        self._room = FreeRoom()
        self._end_nbytes = 0
        self._pid = os.getpid()
        self._abandon = weakref.finalize(self, self._transfers.threads.stop, self._file.close)

    @property
    def is_direct(self) -> bool:
        """The file system lets bytes pass its cache."""
        return self._file.is_direct

    @property
    def reserved_nbytes(self) -> int:
        """How long the file is, given out or not."""
        return self._end_nbytes

    def alloc(self, role: str, nbytes: int, *, num: int = 1) -> DiskSlab:
        """See `SlabPool.alloc`.

        Raises:
            TierIOError: the disk is full, although the ledger has room.
            StateError: the pool is closed, or belongs to another process.
        """
        self._require_open()
        slab = super().alloc(role, nbytes, num=num)
        assert isinstance(slab, DiskSlab)
        return slab

    def _cut(self, nbytes: int, num: int) -> DiskSlab:
        extents = self._take(round_up(nbytes, self._file.alignment))
        return DiskSlab(self._transfers.stored(nbytes, extents), self._transfers)

    def close(self) -> None:
        """Finish what is read and written, end the threads and give the file back; the second time, do nothing.

        Raises:
            TierIOError: the system says that something has failed.
        """
        self._abandon.detach()
        self._transfers.threads.stop()
        self._transfers.threads.join()
        self._idle.clear()
        self._file.close()

    def _require_open(self) -> None:
        if not self._abandon.alive:
            raise StateError("DISK is closed; no slab can be taken any more")
        if os.getpid() != self._pid:
            raise StateError(f"DISK: {self._file.name} belongs to process {self._pid}, this is a fork of it")

    def _take(self, nbytes: int) -> Sequence[Extent]:
        """Return room in the file, aligned: in one place if possible.

        Raises:
            TierIOError: the disk is full.
        """
        if nbytes == 0:
            return ()
        if (run := self._room.cut(nbytes)) is not None:
            return (run,)
        if self._end_nbytes + nbytes <= self.ledger.cap_nbytes:
            try:
                return (self._grow(nbytes),)
            except TierIOError as error:
                if not is_full(error):
                    raise
        self._join_idle()
        if (run := self._room.cut(nbytes)) is not None:
            return (run,)
        found = self._room.gather(nbytes)
        missing_nbytes = nbytes - sum(extent.nbytes for extent in found)
        if missing_nbytes == 0:
            return found
        try:
            return (*found, self._grow(missing_nbytes))
        except BaseException:
            for extent in found:
                self._room.give(extent)
            raise

    def _grow(self, nbytes: int) -> Extent:
        self._file.reserve(self._end_nbytes, nbytes)
        extent = Extent(self._end_nbytes, nbytes)
        self._end_nbytes = extent.end
        return extent

    def _join(self, slab: Slab) -> None:
        assert isinstance(slab, DiskSlab)
        for extent in slab.extents:
            self._room.give(extent)
