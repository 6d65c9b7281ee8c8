"""From one format of checkpoints to another, a tensor in memory at a time."""

from __future__ import annotations

import enum
import os
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from chunkmem.checkpoints.directory import MANIFEST, standing
from chunkmem.checkpoints.files import EXTRA
from chunkmem.checkpoints.metadata import TRUST
from chunkmem.checkpoints.pretrained import shards_of, write_weights
from chunkmem.checkpoints.reading import CheckpointFiles
from chunkmem.checkpoints.safetensors_files import open_safetensors
from chunkmem.checkpoints.saved_objects import damaged_member, load_saved
from chunkmem.checkpoints.saving import save_now
from chunkmem.checkpoints.streaming import untied
from chunkmem.checkpoints.unfinished import Unfinished, in_one_line, sync, written
from chunkmem.data.errors import CheckpointError, said
from chunkmem.modules.lazy_tensor import LazyTensor
from chunkmem.ranks.ranks import open_ranks


class Format(enum.Enum):
    """Of a checkpoint."""

    DCP = "dcp"
    """A directory of torch.distributed.checkpoint, as `manager.save` writes."""
    SAFETENSORS = "safetensors"
    """A directory of weights, as `from_pretrained` loads."""
    TORCH = "torch"
    """One file of `torch.save`."""


@dataclass(frozen=True)
class Converted:
    """What was written."""

    num_tensors: int
    nbytes: int
    left_out: tuple[str, ...]
    """What the format has no place for."""


def format_of(path: Path) -> Format:
    """Return the format of a checkpoint that is there.

    Raises:
        CheckpointError: it is none.
    """
    if (path / MANIFEST).is_file():
        return Format.DCP
    if path.suffix == ".safetensors" or (path.is_dir() and any(path.glob("*.safetensors"))):
        return Format.SAFETENSORS
    if path.is_file():
        return Format.TORCH
    what = "is not there"
    if path.exists():
        what = "has neither .metadata nor *.safetensors" if path.is_dir() else "is no regular file"
    raise CheckpointError(f"{path} {what}; name a directory of manager.save(), safetensors, or a file of torch.save()")


def convert(source: Path, target: Path, to: Format, *, max_shard_nbytes: int, trust: bool = False) -> Converted:
    """Write a checkpoint in another format.

    Args:
        source: a checkpoint.
        target: where to.
        to: the format. Safetensors have weights alone: objects are not even read then.
        max_shard_nbytes: of a safetensors file.
        trust: what pickles in `source` name may be imported and called.

    Raises:
        CheckpointError: one cannot be read or written.
    """
    state = _open(source, trust=trust, with_objects=to is not Format.SAFETENSORS)
    if to is Format.DCP:
        _require_names("", {key: value for key, value in state.items() if key != EXTRA})
    if to is Format.SAFETENSORS:
        return _write_safetensors(state, target, max_shard_nbytes=max_shard_nbytes)
    if to is Format.TORCH:
        _write_torch(state, target)
    else:
        save_now(state, target, open_ranks(timeout_s=1))
    tensors = dict(tensors_in("", state))
    return Converted(len(tensors), sum(value.nbytes for value in tensors.values()), ())


def _open(path: Path, *, trust: bool, with_objects: bool) -> dict[str, Any]:
    """Return all that a checkpoint has, as it was nested; weights alone are under "model"."""
    path = standing(path)
    kind = format_of(path)
    if kind is Format.DCP:
        files = CheckpointFiles(path, trust=trust)
        return {key: files.nested(key, with_objects=with_objects) for key in files.keys}
    if kind is Format.SAFETENSORS:
        return {"model": open_safetensors(path)}
    state = load_torch(path, trust=trust)
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path} has a {type(state).__name__}, not a dict")
    return dict(state) if any(isinstance(each, Mapping) for each in state.values()) else {"model": dict(state)}


def load_torch(path: Path, *, trust: bool) -> Any:
    """Return what a file of `torch.save` has; its tensors are read when they are used.

    Raises:
        CheckpointError: it is none, is damaged, or needs trust.
    """
    is_archive = zipfile.is_zipfile(path)
    if not is_archive and not trust:
        raise CheckpointError(
            f"{path} is no file of torch.save() that can be read safely: it is no zip archive; name another, or {TRUST}"
        )
    try:
        damaged = damaged_member(path) if is_archive else None
    except Exception as error:  # a damaged file raises anything
        raise CheckpointError(f"{path} cannot be read: {said(error)}") from None
    if damaged is not None:
        raise CheckpointError(f"{path} has changed since it was written: {damaged} in it has not its CRC-32")
    return load_saved(path, str(path), trust=trust, map_location="cpu", mmap=is_archive)


def _require_names(prefix: str, value: Any) -> None:
    """Raise if a key is no text: torch.distributed.checkpoint would make it one."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            if not isinstance(key, str):
                raise CheckpointError(
                    f"{prefix or 'the checkpoint'} has the key {key!r}, and torch.distributed.checkpoint has names "
                    "only: save optimizer states by name, as get_state_dict() does, or under the key extra"
                )
            _require_names(f"{prefix}.{key}" if prefix else key, each)
    elif isinstance(value, list | tuple):
        for each in value:
            _require_names(prefix, each)


def tensors_in(prefix: str, value: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors in nested containers, with their names below `prefix`."""
    if isinstance(value, torch.Tensor):
        return [(prefix, value)]
    inside: Iterable[tuple[Any, Any]] = enumerate(value) if isinstance(value, list | tuple) else ()
    if isinstance(value, Mapping):
        inside = value.items()
    return [found for key, each in inside for found in tensors_in(f"{prefix}.{key}" if prefix else str(key), each)]


def _write_safetensors(state: Mapping[str, Any], target: Path, *, max_shard_nbytes: int) -> Converted:
    weights = state.get("model", state)
    kept = untied(dict(tensors_in("", weights)))
    read = (value.read() if isinstance(value, LazyTensor) else value.clone() for value in kept.values())
    try:
        write_weights(target, shards_of(kept, max_nbytes=max_shard_nbytes), read)
    except OSError as error:
        raise CheckpointError(f"{target} could not be written: {in_one_line(error)}") from None
    left_out = tuple(sorted(key for key in state if key != "model")) if weights is not state else ()
    return Converted(len(kept), sum(value.nbytes for value in kept.values()), left_out)


def _write_torch(state: Mapping[str, Any], target: Path) -> None:
    try:
        own = Unfinished.make(target.parent, target.name)
        try:
            partial = own.folder / "all"
            with written(partial) as file:
                torch.save(dict(state), file)
            os.replace(partial, target)
            sync(target.parent)
        finally:
            own.discard()
    except OSError as error:
        raise CheckpointError(f"{target} could not be written: {in_one_line(error)}") from None
