"""Files that are replaced as a whole."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def replace_file(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file, which is replaced as a whole or, after an error, as it was; a symbolic link stays one.

    Raises:
        OSError: it cannot be written, or is not a regular file.
    """
    target = Path(os.path.realpath(path))
    # Renaming over a device file or a socket would destroy it.
    if target.exists() and not target.is_file():
        raise OSError(0, "it is not a regular file")
    # Not tempfile, whose files nobody but their owner can read. Short: the name of the target may be of full length.
    partial = target.with_name(f".chunkmem-{secrets.token_hex(8)}.part")
    try:
        with partial.open("xb") as file:
            file.write(content)
            file.flush()
            # Else a crash of the machine may leave the new name on old, empty blocks.
            os.fsync(file.fileno())
        os.replace(partial, target)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
