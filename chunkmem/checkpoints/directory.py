"""Where a checkpoint is."""

from __future__ import annotations

from pathlib import Path

MANIFEST = ".metadata"
"""The file of a checkpoint that says what it has, and is put in its place last."""


def standing(path: Path) -> Path:
    """Return where a checkpoint is: an older chunkmem, killed between two renames, has left it under another name."""
    before = path.with_name(f".{path.name}.before") if path.name else path
    return before if not path.exists() and (before / MANIFEST).is_file() else path
