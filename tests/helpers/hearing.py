"""Steps that are heard of in the ways that a test chooses: not at all inside, by block, or module by module."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import chunkmem
from chunkmem.data.trace import Mode
from chunkmem.data.types import Tier
from chunkmem.steps.hook_levels import has_room
from chunkmem.steps.plan_cache import Key, PlanCache

WAYS = ("resident", "by block", "by module")
"""[Note: Resident models] in `modules/hooks.py`; [Note: Blocks as a whole] in `modules/blocks.py`; all hooks."""


class Hearing:
    """Has each step and evaluation of a manager heard of in the next of some ways, over and over.

    A way is taken where the controller would be free to take it: all chunks stay on DEVICE, there is room for blocks,
    and nobody has to hear of calls inside of models. It is not asked whether that is worth it. Chunks that have stayed
    leave DEVICE as soon as they may, so that what nobody hears of finds no weights.
    """

    def __init__(self, manager: chunkmem.ChunkManager, ways: Sequence[str]) -> None:
        """Begin with the first way; the controller itself decides where one is empty."""
        self.taken: list[str] = []
        """The ways that were taken, in the end."""
        self._controller = controller = manager.runtime.controller
        self._memory = manager.runtime.memory
        self._events = self._memory.pager.events
        self._ways = itertools.cycle(ways)
        self._way = ""
        residence = controller.residence
        self._begin, self._of, self._leave = controller._begin_iteration, residence.of, residence.leave
        self._events.has_inner_hooks.append(lambda: self._way == "by module")
        controller._begin_iteration = self._begin_iteration  # type: ignore[method-assign]
        residence.of = lambda *args: None if self._way == "by block" else self._of(*args)  # type: ignore[method-assign]
        residence.leave = self._leave_device  # type: ignore[method-assign]

    def _leave_device(self) -> None:
        was_on = self._controller.residence.is_on
        self._leave()
        for chunk in self._memory.store.chunks.values() if was_on else ():
            self._memory.pager.shrink(Tier.DEVICE, chunk.nbytes)

    def _begin_iteration(self, mode: Mode, root: int) -> None:
        self._way = next(self._ways)
        known = self._controller.known
        self._lead(known.key_of(root, mode), known.kinds[mode])
        self._begin(mode, root)
        by = "by block" if self._controller._blocks.is_on else "by module"
        self.taken.append("resident" if self._controller.residence.is_on else by)

    def _lead(self, key: Key, kinds: PlanCache) -> None:
        """Have what the controller waits for come at once."""
        entry = kinds.of(key)
        if entry is None or entry.trace is None:
            return
        if self._way == "resident" and entry.prepare(has_alternative=True) is not None:
            entry._num_refinements = max(1, entry._num_refinements)  # as if a step had followed the plan
        is_new = not entry.trace.by_block and any(tell() for tell in self._events.num_in_blocks)
        if self._way == "by block" and is_new and has_room(entry.trace, entry.machine()):
            kinds.hook_by_block(key, True)
