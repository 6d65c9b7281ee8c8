"""Steps of models that fit: nothing moves, and so nothing is heard of them; see [Note: Resident models]."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from chunkmem.errors import CapacityError
from chunkmem.runtime.pager import Pager
from chunkmem.steps.cached_plan import CachedPlan
from chunkmem.steps.plan_cache import Key, PlanCache


class Residence:
    """Decides whether all chunks stay on DEVICE in the step that begins, and tells who has to know."""

    def __init__(self, pager: Pager, *, is_model: Callable[[int], bool]) -> None:
        """Begin with chunks that may leave; `is_model` tells whether what is called is a whole model, packed."""
        self._pager = pager
        self._is_model = is_model
        self.is_on = False
        """All chunks stay, and calls inside of models are not heard of."""
        self._kinds: set[CachedPlan] = set()
        """Of steps that have been found to move nothing since."""

    def of(self, key: Key, kinds: PlanCache, entry: CachedPlan | None) -> CachedPlan | None:
        """Return what a step is like that begins now, if it need not be heard of; `entry` is what it would follow."""
        found = entry if entry is not None and entry.is_timed else kinds.needless(key)
        snapshot = self._pager.store.snapshot
        if found is None or not self._is_model(key.root) or (snapshot is not None and not snapshot.is_over):
            return None
        if any(hears() for hears in self._pager.events.hears_inside):
            return None
        return found if found in self._kinds or found.fits(self._pager.store.chunks) else None

    def enter(self, entry: CachedPlan) -> None:
        """A step like `entry` begins: chunks stay from now on."""
        self._kinds.add(entry)
        if self.is_on:
            return
        self.is_on = True
        try:
            for tell in self._pager.events.resident:
                tell(True)
        except CapacityError:
            self.leave()
            entry.has_moved = True

    def leave(self) -> None:
        """Chunks may leave DEVICE from now on. Raises what `AccessTracker.stay` does; everybody knows then, too."""
        self._kinds.clear()
        if self.is_on:
            self.is_on = False
            with ExitStack() as stack:
                for tell in self._pager.events.resident:
                    stack.callback(tell, False)
