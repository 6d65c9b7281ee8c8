"""`.metadata` of torch.distributed.checkpoint, read without running what it names.

It is a pickle, and a pickle is a program: it may name any function and call it. Here each name that torch writes means
a record of this module, and no other name means anything. What comes out is checked, and made of torch's classes again.
"""

from __future__ import annotations

import io
import math
import pickle
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import _check_box_bounds, _check_box_overlap
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from chunkmem.checkpoints.odd_files import path_in
from chunkmem.data.errors import CheckpointError, said

TRUST = "if you trust its author, pass trust=True (chunkmem convert: --trust)"
_MAX_DEPTH = 64
"""Of what a checkpoint nests."""
_MAX_NUMBER = (1 << 63) - 1


def read_metadata(content: bytes, path: Path, *, trust: bool) -> Metadata:
    """Return what a checkpoint's metadata says, once it is certain to make sense.

    Every tensor is covered by its parts, none of which overlap, and each part has its place in a file of the folder.

    Args:
        content: of the file.
        path: of the file.
        trust: what it names may be imported and called, as torch does.

    Raises:
        CheckpointError: it is damaged, does not make sense, or names what torch does not write.
    """
    try:
        found = _Unpickler(io.BytesIO(content), trust=trust).load()
        return _metadata(found, path.parent)
    except CheckpointError:
        raise
    except _ForeignNameError as error:
        raise CheckpointError(
            f"{path} names {error}, which is none of torch's metadata: to read it could run anything; {TRUST}"
        ) from None
    except _OddMetadataError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}; it is damaged, or no dcp.save() has written it"
        ) from None
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointError(f"{path} cannot be read: {said(error)}") from None


class _ForeignNameError(Exception):
    """A name that torch's metadata does not have."""


class _OddMetadataError(Exception):
    """Metadata that do not make sense."""


# Unpickling.


class _Record:
    """What stands for an object of torch's, with its state as it was pickled.

    That it has `__setstate__` keeps a pickle from changing the class itself.
    """

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Tensor(_Record):
    """For TensorStorageMetadata."""


class _Bytes(_Record):
    """For BytesStorageMetadata."""


def _nothing(*_: Any) -> None:
    """Stand for what is not looked at: a path, a layout or a memory format."""


_NAMES: Mapping[str, Any] = MappingProxyType({
    **{f"torch.distributed.checkpoint.metadata.{name}": _Record for name in (
        "Metadata", "MetadataIndex", "ChunkStorageMetadata", "TensorProperties", "StorageMeta")},
    "torch.distributed.checkpoint.metadata.TensorStorageMetadata": _Tensor,
    "torch.distributed.checkpoint.metadata.BytesStorageMetadata": _Bytes,
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING": _nothing,
    "torch.distributed.checkpoint.filesystem._StorageInfo": _Record,
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties": _Record,
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING": _nothing,
    "torch.serialization._get_layout": _nothing,
    "torch.Size": tuple,
    "collections.OrderedDict": dict,
    **{f"{module}.{name}": _nothing for module in ("pathlib", "pathlib._local") for name in (
        "Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath")},
    **{str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)},
})  # fmt: skip
"""What names mean."""


class _Unpickler(pickle._Unpickler):
    """Knows the names of torch's metadata, and with `trust` all others.

    It is the one in Python, a tenth of a second for a thousand tensors: that in C, ten times as fast, takes any amount
    of memory that a few bytes ask for.
    """

    def __init__(self, stream: io.BytesIO, *, trust: bool) -> None:
        super().__init__(stream)
        self._trust = trust

    def find_class(self, module: str, name: str) -> Any:
        found = _NAMES.get(f"{module}.{name}")
        if found is not None:
            return found
        if self._trust:
            return super().find_class(module, name)
        raise _ForeignNameError(f"{module}.{name}")


def _of(value: Any, name: str) -> Any:
    """Return an attribute of an object that was pickled; None: it has none."""
    if isinstance(value, _Record):
        return value.state.get(name) if isinstance(value.state, dict) else None
    return getattr(value, name, None)


# Checking.


def _metadata(found: Any, folder: Path) -> Metadata:
    rows, data, keys = (_of(found, name) for name in ("state_dict_metadata", "storage_data", "planner_data"))
    if not isinstance(rows, dict) or not isinstance(data, dict) or not isinstance(keys or {}, dict):
        raise _OddMetadataError("it is not what torch.distributed.checkpoint writes")
    forms: dict[str, Any] = {_name(name): _form(name, row) for name, row in rows.items()}
    places = dict(_places(data, folder))
    for name, form in forms.items():
        offsets = [part.offsets for part in form.chunks] if isinstance(form, TensorStorageMetadata) else [None]
        if missing := [each for each in offsets if MetadataIndex(name, each) not in places]:
            raise _OddMetadataError(f"{name} has no place in a file, or its part at {missing[0]} has none")
    paths = {name: _path(name, (keys or {}).get(name, (name,)), len(forms)) for name in forms}
    _require_tree(paths.values())
    return Metadata(forms, planner_data=paths, storage_data=places)


