"""The files of a checkpoint, read a tensor at a time."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from chunkmem.checkpoints.checksums import checksum, entry_name, read_checksums
from chunkmem.checkpoints.directory import MANIFEST
from chunkmem.errors import CheckpointError
from chunkmem.nn.lazy_tensor import Extent, LazyTensor, Source
from chunkmem.runtime.device import give_back_freed_ram

_KEPT_NBYTES = 48 << 20
"""By which the process may grow before freed memory is given back: new memory for each tensor is slow to touch."""


class CheckpointFiles:
    """A checkpoint directory, of chunkmem or of torch.distributed.checkpoint."""

    def __init__(self, path: Path) -> None:
        """Read what it has.

        Raises:
            CheckpointError: it is not there, is not complete, or cannot be read.
        """
        self.path = path
        self._reader = FileSystemReader(path)
        checksums = read_checksums(path) if (path / MANIFEST).is_file() else {}
        try:
            self.metadata: Metadata = self._reader.read_metadata()
        except FileNotFoundError:
            what = "has no .metadata, so it is no checkpoint" if path.is_dir() else "is not there"
            raise CheckpointError(f"{path} {what}; name the directory that manager.save() was given") from None
        except NotADirectoryError:
            raise CheckpointError(f"{path} is a file; name the directory that manager.save() was given") from None
        except Exception as error:  # it is pickled: a damaged one raises anything
            raise CheckpointError(f"{path / MANIFEST} cannot be read: {_said(error)}") from None
        if not isinstance(self.metadata, Metadata) or self.metadata.storage_data is None:
            raise CheckpointError(f"{path / MANIFEST} is not what torch.distributed.checkpoint writes")
        self._reader.set_up_storage_reader(self.metadata, is_coordinator=True)
        self._checksums = checksums
        self._process = psutil.Process()
        self._least_nbytes = self._process.memory_info().rss
        """What the process had when freed memory was given back."""

    @property
    def digest(self) -> str:
        """What tells two checkpoints apart, as far as their contents are listed."""
        found = hashlib.sha256((self.path / MANIFEST).read_bytes())
        found.update(repr(sorted(self._checksums.items())).encode())
        return found.hexdigest()

    def nested(self, prefix: str) -> Any:
        """Return what was saved under a key, as it was nested, with lazy tensors; None if there is nothing."""
        found: Any = None
        for name, form in self.metadata.state_dict_metadata.items():
            keys = (self.metadata.planner_data or {}).get(name, (name,))
            if keys[0] != prefix:
                continue
            if isinstance(form, TensorStorageMetadata):
                value: Any = LazyTensor.of(_FileSource(self, name), tuple(form.size), form.properties.dtype)
            else:
                value = self._object(name)
            found = _put(found, keys[1:], value)
        return found

    def all(self) -> dict[str, Any]:
        """Return all that was saved, as it was nested, with lazy tensors."""
        names = self.metadata.state_dict_metadata
        keys = (str((self.metadata.planner_data or {}).get(name, (name,))[0]) for name in names)
        return {key: self.nested(key) for key in dict.fromkeys(keys)}

    def entries(self) -> Iterator[tuple[MetadataIndex, ChunkStorageMetadata]]:
        """Yield all parts of tensors that are stored, those of one file after each other."""
        forms = self.metadata.state_dict_metadata.items()
        tensors = ((name, form) for name, form in forms if isinstance(form, TensorStorageMetadata))
        found = [(MetadataIndex(name, part.offsets), part) for name, form in tensors for part in form.chunks]
        yield from sorted(found, key=lambda entry: (self._file(entry[0]), self._storage(entry[0]).offset))

    def verify(self, index: MetadataIndex, part: ChunkStorageMetadata) -> None:
        """Read a part of a tensor, and compare it with its checksum, if there is one.

        Raises:
            CheckpointError: it cannot be read, or has changed since it was written.
        """
        values = self.read(index.fqn, tuple(part.offsets), tuple(part.sizes))
        written = self._checksums.get(entry_name(index))
        if written is not None and checksum(values) != written:
            raise self._changed(index)

    def read(self, name: str, start: Extent, shape: Extent) -> torch.Tensor:
        """Return a part of a tensor.

        Raises:
            CheckpointError: its file cannot be read.
        """
        form = self.metadata.state_dict_metadata[name]
        assert isinstance(form, TensorStorageMetadata)
        values = torch.empty(shape, dtype=form.properties.dtype, device="cpu")
        if self._process.memory_info().rss > self._least_nbytes + _KEPT_NBYTES:
            give_back_freed_ram()  # the C library would keep what was read before
            self._least_nbytes = self._process.memory_info().rss
        wanted = ChunkStorageMetadata(offsets=torch.Size(start), sizes=torch.Size(shape))
        items = create_read_items_for_chunk_list(name, form, [wanted])
        self._read(items, _Into(values), of=name)
        return values

    def file_of(self, name: str) -> str:
        """Return the file that a tensor begins in."""
        form = self.metadata.state_dict_metadata[name]
        assert isinstance(form, TensorStorageMetadata)
        return self._file(MetadataIndex(name, form.chunks[0].offsets))

    def _object(self, name: str) -> Any:
        index = MetadataIndex(name)
        into = _Into(torch.empty(0))
        items = [ReadItem(LoadItemType.BYTE_IO, index, torch.Size((0,)), index, torch.Size((0,)), torch.Size((0,)))]
        self._read(items, into, of=name)
        written = self._checksums.get(entry_name(index))
        if written is not None and into.crc != written:
            raise self._changed(index)
        return into.loaded

    def _changed(self, index: MetadataIndex) -> CheckpointError:
        return CheckpointError(
            f"{self.path / self._file(index)} has changed since it was written: {index.fqn} has not its checksum"
        )

    def _read(self, items: list[ReadItem], into: LoadPlanner, *, of: str) -> None:
        file = MANIFEST
        try:
            for item in items:
                file = self._file(item.storage_index)
                self._reader.read_data(LoadPlan([item]), into)
        except Exception as error:  # a damaged file raises anything
            raise CheckpointError(f"{self.path / file} cannot be read where {of} is: {_said(error)}") from None

    def _storage(self, index: MetadataIndex) -> Any:
        assert self.metadata.storage_data is not None
        return self.metadata.storage_data[index]

    def _file(self, index: MetadataIndex) -> str:
        return str(self._storage(index).relative_path)


class _FileSource(Source):
    """A tensor in a checkpoint's files."""

    def __init__(self, files: CheckpointFiles, name: str) -> None:
        self._files = files
        self._name = name

    @property
    def is_here(self) -> bool:
        return True

    @property
    def place(self) -> str:
        return self._files.file_of(self._name)

    def read_here(self, start: Extent, shape: Extent) -> torch.Tensor:
        return self._files.read(self._name, start, shape)


class _Into(DefaultLoadPlanner):
    """Puts what is read into one tensor, or keeps an object."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self._values = values
        self.loaded: Any = None
        self.crc = 0
        """Of the object."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.crc = checksum(value)
        self.loaded = torch.load(value, weights_only=False)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        where = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return self._values[tuple(slice(at, at + size) for at, size in where)]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """It is in its place."""


def _put(nested: Any, keys: Sequence[Any], value: Any) -> Any:
    """Put a value into dicts, and lists where keys are numbers; return them."""
    if not keys:
        return value
    key, rest = keys[0], keys[1:]
    if isinstance(key, int):
        items: list[Any] = [] if nested is None else nested
        items += [None] * (key + 1 - len(items))
        items[key] = _put(items[key], rest, value)
        return items
    entries: dict[Any, Any] = {} if nested is None else nested
    entries[key] = _put(entries.get(key), rest, value)
    return entries


def _said(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
