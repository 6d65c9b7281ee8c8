"""What the training leaves in its folder: each file as a whole, or the one that was there before."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from options import fail


def make_folder(path: Path) -> None:
    """Find out before the training, not after it, whether results can be written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        fail(f"--out {path} cannot be written to: {error.strerror}")


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Write a file; whenever this is interrupted, it is the old one or the new one, never half of one."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def save(state: dict[str, Any], path: Path) -> None:
    """Write a checkpoint."""
    with replacing(path) as file:
        torch.save(state, file)


def load(path: Path) -> dict[str, Any]:
    """Read what `save` wrote: mapped, so that the ranks of one machine share the memory it takes."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return {key: state[key] for key in ("step", "model", "optimizer", "scheduler")}
    except FileNotFoundError:
        fail(f"{path} does not exist, so there is nothing to resume")
    except Exception:  # torch.load raises half a dozen kinds for files that are cut off or something else
        fail(f"{path} is not a checkpoint of this program")


def set_aside(path: Path) -> None:
    """Keep what an earlier training left, under another name."""
    if path.exists():
        os.replace(path, path.with_name(f"earlier-{path.name}"))
