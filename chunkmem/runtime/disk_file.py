"""The file of DISK: without a name, so that nothing of it is left, and past the page cache where that is possible.

The file is made without a name (`O_TMPFILE`), or loses it at once: when the last process that has it open ends, however
it ends, the system frees it, and no other process can open it.

Where the file system takes `O_DIRECT`, bytes go between RAM and the disk without a copy, and no RAM is taken that no
ledger counts. Addresses, offsets and lengths are then multiples of `alignment`. Elsewhere the page cache is passed
through, and `O_DSYNC` has each write wait until its bytes are on the disk: what the system writes later on its own and
fails at would be said to nobody.

Decided in ADR 38.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from chunkmem.errors import ConfigError, StateError, TierIOError
from chunkmem.runtime.device import prefer_large_pages
from chunkmem.runtime.disk_calls import DiskCalls
from chunkmem.sizes import format_nbytes

_ALIGNMENTS = (4 << 10, 16 << 10, 64 << 10)
"""Tried in turn. Disks and file systems ask for 512 or 4096 bytes, few for more."""
_MODE = 0o600
_NO_UNNAMED_FILES = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT}
"""Error numbers of file systems and kernels without `O_TMPFILE`."""
_FULL = {errno.ENOSPC, errno.EDQUOT}
_MAX_STUCK = 8
"""So often in a row may a call move less than one aligned piece."""

_Call = Callable[[int, Sequence[memoryview], int], int]


class AlignedBuffer:
    """RAM of this process alone, at an address that is a multiple of `alignment`; in large pages, if there are any.

    A request to a disk names a limited number of pieces of RAM: it is larger if those are.
    """

    def __init__(self, nbytes: int, alignment: int) -> None:
        region = mmap.mmap(-1, nbytes + alignment, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A fork while the disk fills it would leave the bytes with the child.
        region.madvise(mmap.MADV_DONTFORK)
        address = ctypes.addressof(ctypes.c_char.from_buffer(region))
        start = -address % alignment
        self.address = address + start
        prefer_large_pages(region)
        self.view = memoryview(region)[start : start + nbytes]


class DiskFile:
    """A file without a name, read and written at any offset by any thread."""

    def __init__(self, directory: Path, *, nbytes: int, calls: DiskCalls, opened: str | None = None) -> None:
        """Make it in `directory`, which is made if it is not there, with room for `nbytes`, which are not taken yet.

        With `opened`, the `path` of such a file that another process has just made, it is that file.

        Raises:
            ConfigError: `directory` is none, cannot be made or written to, or its file system has less room.
            TierIOError: the first bytes could not be written or read.
        """
        self.directory = folder_at(directory)
        self._calls = calls
        self._reserves = True
        """The file system can; until it has said no."""
        self._pid = os.getpid()
        self._opened = opened
        self._has_others = opened is not None
        """Other processes may have it open, too, and use it."""
        if opened is None:
            self._make_directory()
            self._require_room(nbytes)
        self.is_direct = True
        """Addresses, offsets and lengths have to be aligned."""
        self.alignment = _ALIGNMENTS[0]
        self._descriptor: int | None = self._open()

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"the unnamed file in {self.directory}"

    @property
    def path(self) -> str:
        """Where other processes of this machine open it, as long as this one has it."""
        self._has_others = True
        return f"/proc/{os.getpid()}/fd/{self._require_open()}"

    @property
    def identity(self) -> tuple[int, int]:
        """The same for all processes that have the same file."""
        found = os.fstat(self._require_open())
        return found.st_dev, found.st_ino

    def padded(self, nbytes: int) -> int:
        """Return how many bytes have to be moved for so many at an aligned offset."""
        return round_up(nbytes, self.alignment) if self.is_direct else nbytes

    def straight_nbytes(self, address: int, offset: int, nbytes: int) -> int:
        """Return how many of these bytes can be moved between `address` and the file: the others need a buffer."""
        if not self.is_direct:
            return nbytes
        if address % self.alignment or offset % self.alignment:
            return 0
        return nbytes // self.alignment * self.alignment

    def read(self, target: memoryview, offset: int) -> None:
        """Fill `target` with what was written at `offset`.

        Raises:
            TierIOError: it could not be read, or the file ends before.
            StateError: the file is closed.
        """
        self._move(self._calls.preadv, target, offset, "reading")

    def write(self, source: memoryview, offset: int) -> None:
        """Write all of `source` at `offset`. Raises what `read` does, also where the disk is full."""
        self._move(self._calls.pwritev, source, offset, "writing")

    def reserve(self, start: int, nbytes: int) -> None:
        """Have the file system set room aside, if it can: else a full disk shows when it is written to.

        Raises:
            TierIOError: it has not that much, with its errno.
        """
        descriptor = self._require_open()
        while self._reserves:
            try:
                self._calls.fallocate(descriptor, start, nbytes)
                return
            except InterruptedError:
                continue
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                    raise self._error("reserving", nbytes, start, error) from error
                self._reserves = False

    def free_nbytes(self) -> int | None:
        """Return how much the file system has left for this process; None: it does not say."""
        with contextlib.suppress(OSError):
            found = os.statvfs(self.directory)
            return found.f_bavail * found.f_frsize if found.f_blocks else None
        return None

    def close(self) -> None:
        """Give it back to the system, with all that is in it; the second time, do nothing.

        Raises:
            TierIOError: the system says that something has failed.
        """
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            if os.getpid() == self._pid and not self._has_others:
                with contextlib.suppress(OSError):  # a forked child has it open, too, and would keep the room
                    os.ftruncate(descriptor, 0)
            try:
                self._calls.close(descriptor)
            except OSError as error:
                raise TierIOError(f"DISK: closing {self.name} failed: {_reason(error)}") from error

    # Opening.

    def _make_directory(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise self._unusable(NotADirectoryError(errno.ENOTDIR, "")) from None
        except OSError as error:
            raise self._unusable(error) from error

    def _require_room(self, nbytes: int) -> None:
        free_nbytes = self.free_nbytes()
        if free_nbytes is not None and free_nbytes < nbytes:
            raise ConfigError(
                f"memory.disk.capacity: {format_nbytes(nbytes)} are asked for, and the file system of {self.directory} "
                f"has {format_nbytes(free_nbytes)} left; make room there, lower the capacity, or name another "
                "directory in memory.disk.path"
            )

    def _open(self) -> int:
        try:
            descriptor = self._open_unnamed(os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise self._unusable(error) from error
        else:
            if self._align(descriptor):
                return descriptor
            self._calls.close(descriptor)
        self.is_direct = False
        try:
            return self._open_unnamed(os.O_DSYNC)
        except OSError as error:
            raise self._unusable(error) from error

    def _open_unnamed(self, flags: int) -> int:
        flags |= os.O_RDWR | os.O_CLOEXEC
        if self._opened is not None:
            return self._calls.open(self._opened, flags, _MODE)
        try:
            return self._calls.open(str(self.directory), flags | os.O_TMPFILE | os.O_EXCL, _MODE)
        except OSError as error:
            if error.errno not in _NO_UNNAMED_FILES:
                raise
        path = self.directory / f".chunkmem-{os.getpid()}-{secrets.token_hex(8)}"
        try:
            return self._calls.open(str(path), flags | os.O_CREAT | os.O_EXCL, _MODE)
        finally:
            # A file system that does not take O_DIRECT says so when it has made the file.
            path.unlink(missing_ok=True)

    def _align(self, descriptor: int) -> bool:
        """Find out by trying what has to be aligned, and how; tell whether it can be."""
        for alignment in _ALIGNMENTS:
            buffer = AlignedBuffer(alignment, alignment)
            try:
                os.pwritev(descriptor, [buffer.view], 0)
                os.preadv(descriptor, [buffer.view], 0)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    self._calls.close(descriptor)
                    raise self._error("trying", alignment, 0, error) from error
            else:
                self.alignment = alignment
                return True
        return False

    # Moving.

    def _require_open(self) -> int:
        if os.getpid() != self._pid:
            raise StateError(f"DISK: {self.name} belongs to process {self._pid}, this is a fork of it")
        if self._descriptor is None:
            raise StateError(f"DISK: {self.name} is closed; nothing can be read or written any more")
        return self._descriptor

    def _move(self, call: _Call, view: memoryview, offset: int, doing: str) -> None:
        descriptor = self._require_open()
        done, total, num_stuck = 0, len(view), 0
        while done < total:
            try:
                moved = call(descriptor, [view[done:]], offset + done)
            except InterruptedError:
                continue
            except OSError as error:
                raise self._error(doing, total, offset, error) from error
            if not 0 < moved <= total - done:
                raise self._short_error(doing, total, offset, done + moved)
            if self.is_direct and done + moved < total:
                moved = moved // self.alignment * self.alignment
            num_stuck = 0 if moved else num_stuck + 1
            if num_stuck > _MAX_STUCK:
                raise self._short_error(doing, total, offset, done)
            done += moved

    # Errors.

    def _unusable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"memory.disk.path: {self.directory} cannot be used: {_reason(error)}; name a directory that this process "
            "can write to, on a disk of this machine"
        )

    def _error(self, doing: str, nbytes: int, offset: int, error: OSError) -> TierIOError:
        if error.errno in _FULL:
            next_step = f"{self._left()}: make room there, or lower memory.disk.capacity to what it has"
        else:
            next_step = "the system's log may say more; memory.disk.path can name another disk"
        return with_errno(
            f"DISK: {self._what(doing, nbytes, offset)} failed: {_reason(error)}; {next_step}", error.errno
        )

    def _left(self) -> str:
        free_nbytes = self.free_nbytes()
        return f"its file system has {'an unknown amount' if free_nbytes is None else format_nbytes(free_nbytes)} left"

    def _short_error(self, doing: str, nbytes: int, offset: int, done: int) -> TierIOError:
        return with_errno(
            f"DISK: {self._what(doing, nbytes, offset)} ended after {done} of {nbytes} bytes; the file was cut off, or "
            "its file system lost a part of it: memory.disk.path can name another disk",
            errno.EIO,
        )

    def _what(self, doing: str, nbytes: int, offset: int) -> str:
        return f"{doing} {format_nbytes(nbytes)} at offset {offset} of {self.name}"


def folder_at(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a folder that a user names, who may write `~` for the home folder."""
    return Path(os.path.expanduser(path)).absolute()


def round_up(nbytes: int, alignment: int) -> int:
    """Return the next multiple of `alignment`."""
    return -(-nbytes // alignment) * alignment


def is_full(error: OSError) -> bool:
    """Tell whether a file system, or what a user may have of it, is full."""
    return error.errno in _FULL


def with_errno(message: str, number: int | None) -> TierIOError:
    """Return an error that has its errno, too."""
    error = TierIOError(message)
    error.errno = number
    return error


def _reason(error: OSError) -> str:
    if error.errno is None:
        return str(error)
    return f"{os.strerror(error.errno)} ({errno.errorcode.get(error.errno, f'errno {error.errno}')})"
