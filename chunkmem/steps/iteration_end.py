"""Where a training step ends and the next one begins.

A plan is the body of a loop: it ends with the residency it began with. So an iteration, the piece of training that one
plan is for, is over when the same gradients wait to be used as at its beginning. With two optimizers, of which one
steps every second time, it is two steps long. Gradients that wait for the first time end an iteration, too: no
optimizer may ever use them, and then they wait from now on. And where no optimizer over managed parameters steps, as
all that is trained is outside of chunks, an iteration is over when a model is called after a backward.
"""

from __future__ import annotations

from collections.abc import Callable

from chunkmem.data.types import ChunkId

_MAX_STEPS = 4
"""Optimizer steps in an iteration. If gradients are not even by then, they never may be."""
_MAX_KNOWN = 64
"""Sets of gradients that are remembered to have waited."""
_MAX_BACKWARDS = 64
"""Backwards without an optimizer's step after which steps are not waited for any more."""


class IterationEnd:
    """Tells whether the iteration that runs is over."""

    def __init__(
        self, *, pending: Callable[[], frozenset[ChunkId]], num_backwards: Callable[[], int], is_lone: bool
    ) -> None:
        """Begin before the first iteration.

        Args:
            pending: returns the chunks of gradients that wait to be used.
            num_backwards: returns how many backwards there have been.
            is_lone: there is one rank; else iterations end with the optimizer's step, which is the same on all of them.
        """
        self._pending = pending
        self._num_backwards = num_backwards
        self._is_lone = is_lone
        self._pending_before: frozenset[ChunkId] = frozenset()
        self._known_pending: set[frozenset[ChunkId]] = set()
        """Sets of pending gradients with which iterations have begun."""
        self._backwards_before = 0
        self._num_steps = 0
        self._backwards_at_step: int | None = None
        """Number of backwards at the last step of an optimizer; None: there was no step."""

    def begin(self) -> None:
        """An iteration begins."""
        self._pending_before, self._backwards_before, self._num_steps = self._pending(), self._num_backwards(), 0
        if len(self._known_pending) >= _MAX_KNOWN:
            self._known_pending.clear()
        self._known_pending.add(self._pending_before)

    def stepped(self) -> None:
        """An optimizer has stepped."""
        self._num_steps += 1
        self._backwards_at_step = self._num_backwards()

    @property
    def is_without_step(self) -> bool:
        """There was a backward, and no optimizer over managed parameters has stepped."""
        return not self._num_steps and self._num_backwards() != self._backwards_before

    @property
    def is_even(self) -> bool:
        """The same gradients wait as at the beginning, or others than ever before."""
        if not self._is_lone:
            return True
        pending = self._pending()
        return pending == self._pending_before or pending not in self._known_pending

    @property
    def is_over(self) -> bool:
        """A model is called: that is not part of the iteration."""
        if self._num_steps:
            return self.is_even or self._num_steps >= _MAX_STEPS
        if not self._is_lone or self._num_backwards() == self._backwards_before:
            return False
        at_step = self._backwards_at_step
        is_step_awaited = at_step is not None and self._num_backwards() - at_step <= _MAX_BACKWARDS
        return self._pending() == self._pending_before and not is_step_awaited
