"""Which parts of a file are free."""

from __future__ import annotations

import bisect
from typing import NamedTuple


class Extent(NamedTuple):
    """Consecutive bytes of a file."""

    start: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.start + self.nbytes


class FreeRoom:
    """Free extents of a file, neighbours joined."""

    def __init__(self) -> None:
        self._runs: list[Extent] = []
        """By their start; no two of them touch."""

    @property
    def nbytes(self) -> int:
        return sum(run.nbytes for run in self._runs)

    def give(self, extent: Extent) -> None:
        """Take an extent back that was cut."""
        at = bisect.bisect(self._runs, extent)
        if at < len(self._runs) and extent.end == self._runs[at].start:
            extent = Extent(extent.start, extent.nbytes + self._runs.pop(at).nbytes)
        if at > 0 and self._runs[at - 1].end == extent.start:
            at -= 1
            extent = Extent(self._runs[at].start, self._runs.pop(at).nbytes + extent.nbytes)
        self._runs.insert(at, extent)

    def cut(self, nbytes: int) -> Extent | None:
        """Return an extent from the first run that has room for it; None if none has."""
        for at, run in enumerate(self._runs):
            if run.nbytes >= nbytes:
                return self._cut(at, nbytes)
        return None

    def gather(self, nbytes: int) -> tuple[Extent, ...]:
        """Return extents of `nbytes` in total, or of all that there is if that is less: few, so large ones first."""
        found: list[Extent] = []
        while nbytes and self._runs:
            at = max(range(len(self._runs)), key=lambda at: self._runs[at].nbytes)
            found.append(self._cut(at, min(nbytes, self._runs[at].nbytes)))
            nbytes -= found[-1].nbytes
        return tuple(found)

    def _cut(self, at: int, nbytes: int) -> Extent:
        run = self._runs.pop(at)
        if run.nbytes > nbytes:
            self._runs.insert(at, Extent(run.start + nbytes, run.nbytes - nbytes))
        return Extent(run.start, nbytes)
