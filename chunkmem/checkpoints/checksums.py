"""Checksums of what a checkpoint's files hold, in a file beside them."""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from chunkmem.checkpoints.directory import MANIFEST
from chunkmem.checkpoints.odd_files import parse_json, read_all
from chunkmem.checkpoints.unfinished import written
from chunkmem.data.errors import CheckpointError, said

NAME = "checksums.json"
"""CRC-32 of values by name and offsets, of the manifest, and of these numbers themselves."""
_WHAT = "list of checksums"


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
    """Write them; all other files are complete.

    Raises:
        OSError: they cannot be written.
    """
    values = {**found, MANIFEST: _of_manifest(folder)}
    _write(folder / NAME, _signed(values))


def add_checksums_of(path: Path, *, to: Path) -> None:
    """Have the file of a new checkpoint, in the folder `to`, tell of the one it replaces, too.

    So the file can come first, and the manifest then: whichever is there finds its checksums.

    Raises:
        OSError: it cannot be written.
    """
    if not (path / MANIFEST).exists():
        return
    manifest = _of_manifest(path)
    try:
        before = dict(_of_this(parse_json(read_all(path / NAME), path / NAME, _WHAT), manifest))
        before.pop("before", None)
    except FileNotFoundError:
        before = _signed({MANIFEST: manifest})
    except (CheckpointError, OSError):  # it was damaged before
        before = None
    _write(to / NAME, {**json.loads((to / NAME).read_text(encoding="utf-8")), "before": before})


def _of_manifest(folder: Path) -> int:
    return zlib.crc32((folder / MANIFEST).read_bytes())


def _of_this(saved: dict[str, Any], manifest: int) -> dict[str, Any]:
    """Return what was saved of the checkpoint that has a manifest with this checksum: the last one, or that before."""
    before = saved.get("before")
    if (
        isinstance(before, dict)
        and isinstance(values := before.get("values"), dict)
        and values.get(MANIFEST) == manifest
    ):
        return before
    return saved


def _write(path: Path, saved: Any) -> None:
    with written(path) as file:
        file.write(json.dumps(saved, indent=0).encode())


def read_checksums(folder: Path, manifest: bytes) -> dict[str, int]:
    """Return what `write_checksums` was given; nothing if another program has written the checkpoint.

    Args:
        folder: of the checkpoint.
        manifest: what the file of that name has.

    Raises:
        CheckpointError: they have changed since, or the manifest has.
    """
    path, crc = folder / NAME, zlib.crc32(manifest)
    try:
        content = read_all(path)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {said(error)}") from None
    saved = _of_this(parse_json(content, path, _WHAT), crc)
    values = saved.get("values")
    if not isinstance(values, dict) or not all(type(value) is int for value in values.values()):
        raise CheckpointError(f"{path} is no {_WHAT}; copy the checkpoint again")
    if saved.get("checksum") != _signed(values)["checksum"]:
        raise CheckpointError(f"{path} has changed since it was written")
    if values.pop(MANIFEST, None) != crc:
        raise CheckpointError(f"{folder / MANIFEST} has changed since it was written")
    return values


def _signed(values: Mapping[str, int]) -> dict[str, Any]:
    return {"values": values, "checksum": zlib.crc32(json.dumps(values).encode())}
