"""Reading and writing slabs of DISK: cut into blocks, straight between RAM and the file where alignment permits.

With `O_DIRECT`, the address in RAM, the offset in the file and the length of what moves are multiples of the file's
alignment. Slabs begin at such offsets, and are padded to such lengths:

    file    |block 0         |block 1         |block 2    ....|        .... padding of the last block
    RAM     |================|================|===========|            aligned: straight, but for the last bytes, which
                                                       ^^             pass through a buffer of the thread
    RAM        |..............|................|..........|            not aligned: everything passes through buffers

A part of a slab may begin and end anywhere, so pieces of a block that are written in part are read first.
"""

from __future__ import annotations

import ctypes
import errno
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from chunkmem.errors import StateError, TierIOError
from chunkmem.runtime.device import runtime_mode
from chunkmem.runtime.disk_file import AlignedBuffer, DiskFile, round_up, with_errno
from chunkmem.runtime.disk_threads import TransferThreads
from chunkmem.runtime.free_room import Extent
from chunkmem.sizes import format_nbytes


class _Block(NamedTuple):
    """What is moved at a time, of one slab."""

    number: int
    start: int
    """Offset in the slab."""
    nbytes: int
    offset: int
    """Offset in the file, in bytes; aligned."""


class _Part(NamedTuple):
    """What a transfer moves of one block."""

    block: _Block
    start: int
    """Offset in the block."""
    memory: memoryview
    address: int
    """Address of the first byte of `memory`."""

    @property
    def is_whole(self) -> bool:
        return len(self.memory) == self.block.nbytes


@dataclass(eq=False, slots=True)
class StoredBytes:
    """Where the bytes of a slab are in the file, and their checksums."""

    nbytes: int
    extents: tuple[Extent, ...]
    """They begin and end at multiples of the alignment; the last one has the padding, too."""
    checksums: list[int | None] | None
    """CRC-32 of each block; None: not written, or not to the end. No list: they are not asked for."""


class _Scratch:
    """What a thread has for itself."""

    def __init__(self, nbytes: int, alignment: int) -> None:
        self._size = nbytes, alignment

    @cached_property
    def buffer(self) -> AlignedBuffer:
        """Made when it is first needed."""
        return AlignedBuffer(*self._size)


