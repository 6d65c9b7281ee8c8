"""Weights as safetensors files that `from_pretrained` loads: sharded, with an index, a tensor in memory at a time."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

from chunkmem.assembly import Runtime
from chunkmem.checkpoints.safetensors_files import DTYPES, INDEX
from chunkmem.errors import CheckpointError
from chunkmem.nn.lazy_tensor import LazyTensor

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_SHARD = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


@dataclass(frozen=True)
class Form:
    """What is known of a tensor before it is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Of its elements."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def save_pretrained(runtime: Runtime, folder: Path, model: nn.Module | None, *, max_shard_nbytes: int) -> None:
    """See `ChunkManager.save_pretrained`."""
    root, ranks = runtime.root(model), runtime.ranks
    with runtime.together("manager.save_pretrained()"):
        runtime.entry_points.ordinary.follow()
        state = runtime.modules.surface.state_dict(root, lazily=True)
    here = {name: value for name, value in _untied(root, state).items() if not value.is_meta}
    stages = ranks.stages
    forms = {name: (Form(value.dtype, tuple(value.shape)), stages and stages.rank) for name, value in here.items()}
    forms = ranks.over_stages(forms, label="the names of a stage's weights")
    if odd := [f"{name} ({form.dtype})" for name, (form, _) in forms.items() if form.dtype not in _NAMES]:
        raise CheckpointError(f"safetensors files have no {', '.join(odd)}; use manager.save()")
    shards = shards_of({name: forms[name][0] for name in state if name in forms}, max_nbytes=max_shard_nbytes)
    problem = ""
    files = Files(folder, shards) if ranks.is_first else None
    for name in (name for shard in shards for name in shard):
        value = here.get(name)
        if isinstance(value, LazyTensor):
            value = value.read()
        if stages is not None:
            value = stages.broadcast_object(value, label=f"sending {name}", source=forms[name][1] or 0)
        assert value is not None
        if files is not None and not problem:
            problem = _problem(files.write, name, value)
    if files is not None:
        problem = problem or _problem(files.finish, root)
        files.close(failed=bool(problem))
    problem = ranks.from_first(problem, label="manager.save_pretrained()")
    if problem:
        raise CheckpointError(f"{folder} could not be written: {problem}")


def _problem(do: Any, *args: Any) -> str:
    """Do something on the first rank; return what it raises, which is raised on all: they would wait for it."""
    try:
        do(*args)
    except OSError as error:
        return f"{error.filename or 'a file'}: {error.strerror}"
    except Exception as error:  # what transformers raises for a configuration that it does not accept
        return f"{type(error).__name__}: {error}"
    return ""


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


def _untied(root: nn.Module, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return one name of each tensor: safetensors has no ties. It is one that transformers does not derive."""
    patterns = tuple(getattr(root, "_tied_weights_keys", None) or ())
    params = dict(root.named_parameters(remove_duplicate=False))
    names: dict[int, list[str]] = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            names.setdefault(id(params.get(name, value)), []).append(name)
    kept = {min(same, key=lambda name: any(re.search(each, name) for each in patterns)) for same in names.values()}
    return {name: value for name, value in state.items() if name in kept}


def shards_of(forms: Mapping[str, Form], *, max_nbytes: int) -> list[dict[str, Form]]:
    """Divide tensors into files of at most so many bytes, in their order; one that is larger has a file of its own."""
    shards: list[dict[str, Form]] = [{}]
    for name, form in forms.items():
        if shards[-1] and sum(each.nbytes for each in shards[-1].values()) + form.nbytes > max_nbytes:
            shards.append({})
        shards[-1][name] = form
    return shards


class Files:
    """The files of a model that are being written: each under another name until all are complete."""

    def __init__(self, folder: Path, shards: Sequence[Mapping[str, Form]]) -> None:
        """Begin with none."""
        self._folder = folder
        self._shards = shards
        last = len(shards)
        self._names = [f"model-{at:05}-of-{last:05}.safetensors" for at in range(1, last + 1)]
        if last == 1:
            self._names = ["model.safetensors"]
        self._waiting = self._order()
        self._file: IO[bytes] | None = None

    def _order(self) -> Iterator[tuple[int, str]]:
        for at, shard in enumerate(self._shards):
            for name in shard:
                yield at, name

    def _partial(self, name: str) -> Path:
        return self._folder / f".{name}.incomplete"

    def write(self, name: str, value: torch.Tensor) -> None:
        """Write the tensor that comes next.

        Raises:
            OSError: it cannot be written.
        """
        at, expected = next(self._waiting)
        assert name == expected
        if name == next(iter(self._shards[at])):
            self._begin(at)
        assert self._file is not None
        self._file.write(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def _begin(self, at: int) -> None:
        self._end()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file = self._partial(self._names[at]).open("wb")
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, form in self._shards[at].items():
            offsets = [end, end := end + form.nbytes]
            header[name] = {"dtype": _NAMES[form.dtype], "shape": list(form.shape), "data_offsets": offsets}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._file.write(len(text).to_bytes(8, "little") + text)

    def _end(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            with file:
                file.flush()
                os.fsync(file.fileno())

    def finish(self, root: nn.Module | None) -> None:
        """Give all files their names, and write the index and the configuration.

        Raises:
            OSError: that fails.
        """
        self._end()
        _save_config(root, self._folder)
        for name in self._names:
            os.replace(self._partial(name), self._folder / name)
        indices = [INDEX] if len(self._names) > 1 else []
        if indices:
            found = {name: self._names[at] for at, shard in enumerate(self._shards) for name in shard}
            total = sum(form.nbytes for shard in self._shards for form in shard.values())
            index = self._folder / INDEX
            self._partial(index.name).write_text(
                json.dumps({"metadata": {"total_size": total}, "weight_map": found}, indent=2), encoding="utf-8"
            )
            os.replace(self._partial(index.name), index)
        for path in self._folder.iterdir():
            if _SHARD.fullmatch(path.name) and path.name not in (*self._names, *indices):
                path.unlink()

    def close(self, *, failed: bool) -> None:
        """Leave nothing that is not complete."""
        if self._file is not None:
            self._file.close()
        for name in self._names if failed else ():
            self._partial(name).unlink(missing_ok=True)
