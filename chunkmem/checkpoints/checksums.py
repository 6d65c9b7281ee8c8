"""Checksums of what a checkpoint's files hold, in a file beside them."""

from __future__ import annotations

import io
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from chunkmem.checkpoints.directory import MANIFEST
from chunkmem.errors import CheckpointError

NAME = "checksums.json"
"""CRC-32 of values by name and offsets, of the manifest, and of these numbers themselves."""


def checksum(values: torch.Tensor | io.BytesIO | memoryview, before: int = 0) -> int:
    """Return the CRC-32 of the bytes of a tensor or an object, or of some bytes that follow others with `before`."""
    if isinstance(values, memoryview):
        return zlib.crc32(values, before)
    if isinstance(values, io.BytesIO):
        return zlib.crc32(values.getbuffer())
    return zlib.crc32(values.detach().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def entry_name(index: MetadataIndex) -> str:
    """Return what a part of a tensor, or an object, is called in the file."""
    return f"{index.fqn} {list(index.offset or ())}"


def write_checksums(folder: Path, found: Mapping[str, int]) -> None:
    """Write them; all other files are complete."""
    values = {**found, MANIFEST: zlib.crc32((folder / MANIFEST).read_bytes())}
    with (folder / NAME).open("w", encoding="utf-8") as file:
        json.dump({"values": values, "checksum": _of(values)}, file, indent=0)
        file.flush()
        os.fsync(file.fileno())


def read_checksums(folder: Path) -> dict[str, int]:
    """Return what `write_checksums` was given; nothing if another program has written the checkpoint.

    Raises:
        CheckpointError: they have changed since, or the manifest has.
    """
    path = folder / NAME
    try:
        saved: Any = json.loads(path.read_text(encoding="utf-8"))
        values: dict[str, int] = saved["values"]
        is_whole = saved["checksum"] == _of(values)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}") from None
    if not is_whole:
        raise CheckpointError(f"{path} has changed since it was written")
    if values.pop(MANIFEST, None) != zlib.crc32((folder / MANIFEST).read_bytes()):
        raise CheckpointError(f"{folder / MANIFEST} has changed since it was written")
    return values


def _of(values: Mapping[str, int]) -> int:
    return zlib.crc32(json.dumps(values).encode())
