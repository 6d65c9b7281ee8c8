"""Which calls of regions a kind of step recomputes, chosen once its first step has been recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from chunkmem.errors import CapacityError
from chunkmem.plan.candidates import PlanOptions
from chunkmem.plan.machine import Machine
from chunkmem.plan.regions import RegionChoice, choose_regions
from chunkmem.runtime.garbage import no_collections
from chunkmem.steps.plan_cache import Key
from chunkmem.trace.model import Trace
from chunkmem.trace.uncharged import uncharged


class RegionChoices:
    """By kind of step: the regions that are recomputed. A first step recomputes all, so that it fits."""

    def __init__(self, machine: Callable[[], Machine], options: PlanOptions) -> None:
        """Choose for a machine, which is asked for when a choice is made."""
        self._machine = machine
        self._options = options
        self.by_key: dict[Key, RegionChoice] = {}

    def recomputed(self, key: Key) -> frozenset[int] | None:
        """Return the numbers of the calls that a kind of step recomputes; None: all, and then there is a choice."""
        choice = self.by_key.get(key)
        return None if choice is None else choice.recomputed

    @no_collections()
    def choose(self, key: Key, trace: Trace) -> bool:
        """Choose by a step that recomputes all; tell whether others than those recompute fewer from now on."""
        machine = self._machine()
        step = uncharged(trace, charges_non_model=machine.charges_non_model)
        try:
            choice = choose_regions(step, replace(machine, charges_non_model=True), options=self._options)
        except CapacityError:
            return False
        self.by_key[key] = choice
        return len(choice.recomputed) < len(trace.regions)
