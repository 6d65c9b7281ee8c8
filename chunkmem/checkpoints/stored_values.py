"""The values of a tensor where they lie in a file, read straight to where they are wanted.

`torch.save` makes an archive whose members are neither compressed nor encrypted: one of them is the tensor's memory.

    file      |.. other tensors ..|  archive of one tensor                          |..
    archive                       |  data.pkl  |  data/0: values  |  directory      |
                                  ^ offset     ^ found by the directory

They are read with `preadv`, not mapped: where a file has become shorter, a mapping would end the process.
"""

from __future__ import annotations

import io
import os
import struct
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import _weights_only_unpickler, nn

from chunkmem.checkpoints.checksums import checksum
from chunkmem.checkpoints.odd_files import opened, read_at
from chunkmem.checkpoints.saved_objects import open_archive
from chunkmem.modules.lazy_tensor import Extent, Source

PIECE_NBYTES = 1 << 20
"""What goes through a buffer at a time: it stays in a cache of the processor."""
_MAX_DESCRIPTION_NBYTES = 1 << 20
"""Of what an archive says of a tensor, which is some hundred bytes; that of a member that is compressed may be any."""
_LENGTHS = struct.Struct("<26xHH")
"""Of what precedes the values of a member: a header, a name and padding, the lengths of which the header has."""


@dataclass(frozen=True)
class StoredValues:
    """Values in the order of their indices, without gaps, in a file."""

    path: Path
    offset: int
    """In the file, in bytes."""
    shape: Extent
    dtype: torch.dtype
    archived_crc: int | None = None
    """Of their bytes, as the archive has it; None: it has none."""

    @property
    def nbytes(self) -> int:
        """Of all of them."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def checksum(self) -> int:
        """Return the CRC-32 of their bytes.

        Raises:
            OSError, EOFError: the file cannot be read, or ends before they do.
        """
        buffer = bytearray(min(self.nbytes, PIECE_NBYTES))
        found = 0
        with opened(self.path) as descriptor:
            for at in range(0, self.nbytes, PIECE_NBYTES):
                piece = memoryview(buffer)[: self.nbytes - at]
                read_at(descriptor, self.offset + at, piece)
                found = checksum(piece, found)
        return found

    def read_into(self, start: Extent, into: torch.Tensor) -> None:
        """Write a part of them to `into`, which may be of another dtype or on another device.

        Where it is as the file is, it is read straight there; else some rows at a time are read and copied.

        Args:
            start: offsets of the part, which has the shape of `into`.
            into: tensor of as many dimensions.

        Raises:
            OSError, EOFError: the file cannot be read, or ends before they do; some may have been written.
        """
        if not into.numel():
            return
        if not self.shape:
            replace(self, shape=(1,)).read_into((0,), into.view(1))
            return
        row_shape = self.shape[1:]
        row_nbytes = self.dtype.itemsize * torch.Size(row_shape).numel()
        offset = self.offset + start[0] * row_nbytes
        with opened(self.path) as descriptor:
            if tuple(into.shape[1:]) == row_shape and self._is_as_stored(into):
                read_at(descriptor, offset, _memory_of(into))
                if not into.is_inference():
                    torch.autograd.graph.increment_version(into)
                return
            wanted = (slice(None), *(slice(at, at + size) for at, size in zip(start[1:], into.shape[1:], strict=True)))
            num_rows = min(len(into), max(1, PIECE_NBYTES // row_nbytes))
            piece = torch.empty((num_rows, *row_shape), dtype=self.dtype, device="cpu")
            for at in range(0, len(into), num_rows):
                target = into[at : at + num_rows]
                rows = piece[: len(target)]
                read_at(descriptor, offset + at * row_nbytes, _memory_of(rows))
                target.copy_(rows[wanted])

    def _is_as_stored(self, into: torch.Tensor) -> bool:
        """Tell whether `into` is memory that the file's bytes can be read to as they are."""
        if type(into) not in (torch.Tensor, nn.Parameter) or not into.is_cpu or into.is_conj() or into.is_neg():
            return False
        return into.dtype is self.dtype and into.layout is torch.strided and into.is_contiguous()


