"""Read safetensors files, a tensor at a time. The format: 8 bytes of length, a header in JSON, values."""

from __future__ import annotations

import math
import os
import reprlib
from pathlib import Path
from types import MappingProxyType

import torch

from chunkmem.checkpoints.odd_files import opened, parse_json, path_in, read_all, read_at
from chunkmem.checkpoints.stored_values import FileSource, StoredValues
from chunkmem.data.errors import CheckpointError, said
from chunkmem.modules.lazy_tensor import Extent, LazyTensor

DTYPES = MappingProxyType({
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
})  # fmt: skip
"""By the names that the format has for them."""
_MAX_HEADER_NBYTES = 100_000_000
"""As the format says."""
INDEX = "model.safetensors.index.json"


class StoredTensor(FileSource):
    """A tensor in a file."""

    def __init__(self, name: str, values: StoredValues) -> None:
        super().__init__(values.dtype)
        self._name = name
        self.values = values

    @property
    def place(self) -> str:
        return self.values.path.name

    def read_into(self, start: Extent, into: torch.Tensor) -> None:
        try:
            self.values.read_into(start, into)
        except (OSError, EOFError) as error:
            raise CheckpointError(f"{self.values.path} cannot be read where {self._name} is: {said(error)}") from None


def open_safetensors(path: Path) -> dict[str, LazyTensor]:
    """Return the tensors of a file, or of the files in a directory, by name; they are read when they are used.

    Raises:
        CheckpointError: there is no such file, or it is not of the format.
    """
    if not path.is_dir():
        return tensors_of(path)
    index = path / INDEX
    listed = _listed(index) if os.path.lexists(index) else {}
    found: dict[str, LazyTensor] = {}
    for each in dict.fromkeys(listed.values()) if listed else sorted(path.glob("*.safetensors")):
        own = tensors_of(each)
        if twice := next((name for name in own if name in found), None):
            raise CheckpointError(f"{each} and another file of {path} both have {twice}; name the one that is meant")
        if missing := next((name for name, file in listed.items() if file == each and name not in own), None):
            raise CheckpointError(f"{index} has {missing} in {each.name}, which has no such tensor; copy both again")
        found |= own
    return found


def _listed(index: Path) -> dict[str, Path]:
    """Return the file of each tensor that an index lists."""
    try:
        content = read_all(index)
    except OSError as error:
        raise CheckpointError(f"{index} cannot be read: {said(error)}") from None
    weights = parse_json(content, index, "index of safetensors files").get("weight_map")
    if not isinstance(weights, dict) or not weights:
        raise CheckpointError(f"{index} is no index of safetensors files: it has no weight_map; copy it again")
    return {name: path_in(index.parent, file) for name, file in weights.items()}


def tensors_of(path: Path) -> dict[str, LazyTensor]:
    """Return the tensors of one file; see `open_safetensors`."""
    try:
        with opened(path) as descriptor:
            file_nbytes = os.fstat(descriptor).st_size
            length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
            if not 2 <= length <= min(_MAX_HEADER_NBYTES, file_nbytes - 8):
                raise CheckpointError(f"{path} is no safetensors file: its header would have {length} bytes")
            content = bytearray(length)
            read_at(descriptor, 8, memoryview(content))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is not there") from None
    except (OSError, EOFError) as error:
        raise CheckpointError(f"{path} cannot be read: {said(error)}") from None
    header = parse_json(bytes(content), path, "safetensors file")
    header.pop("__metadata__", None)
    rows = [(name, *_row(path, name, about)) for name, about in header.items()]
    end = 0
    for name, shape, dtype, first, last in sorted(rows, key=lambda row: row[3:]):
        problem = ""
        if first != end:
            problem = "overlaps with another one" if first < end else "begins after bytes that are none's"
        elif last - first != dtype.itemsize * math.prod(shape):
            problem = f"has {last - first} bytes for {shape} of {dtype}"
        if problem:
            raise CheckpointError(f"{path} is no safetensors file: {name} at byte {first} {problem}; copy it again")
        end = last
    begin = 8 + length
    if begin + end != file_nbytes:
        what = f"has {file_nbytes} bytes instead of {begin + end}: it is longer than its header says, or cut off"
        raise CheckpointError(f"{path} {what}; copy it again")
    values = {name: StoredValues(path, begin + first, shape, dtype) for name, shape, dtype, first, _ in rows}
    return {name: LazyTensor.of(StoredTensor(name, each), each.shape, each.dtype) for name, each in values.items()}


def _row(path: Path, name: str, about: object) -> tuple[Extent, torch.dtype, int, int]:
    """Return what a header says of a tensor: shape, dtype, and where it begins and ends."""
    row = about if isinstance(about, dict) else {}
    dtype = DTYPES.get(row["dtype"]) if isinstance(row.get("dtype"), str) else None
    if dtype is None:
        known = ", ".join(DTYPES)
        raise CheckpointError(
            f"{path}: {name} has the dtype {reprlib.repr(row.get('dtype'))}; what can be read is {known}"
        )
    shape, offsets = _numbers(row.get("shape")), _numbers(row.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2:
        raise CheckpointError(f"{path} is no safetensors file: {name} has no shape, or no offsets; copy it again")
    return shape, dtype, *offsets


def _numbers(value: object) -> Extent | None:
    """Return a list of sizes or offsets; None: it is none."""
    if not isinstance(value, list) or not all(type(each) is int and 0 <= each < 1 << 63 for each in value):
        return None
    return tuple(value)
