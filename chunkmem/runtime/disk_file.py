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
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from chunkmem.data.errors import ConfigError, StateError, TierIOError
from chunkmem.data.sizes import format_nbytes
from chunkmem.runtime.device import prefer_large_pages

_ALIGNMENTS = (4 << 10, 16 << 10, 64 << 10)
"""Tried in turn. Disks and file systems ask for 512 or 4096 bytes, few for more."""
_MODE = 0o600
_NO_UNNAMED_FILES = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT}
"""Error numbers of file systems and kernels without `O_TMPFILE`."""
_FULL = {errno.ENOSPC, errno.EDQUOT}
_MAX_STUCK = 8
"""So often in a row may a call move less than one aligned piece."""

_Call = Callable[[int, Sequence[memoryview], int], int]


class SystemCalls:
    """The system calls that the file of DISK is used by, from several threads at once; tests put faults into them.

    What fails raises an `OSError` with an errno. Descriptors are the system's: what a file system can do is asked of
    `os`, which is not meant to fail in tests.
    """

    def __init__(self) -> None:
        # Not `os.posix_fallocate`: where a file system cannot reserve, the C library writes a byte into each of a
        # file's blocks in its place.
        library = ctypes.CDLL(None, use_errno=True)
        self._fallocate = getattr(library, "fallocate64", None) or getattr(library, "fallocate", None)
        if self._fallocate is not None:
            self._fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)

    def open(self, path: str, flags: int, mode: int) -> int:
        """Return the descriptor of a file that is opened, or made in a directory."""
        return os.open(path, flags, mode)

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read from `offset` on; return how many bytes, which may be less than there is room for."""
        return os.preadv(descriptor, buffers, offset)

    def pwritev(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write from `offset` on; return how many bytes, which may be less than given."""
        return os.pwritev(descriptor, buffers, offset)

    def fallocate(self, descriptor: int, offset: int, nbytes: int) -> None:
        """Reserve room on the disk, and make the file that long; EOPNOTSUPP: the file system cannot."""
        number = errno.EOPNOTSUPP
        if self._fallocate is not None:
            if self._fallocate(descriptor, 0, offset, nbytes) == 0:
                return
            number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))

    def close(self, descriptor: int) -> None:
        """Give the descriptor back."""
        os.close(descriptor)