class FileSource(Source):
    """A tensor in files, which each rank reads by itself."""

    is_here = True

    def __init__(self, dtype: torch.dtype) -> None:
        """Take the dtype of its values."""
        self._dtype = dtype

    def read_here(self, start: Extent, shape: Extent) -> torch.Tensor:
        """Return a part of it, which is read to memory of its own."""
        found = torch.empty(shape, dtype=self._dtype, device="cpu")
        self.read_into(start, found)
        return found


def find_values(path: Path, *, offset: int, nbytes: int, like: torch.Tensor | None = None) -> StoredValues | None:
    """Return where the values of a tensor are in an archive of `torch.save`; None: torch has to read them.

    That is so if they are compressed, or not in the order of their indices, without gaps, and in this machine's byte
    order. The archive says that, at ten times the cost of finding them.

    Args:
        path: of the file.
        offset: of the archive in it.
        nbytes: of the archive.
        like: has the tensor's shape and dtype, and order: only the checksum of what is found tells whether that is so.

    Raises:
        OSError, EOFError: the file cannot be read.
        Exception: anything, where it is damaged.
    """
    with opened(path) as descriptor:
        with open_archive(FilePart(descriptor, offset, nbytes)) as archive:
            records = {Path(record.filename).name: record for record in archive.infolist()}
            tensor = _described(archive, records) if like is None else like
        values = records["0"]
        header = bytearray(_LENGTHS.size)
        read_at(descriptor, offset + values.header_offset, memoryview(header))
    begin = values.header_offset + _LENGTHS.size + sum(_LENGTHS.unpack(header))
    is_there = values.compress_type == zipfile.ZIP_STORED and values.file_size == tensor.nbytes <= nbytes - begin
    if not is_there or tensor.storage_offset() or not tensor.is_contiguous():
        return None
    return StoredValues(path, offset + begin, tuple(tensor.shape), tensor.dtype, getattr(values, "CRC", None))


def _described(archive: zipfile.ZipFile, records: Mapping[str, zipfile.ZipInfo]) -> torch.Tensor:
    """Return the tensor that an archive has, without its values, which are not read."""
    if "byteorder" in records and archive.read(records["byteorder"]).decode() != sys.byteorder:
        raise ValueError(f"the values are not {sys.byteorder}-endian")
    pickled = records["data.pkl"]
    if pickled.file_size > _MAX_DESCRIPTION_NBYTES:
        raise zipfile.BadZipFile(f"{pickled.filename} would have {pickled.file_size} bytes")

    def storage(saved: Any) -> Any:
        _, kind, _, _, numel = saved
        nbytes = numel * kind.dtype.itemsize
        memory = torch.UntypedStorage(nbytes, device="meta")
        return torch.storage.TypedStorage(wrap_storage=memory, dtype=kind.dtype, _internal=True)

    unpickler: Any = _weights_only_unpickler.Unpickler(io.BytesIO(archive.read(pickled)), encoding="utf-8")
    unpickler.persistent_load = storage
    found: torch.Tensor = unpickler.load()
    return found


@dataclass(eq=False)
class FilePart(io.RawIOBase):
    """A part of a file as a file of its own, to read from: so many bytes from an offset on."""

    descriptor: int
    offset: int
    nbytes: int
    at: int = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.nbytes}[whence]
        if at < 0:
            raise ValueError(f"{at} is before the part of the file begins")
        self.at = at
        return at

    def readinto(self, into: Any) -> int:
        piece = memoryview(into)[: max(0, self.nbytes - self.at)]
        count = os.preadv(self.descriptor, [piece], self.offset + self.at) if len(piece) else 0
        self.at += count
        return count


def _memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))  # a single element has any strides
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
