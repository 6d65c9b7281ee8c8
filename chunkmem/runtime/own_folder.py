"""The folder of native code: what is loaded from it runs, so it is the user's, and nobody else writes to it."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_WRITABLE_BY_OTHERS = 0o022


def default_cache_dir() -> Path:
    """Return the user's folder for libraries."""
    from torch._appdirs import user_cache_dir

    return Path(user_cache_dir("chunkmem")) / "native"


def own_folder(folder: Path) -> Path:
    """Return a folder with links followed; it is made for the user alone if it is not there.

    Raises:
        OSError: it cannot be made, belongs to somebody else, or others may write to it, or put another in its place.
    """
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    real = folder.resolve(strict=True)  # a link of somebody else's could lead elsewhere between two looks
    require_own(real)
    for parent in real.parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:  # as /tmp has it, where only owners rename
            raise PermissionError(errno.EPERM, f"others may rename what is in it (mode {mode & 0o7777:o})", str(parent))
    return real


def require_own(path: Path) -> None:
    """Raise an OSError unless a file or folder is the user's, or root's, and others may not write to it."""
    found = path.stat()
    if found.st_uid not in (os.geteuid(), 0):
        raise PermissionError(
            errno.EPERM, f"it belongs to user {found.st_uid}, and this is user {os.geteuid()}", str(path)
        )
    if found.st_mode & _WRITABLE_BY_OTHERS:
        raise PermissionError(errno.EPERM, f"others may write to it (mode {found.st_mode & 0o7777:o})", str(path))


def make_own(path: Path) -> None:
    """Take from others the right to write to a file."""
    path.chmod(path.stat().st_mode & 0o7777 & ~_WRITABLE_BY_OTHERS)
