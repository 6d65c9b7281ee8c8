"""Which rank owns which group of chunks: all that a strategy has to say."""

from __future__ import annotations

from typing import Protocol


class Ownership(Protocol):
    """A strategy, which answers the same on all ranks, and always the same."""

    def owner(self, group: int) -> int:
        """Return the rank that keeps the chunks of a group, and updates them; counted within its replica."""
        ...


class RoundRobin:
    """Groups dealt out to ranks in turn, so that those of one unit belong to as many ranks as possible."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks

    def owner(self, group: int) -> int:
        """Return ``group % num_ranks``."""
        return group % self._num_ranks
