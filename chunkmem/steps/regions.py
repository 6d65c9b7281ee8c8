"""What a step asks of the blocks whose activations are managed."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from chunkmem.trace.model import Region, Trace


class Regions(Protocol):
    """Blocks whose activations are kept, offloaded or recomputed."""

    @property
    def is_auto(self) -> bool:
        """Which of them are recomputed is decided for each kind of step."""
        ...

    def begin_iteration(self, kept: Collection[int] | None, now: Callable[[], int]) -> None:
        """A training step begins.

        Args:
            kept: where that is decided for each kind of step, the numbers of the calls that are not recomputed; None:
                there are none.
            now: tells the number of moments so far.
        """
        ...

    def adopt(self, trace: Trace) -> None:
        """Have the chunks of a training step of an earlier run; raise a TraceError if other regions are managed."""
        ...

    def recorded(self) -> tuple[Region, ...]:
        """Return the calls of the step that was recorded."""
        ...
