"""Keep torch from printing what is said in one line anyway."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def silenced(name: str) -> Iterator[None]:
    """Keep a logger from printing; what it has to say is in the error too."""
    logger = logging.getLogger(name)
    was = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = was
