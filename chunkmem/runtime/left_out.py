"""What a step has left out of its plan, and how much it may."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from chunkmem.trace.model import Kind, Trace

_MAX_SHARE = 0.75
"""Largest share of a trace's moments that a step may leave out: copies for moments that do not come are wasted."""


class LeftOut:
    """The moments of a trace that one step did not have. Who releases a chunk, and when, does not count."""

    def __init__(self, trace: Trace) -> None:
        """Begin with none.

        Over ranks none may be left out: all of them have to exchange the same.
        """
        counts = (moment.kind is not Kind.RELEASE for moment in trace.moments)
        self._num_before = tuple(accumulate(counts, initial=0))
        self._kinds = tuple(moment.kind for moment in trace.moments)
        self.is_possible = not trace.remote_groups and all(kind is not Kind.EXCHANGE for kind in self._kinds)
        self.spans: list[tuple[int, int]] = []
        """Half-open ranges `[start, stop)` of the moments that were left out."""

    @property
    def num_moments(self) -> int:
        return sum(self._num_before[stop] - self._num_before[start] for start, stop in self.spans)

    def number(self, start: int, stop: int) -> int:
        """Return how many moments are left out if `stop` comes where `start` is expected."""
        return self.num_moments + self._num_before[stop] - self._num_before[start]

    def may_go(self, start: int, stop: int) -> bool:
        """Tell whether that is not too much."""
        return self.is_possible and self.number(start, stop) <= _MAX_SHARE * self._num_before[-1]

    def go(self, start: int, stop: int) -> None:
        """They are left out."""
        if self._num_before[stop] > self._num_before[start]:
            self.spans.append((start, stop))

    def come(self, stop: int) -> Iterator[int]:
        """Yield the moments before `stop` that were not left out, but for releases."""
        left_out = {at for span in self.spans for at in range(*span)}
        for at in range(stop):
            if at not in left_out and self._kinds[at] is not Kind.RELEASE:
                yield at
