"""Directories that are complete or not there: what is written comes under its name when all of it is on the disk."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from chunkmem.comm.ranks import Ranks
from chunkmem.errors import CheckpointError

MANIFEST = ".metadata"
"""The file of a checkpoint that is written last."""
_LABEL = "making the directory of a checkpoint"
_LATE_S = 5.0
"""How long a file may take to be seen by another machine."""
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


@contextlib.contextmanager
def replacing(path: Path, ranks: Ranks) -> Iterator[Path]:
    """Yield an empty directory, the same on all ranks, that takes the place of `path` when the block is over.

    After a kill or an error, there is what was there before, or all of what was written. What a killed block has left
    is removed by the next one.

    Raises:
        CheckpointError: it cannot be made or renamed, or `path` is something else than a checkpoint; on every rank.
    """
    folder = begin_replacing(path, ranks)
    try:
        yield folder
        _on_first(ranks, path, lambda: put_in_place(folder, path))
    except BaseException:
        if ranks.is_first:
            discard(folder)
        raise


def begin_replacing(path: Path, ranks: Ranks) -> Path:
    """Return an empty directory, the same on all ranks, to take the place of `path`. Raises what `replacing` does."""
    folder = path.with_name(f".{path.name}.incomplete")
    _on_first(ranks, path, lambda: _make(path, folder))
    if not ranks.are_one:
        _check_shared(folder, path, ranks)
    return folder


def _check_shared(folder: Path, path: Path, ranks: Ranks) -> None:
    """Raise a `CheckpointError` on every rank if one of them has another directory, which lacks what others write."""
    mark = folder / ranks.from_first(f".seen-by-all-{uuid.uuid4().hex}", label=_LABEL)
    _on_first(ranks, path, mark.touch)
    problem = "" if _appears(mark) else f"rank {ranks.name(ranks.rank)} does not see what the first rank writes there"
    problem = ranks.any_text(f"{path}: {problem}" if problem else "", label=_LABEL)
    if ranks.is_first:
        mark.unlink(missing_ok=True)
        if problem:
            discard(folder)
    if problem:
        raise CheckpointError(
            f"the checkpoint could not be written ({problem}); what was there before is there. Name a directory on a "
            "file system that all ranks share"
        )


def _appears(mark: Path) -> bool:
    """Tell whether there is a file that another machine has just made; file systems over a network may be late."""
    deadline_s = time.monotonic() + _LATE_S
    while not mark.exists():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_LATE_S / 100)
        with contextlib.suppress(OSError):
            os.listdir(mark.parent)  # has it looked up again
    return True


def discard(folder: Path) -> None:
    """Remove what is not complete, as far as that is possible; the next time does so, too."""
    shutil.rmtree(folder, ignore_errors=True)


def _on_first(ranks: Ranks, path: Path, do: Callable[[], None]) -> None:
    """Do something on the first rank; what goes wrong there is raised on all of them."""
    problem = ""
    if ranks.is_first:
        try:
            do()
        except OSError as error:
            problem = f"{error.filename or path}: {error.strerror or error}"
        except CheckpointError as error:
            problem = str(error)
    problem = ranks.from_first(problem, label=_LABEL)
    if problem:
        raise CheckpointError(f"the checkpoint {path} could not be written ({problem}); what was there before is there")


def _make(path: Path, folder: Path) -> None:
    if path.exists() and not (path / MANIFEST).exists() and not (path.is_dir() and not any(path.iterdir())):
        raise CheckpointError(f"{path} is there, and is no checkpoint; name another directory")
    if path == Path.cwd():
        raise CheckpointError(f"{path} is the current directory, which would be replaced; name one in it")
    path.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()


def put_in_place(folder: Path, path: Path) -> None:
    """Have a directory take the place of `path`, once its files are on the disk.

    Raises:
        OSError: it has not.
    """
    sync(folder)
    replaces = path.exists()
    swap = _swap if replaces else Path.rename
    swap(folder, path)
    try:
        sync(path.parent)
    except OSError:  # nobody knows whether the new one would be there after a crash
        swap(path, folder)
        raise
    if replaces:
        shutil.rmtree(folder)


def _swap(one: Path, other: Path) -> None:
    """Give each of two directories the other's name."""
    if not _exchange(one, other):
        # This file system cannot do so in one step: for a moment, one of them is not there.
        between = other.with_name(f".{other.name}.before")
        other.rename(between)
        one.rename(other)
        between.rename(one)


def sync(folder: Path) -> None:
    """Have the names in a directory on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> bool:
    """Give each of two directories the other's name, in one step of the file system; return whether it can."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    return bool(rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)
