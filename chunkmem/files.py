"""Files that are replaced as a whole, and objects in JSON that have each key once."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections import Counter
from pathlib import Path
from typing import Any

from chunkmem.sizes import shown


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


def with_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, as its ``object_pairs_hook``.

    Raises:
        ValueError: it has a key twice; names the key.
    """
    values = dict(pairs)
    if len(values) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {shown(twice)} is given twice in one object")
    return values
