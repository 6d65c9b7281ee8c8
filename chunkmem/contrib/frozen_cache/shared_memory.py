"""Memory that the ranks of a machine have together, and a lock on it; gone with the last of their processes."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Lock

from chunkmem.data.errors import RankError, StateError
from chunkmem.runtime.disk_file import DiskFile

_SHORTEST_S, _LONGEST_S = 20e-6, 2e-3
"""Of a pause before a lock is tried again."""


class SharedFile:
    """A file in RAM (`memfd_create`), which has no name anywhere.

    Other ranks open it below `/proc/<process>/fd`, once, while the rank that made it waits for them; from then on it is
    theirs as well, and the system frees it when the last of them ends, however it ends.
    """

    def __init__(self, path: str | None = None) -> None:
        """Make one, or open the one at a path that another process has said.

        Raises:
            OSError: it is not there, or this process may not open it.
        """
        made = path is None
        self.descriptor = os.memfd_create("chunkmem") if made else os.open(str(path), os.O_RDWR | os.O_CLOEXEC)

    @property
    def path(self) -> str:
        """Where other processes of this machine open it, as long as this one has it."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    @property
    def identity(self) -> tuple[int, int]:
        """The same for all processes that have the same file."""
        return _identity_of(self.descriptor)

    def resize(self, nbytes: int) -> None:
        """Have so many bytes, of which only those that are written to take memory; what is new is 0."""
        os.ftruncate(self.descriptor, nbytes)

    def map(self) -> mmap.mmap:
        """Return all of its bytes."""
        region = mmap.mmap(self.descriptor, os.fstat(self.descriptor).st_size)
        region.madvise(mmap.MADV_DONTFORK)
        return region

    def close(self) -> None:
        """Have it no more; the second time, do nothing."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class SharedDiskFile(DiskFile):
    """A file on a disk that the ranks of a machine open as they do a `SharedFile`."""

    def __init__(self, directory: Path, *, nbytes: int, opened: str | None = None) -> None:
        """Make it, see `DiskFile`; or open the one at the `path` that another process has said."""
        self._opened = opened
        self.has_others = opened is not None
        super().__init__(directory, nbytes=0 if opened else nbytes)

    @property
    def path(self) -> str:
        """Where other processes of this machine open it, as long as this one has it."""
        self.has_others = True
        return f"/proc/{os.getpid()}/fd/{self.require_open()}"

    @property
    def identity(self) -> tuple[int, int]:
        """The same for all processes that have the same file."""
        return _identity_of(self.require_open())

    def open_with(self, flags: int) -> int:
        """Open that of the other process, if there is one."""
        if self._opened is None:
            return super().open_with(flags)
        return os.open(self._opened, flags | os.O_RDWR | os.O_CLOEXEC)


def _identity_of(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


class ProcessLock:
    """Held by one process, or by several that only read.

    It is one of `fcntl`: the system takes it from a process that ends, and children that were forked meanwhile do not
    have it. It is on a file of its own, as closing any descriptor of a file, also one that `mmap` has made, gives up a
    process's locks on it.
    """

    def __init__(self, file: SharedFile, *, timeout_s: float) -> None:
        """Lock `file`, which has no bytes; a rank that does not get the lock in time raises."""
        self._file = file
        self._timeout_s = timeout_s
        self._threads = Lock()
        self._pid = os.getpid()

    @contextlib.contextmanager
    def held(self, *, alone: bool) -> Iterator[None]:
        """Hold it inside; `alone`: nobody else reads meanwhile.

        Raises:
            RankError: another rank did not give it back.
        """
        if os.getpid() != self._pid:
            raise StateError(f"FrozenCache: it belongs to process {self._pid}, this is a fork of it")
        with self._threads:
            self._take(fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            try:
                yield
            finally:
                fcntl.lockf(self._file.descriptor, fcntl.LOCK_UN)

    def _take(self, kind: int) -> None:
        started_s, pause_s = time.monotonic(), _SHORTEST_S
        while True:
            try:
                fcntl.lockf(self._file.descriptor, kind | fcntl.LOCK_NB)
                return
            except (BlockingIOError, PermissionError):  # what systems answer when another process has it
                pass
            if time.monotonic() - started_s > self._timeout_s:
                raise RankError(
                    f"FrozenCache: another rank of this machine has used the cache for {self._timeout_s:.0f} s; it is "
                    "stopped, or its disk does not answer",
                    (),
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_S)
