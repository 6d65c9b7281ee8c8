"""The files of a checkpoint, read a tensor at a time."""

from __future__ import annotations

import contextlib
import hashlib
import io
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.filesystem import _StorageReaderTransforms
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from chunkmem.checkpoints.checksums import checksum, entry_name, read_checksums
from chunkmem.checkpoints.directory import MANIFEST, standing
from chunkmem.checkpoints.metadata import read_metadata
from chunkmem.checkpoints.odd_files import opened, read_all
from chunkmem.checkpoints.saved_objects import damaged_member, load_saved
from chunkmem.checkpoints.stored_values import FilePart, FileSource, StoredValues, find_values
from chunkmem.errors import CheckpointError, said
from chunkmem.nn.lazy_tensor import Extent, LazyTensor
from chunkmem.runtime.device import give_back_freed_ram

_T = TypeVar("_T")
_KEPT_NBYTES = 48 << 20
"""By which the process may grow before freed memory is given back: new memory for each tensor is slow to touch."""
_NO_ITEM: Any = None
"""No transform of torch's looks at what it is of."""
_MAX_THREADS = 4
"""That verify files: more of them wait for memory."""


class CheckpointFiles:
    """A checkpoint directory, of chunkmem or of torch.distributed.checkpoint."""

    def __init__(self, path: Path, *, trust: bool = False) -> None:
        """Read what it has.

        Args:
            path: of the directory.
            trust: what its pickles name may be imported and called.

        Raises:
            CheckpointError: it is not there, is not complete, or cannot be read.
        """
        self.path = path = standing(path)
        self._trust = trust
        manifest = _manifest(path)
        self._checksums = read_checksums(path, manifest)
        self.digest = hashlib.sha256(manifest + repr(sorted(self._checksums.items())).encode()).hexdigest()
        """What tells two checkpoints apart, as far as their contents are listed."""
        self.metadata = read_metadata(manifest, path / MANIFEST, trust=trust)
        self._transforms = _StorageReaderTransforms()
        self._process = psutil.Process()
        self._least_nbytes = self._process.memory_info().rss
        """What the process had when freed memory was given back."""
        self._found: dict[MetadataIndex, StoredValues | None] = {}
        """Where the values are of parts that have their checksums; None: torch has to read them."""
        self._alone = threading.Lock()
        """Whose is the memory that it takes to have torch read a part."""

    @property
    def has_checksums(self) -> bool:
        """Whether chunkmem has written it."""
        return bool(self._checksums)

    def key_of(self, name: str) -> str:
        """Return the key on the outside that something is saved under."""
        return str(self._keys(name)[0])

    def nbytes_of(self, index: MetadataIndex) -> int:
        """Return what a part of a tensor takes in its file."""
        return int(self._storage(index).length)

    @property
    def keys(self) -> tuple[str, ...]:
        """What the checkpoint has, on the outside."""
        return tuple(dict.fromkeys(map(self.key_of, self.metadata.state_dict_metadata)))

    def nested(self, *prefix: str, with_objects: bool = True) -> Any:
        """Return what was saved under a key, or keys in each other, as it was nested; None if there is nothing.

        Tensors are lazy. Objects are read now, or, without `with_objects`, left out and not read.
        """
        whole: dict[str, Any] = {}
        for name, form in self.metadata.state_dict_metadata.items():
            keys = self._keys(name)
            if keys[: len(prefix)] != prefix:
                continue
            if isinstance(form, TensorStorageMetadata):
                dtype = form.properties.dtype
                value: Any = LazyTensor.of(_StoredTensor(self, name, dtype), tuple(form.size), dtype)
            elif with_objects:
                value = self.object(MetadataIndex(name))
            else:
                continue
            set_element(whole, keys, value)
        found: Any = whole
        for key in prefix:
            found = found.get(key) if isinstance(found, dict) else None
        return found

    def _keys(self, name: str) -> tuple[str | int, ...]:
        keys: tuple[str | int, ...] = self.metadata.planner_data[name]
        return keys

    def entries(self) -> list[MetadataIndex]:
        """Return all parts of tensors that are stored, those of one file after each other."""
        forms = self.metadata.state_dict_metadata.items()
        tensors = ((name, form) for name, form in forms if isinstance(form, TensorStorageMetadata))
        found = [MetadataIndex(name, part.offsets, at) for name, form in tensors for at, part in enumerate(form.chunks)]
        return sorted(found, key=lambda index: (self._path(index), self._storage(index).offset))

    def objects(self) -> list[MetadataIndex]:
        """Return all that is no tensor."""
        forms = self.metadata.state_dict_metadata.items()
        return [MetadataIndex(name) for name, form in forms if not isinstance(form, TensorStorageMetadata)]

    def verify(self, indices: Sequence[MetadataIndex]) -> None:
        """Read parts of tensors, and compare them with their checksums, where there are some.

        Raises:
            CheckpointError: one cannot be read, or has changed since it was written.
        """
        with contextlib.closing(self.verified(indices)) as parts:
            for _, error in parts:
                if error is not None:
                    raise error

    def verified(self, indices: Sequence[MetadataIndex]) -> Generator[tuple[MetadataIndex, CheckpointError | None]]:
        """Read parts of tensors, and yield each when it was compared with its checksum, with what is wrong."""
        threads = ThreadPoolExecutor(min(torch.get_num_threads(), _MAX_THREADS))
        try:
            for index, (found, error) in zip(indices, threads.map(partial(tried, self._find), indices), strict=True):
                if error is None:
                    self._found[index] = found
                yield index, error
        finally:
            threads.shutdown(cancel_futures=True)

    def _find(self, index: MetadataIndex) -> StoredValues | None:
        """Return where the values of a part are, once they have their checksum; None: torch has to read the part.

        Raises:
            CheckpointError: it cannot be read, has changed since it was written, or is not what the metadata say.
        """
        storage, written, like = self._storage(index), self._written(index), self._expected(index)
        with contextlib.suppress(Exception):  # a damaged file raises anything; torch says what is wrong
            if not storage.transform_descriptors:
                where = {"offset": storage.offset, "nbytes": storage.length}
                found = find_values(self._path(index), **where, like=None if written is None else like)
                if found is not None and (found.shape, found.dtype) == (tuple(like.shape), like.dtype):
                    crc = found.archived_crc if written is None else written
                    if found.checksum() == crc or crc is None:
                        return found
        with self._alone:
            self._load(index)
        return None

    def _load(self, index: MetadataIndex) -> torch.Tensor:
        """Have torch read a part, which takes the memory of two. Raises what `_find` does."""
        self._give_back()
        stream, like = self._saved(index), self._expected(index)
        try:
            values: torch.Tensor = torch.load(stream, map_location="cpu", weights_only=True)
            crc, is_expected = checksum(values), (values.shape, values.dtype) == (like.shape, like.dtype)
        except Exception as error:  # a damaged file raises anything
            raise self._unreadable(index, error) from None
        if not is_expected:
            raise CheckpointError(
                f"{self._path(index)} has {values.dtype} of shape {tuple(values.shape)} where {index.fqn} is, and "
                f".metadata says {like.dtype} of shape {tuple(like.shape)}"
            )
        if self._written(index) not in (None, crc):
            raise self._changed(index)
        return values

    def _expected(self, index: MetadataIndex) -> torch.Tensor:
        """Return what the metadata say that a part is, without values."""
        dtype = self._form(index.fqn).properties.dtype
        return torch.empty(self._part(index).sizes, dtype=dtype, device="meta")

    def _saved(self, index: MetadataIndex) -> io.BytesIO:
        """Return what `torch.save` has written of a part of a tensor, or of an object.

        Raises:
            CheckpointError: it cannot be read; or another program has written it, and it has changed since.
        """
        storage = self._storage(index)
        try:
            with opened(self._path(index)) as descriptor:
                raw: Any = io.BufferedReader(FilePart(descriptor, storage.offset, storage.length))
                transforms = storage.transform_descriptors or ()
                stream = io.BytesIO(self._transforms.transform_load_stream(_NO_ITEM, transforms, raw).read())
            is_whole = self._written(index) is not None or damaged_member(stream) is None
        except Exception as error:  # a damaged file raises anything
            raise self._unreadable(index, error) from None
        if not is_whole:
            raise self._changed(index)
        stream.seek(0)
        return stream

    def read_into(self, name: str, start: Extent, into: torch.Tensor) -> None:
        """Write a part of a tensor to `into`, which has its shape, of any dtype and device.

        Raises:
            CheckpointError: its file cannot be read, or has changed since it was written; some may have been written.
        """
        self._give_back()
        wanted = ChunkStorageMetadata(offsets=torch.Size(start), sizes=into.shape)
        for item in create_read_items_for_chunk_list(name, self._form(name), [wanted]):
            index = item.storage_index
            if index not in self._found:  # another rank has verified it, maybe of another copy; or nobody has
                self._found[index] = self._find(index)
            found, start = self._found[index], tuple(item.storage_offsets)
            part = narrow_tensor_by_index(into, item.dest_offsets, item.lengths)
            if found is None:
                part.copy_(narrow_tensor_by_index(self._load(index), start, item.lengths))
                continue
            try:
                found.read_into(start, part)
            except (OSError, EOFError) as error:
                raise self._unreadable(index, error) from None

    def _give_back(self) -> None:
        """Return memory that was freed to the system, now and then: the C library would keep what was read before."""
        if self._process.memory_info().rss > self._least_nbytes + _KEPT_NBYTES:
            give_back_freed_ram()
            self._least_nbytes = self._process.memory_info().rss

    def file_of(self, name: str) -> str:
        """Return the file that a tensor begins in."""
        return str(self._path(MetadataIndex(name, self._form(name).chunks[0].offsets)))

    def object(self, index: MetadataIndex) -> Any:
        """Return what was saved and is no tensor.

        Raises:
            CheckpointError: its file cannot be read, has changed since it was written, or needs trust.
        """
        stream = self._saved(index)
        if self._written(index) not in (None, checksum(stream)):
            raise self._changed(index)
        return load_saved(stream, f"{index.fqn} in {self._path(index)}", trust=self._trust)

    def _written(self, index: MetadataIndex) -> int | None:
        """Return the checksum that `manager.save` has kept; None: another program has written the checkpoint."""
        return self._checksums.get(entry_name(index))

    def _changed(self, index: MetadataIndex) -> CheckpointError:
        return CheckpointError(
            f"{self._path(index)} has changed since it was written: {index.fqn} has not its checksum"
        )

    def _unreadable(self, index: MetadataIndex, error: Exception) -> CheckpointError:
        return CheckpointError(f"{self._path(index)} cannot be read where {index.fqn} is: {said(error)}")

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

    def _path(self, index: MetadataIndex) -> Path:
        return self.path / str(self._storage(index).relative_path)


class _StoredTensor(FileSource):
    """A tensor in a checkpoint's files."""

    def __init__(self, files: CheckpointFiles, name: str, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self._files = files
        self._name = name

    @property
    def place(self) -> str:
        return self._files.file_of(self._name)

    def read_into(self, start: Extent, into: torch.Tensor) -> None:
        self._files.read_into(self._name, start, into)


def tried(read: Callable[[MetadataIndex], _T], index: MetadataIndex) -> tuple[_T | None, CheckpointError | None]:
    """Return what is read, or what is wrong with it."""
    try:
        return read(index), None
    except CheckpointError as error:
        return None, error


def _manifest(path: Path) -> bytes:
    try:
        return read_all(path / MANIFEST)
    except FileNotFoundError:
        what = "has no .metadata, so it is no checkpoint" if path.is_dir() else "is not there"
        raise CheckpointError(f"{path} {what}; name the directory that manager.save() was given") from None
    except NotADirectoryError:
        raise CheckpointError(f"{path} is a file; name the directory that manager.save() was given") from None
    except OSError as error:
        raise CheckpointError(f"{path / MANIFEST} cannot be read: {said(error)}") from None
