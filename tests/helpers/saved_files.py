"""What a checkpoint has, as nested dicts of ordinary tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils._pytree import tree_map_only

from chunkmem.checkpoints.reading import CheckpointFiles
from chunkmem.modules.lazy_tensor import LazyTensor


def contents(path: Path, *keys: str) -> dict[str, Any]:
    """Return what is under some keys, those of one process if none are named."""
    files = CheckpointFiles(path)
    wanted = keys or ("model", "optimizer", "extra")
    found = {key: files.nested(key) for key in wanted if not keys or key in files.keys}
    read: dict[str, Any] = tree_map_only(LazyTensor, LazyTensor.read, found)
    return read


def last_contents(folder: Path) -> dict[str, Any]:
    """Of the last checkpoint of a training that an example has run."""
    return contents(max((folder / "checkpoints").iterdir(), key=lambda path: int(path.name.removeprefix("step-"))))