SYSTEM_CALLS = SystemCalls()


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

    has_others = False
    """Other processes may have it open, too, and use it."""

    def __init__(self, directory: str | Path, *, nbytes: int, calls: SystemCalls = SYSTEM_CALLS) -> None:
        """Make it in `directory`, which is made if it is not there, with room for `nbytes`, which are not taken yet.

        Raises:
            ConfigError: `directory` is none, cannot be made or written to, or its file system has less room.
            TierIOError: the first bytes could not be written or read.
        """
        self.directory = folder_at(directory)
        self._calls = calls
        self._reserves = True
        """The file system can; until it has said no."""
        self._pid = os.getpid()
        self.alignment = _ALIGNMENTS[0]
        """Slabs begin at multiples of it."""
        self.is_direct = True
        try:
            with contextlib.suppress(FileExistsError):  # a file, which opening it says
                self.directory.mkdir(parents=True, exist_ok=True)
            self.require_room(nbytes, f"memory.disk.capacity: {format_nbytes(nbytes)} are asked for")
            self._descriptor: int | None = self._open()
        except TierIOError:
            raise
        except OSError as error:
            raise ConfigError(
                f"memory.disk.path: {self.directory} cannot be used: {_reason(error)}; name a directory that this "
                "process can write to, on a disk of this machine"
            ) from error

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"the unnamed file in {self.directory}"

    @property
    def unit_nbytes(self) -> int:
        """Of which addresses, offsets and lengths are multiples; 1 with the page cache, which takes any."""
        return self.alignment if self.is_direct else 1

    def straight_nbytes(self, address: int, offset: int, nbytes: int) -> int:
        """Return how many of these bytes can be moved between `address` and the file: the others need a buffer."""
        unit = self.unit_nbytes
        return nbytes - nbytes % unit if address % unit == offset % unit == 0 else 0

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
        descriptor = self.require_open()
        while self._reserves:
            try:
                self._calls.fallocate(descriptor, start, nbytes)
                return
            except InterruptedError:
                continue
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                    raise self._failed("reserving", nbytes, start, error) from error
                self._reserves = False

    def free_nbytes(self) -> int | None:
        """Return how much the file system has left for this process; None: it does not say."""
        with contextlib.suppress(OSError):
            found = shutil.disk_usage(self.directory)
            return found.free if found.total else None
        return None

    def close(self) -> None:
        """Give it back to the system, with all that is in it; the second time, do nothing.

        Raises:
            TierIOError: the system says that something has failed.
        """
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            if os.getpid() == self._pid and not self.has_others:
                with contextlib.suppress(OSError):  # a forked child has it open, too, and would keep the room
                    os.ftruncate(descriptor, 0)
            try:
                self._calls.close(descriptor)
            except OSError as error:
                raise TierIOError(f"DISK: closing {self.name} failed: {_reason(error)}") from error

    def require_room(self, nbytes: int, wanted: str) -> None:
        """Raise a ConfigError that begins with what is `wanted` if the file system says that it has less left."""
        free_nbytes = self.free_nbytes()
        if free_nbytes is not None and free_nbytes < nbytes:
            raise ConfigError(
                f"{wanted}, and the file system of {self.directory} has {format_nbytes(free_nbytes)} left; make room "
                "there, lower the capacity, or name another directory in memory.disk.path"
            )

    # Opening.

    def _open(self) -> int:
        try:
            descriptor = self.open_with(os.O_DIRECT)
            if self._align(descriptor):
                return descriptor
            self._calls.close(descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        self.is_direct = False
        return self.open_with(os.O_DSYNC)

    def open_with(self, flags: int) -> int:
        """Return the descriptor of a file without a name."""
        flags |= os.O_RDWR | os.O_CLOEXEC
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
                    raise self._failed("trying", alignment, 0, error) from error
            else:
                self.alignment = alignment
                return True
        return False

    # Moving.

    def require_open(self) -> int:
        """Return its descriptor.

        Raises:
            StateError: it is closed, or another process made it.
        """
        if os.getpid() != self._pid:
            raise StateError(f"DISK: {self.name} belongs to process {self._pid}, this is a fork of it")
        if self._descriptor is None:
            raise StateError(f"DISK is closed; nothing of {self.name} can be read or written any more")
        return self._descriptor

    def _move(self, call: _Call, view: memoryview, offset: int, doing: str) -> None:
        descriptor = self.require_open()
        done, total, num_stuck = 0, len(view), 0
        while done < total:
            try:
                moved = call(descriptor, [view[done:]], offset + done)
            except InterruptedError:
                continue
            except OSError as error:
                raise self._failed(doing, total, offset, error) from error
            is_possible = 0 < moved <= total - done
            if is_possible and done + moved < total:
                moved -= moved % self.unit_nbytes
            num_stuck = 0 if moved else num_stuck + 1
            if not is_possible or num_stuck > _MAX_STUCK:
                raise self.error(
                    f"{doing} {format_nbytes(total)}",
                    offset,
                    f"ended after {done + moved} of {total} bytes; the file was cut off, or its file system lost a "
                    "part of it: memory.disk.path can name another disk",
                )
            done += moved

    # Errors.

    def error(self, what: str, offset: int, why: str, *, number: int | None = errno.EIO) -> TierIOError:
        """Return an error about bytes at an offset, that has its errno, too."""
        error = TierIOError(f"DISK: {what} at offset {offset} of {self.name} {why}")
        error.errno = number
        return error

    def _failed(self, doing: str, nbytes: int, offset: int, error: OSError) -> TierIOError:
        next_step = "the system's log may say more; memory.disk.path can name another disk"
        if is_full(error):
            free_nbytes = self.free_nbytes()
            left = "an unknown amount" if free_nbytes is None else format_nbytes(free_nbytes)
            next_step = (
                f"its file system has {left} left: make room there, or lower memory.disk.capacity to what it has"
            )
        why = f"failed: {_reason(error)}; {next_step}"
        return self.error(f"{doing} {format_nbytes(nbytes)}", offset, why, number=error.errno)


def folder_at(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a folder that a user names, who may write `~` for the home folder."""
    return Path(os.path.expanduser(path)).absolute()


def round_up(nbytes: int, alignment: int) -> int:
    """Return the next multiple of `alignment`."""
    return -(-nbytes // alignment) * alignment


def is_full(error: OSError) -> bool:
    """Tell whether a file system, or what a user may have of it, is full."""
    return error.errno in _FULL


def _reason(error: OSError) -> str:
    if error.errno is None:
        return str(error)
    return f"{os.strerror(error.errno)} ({errno.errorcode.get(error.errno, f'errno {error.errno}')})"
