"""Files that anybody may have written: opened and parsed, or refused in one sentence.

A name may lead out of its folder, a file may be a pipe that nobody writes to, JSON may be nested without end: none of
it raises anything but a `CheckpointError`, and nothing is waited for.
"""

from __future__ import annotations

import errno
import json
import os
import reprlib
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

from chunkmem.data.errors import CheckpointError, said
from chunkmem.data.schema import with_unique_keys


def checkpoint_path(path: str | bytes | os.PathLike[str]) -> Path:
    """Return the absolute path that a user means, with links followed.

    Raises:
        CheckpointError: it is none, or its links lead nowhere.
    """
    try:
        return Path(os.fsdecode(path)).resolve()
    except (TypeError, ValueError, RuntimeError, OSError) as error:
        raise CheckpointError(f"{path!r} is no path of a checkpoint: {said(error)}; name a directory") from None


def path_in(folder: Path, name: object) -> Path:
    """Return the path of a file that a list of files in `folder` names.

    Raises:
        CheckpointError: it leads out of the folder, or is no name.
    """
    if not isinstance(name, str) or name in ("", ".") or "\0" in name:
        raise CheckpointError(
            f"{folder} lists the file {reprlib.repr(name)}, which is no name; it is damaged, or was made to harm"
        )
    if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
        raise CheckpointError(
            f"{folder} lists the file {reprlib.repr(name)}, which is outside of it; it is damaged, or was made to harm"
        )
    return folder / name


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a regular file to read from, and yield its descriptor; `preadv` reads a file that becomes shorter, too.

    Raises:
        OSError: it is not there, is a pipe, a device or a folder, or cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # to open a pipe would wait for a writer
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        yield descriptor
    finally:
        os.close(descriptor)


def read_all(path: Path) -> bytes:
    """Return what a regular file has. Raises what `opened` does."""
    with opened(path) as descriptor, open(descriptor, "rb", closefd=False) as file:
        return file.read()


def read_at(descriptor: int, offset: int, into: memoryview) -> None:
    """Fill `into` with what a file has at `offset`; the system may give less than it was asked for.

    Raises:
        OSError, EOFError: it cannot be read, or the file ends before.
    """
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], offset + done)
        if not count:
            raise EOFError(f"the file has {os.fstat(descriptor).st_size} bytes, and values end at {offset + len(into)}")
        done += count


def parse_json(content: bytes, path: Path, what: str) -> dict[str, Any]:
    """Return a JSON object that a file has.

    Args:
        content: of the file, or of a part of it.
        path: of the file.
        what: it should be, in errors.

    Raises:
        CheckpointError: it is none, has a key twice, or is nested too deeply.
    """
    try:
        found: Any = json.loads(content, object_pairs_hook=with_unique_keys)
    except (ValueError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"{path} is no {what}: {said(error)}; copy it again") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is no {what}: it has a {type(found).__name__}; copy it again")
    return found
