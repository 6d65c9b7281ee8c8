"""Work that is done in pieces, done at once."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")


def found_by(pieces: Generator[int, None, T]) -> T:
    """Return what comes of a generator that yields work."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            value: T = end.value
            return value