class DiskTransfers:
    """Moves bytes between RAM and a file, by `depth` threads, `block_nbytes` at a time."""

    def __init__(self, file: DiskFile, *, block_nbytes: int, depth: int, checks: bool) -> None:
        """Make it; with `checks`, each block has a checksum in RAM, which is compared whenever it is read.

        Raises:
            StateError: `block_nbytes` or `depth` is not positive.
        """
        if block_nbytes < 1 or depth < 1:
            raise StateError(f"DISK: blocks of {block_nbytes} bytes by {depth} threads move nothing; the least is 1")
        self._file = file
        self._checks = checks
        self._block_nbytes = block_nbytes = round_up(block_nbytes, file.alignment)
        alignment = file.alignment
        self.threads = TransferThreads(depth, lambda: _Scratch(block_nbytes, alignment))

    def stored(self, nbytes: int, extents: Sequence[Extent]) -> StoredBytes:
        """Return the description of a slab in `extents`, of which nothing has been written."""
        num_blocks = sum(-(-extent.nbytes // self._block_nbytes) for extent in extents)
        return StoredBytes(nbytes, tuple(extents), [None] * num_blocks if self._checks else None)

    def read(self, stored: StoredBytes, target: torch.Tensor, *, start: int = 0) -> None:
        """Fill `target`, 1-D and contiguous in RAM, with the bytes of a slab from `start` on.

        Raises:
            TierIOError: they could not be read, or are not what was written.
            StateError: `target` is something else, or larger than what there is; the file is closed.
        """
        parts = self._parts(stored, target, start)
        self.threads.carry_out(len(parts), lambda at, scratch: self._read(stored, parts[at], scratch))

    def write(self, stored: StoredBytes, source: torch.Tensor, *, start: int = 0) -> None:
        """Write `source`, 1-D and contiguous in RAM, to a slab from `start` on. Raises what `read` does."""
        parts = self._parts(stored, source, start)
        self.threads.carry_out(len(parts), lambda at, scratch: self._write(stored, parts[at], scratch))

    # What is moved.

    def _parts(self, stored: StoredBytes, tensor: torch.Tensor, start: int) -> list[_Part]:
        with runtime_mode():
            if not tensor.is_cpu or tensor.dim() != 1 or not tensor.is_contiguous():
                raise StateError(
                    "DISK: only 1-D contiguous tensors in RAM are read and written, not one of shape "
                    f"{list(tensor.shape)} on {tensor.device}"
                )
            end = start + tensor.nbytes
            if not 0 <= start <= end <= stored.nbytes:
                raise StateError(f"DISK: bytes {start} to {end} are not in a slab of {stored.nbytes} bytes")
            memory = memoryview(tensor.detach().view(torch.uint8).numpy())  # type: ignore[arg-type]
            address = tensor.data_ptr()
        found = []
        for block in self._blocks(stored):
            first, last = max(start, block.start), min(end, block.start + block.nbytes)
            if first < last:
                at = first - start
                found.append(_Part(block, first - block.start, memory[at : last - start], address + at))
        return found

    def _blocks(self, stored: StoredBytes) -> list[_Block]:
        found: list[_Block] = []
        start = 0
        for extent in stored.extents:
            for offset in range(extent.start, extent.end, self._block_nbytes):
                nbytes = min(self._block_nbytes, extent.end - offset, stored.nbytes - start)
                found.append(_Block(len(found), start, nbytes, offset))
                start += nbytes
        return found

    # In a thread.

    def _read(self, stored: StoredBytes, part: _Part, scratch: _Scratch) -> None:
        if self._checks and not part.is_whole:
            buffer, begin = self._read_around(stored, part, scratch)
            ctypes.memmove(part.address, buffer.address + begin, len(part.memory))
            return
        offset, nbytes = part.block.offset + part.start, len(part.memory)
        straight = self._file.straight_nbytes(part.address, offset, nbytes)
        if straight:
            self._file.read(part.memory[:straight], offset)
        if straight < nbytes:
            begin = (offset + straight) % self._file.alignment
            buffer = scratch.buffer
            self._file.read(buffer.view[: self._file.padded(begin + nbytes - straight)], offset + straight - begin)
            ctypes.memmove(part.address + straight, buffer.address + begin, nbytes - straight)
        if self._checks:
            self._compare(stored, part.block, part.memory)

    def _write(self, stored: StoredBytes, part: _Part, scratch: _Scratch) -> None:
        block, nbytes, offset = part.block, len(part.memory), part.block.offset + part.start
        straight = self._file.straight_nbytes(part.address, offset, nbytes)
        if part.is_whole or (straight == nbytes and not self._checks):
            checksum = self._begin_writing(stored, block, part.memory)
            if straight:
                self._file.write(part.memory[:straight], offset)
            if straight < nbytes:
                buffer = scratch.buffer
                ctypes.memmove(buffer.address, part.address + straight, nbytes - straight)
                self._file.write(buffer.view[: self._file.padded(nbytes - straight)], offset + straight)
        else:
            buffer, begin = self._read_around(stored, part, scratch)
            ctypes.memmove(buffer.address + begin, part.address, nbytes)
            first, around_nbytes = self._around(part)
            checksum = self._begin_writing(stored, block, buffer.view[: block.nbytes])
            self._file.write(buffer.view[:around_nbytes], block.offset + first)
        if stored.checksums is not None:
            stored.checksums[block.number] = checksum

    def _around(self, part: _Part) -> tuple[int, int]:
        """Return what has to be read of a block to change a part of it, by offset and length: aligned.

        All of it if it has a checksum.
        """
        if self._checks:
            return 0, self._file.padded(part.block.nbytes)
        first = part.start // self._file.alignment * self._file.alignment
        return first, self._file.padded(part.start + len(part.memory) - first)

    def _read_around(self, stored: StoredBytes, part: _Part, scratch: _Scratch) -> tuple[AlignedBuffer, int]:
        """Read that; return it, and where in it the part begins."""
        first, nbytes = self._around(part)
        buffer = scratch.buffer
        self._file.read(buffer.view[:nbytes], part.block.offset + first)
        if self._checks:
            self._compare(stored, part.block, buffer.view[: part.block.nbytes])
        return buffer, part.start - first

    # Checksums.

    def _begin_writing(self, stored: StoredBytes, block: _Block, contents: memoryview) -> int | None:
        """Return the checksum of what is about to be written; until it is, the block has none."""
        if stored.checksums is None:
            return None
        stored.checksums[block.number] = None
        return zlib.crc32(contents)

    def _compare(self, stored: StoredBytes, block: _Block, contents: memoryview) -> None:
        assert stored.checksums is not None
        expected, found = stored.checksums[block.number], zlib.crc32(contents)
        if expected is None:
            raise self._wrong(block, "were never written to the end: what is there means nothing")
        if found != expected:
            raise self._wrong(
                block,
                f"are not what was written: their CRC-32 is {found:08x}, and was {expected:08x}. The disk or RAM is "
                "faulty; go back to a checkpoint, and name another disk in memory.disk.path",
            )

    def _wrong(self, block: _Block, what: str) -> TierIOError:
        where = f"at offset {block.offset} of {self._file.name}"
        return with_errno(f"DISK: {format_nbytes(block.nbytes)} {where} {what}", errno.EIO)
