"""The files of a checkpoint, read a tensor at a time."""

from __future__ import annotations

import contextlib
import hashlib
import io
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
from chunkmem.data.errors import CheckpointError, said
from chunkmem.modules.lazy_tensor import Extent, LazyTensor
from chunkmem.runtime.device import give_back_freed_ram

_T = TypeVar("_T")
_KEPT_NBYTES = 48 << 20
"""By which the process may grow before freed memory is given back: new memory for each tensor is slow to touch."""
_NO_ITEM: Any = None
"""No transform of torch's looks at what it is of."""
_MAX_THREADS = 4
"""That verify files: more of them wait for memory."""


@dataclass(frozen=True, eq=False)
class StoredPart:
    """A part of a tensor, or an object, where a checkpoint has it."""

    name: str
    """Of the whole."""
    key: str
    """That it is saved under, on the outside."""
    path: Path
    place: Any
    """In the file: an offset, a length, and how it was transformed."""
    like: Any
    """A tensor as the metadata say that it is, without values; None: an object."""
    is_first: bool
    """Of the parts of a tensor."""
    crc: int | None
    """The checksum that `manager.save` has kept; None: another program has written the checkpoint."""


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
        self.checksums = read_checksums(path, manifest)
        """Empty where another program has written it."""
        self.digest = hashlib.sha256(manifest + repr(sorted(self.checksums.items())).encode()).hexdigest()
        """What tells two checkpoints apart, as far as their contents are listed."""
        self.metadata = read_metadata(manifest, path / MANIFEST, trust=trust)
        self._transforms = _StorageReaderTransforms()
        self._process = psutil.Process()
        self._least_nbytes = self._process.memory_info().rss
        """What the process had when freed memory was given back."""
        self._parts = dict(pair for name in self.metadata.state_dict_metadata for pair in self._parts_of(name))
        by_place = sorted(self._parts.values(), key=lambda part: (part.path, part.place.offset))
        self.tensors = [part for part in by_place if part.like is not None]
        """All parts of tensors that are stored, those of one file after each other."""
        self.objects = [part for part in self._parts.values() if part.like is None]
        """All that is no tensor."""
        self._found: dict[StoredPart, StoredValues | None] = {}
        """Where the values are of parts that have their checksums; None: torch has to read them."""
        self._alone = threading.Lock()
        """Whose is the memory that it takes to have torch read a part."""

    @property
    def keys(self) -> tuple[str, ...]:
        """What the checkpoint has, on the outside."""
        return tuple(dict.fromkeys(str(self._keys(name)[0]) for name in self.metadata.state_dict_metadata))

    def _parts_of(self, name: str) -> Iterator[tuple[MetadataIndex, StoredPart]]:
        form: Any = self.metadata.state_dict_metadata[name]
        places, key = self.metadata.storage_data or {}, str(self._keys(name)[0])
        chunks: Any = form.chunks if isinstance(form, TensorStorageMetadata) else [None]
        for at, chunk in enumerate(chunks):
            index = MetadataIndex(name, chunk and chunk.offsets)
            like = chunk and torch.empty(chunk.sizes, dtype=form.properties.dtype, device="meta")
            path, crc = self.path / places[index].relative_path, self.checksums.get(entry_name(index))
            yield index, StoredPart(name, key, path, places[index], like, at == 0, crc)

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
                value = self.object(self._parts[MetadataIndex(name)])
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

    def verify(self, parts: Sequence[StoredPart]) -> None:
        """Read parts of tensors, and compare them with their checksums, where there are some.

        Raises:
            CheckpointError: one cannot be read, or has changed since it was written.
        """
        with contextlib.closing(self.verified(parts)) as verified:
            for _, error in verified:
                if error is not None:
                    raise error

    def verified(self, parts: Sequence[StoredPart]) -> Generator[tuple[StoredPart, CheckpointError | None]]:
        """Read parts of tensors, and yield each when it was compared with its checksum, with what is wrong."""
        threads = ThreadPoolExecutor(min(torch.get_num_threads(), _MAX_THREADS))
        try:
            for part, (found, error) in zip(parts, threads.map(partial(tried, self._find), parts), strict=True):
                if error is None:
                    self._found[part] = found
                yield part, error
        finally:
            threads.shutdown(cancel_futures=True)

    def _find(self, part: StoredPart) -> StoredValues | None:
        """Return where the values of a part are, once they have their checksum; None: torch has to read the part.

        Raises:
            CheckpointError: it cannot be read, has changed since it was written, or is not what the metadata say.
        """
        place, like = part.place, part.like
        with contextlib.suppress(Exception):  # a damaged file raises anything; torch says what is wrong
            if not place.transform_descriptors:
                known = None if part.crc is None else like
                found = find_values(part.path, offset=place.offset, nbytes=place.length, like=known)
                if found is not None and (found.shape, found.dtype) == (tuple(like.shape), like.dtype):
                    crc = found.archived_crc if part.crc is None else part.crc
                    if found.checksum() == crc or crc is None:
                        return found
        with self._alone:
            self._load(part)
        return None

    def _load(self, part: StoredPart) -> torch.Tensor:
        """Have torch read a part, which takes the memory of two. Raises what `_find` does."""
        self._give_back()
        stream, like = self._saved(part), part.like
        try:
            values: torch.Tensor = torch.load(stream, map_location="cpu", weights_only=True)
            crc, is_expected = checksum(values), (values.shape, values.dtype) == (like.shape, like.dtype)
        except Exception as error:  # a damaged file raises anything
            raise _unreadable(part, error) from None
        if not is_expected:
            raise CheckpointError(
                f"{part.path} has {values.dtype} of shape {tuple(values.shape)} where {part.name} is, and "
                f".metadata says {like.dtype} of shape {tuple(like.shape)}"
            )
        if part.crc not in (None, crc):
            raise _changed(part)
        return values

    def _saved(self, part: StoredPart) -> io.BytesIO:
        """Return what `torch.save` has written of a part of a tensor, or of an object.

        Raises:
            CheckpointError: it cannot be read; or another program has written it, and it has changed since.
        """
        place = part.place
        try:
            with opened(part.path) as descriptor:
                raw: Any = io.BufferedReader(FilePart(descriptor, place.offset, place.length))
                transforms = place.transform_descriptors or ()
                stream = io.BytesIO(self._transforms.transform_load_stream(_NO_ITEM, transforms, raw).read())
            is_whole = part.crc is not None or damaged_member(stream) is None
        except Exception as error:  # a damaged file raises anything
            raise _unreadable(part, error) from None
        if not is_whole:
            raise _changed(part)
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
            part = self._parts[item.storage_index]
            if part not in self._found:  # another rank has verified it, maybe of another copy; or nobody has
                self._found[part] = self._find(part)
            found, start = self._found[part], tuple(item.storage_offsets)
            target = narrow_tensor_by_index(into, item.dest_offsets, item.lengths)
            if found is None:
                target.copy_(narrow_tensor_by_index(self._load(part), start, item.lengths))
                continue
            try:
                found.read_into(start, target)
            except (OSError, EOFError) as error:
                raise _unreadable(part, error) from None

    def _give_back(self) -> None:
        """Return memory that was freed to the system, now and then: the C library would keep what was read before."""
        if self._process.memory_info().rss > self._least_nbytes + _KEPT_NBYTES:
            give_back_freed_ram()
            self._least_nbytes = self._process.memory_info().rss

    def file_of(self, name: str) -> str:
        """Return the file that a tensor begins in."""
        return str(self._parts[MetadataIndex(name, self._form(name).chunks[0].offsets)].path)

    def object(self, part: StoredPart) -> Any:
        """Return what was saved and is no tensor.

        Raises:
            CheckpointError: its file cannot be read, has changed since it was written, or needs trust.
        """
        stream = self._saved(part)
        if part.crc not in (None, checksum(stream)):
            raise _changed(part)
        return load_saved(stream, f"{part.name} in {part.path}", trust=self._trust)

    def _form(self, name: str) -> TensorStorageMetadata:
        form = self.metadata.state_dict_metadata[name]
        assert isinstance(form, TensorStorageMetadata)
        return form


def _changed(part: StoredPart) -> CheckpointError:
    return CheckpointError(f"{part.path} has changed since it was written: {part.name} has not its checksum")


def _unreadable(part: StoredPart, error: Exception) -> CheckpointError:
    return CheckpointError(f"{part.path} cannot be read where {part.name} is: {said(error)}")


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


def tried(read: Callable[[StoredPart], _T], part: StoredPart) -> tuple[_T | None, CheckpointError | None]:
    """Return what is read, or what is wrong with it."""
    try:
        return read(part), None
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
