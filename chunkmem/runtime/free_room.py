"""Which parts of a mapping, or of a file, are free."""

from __future__ import annotations

import bisect
from typing import NamedTuple


class Extent(NamedTuple):
    """Consecutive bytes."""

    start: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.start + self.nbytes


class FreeRoom:
    """Free extents, neighbours joined."""

    def __init__(self, *runs: Extent) -> None:
        self._runs: list[Extent] = [*runs]
        """Free extents by their start; no two of them touch."""

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

    def cut(self, nbytes: int, *, from_end: bool = False) -> Extent | None:
        """Return an extent from the start of the first run that has room for it, or from the end of the last one; None:
        none has."""
        fitting = [at for at, run in enumerate(self._runs) if run.nbytes >= nbytes]
        return self._cut(fitting[-from_end], nbytes, from_end=from_end) if fitting else None

    def gather(self, nbytes: int) -> tuple[Extent, ...]:
        """Return extents of `nbytes` in total, or of all that there is if that is less: few, so large ones first."""
        found: list[Extent] = []
        while nbytes and self._runs:
            at = max(range(len(self._runs)), key=lambda at: self._runs[at].nbytes)
            found.append(self._cut(at, min(nbytes, self._runs[at].nbytes)))
            nbytes -= found[-1].nbytes
        return tuple(found)

    def _cut(self, at: int, nbytes: int, *, from_end: bool = False) -> Extent:
        run = self._runs.pop(at)
        rest_nbytes = run.nbytes - nbytes
        start, rest = (run.start + rest_nbytes, run.start) if from_end else (run.start, run.start + nbytes)
        if rest_nbytes:
            self._runs.insert(at, Extent(rest, rest_nbytes))
        return Extent(start, nbytes)
