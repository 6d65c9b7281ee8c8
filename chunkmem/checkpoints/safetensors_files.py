"""Read safetensors files, a tensor at a time. The format: 8 bytes of length, a header in JSON, values."""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType

import torch

from chunkmem.errors import CheckpointError
from chunkmem.nn.lazy_tensor import Extent, LazyTensor, Source

DTYPES = MappingProxyType({
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
})  # fmt: skip
"""By the names that the format has for them."""
_MAX_HEADER_NBYTES = 100_000_000
"""As the format says."""
INDEX = "model.safetensors.index.json"


class _FileSource(Source):
    """A tensor in a file."""

    def __init__(self, path: Path, name: str, offset: int, shape: Extent, dtype: torch.dtype) -> None:
        self._path = path
        self._name = name
        self._offset = offset
        self._shape = shape
        self._dtype = dtype

    @property
    def is_here(self) -> bool:
        return True

    @property
    def place(self) -> str:
        return self._path.name

    def read_here(self, start: Extent, shape: Extent) -> torch.Tensor:
        content = bytearray(self._dtype.itemsize * torch.Size(self._shape).numel())
        with self._path.open("rb") as file:
            file.seek(self._offset)
            if file.readinto(content) < len(content):
                raise CheckpointError(f"{self._path} ends before {self._name} does")
        if not content:
            return torch.empty(shape, dtype=self._dtype, device="cpu")
        values = torch.frombuffer(content, dtype=self._dtype).reshape(self._shape)
        return values if shape == self._shape else values[tuple(map(_slice, start, shape))].clone()


def _slice(start: int, size: int) -> slice:
    return slice(start, start + size)


def open_safetensors(path: Path) -> dict[str, LazyTensor]:
    """Return the tensors of a file, or of the files in a directory, by name; they are read when they are used.

    Raises:
        CheckpointError: there is no such file, or it is not of the format.
    """
    paths = [path]
    if path.is_dir():
        paths = sorted(path.glob("*.safetensors"))
        if (path / INDEX).exists():
            try:
                weights = json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"]
                paths = [path / name for name in dict.fromkeys(weights.values())]
            except (ValueError, KeyError, AttributeError):
                raise CheckpointError(f"{path / INDEX} is no index of safetensors files") from None
    found: dict[str, LazyTensor] = {}
    for each in paths:
        found |= _tensors_of(each)
    return found


def _tensors_of(path: Path) -> dict[str, LazyTensor]:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_MAX_HEADER_NBYTES, path.stat().st_size - 8):
                raise CheckpointError(f"{path} is no safetensors file: its header would have {length} bytes")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        found = {}
        for name, about in header.items():
            shape, dtype, (first, last) = tuple(about["shape"]), DTYPES[about["dtype"]], about["data_offsets"]
            if last - first != dtype.itemsize * torch.Size(shape).numel() or 8 + length + last > path.stat().st_size:
                raise CheckpointError(
                    f"{path}: {name} has {last - first} bytes for {shape} of {dtype}, or ends too early"
                )
            source = _FileSource(path, name, 8 + length + first, shape, dtype)
            found[name] = LazyTensor.of(source, shape, dtype)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is not there") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no safetensors file: {type(error).__name__}: {error}") from None
    return found
