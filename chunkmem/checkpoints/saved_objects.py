"""What `torch.save` has written, read without running what it names: tensors and plain containers, unless trusted."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

from chunkmem.checkpoints.metadata import TRUST
from chunkmem.data.errors import CheckpointError, said


class UntrustedError(CheckpointError):
    """An object names what only `trust` reads.

    Attributes:
        names: of functions and classes.
    """

    def __init__(self, message: str, names: Sequence[str]) -> None:
        super().__init__(message)
        self.names = tuple(names)


_MAX_NAMES = 3
"""That an error tells."""


def load_saved(file: io.BytesIO | Path, named: str, *, trust: bool, **how: Any) -> Any:
    """Return what `torch.save` has written.

    Args:
        file: with it.
        named: in errors.
        trust: what it names may be imported and called, as `torch.load(weights_only=False)` does.
        how: other arguments of `torch.load`.

    Raises:
        UntrustedError: it needs trust.
        CheckpointError: it is damaged.
    """
    try:
        return torch.load(file, weights_only=not trust, **how)
    except Exception as error:  # a damaged file raises anything
        if not trust and (names := unsafe_names(file)):
            more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
            raise UntrustedError(
                f"{named} needs {', '.join(names[:_MAX_NAMES])}{more}, which is neither a tensor nor a plain "
                f"container: to read it could run anything; {TRUST}",
                names,
            ) from None
        raise CheckpointError(f"{named} cannot be read: {said(error)}") from None


def unsafe_names(file: io.BytesIO | Path) -> list[str]:
    """Return the names in a file of `torch.save` that only `trust` reads; none if it is damaged."""
    try:
        if isinstance(file, io.BytesIO):
            file.seek(0)
        return sorted(get_unsafe_globals_in_checkpoint(file))
    except Exception:  # of what is damaged, `torch.load` has said what is wrong
        return []


def damaged_member(file: io.BytesIO | Path) -> str | None:
    """Return a member of an archive of `torch.save` that has not its CRC-32; None: all have, or it has none.

    torch does not look at them when it reads.

    Raises:
        zipfile.BadZipFile: it is no archive.
        OSError: it cannot be read.
    """
    with open_archive(file) as archive:
        return archive.testzip()


@contextmanager
def open_archive(file: IO[bytes] | io.RawIOBase | Path) -> Iterator[zipfile.ZipFile]:
    """Open an archive of `torch.save`, whose members have no `CRC` if torch was told to compute none.

    After `torch.serialization.set_crc32_options(False)` all of them are 0, which Python would take for checksums.
    """
    with zipfile.ZipFile(cast("IO[bytes]", file)) as archive:
        members = archive.infolist()
        if not any(member.CRC for member in members):
            for member in members:
                del member.CRC
        yield archive
