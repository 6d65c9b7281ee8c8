"""The system calls behind DISK, apart, so that tests can put faults and slow disks below everything else."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence


class DiskCalls:
    """The system calls that the file of DISK is used by, from several threads at once.

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


SYSTEM_CALLS = DiskCalls()
