"""Slabs of DISK: extents of a file, moved in blocks, straight between RAM and the file where alignment permits.

With `O_DIRECT`, the address in RAM, the offset in the file and the length of what moves are multiples of the file's
alignment. Slabs begin at such offsets, and are padded to such lengths:

    file    |block 0         |block 1         |block 2    ....|        .... padding of the last block
    RAM     |================|================|===========|            aligned: straight, but for the last bytes, which
                                                       ^^             pass through a buffer of the thread
    RAM        |..............|................|..........|            not aligned: everything passes through buffers

Slabs are written as a whole. What is read of one may begin and end anywhere.
"""

from __future__ import annotations

import ctypes
import weakref
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from chunkmem.data.errors import StateError, TierIOError
from chunkmem.data.sizes import format_nbytes
from chunkmem.runtime.device import runtime_mode
from chunkmem.runtime.disk_file import SYSTEM_CALLS, AlignedBuffer, DiskFile, SystemCalls, is_full, round_up
from chunkmem.runtime.free_room import Extent, FreeRoom
from chunkmem.runtime.ledger import Ledger
from chunkmem.runtime.pool import POISON, CutPool, Slab
from chunkmem.runtime.transfer_threads import TransferThreads

BLOCK_NBYTES, DEPTH = 16 << 20, 4
"""Large blocks, as a thread needs Python's lock for each; the system cuts them into pieces that move at once."""


class _Part(NamedTuple):
    """What a transfer moves of one block."""

    number: int
    """Of the block, in its slab."""
    offset: int
    """Of the block, in the file, in bytes; aligned."""
    nbytes: int
    """Of the block."""
    start: int
    """Offset in the block."""
    memory: memoryview
    address: int
    """Address of the first byte of `memory`."""


class DiskSlab(Slab):
    """A slab of DISK. It has no memory, so `bytes` is empty; `start` is its offset in the file."""

    is_memory = False
    __slots__ = ("_transfers", "checksums", "extents")

    def __init__(self, transfers: DiskTransfers, nbytes: int, extents: Sequence[Extent]) -> None:
        """Describe what is in `extents`, of which nothing has been written."""
        with runtime_mode():
            empty = torch.empty(0, dtype=torch.uint8, device="cpu")
        super().__init__(nbytes, empty, start=extents[0].start if extents else 0)
        self._transfers = transfers
        self.extents = tuple(extents)
        """Where in the file it is: mostly in one place. They begin and end at multiples of the alignment; the last one
        has the padding, too."""
        self.checksums: dict[int, int | None] = {}
        """CRC-32 of each block by its number, if they are asked for; None: not written, or not to the end."""

    def read(self, target: torch.Tensor, at: int = 0) -> None:
        """Fill `target`, 1-D and contiguous in RAM, with as many bytes of the slab from byte `at` on; wait for it.

        Any thread may call, and several at once. Memory at any address will do; that of HOST is moved without a copy.

        Raises:
            TierIOError: they could not be read, or with `checks` are not what was written; `target` has some of them.
            StateError: `target` is something else or too large, the pool is closed or belongs to another process.
        """
        self._transfers.move(self, target, at, writes=False)

    def write(self, source: torch.Tensor) -> None:
        """Write `source`, as many bytes as the slab has; wait until the system has them. Otherwise as `read`.

        Not while another thread reads or writes the same slab. After an error the slab holds some of both contents.
        """
        self._transfers.move(self, source, writes=True)

    def poison(self) -> None:
        """Fill it with NaN, unless a copy still reads it, or failed to."""
        if not self.uses:
            with runtime_mode():
                self.write(torch.full((self.nbytes,), POISON, dtype=torch.uint8, device="cpu"))


