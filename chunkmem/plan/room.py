"""Bytes left in each moment of a loop: take some of a stretch, and find where there is too little. Pure.

[Note: Room] A stretch can be as long as the step, so going through it moment by moment would make planning quadratic.
The moments are the leaves of a tree; a node has the least of its two children plus what was added to its stretch as a
whole. Both operations look at two nodes a level.
"""

from __future__ import annotations

from collections.abc import Sequence


class Room:
    """Bytes by moment. Moments are counted on into the iterations before and after: of `n`, -1 is the last."""

    def __init__(self, nbytes: Sequence[int]) -> None:
        self._n = len(nbytes)
        self._size = size = 1 << max(0, self._n - 1).bit_length()
        self._least = [0] * size + list(nbytes) + [0] * (size - self._n)
        self._added = [0] * size
        """To the stretch of an inner node, and already in its own `_least`, but in none of those below it."""
        for node in range(size - 1, 0, -1):
            self._least[node] = min(self._least[2 * node], self._least[2 * node + 1])

    def take(self, start: int, stop: int, nbytes: int) -> None:
        """Take `nbytes` of each moment of `[start, stop)`, which is an iteration long at most."""
        if start >= stop:
            return
        start, length = start % self._n, stop - start
        self._take(start, min(start + length, self._n), nbytes)
        if start + length > self._n:
            self._take(0, start + length - self._n, nbytes)

    def last_short(self, start: int, stop: int, nbytes: int) -> int | None:
        """Return the last moment of `[start, stop)`, an iteration at most, with less than `nbytes`; None if all have
        that."""
        if start >= stop:
            return None
        first = start % self._n
        base, length = start - first, stop - start
        if first + length > self._n:
            found = self._last_short(first + length - self._n, nbytes)
            if found is not None:
                return base + self._n + found
        found = self._last_short(min(first + length, self._n), nbytes)
        return None if found is None or found < first else base + found

    def _take(self, start: int, stop: int, nbytes: int) -> None:
        least, added, size = self._least, self._added, self._size
        left, right = start + size, stop + size
        ends = left >> 1, (right - 1) >> 1
        while left < right:
            if left & 1:
                least[left] -= nbytes
                if left < size:
                    added[left] -= nbytes
                left += 1
            if right & 1:
                right -= 1
                least[right] -= nbytes
                if right < size:
                    added[right] -= nbytes
            left >>= 1
            right >>= 1
        for node in ends:
            while node:
                one, other = least[2 * node], least[2 * node + 1]
                least[node] = (one if one < other else other) + added[node]
                node >>= 1

    def _last_short(self, stop: int, nbytes: int) -> int | None:
        """Return the last moment of `[0, stop)` with less than `nbytes`."""
        least, added, size = self._least, self._added, self._size
        leaf = stop - 1 + size
        # What was added above each node on the way from the root to the leaf, the leaf's own last.
        above = [0]
        for level in range(size.bit_length() - 1, 0, -1):
            above.append(above[-1] + added[leaf >> level])
        node = leaf
        if least[node] + above.pop() < nbytes:
            return stop - 1
        while above:
            rest = above.pop() + added[node >> 1]
            if node & 1 and least[node - 1] + rest < nbytes:
                return self._last_below(node - 1, nbytes - rest)
            node >>= 1
        return None

    def _last_below(self, node: int, nbytes: int) -> int:
        """Return the last leaf below `node` with less than `nbytes`, where there is one."""
        while node < self._size:
            nbytes -= self._added[node]
            node = 2 * node + (self._least[2 * node + 1] < nbytes)
        return node - self._size
