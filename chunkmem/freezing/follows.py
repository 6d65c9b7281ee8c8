"""What belongs to a manager, whose parts may be made again meanwhile."""

from __future__ import annotations

from typing import Protocol

from chunkmem.assembly.runtime import Runtime


class HasRuntime(Protocol):
    """A `chunkmem.ChunkManager`."""

    @property
    def runtime(self) -> Runtime:
        """Its parts, which `pipe.repartition()` makes again."""
        ...
