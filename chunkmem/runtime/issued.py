"""Work that has been issued to a lane, and the memory that it reads and writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from chunkmem.data.errors import TierIOError
from chunkmem.data.types import Tier
from chunkmem.runtime.chunk import Chunk
from chunkmem.runtime.events import Event
from chunkmem.runtime.pool import Slab


@dataclass(frozen=True, slots=True, eq=False)
class IssuedCopy:
    """A copy on a lane, as it was when it was issued. Slabs, not replicas: views of those would count as in use."""

    chunk: Chunk
    version: int
    """Version of the chunk that is copied."""
    origin: Tier
    source: Slab
    """Slab on `origin` that is read."""
    tier: Tier
    target: Slab
    """Slab on `tier` that is written."""
    event: Event

    @property
    def slabs(self) -> tuple[Slab, ...]:
        return self.source, self.target

    @property
    def written_slabs(self) -> tuple[Slab, ...]:
        return (self.target,)


@dataclass(eq=False, slots=True)
class LeftUpdate:
    """An update that `step()` has left to HOST_UPDATE."""

    work: Callable[[], object]
    chunk: Chunk
    """PARAM of the group that is updated."""
    slabs: tuple[Slab, ...]
    """Slabs of all chunks that the update reads or writes."""
    written_slabs: tuple[Slab, ...]
    """The subset of `slabs` that the update writes."""
    event: Event | None = None
    """Once it is issued."""
    has_begun: bool = False

    def run(self) -> None:
        """Do it.

        Raises:
            TierIOError: it fails; what it writes is half an update.
        """
        self.has_begun = True
        try:
            self.work()
        except Exception as error:
            raise TierIOError(
                f"the update of group {self.chunk.id.group}, which step() had left to its lane, has failed: {error!r}; "
                "load what was saved last into a new manager"
            ) from error
