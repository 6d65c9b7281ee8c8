"""Follow the events of a step along its trace: which moment is it, and is it the one expected? Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Sequence

from chunkmem.data.trace import Kind, Trace
from chunkmem.data.types import ChunkId
from chunkmem.plan.merge import phase_of

Said = tuple[Kind, ChunkId, str]
"""What is known of an event: its kind, its chunk, and the label of the moment it begins."""


def label_of(kind: Kind, chunk: ChunkId, reader: object) -> str:
    """Return the label of the moment that an event begins."""
    if kind is Kind.UPDATE:
        return f"update of group {chunk.group}"
    return "" if reader is None else str(reader)


class TraceCursor:
    """A cursor over the moments of a trace."""

    def __init__(self, trace: Trace) -> None:
        self._places: dict[Hashable, list[int]] = defaultdict(list)
        self._num_before = [0]
        """By moment: the number of earlier moments that are no RELEASE."""
        for at, moment in enumerate(trace.moments):
            self._num_before.append(self._num_before[-1] + (moment.kind is not Kind.RELEASE))
            if moment.kind is Kind.RELEASE:
                continue  # who releases a chunk is not known, and says nothing about where the step is
            self._places[moment.kind, moment.chunk, moment.label].append(at)
            if moment.kind is Kind.HOLD:
                self._places[moment.kind, moment.chunk, phase_of(moment.label), ...].append(at)

    def find(self, kind: Kind, chunk: ChunkId, label: str, *, after: int) -> int | None:
        """Return the first moment at or after `after` that this event begins; None if there is none.

        After a plan miss the step may continue anywhere later in the trace.
        """
        return self._first((kind, chunk, label), after)

    def find_next(self, event: Said, *, after: int) -> int | None:
        """Return the first moment at or after `after` that this event may begin, if those before it are left out.

        Where a module is left out that shares a chunk with others, another one is the first to hold the chunk, or to
        have a gradient in it.
        """
        kind, chunk, label = event
        places = [self._first(event, after)]
        if kind is Kind.CREATE:
            places.append(self._first((Kind.WRITE, chunk, label), after))
        if kind is Kind.HOLD and places[0] is None:
            places.append(self._first((kind, chunk, phase_of(label), ...), after))
        return min((at for at in places if at is not None), default=None)

    def num_left_out(self, events: Sequence[Said]) -> int | None:
        """Return how many moments are left out by a step that begins with these events; None: it is another step.

        Releases count in neither.
        """
        after = 0
        for event in events:
            at = self.find_next(event, after=after)
            if at is None:
                return None
            after = at + 1
        return self._num_before[after] - len(events)

    def _first(self, key: Hashable, after: int) -> int | None:
        places = self._places.get(key, ())
        at = bisect_left(places, after)
        return places[at] if at < len(places) else None
