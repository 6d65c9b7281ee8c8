"""References to the memory of chunks that have to go before the running backwards are done with it.

They are counted where gradients do not tell: a call that is recomputed, a graph whose saved tensors nobody sees, ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import cast

import torch

from chunkmem.nn.binding import BoundChunk
from chunkmem.nn.frames import Frame
from chunkmem.runtime.chunk import Chunk

_BEFORE = 0
"""Stands for what was there before any module was recomputed."""


class ReferenceCounts:
    """Counts by running backward, which is named by the id of autograd's graph task."""

    def __init__(self, chunks: Mapping[int, Chunk], *, is_rehearsal: bool) -> None:
        """Begin with none.

        Args:
            chunks: PARAM chunk by group.
            is_rehearsal: nothing is counted for recomputed calls: views of fake tensors cannot be told apart.
        """
        self._chunks = chunks
        self._is_rehearsal = is_rehearsal
        self._levels: dict[int, dict[int, int]] = {}
        """By backward and group: the references that are left when all calls announced so far have been through."""
        self._recomputed_in: dict[int, dict[int, Counter[int]]] = {}
        """By backward and group: references left by recomputed calls, by the identity of their module."""

    def lower(self, task: int, group: int, *, by: int) -> None:
        """Expect so many references of a group to go, besides those that are expected to go already."""
        levels = self._levels.setdefault(task, {})
        levels[group] = (levels[group] if group in levels else self._num(group)) - by

    def is_through(self, group: int) -> bool:
        """Tell whether all references of a group are gone that the running backward expects to go."""
        level = self._levels.get(torch._C._current_graph_task_id(), {}).get(group)
        return level is None or self._num(group) <= level

    def recomputed(self, frame: Frame, left: Mapping[int, int]) -> None:
        """A call inside of backward has left references, in tensors that somebody saves for its graph."""
        recomputed = self._recomputed_in.setdefault(torch._C._current_graph_task_id(), {})
        for group, count in left.items():
            if group not in recomputed:
                recomputed[group] = Counter({_BEFORE: self._num(group) - count})
            recomputed[group][id(frame.module)] += count

    def has_used_up(self, module: int, group: int) -> bool:
        """Tell whether the references that a module left when it was recomputed are gone; others' may be there.

        Args:
            module: its identity.
            group: whose chunk they are of.
        """
        recomputed = self._recomputed_in.get(torch._C._current_graph_task_id(), {}).get(group)
        if recomputed is None or module not in recomputed or self._is_rehearsal:
            return True
        if self._num(group) > recomputed.total() - recomputed[module]:
            return False
        del recomputed[module]
        return True

    def end_backward(self, task: int) -> None:
        """A backward is over."""
        self._levels.pop(task, None)
        self._recomputed_in.pop(task, None)

    def clear(self) -> None:
        """No backward runs."""
        self._levels.clear()
        self._recomputed_in.clear()

    def _num(self, group: int) -> int:
        return cast(BoundChunk, self._chunks[group].home).num_foreign_references(besides=0)
