"""Which calls of regions a kind of step recomputes, chosen once its first step has been recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from chunkmem.errors import CapacityError
from chunkmem.plan.candidates import PlanOptions
from chunkmem.plan.machine import Machine
from chunkmem.plan.regions import choose_regions
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
        self._kept: dict[Key, frozenset[int]] = {}
        self._adopted: frozenset[int] | None = None

    def kept(self, key: Key) -> frozenset[int] | None:
        """Return the numbers of the calls that a kind of step does not recompute; None: there is no choice yet."""
        return self._kept.get(key, self._adopted)

    def adopt(self, trace: Trace) -> None:
        """Choose for all kinds of steps what a trace of an earlier run has recomputed."""
        self._adopted = frozenset(region.number for region in trace.regions if region.recomputed is None)

    def keep(self, key: Key, kept: frozenset[int]) -> None:
        """Have a kind of step recompute all calls but these."""
        self._kept[key] = kept

    @no_collections()
    def choose(self, trace: Trace) -> frozenset[int]:
        """Return what steps like this one, which recomputes all, had better not recompute.

        A tensor that two regions save belongs to the first that is kept. So what a region needs depends a little on
        the others, by no more than inputs take: so much of DEVICE is left, and where that is too much, all is
        recomputed as before, which has fitted.
        """
        machine = self._machine()
        inputs = [trace.chunk_nbytes[region.inputs] for region in trace.regions if region.inputs is not None]
        device_nbytes = max(1, machine.device_nbytes - max(inputs, default=0))
        step = uncharged(trace, charges_non_model=machine.charges_non_model)
        machine = replace(machine, charges_non_model=True, device_nbytes=device_nbytes)
        try:
            choice = choose_regions(step, machine, options=self._options)
        except CapacityError:
            return frozenset()  # what comes of it is said when the plan is made
        return frozenset(region.number for at, region in enumerate(trace.regions) if at not in choice.recomputed)
