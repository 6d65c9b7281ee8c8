"""Folders that are being written: under a name of their own, with a lock that says that their owner is alive.

[Note: Unfinished folders] What is written for a place stands in a folder whose name nobody else has, so that two who
write for one place do not meet until they put it there. Beside it lies a file that its owner has locked (`flock`). The
kernel gives the lock back when the owner ends, however it does: a folder whose lock can be taken was left by somebody
who was killed, and the next process that writes for the same place removes it. The lock is taken before the folder is
made, and its file is removed after the folder is, so a folder that has a living owner is never without it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from chunkmem.data.errors import CheckpointError

LOCK = ".saving.lock"
"""The file whose lock those have who change a folder that others may change, too."""
_BUSY_S = 30.0
"""How long somebody else may have it."""
_POLL_S = 0.02
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, errno.EBADF)
"""What `flock` raises on file systems that have none."""
_MAX_STEM = 50
"""Characters of a name that are part of another one: that may have 255 bytes."""


class NoLocksError(OSError):
    """A file system has no locks."""


@dataclass
class FileLock:
    """A file that one owner has, among all threads and processes; the kernel knows when the owner has ended."""

    path: Path
    descriptor: int

    @classmethod
    def take(cls, path: Path) -> FileLock | None:
        """Return the lock, whose file is made if it is not there; None: somebody has it.

        Raises:
            NoLocksError: its file system has none.
            OSError: the file cannot be made.
        """
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_there = path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())
            except OSError as error:
                os.close(descriptor)
                if isinstance(error, BlockingIOError):
                    return None
                if error.errno in _NO_LOCKS:
                    path.unlink(missing_ok=True)
                    raise NoLocksError(error.errno, error.strerror, str(path)) from None
                raise
            if is_there:
                return cls(path, descriptor)
            os.close(descriptor)  # its last owner has removed it meanwhile

    def give_back(self) -> None:
        """Remove the file, and have the lock no more."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
        # Not by closing alone: a forked child has the descriptor, too.
        with contextlib.suppress(OSError):
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        os.close(self.descriptor)


@contextlib.contextmanager
def alone_in(folder: Path, *, is_new: bool = False) -> Iterator[None]:
    """Have a folder locked inside of the block; one in which nothing is replaced may be on a file system without locks.

    Raises:
        CheckpointError: somebody else has it locked for long, or the file system has no locks.
        OSError: the file that is locked cannot be made.
    """
    lock: FileLock | None = None
    try:
        lock = _wait_for(folder / LOCK)
    except NoLocksError as error:
        if not is_new:
            raise CheckpointError(
                f"the file system has no locks, which keep two who write there apart ({error.filename}: "
                f"{error.strerror}): name a directory that is not there yet"
            ) from None
    try:
        yield
    finally:
        if lock is not None:
            lock.give_back()


def _wait_for(path: Path) -> FileLock:
    deadline_s = time.monotonic() + _BUSY_S
    while (lock := FileLock.take(path)) is None:
        if time.monotonic() > deadline_s:
            raise CheckpointError(
                f"somebody else has had {path} locked for {_BUSY_S:.0f} s, and is writing there: end that process, or "
                "name another directory"
            )
        time.sleep(_POLL_S)
    return lock


@dataclass
class Unfinished:
    """A folder that this process writes, and nobody else: see [Note: Unfinished folders]."""

    folder: Path
    lock: FileLock | None
    """None: the file system has none, so that nobody removes what is left of this folder."""

    @classmethod
    def make(cls, where: Path, stem: str = "") -> Unfinished:
        """Make one in a folder; what is there of others with the same stem, who have ended, is removed.

        Raises:
            OSError: it cannot be made.
        """
        sweep(where, stem)
        while True:
            name = f".{_start(stem)}{uuid.uuid4().hex[:16]}"
            try:
                lock = FileLock.take(where / f"{name}.lock")
                if lock is None:  # another process has just taken it, to remove what was left
                    continue
            except NoLocksError:
                lock = None
            own = cls(where / f"{name}.incomplete", lock)
            try:
                own.folder.mkdir()
            except BaseException:
                own.discard()
                raise
            return own

    def discard(self) -> None:
        """Remove the folder, as far as that is possible; the next process that writes there does so, too."""
        shutil.rmtree(self.folder, ignore_errors=True)
        lock, self.lock = self.lock, None
        if lock is not None:
            lock.give_back()


def _start(stem: str) -> str:
    return f"{stem[:_MAX_STEM]}." if stem else ""


def is_unfinished(name: str, stem: str = "") -> bool:
    """Tell whether a name is that of such a folder, or of its lock."""
    return re.fullmatch(rf"\.{re.escape(_start(stem))}[0-9a-f]{{16}}\.(incomplete|lock)", name) is not None


def sweep(where: Path, stem: str = "") -> None:
    """Remove folders whose owners have ended.

    Raises:
        OSError: what is there cannot be listed.
    """
    for name in [name for name in os.listdir(where) if is_unfinished(name, stem)]:
        path = where / name
        with contextlib.suppress(OSError):  # it is somebody else's, or cannot be removed: it stays
            if (lock := FileLock.take(path.with_suffix(".lock"))) is not None:
                shutil.rmtree(path.with_suffix(".incomplete"), ignore_errors=True)
                lock.give_back()


def make_folder(path: Path) -> None:
    """Make a folder, and those it is in, with their names on the disk; do nothing if it is there.

    Raises:
        OSError: it cannot be made.
    """
    if not path.is_dir():
        if path.parent != path:
            make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def sync(folder: Path) -> None:
    """Have the names in a directory on the disk.

    Raises:
        OSError: they are not.
    """
    with naming(folder):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """Yield a file to be written anew, which is on the disk when the block is over.

    Raises:
        OSError: it is not; names the file.
    """
    with naming(path), path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have errors of the system name a file, where they name none: those of `fsync` and `close` do not."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def in_one_line(error: BaseException) -> str:
    """Return what an error says, of the system's ones what and of which file."""
    said = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
    return said.strip().splitlines()[0] if said.strip() else type(error).__name__
