"""Follow the events of a step along its trace: which moment is it, and is it the one expected? Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict

from chunkmem.trace.model import Kind, Trace
from chunkmem.types import ChunkId


class Director:
    """A cursor over the moments of a trace."""

    def __init__(self, trace: Trace) -> None:
        self._places: dict[tuple[Kind, ChunkId, str], list[int]] = defaultdict(list)
        for at, moment in enumerate(trace.moments):
            # Who releases a chunk is not known, and says nothing about where the step is.
            if moment.kind is not Kind.RELEASE:
                self._places[moment.kind, moment.chunk, moment.label].append(at)

    def find(self, kind: Kind, chunk: ChunkId, label: str, *, after: int) -> int | None:
        """Return the first moment at or after `after` that this event begins; None if there is none.

        After a departure the step may go on anywhere later in the trace.
        """
        places = self._places.get((kind, chunk, label), ())
        at = bisect_left(places, after)
        return places[at] if at < len(places) else None
