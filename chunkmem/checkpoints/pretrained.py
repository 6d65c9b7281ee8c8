"""Weights as safetensors files that `from_pretrained` loads: sharded, with an index, a tensor in memory at a time."""

from __future__ import annotations

import contextlib
import json
import os
import re
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from chunkmem.assembly.runtime import Runtime
from chunkmem.checkpoints.safetensors_files import DTYPES, INDEX, open_safetensors
from chunkmem.checkpoints.streaming import weight_stream
from chunkmem.checkpoints.unfinished import Unfinished, alone_in, in_one_line, make_folder, naming, sync, written
from chunkmem.data.errors import CheckpointError, ChunkmemError, TierIOError, said

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ONE = "model.safetensors"
_SHARD = re.compile(r"model(-[0-9a-f]{16})?-\d{5}-of-\d{5}\.safetensors")


def save_pretrained(runtime: Runtime, folder: Path, model: nn.Module | None, *, max_shard_nbytes: int) -> None:
    """See `ChunkManager.save_pretrained`."""
    root, ranks = runtime.root(model), runtime.ranks
    forms, weights = weight_stream(runtime, root, "manager.save_pretrained()")
    if odd := [f"{name} ({form.dtype})" for name, form in forms.items() if form.dtype not in _NAMES]:
        raise CheckpointError(f"safetensors files have no {', '.join(odd)}; use manager.save()")
    shards = shards_of(forms, max_nbytes=max_shard_nbytes)
    sent, problem = (value for _, value in weights), ""
    if ranks.is_first:
        try:
            write_weights(folder, shards, sent, root)
        except (OSError, CheckpointError) as error:
            if isinstance(error, TierIOError):  # of what is read
                raise
            problem = in_one_line(error)
        except ChunkmemError:
            raise
        except Exception as error:  # what transformers raises for a configuration that it does not accept
            problem = said(error)
    for _ in sent:
        """All ranks take part in it, also after an error."""
    problem = ranks.from_first(problem, label="manager.save_pretrained()")
    if problem:
        raise CheckpointError(f"{folder} could not be written: {problem}")