def _form(name: str, row: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(row, _Bytes):
        return BytesStorageMetadata()
    parts = _of(row, "chunks")
    if not isinstance(row, _Tensor) or not isinstance(parts, list):
        raise _OddMetadataError(f"{name} is neither a tensor nor an object")
    properties, size = _of(row, "properties"), _extent(name, _of(row, "size"))
    state = getattr(properties, "state", None)
    dtype = state[0] if isinstance(state, tuple) and state else _of(properties, "dtype")
    if not isinstance(dtype, torch.dtype):
        raise _OddMetadataError(f"{name} has no dtype")
    chunks = [
        ChunkStorageMetadata(_extent(name, _of(part, "offsets")), _extent(name, _of(part, "sizes"))) for part in parts
    ]
    _require_cover(name, size, chunks)
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)


def _places(data: Mapping[Any, Any], folder: Path) -> Iterator[tuple[MetadataIndex, _StorageInfo]]:
    for key, row in data.items():
        name, offset = _name(_of(key, "fqn")), _of(key, "offset")
        start, nbytes = _number(name, _of(row, "offset")), _number(name, _of(row, "length"))
        transforms = _of(row, "transform_descriptors")
        if not isinstance(transforms, tuple | list | None) or not all(
            isinstance(each, str) for each in transforms or ()
        ):
            raise _OddMetadataError(f"{name} is transformed by {reprlib.repr(transforms)}")
        file = _of(row, "relative_path")
        path_in(folder, file)
        index = MetadataIndex(name, None if offset is None else _extent(name, offset))
        yield index, _StorageInfo(file, start, nbytes, transforms)


def _require_cover(name: str, size: torch.Size, parts: Sequence[ChunkStorageMetadata]) -> None:
    """Raise unless the parts are a tensor's, and each of its elements is in one of them.

    None overlap, so they cover it if they have as many elements.
    """
    for part in parts:
        if len(part.offsets) != len(size) or len(part.sizes) != len(size):
            raise _OddMetadataError(f"{name} of shape {tuple(size)} has a part of {len(part.sizes)} dimensions")
        if not _check_box_bounds(size, part):
            raise _OddMetadataError(f"{name} of shape {tuple(size)} has a part {_shown(part)}, which is outside of it")
    numel, covered = math.prod(size), sum(math.prod(part.sizes) for part in parts)
    if covered != numel or not parts:
        raise _OddMetadataError(f"its parts cover {covered} of the {numel} elements of {name}")
    if pair := _overlap([part for part in parts if math.prod(part.sizes)]):
        raise _OddMetadataError(f"{name} has two parts that overlap, {_shown(pair[0])} and {_shown(pair[1])}")


def _overlap(parts: Sequence[ChunkStorageMetadata]) -> tuple[ChunkStorageMetadata, ChunkStorageMetadata] | None:
    """Return two parts that overlap, found by a sweep along the dimension that has most borders."""
    if len(parts) < 2 or not parts[0].sizes:
        return (parts[0], parts[1]) if len(parts) > 1 else None
    axis = max(range(len(parts[0].sizes)), key=lambda each: len({part.offsets[each] for part in parts}))
    reached: list[ChunkStorageMetadata] = []
    for part in sorted(parts, key=lambda part: part.offsets[axis]):
        reached = [other for other in reached if other.offsets[axis] + other.sizes[axis] > part.offsets[axis]]
        for other in reached:
            if _check_box_overlap(other, part):
                return other, part
        reached.append(part)
    return None


def _shown(part: ChunkStorageMetadata) -> str:
    return f"{tuple(part.sizes)} at {tuple(part.offsets)}"


def _require_tree(paths: Iterable[tuple[str | int, ...]]) -> None:
    """Raise if what is saved cannot be nested: one thing in another, or names and positions in one place."""
    ends, inner = set[tuple[str | int, ...]](), dict[tuple[str | int, ...], type]()
    for path in paths:
        if path in ends or any(inner.setdefault(path[:at], type(key)) is not type(key) for at, key in enumerate(path)):
            raise _OddMetadataError(f"what is saved under {'.'.join(map(str, path))} cannot be nested with the rest")
        ends.add(path)
    if odd := next((path for path in ends if path in inner), None):
        raise _OddMetadataError(f"what is saved under {'.'.join(map(str, odd))} cannot be nested with the rest")


# Values.


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise _OddMetadataError(f"it has {reprlib.repr(value)} in the place of a name")
    return value


def _path(name: str, value: Any, num_names: int) -> tuple[str | int, ...]:
    if not isinstance(value, tuple | list) or not 0 < len(value) <= _MAX_DEPTH or not isinstance(value[0], str):
        raise _OddMetadataError(f"{name} is nested under {reprlib.repr(value)}")
    for key in value:
        if not isinstance(key, str) and not (type(key) is int and 0 <= key < num_names):
            raise _OddMetadataError(
                f"{name} is nested under {reprlib.repr(key)}, which is neither a name nor a position"
            )
    return tuple(value)


def _extent(name: str, value: Any) -> torch.Size:
    if not isinstance(value, tuple | list):
        raise _OddMetadataError(f"{name} has {reprlib.repr(value)} in the place of a shape")
    return torch.Size([_number(name, each) for each in value])


def _number(name: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_NUMBER:
        raise _OddMetadataError(f"{name} has {reprlib.repr(value)} in the place of a size or an offset")
    return value