class DiskTransfers:
    """Moves bytes between RAM and a file, by `depth` threads, `block_nbytes` at a time."""

    def __init__(
        self, file: DiskFile, *, block_nbytes: int = BLOCK_NBYTES, depth: int = DEPTH, checks: bool = False
    ) -> None:
        """Make it; with `checks`, each block has a checksum in RAM, which is compared whenever it is read.

        Raises:
            StateError: `block_nbytes` or `depth` is not positive.
        """
        if block_nbytes < 1 or depth < 1:
            raise StateError(f"DISK: blocks of {block_nbytes} bytes by {depth} threads move nothing; the least is 1")
        self._file = file
        self._checks = checks
        self._block_nbytes = round_up(block_nbytes, file.alignment)
        self.threads = TransferThreads(depth, partial(AlignedBuffer, self._block_nbytes, file.alignment))

    def close(self) -> None:
        """Finish what is read and written, end the threads and give the file back; the second time, do nothing.

        Raises:
            TierIOError: the system says that something has failed.
        """
        self.threads.close()
        self._file.close()

    def move(self, slab: DiskSlab, tensor: torch.Tensor, start: int = 0, *, writes: bool) -> None:
        """Write `tensor` to a slab, or read it from byte `start` on; see `DiskSlab`."""
        self._file.require_open()
        with runtime_mode():
            if not tensor.is_cpu or tensor.dim() != 1 or not tensor.is_contiguous():
                raise StateError(
                    "DISK: only 1-D contiguous tensors in RAM are read and written, not one of shape "
                    f"{list(tensor.shape)} on {tensor.device}"
                )
            end = start + tensor.nbytes
            if not 0 <= start <= end <= slab.nbytes or (writes and end < slab.nbytes):
                raise StateError(f"DISK: bytes {start} to {end} are not in a slab of {slab.nbytes} bytes, or not all")
            memory = memoryview(tensor.detach().view(torch.uint8).numpy())  # type: ignore[arg-type]
            parts = [*self._parts(slab, memory, tensor.data_ptr(), start)]
        self.threads.carry_out(len(parts), lambda at, buffer: self._move(slab, parts[at], buffer, writes=writes))

    def _parts(self, slab: DiskSlab, memory: memoryview, address: int, start: int) -> Iterator[_Part]:
        number, at = 0, -start  # of a block, and where in `memory` it begins
        for extent in slab.extents:
            for offset in range(extent.start, extent.end, self._block_nbytes):
                nbytes = min(self._block_nbytes, extent.end - offset, slab.nbytes - start - at)
                first, last = max(0, at), min(len(memory), at + nbytes)
                if first < last:
                    yield _Part(number, offset, nbytes, first - at, memory[first:last], address + first)
                number, at = number + 1, at + nbytes

    def _move(self, slab: DiskSlab, part: _Part, buffer: AlignedBuffer, *, writes: bool) -> None:
        """Move a part in a thread, which has `buffer`: what is not aligned passes through that, with what is around."""
        file, unit, nbytes, offset = self._file, self._file.unit_nbytes, len(part.memory), part.offset + part.start
        needs_all = self._checks and nbytes < part.nbytes  # of the block, as its checksum is of that
        straight = 0 if needs_all else file.straight_nbytes(part.address, offset, nbytes)
        at = offset + straight
        first, end = (part.offset, part.offset + part.nbytes) if needs_all else (at - at % unit, offset + nbytes)
        around = buffer.view[: round_up(end - first, unit)]
        inside, outside, rest = buffer.address + at - first, part.address + straight, nbytes - straight
        move = file.write if writes else file.read
        if writes:
            ctypes.memmove(inside, outside, rest)
            checksum = zlib.crc32(part.memory) if self._checks else None
            slab.checksums[part.number] = None  # until all is written
        move(part.memory[:straight], offset)
        move(around, first)
        if writes:
            slab.checksums[part.number] = checksum
            return
        ctypes.memmove(outside, inside, rest)
        if self._checks:
            self._compare(slab, part, around[: part.nbytes] if needs_all else part.memory)

    def _compare(self, slab: DiskSlab, part: _Part, contents: memoryview) -> None:
        expected, found = slab.checksums.get(part.number), zlib.crc32(contents)
        if found == expected:
            return
        why = "were never written to the end: what is there means nothing"
        if expected is not None:
            why = (
                f"are not what was written: their CRC-32 is {found:08x}, and was {expected:08x}. The disk or RAM is "
                "faulty; go back to a checkpoint, and name another disk in memory.disk.path"
            )
        raise self._file.error(format_nbytes(part.nbytes), part.offset, why)


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
        calls: SystemCalls = SYSTEM_CALLS,
    ) -> None:
        """Make the file in `directory`, which is made if it is not there.

        Args:
            ledger: its cap is what the file system needs to have left.
            directory: on the disk to use.
            block_nbytes: what a thread moves at a time.
            depth: how many threads do.
            checks: keep a checksum of each block in RAM, and compare it whenever the block is read.
            calls: the system calls; see `tests.helpers.faulty_disk` for others.

        Raises:
            StateError: `block_nbytes` or `depth` is not positive.
            ConfigError: `directory` cannot be used, or its file system has less room than the cap.
            TierIOError: the first bytes could not be written or read.
        """
        super().__init__(ledger)
        self._file = DiskFile(directory, nbytes=ledger.limit_nbytes, calls=calls)
        try:
            self._transfers = DiskTransfers(self._file, block_nbytes=block_nbytes, depth=depth, checks=checks)
        except BaseException:
            self._file.close()
            raise
        self._room = FreeRoom()
        self.reserved_nbytes = 0
        """How long the file is, given out or not."""
        self._abandon = weakref.finalize(self, self._transfers.threads.stop, self._file.close)

    @property
    def is_direct(self) -> bool:
        """The file system lets bytes pass its cache."""
        return self._file.is_direct

    def alloc(self, role: str, nbytes: int, *, num: int = 1) -> Slab:
        """See `SlabPool.alloc`.

        Raises:
            TierIOError: the disk is full, although the ledger has room.
            StateError: the pool is closed, or belongs to another process.
        """
        self._file.require_open()
        return super().alloc(role, nbytes, num=num)

    def _cut(self, nbytes: int, num: int) -> DiskSlab:
        return DiskSlab(self._transfers, nbytes, self._take(round_up(nbytes, self._file.alignment)))

    def close(self) -> None:
        """See `DiskTransfers.close`."""
        self._abandon.detach()
        self._idle.clear()
        self._transfers.close()

    def _take(self, nbytes: int) -> Sequence[Extent]:
        """Return room in the file, aligned: in one place if possible.

        Raises:
            TierIOError: the disk is full.
        """
        if nbytes == 0:
            return ()
        if (run := self._room.cut(nbytes)) is not None:
            return (run,)
        if self.reserved_nbytes + nbytes <= self.ledger.cap_nbytes:
            try:
                return (self._grow(nbytes),)
            except TierIOError as error:
                if not is_full(error):
                    raise
        self._join_idle()
        found = self._room.gather(nbytes)
        missing_nbytes = nbytes - sum(extent.nbytes for extent in found)
        try:
            return (*found, self._grow(missing_nbytes)) if missing_nbytes else found
        except BaseException:
            self._give(found)
            raise

    def _grow(self, nbytes: int) -> Extent:
        self._file.reserve(self.reserved_nbytes, nbytes)
        extent = Extent(self.reserved_nbytes, nbytes)
        self.reserved_nbytes = extent.end
        return extent

    def _give(self, extents: Sequence[Extent]) -> None:
        for extent in extents:
            self._room.give(extent)

    def _join(self, slab: Slab) -> None:
        assert isinstance(slab, DiskSlab)
        self._give(slab.extents)
