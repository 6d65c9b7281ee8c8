"""What the training leaves in its folder: each file as a whole, or the one that was there before."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from options import fail


def make_folder(path: Path) -> None:
    """Find out before the training, not after it, whether results can be written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        fail(f"--out {path} cannot be written to: {error.strerror}")


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Write a file; whenever this is interrupted, it is the old one or the new one, never half of one."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