def _save_config(root: Any, folder: Path) -> None:
    """Have a model of transformers' write its configuration."""
    config: Any = getattr(root, "config", None)
    if not hasattr(config, "save_pretrained"):
        return
    config.architectures = [type(root).__name__]
    config.dtype = str(root.dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    if root.can_generate():
        root.generation_config.save_pretrained(folder)


def shards_of(forms: Mapping[str, torch.Tensor], *, max_nbytes: int) -> list[dict[str, torch.Tensor]]:
    """Divide tensors into files of at most so many bytes, in their order; one that is larger has a file of its own.

    Only their dtypes and shapes are looked at: `forms` may be lazy, or on the meta device.
    """
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, form in forms.items():
        if shards[-1] and sum(each.nbytes for each in shards[-1].values()) + form.nbytes > max_nbytes:
            shards.append({})
        shards[-1][name] = form
    return shards


def write_weights(
    folder: Path,
    shards: Sequence[Mapping[str, torch.Tensor]],
    values: Iterator[torch.Tensor],
    root: nn.Module | None = None,
) -> None:
    """Write the files of a model, with their index and its configuration, in the place of others.

    Args:
        folder: where to; it is made if it is not there.
        shards: by file, tensors by name with dtype and shape; see `shards_of`.
        values: of all of them, in this order.
        root: what may have a configuration.

    Raises:
        OSError: they cannot be written; what was there before is.
        CheckpointError: somebody else is writing there.
    """
    make_folder(folder)
    own = Unfinished.make(folder)
    try:
        for at, shard in enumerate(shards):
            with written(own.folder / str(at)) as file:
                file.write(_header(shard))
                for _, value in zip(shard, values, strict=False):
                    file.write(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        others = own.folder / "others"
        others.mkdir()
        _save_config(root, others)
        for path in others.iterdir():
            with naming(path), path.open("rb") as file:
                os.fsync(file.fileno())
        placing = _Placing(folder, own.folder, shards)
        with alone_in(folder, is_new=not placing.found()):
            for path in others.iterdir():
                os.replace(path, folder / path.name)
            placing.replace()
    finally:
        own.discard()


def _header(shard: Mapping[str, torch.Tensor]) -> bytes:
    rows: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, form in shard.items():
        offsets = [end, end := end + form.nbytes]
        rows[name] = {"dtype": _NAMES[form.dtype], "shape": list(form.shape), "data_offsets": offsets}
    text = json.dumps(rows).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@dataclass
class _Placing:
    """Files that are complete, on their way to their place.

    Programs look for weights in two ways. transformers takes `model.safetensors`, and if there is none, the shards that
    the index names. Others take what the index names, and if there is none, all `*.safetensors`. So that each of them
    finds the old weights or the new ones, whenever the process is killed:

    1. Where there is one file, and shards replace it, an index is written that names that file.
    2. Shards come under names that are not there, which no index has. One file takes the place of `model.safetensors`.
    3. The index is replaced: by one that names the new shards; or the one file, if there was an index.
    4. What was there before goes: `model.safetensors` first, and last the index, if there is one file now.
    """

    folder: Path
    unfinished: Path
    shards: Sequence[Mapping[str, torch.Tensor]]

    def replace(self) -> None:
        """Have them there, and what was there before no more."""
        before = self.found()
        names = self._names(before)
        if _ONE in before and INDEX not in before and names != [_ONE]:
            self._name_the_one()
        moved = [self.folder / name for name in names if name not in before]
        try:
            for at, name in enumerate(names):
                os.replace(self.unfinished / str(at), self.folder / name)
            if names != [_ONE] or INDEX in before:
                sync(self.folder)
                self._put_index({name: names[at] for at, shard in enumerate(self.shards) for name in shard})
        except (OSError, CheckpointError):
            for path in moved:
                path.unlink(missing_ok=True)
            raise
        sync(self.folder)
        self._remove(before - set(names), is_one=names == [_ONE])

    def found(self) -> set[str]:
        """Return what is there of weights."""
        return {name for name in os.listdir(self.folder) if _SHARD.fullmatch(name) or name in (_ONE, INDEX)}

    def _names(self, before: set[str]) -> list[str]:
        """Return names for the shards: those that everybody knows, or, where such are there, others."""
        last = len(self.shards)
        if last == 1:
            return [_ONE]
        numbers = [f"{at:05}-of-{last:05}.safetensors" for at in range(1, last + 1)]
        known = [f"model-{number}" for number in numbers]
        generation = uuid.uuid4().hex[:16]
        return known if before.isdisjoint(known) else [f"model-{generation}-{number}" for number in numbers]

    def _name_the_one(self) -> None:
        with contextlib.suppress(CheckpointError):  # it is no such file: nobody reads it
            self._put_index(dict.fromkeys(open_safetensors(self.folder / _ONE), _ONE))

    def _put_index(self, found: Mapping[str, str]) -> None:
        total = sum(form.nbytes for shard in self.shards for form in shard.values())
        path = self.unfinished / INDEX
        with written(path) as file:
            file.write(json.dumps({"metadata": {"total_size": total}, "weight_map": found}, indent=2).encode())
        os.replace(path, self.folder / INDEX)

    def _remove(self, names: set[str], *, is_one: bool) -> None:
        if _ONE in names:  # else it would be read in the place of the shards
            (self.folder / _ONE).unlink()
        left: list[str] = []
        for name in names - {_ONE, INDEX}:
            try:
                (self.folder / name).unlink(missing_ok=True)
            except OSError as error:
                left.append(in_one_line(error))
        if left:  # the index stays: without one, a program may take all files that are there
            warnings.warn(
                f"the weights are in place, and {len(left)} files of those before them could not be removed "
                f"({left[0]}); no index names them, and the next save_pretrained() tries again",
                stacklevel=2,
            )
        elif is_one:
            (self.folder / INDEX).unlink(missing_ok=True)
