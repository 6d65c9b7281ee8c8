"""The files of a checkpoint, read a tensor at a time."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
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
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from chunkmem.checkpoints.checksums import checksum, entry_name, read_checksums
from chunkmem.checkpoints.directory import MANIFEST, standing
from chunkmem.checkpoints.stored_values import PIECE_NBYTES, StoredValues, find_values
from chunkmem.errors import CheckpointError
from chunkmem.nn.lazy_tensor import Extent, LazyTensor, Source
from chunkmem.runtime.device import give_back_freed_ram

_KEPT_NBYTES = 48 << 20
"""By which the process may grow before freed memory is given back: new memory for each tensor is slow to touch."""
_MAX_THREADS = 4
"""That verify files: more of them wait for memory."""


class CheckpointFiles:
    """A checkpoint directory, of chunkmem or of torch.distributed.checkpoint."""

    def __init__(self, path: Path) -> None:
        """Read what it has.

        Raises:
            CheckpointError: it is not there, is not complete, or cannot be read.
        """
        self.path = path = standing(path)
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
        self._found: dict[MetadataIndex, StoredValues | None] = {}
        """Where the values are of parts that have their checksums; None: torch has to read them."""

    @cached_property
    def _buffer(self) -> bytearray:
        return bytearray(PIECE_NBYTES)

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

    def entries(self) -> Iterator[MetadataIndex]:
        """Yield all parts of tensors that are stored, those of one file after each other."""
        forms = self.metadata.state_dict_metadata.items()
        tensors = ((name, form) for name, form in forms if isinstance(form, TensorStorageMetadata))
        found = [MetadataIndex(name, part.offsets, at) for name, form in tensors for at, part in enumerate(form.chunks)]
        yield from sorted(found, key=lambda index: (self._file(index), self._storage(index).offset))

    def verify(self, indices: Sequence[MetadataIndex]) -> None:
        """Read parts of tensors, and compare them with their checksums, where there are some.

        Raises:
            CheckpointError: one cannot be read, or has changed since it was written.
        """
        threads = ThreadPoolExecutor(min(torch.get_num_threads(), _MAX_THREADS))
        try:
            for index, found in zip(indices, threads.map(self._find, indices), strict=True):
                self._found[index] = found
                if found is None:
                    self._verify_by_torch(index)
        finally:
            threads.shutdown(cancel_futures=True)

    def _verify_by_torch(self, index: MetadataIndex) -> None:
        part = self._part(index)
        values = self.read(index.fqn, tuple(part.offsets), tuple(part.sizes))
        written = self._checksums.get(entry_name(index))
        if written is not None and checksum(values) != written:
            raise self._changed(index)

    def _find(self, index: MetadataIndex) -> StoredValues | None:
        """Return where the values of a part are, if they have its checksum; None: torch has to read the part."""
        written = self._checksums.get(entry_name(index))
        storage = self._storage(index)
        if written is None or getattr(storage, "transform_descriptors", None):
            return None
        part, form = self._part(index), self._form(index.fqn)
        try:
            found = find_values(
                self.path / storage.relative_path,
                offset=storage.offset,
                nbytes=storage.length,
                shape=tuple(part.sizes),
                dtype=form.properties.dtype,
            )
            return found if found is not None and found.checksum() == written else None
        except Exception:  # a damaged file raises anything: torch reads it again, and says what is wrong
            return None

    def read(self, name: str, start: Extent, shape: Extent) -> torch.Tensor:
        """Return a part of a tensor.

        Raises:
            CheckpointError: its file cannot be read, or has changed since it was written.
        """
        values = torch.empty(shape, dtype=self._form(name).properties.dtype, device="cpu")
        self._give_back()
        self.read_into(name, start, values)
        return values

    def read_into(self, name: str, start: Extent, into: torch.Tensor) -> None:
        """Write a part of a tensor to `into`, which has its shape, of any dtype and device.

        Raises:
            CheckpointError: its file cannot be read, or has changed since it was written; some may have been written.
        """
        wanted = ChunkStorageMetadata(offsets=torch.Size(start), sizes=into.shape)
        for item in create_read_items_for_chunk_list(name, self._form(name), [wanted]):
            index = item.storage_index
            if index not in self._found:  # another rank has verified it, maybe of another copy; or nobody has
                self._found[index] = self._find(index)
                if self._found[index] is None and entry_name(index) in self._checksums:
                    self._verify_by_torch(index)
            found = self._found[index]
            try:
                if found is None:
                    self._give_back()
                    self._reader.read_data(LoadPlan([item]), _Into(into))
                else:
                    found.read_into(tuple(item.storage_offsets), _part_of(into, item), self._buffer)
            except Exception as error:  # a damaged file raises anything
                raise self._unreadable(index, error) from None

    def _give_back(self) -> None:
        """Return memory that was freed to the system, now and then: the C library would keep what was read before."""
        if self._process.memory_info().rss > self._least_nbytes + _KEPT_NBYTES:
            give_back_freed_ram()
            self._least_nbytes = self._process.memory_info().rss

    def file_of(self, name: str) -> str:
        """Return the file that a tensor begins in."""
        return self._file(MetadataIndex(name, self._form(name).chunks[0].offsets))

    def _object(self, name: str) -> Any:
        index = MetadataIndex(name)
        into = _Into(torch.empty(0))
        item = ReadItem(LoadItemType.BYTE_IO, index, torch.Size((0,)), index, torch.Size((0,)), torch.Size((0,)))
        try:
            self._reader.read_data(LoadPlan([item]), into)
        except Exception as error:  # a damaged file raises anything
            raise self._unreadable(index, error) from None
        written = self._checksums.get(entry_name(index))
        if written is not None and into.crc != written:
            raise self._changed(index)
        return into.loaded

    def _changed(self, index: MetadataIndex) -> CheckpointError:
        return CheckpointError(
            f"{self.path / self._file(index)} has changed since it was written: {index.fqn} has not its checksum"
        )

    def _unreadable(self, index: MetadataIndex, error: Exception) -> CheckpointError:
        return CheckpointError(f"{self.path / self._file(index)} cannot be read where {index.fqn} is: {_said(error)}")

    def _form(self, name: str) -> TensorStorageMetadata:
        form = self.metadata.state_dict_metadata[name]
        assert isinstance(form, TensorStorageMetadata)
        return form

    def _part(self, index: MetadataIndex) -> ChunkStorageMetadata:
        assert index.index is not None
        return self._form(index.fqn).chunks[index.index]

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

    def read_into(self, start: Extent, into: torch.Tensor) -> None:
        self._files.read_into(self._name, start, into)


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
        return _part_of(self._values, read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """It is in its place."""


def _part_of(values: torch.Tensor, item: ReadItem) -> torch.Tensor:
    """Return what an item is read to."""
    where = zip(item.dest_offsets, item.lengths, strict=True)
    return values[tuple(slice(at, at + size) for at, size in where)]


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
