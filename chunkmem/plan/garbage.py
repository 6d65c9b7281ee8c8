"""Python's collector of reference cycles, kept waiting where there are none to be found."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """Begin no collection of garbage meanwhile: for work that makes many objects, and no reference cycles.

    A full collection visits every object of the process, those of torch and of the model among them, and one is due
    whenever a quarter more have been made: in planning, which makes hundreds of thousands, they took half of the time.
    What nobody refers to is freed all the same. As a decorator, it is for each call of a function.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
