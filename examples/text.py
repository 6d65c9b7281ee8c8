"""Bytes to train on: Python's own standard library, or any file or folder."""

from __future__ import annotations

import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Tests repeat each other, the others are tables of characters or long prose: little code to learn from.
_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data"})
_INDENTATION = re.compile(rb"^(?: {4})+", re.MULTILINE)


class TextError(Exception):
    """There is nothing to train on; the message says what is wrong with the path."""


@dataclass(frozen=True)
class Text:
    """1D uint8 tensors: the last twentieth of the bytes is kept for validation."""

    training: Tensor
    validation: Tensor


def load_text(path: Path | None, *, seq: int) -> Text:
    """Read a file or a folder, in an order that is always the same; None is the standard library's sources.

    Those come indented by tabs, so that a short sequence holds code and not the spaces before it.

    Raises:
        TextError: it cannot be read, or is too short for one sequence of `seq` bytes in each part.
    """
    try:
        files = _standard_library() if path is None else _files_in(path)
        data = bytearray().join(file.read_bytes() for file in files)
        if path is None:
            data = bytearray(_INDENTATION.sub(lambda spaces: b"\t" * (len(spaces[0]) // 4), data))
    except OSError as error:
        raise TextError(f"{error.filename} cannot be read: {error.strerror}") from None
    num_validation = max(len(data) // 20, seq + 1)
    if len(data) < num_validation + seq + 1:
        name = path or "the standard library"
        raise TextError(
            f"{name} has {len(data)} bytes, and sequences of {seq} need at least {2 * (seq + 1)} for training and "
            "validation; give more text or a smaller --seq"
        )
    text = torch.frombuffer(data, dtype=torch.uint8)
    return Text(training=text[:-num_validation], validation=text[-num_validation:])


def batch_at(
    text: Tensor, step: int, *, batch: int, seq: int, seed: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of step `step`, each (batch, seq) int64 on `device`.

    They depend on nothing else, so a resumed run sees what an uninterrupted one would have seen.
    """
    rng = torch.Generator().manual_seed(1_000_003 * seed + step)
    starts = torch.randint(len(text) - seq, (batch, 1), generator=rng)
    rows = text[starts + torch.arange(seq + 1)].long().to(device)
    return rows[:, :-1], rows[:, 1:]


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    return [root / file for file in files if not _SKIPPED.intersection(file.parts)]


def _files_in(path: Path) -> list[Path]:
    """Return the file itself, or the files in a folder and below, without hidden ones."""
    if not path.exists():
        raise TextError(f"{path} does not exist")
    if path.is_file():
        return [path]
    files = sorted(file.relative_to(path) for file in path.rglob("*") if file.is_file())
    return [path / file for file in files if not any(part.startswith(".") for part in file.parts)]
