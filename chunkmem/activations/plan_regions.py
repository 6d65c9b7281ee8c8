"""Which regions are recomputed in backward, and which keep their activations: the faster step decides. Pure.

[Note: Choosing regions] Any choice is judged by plans for its own trace (`with_kept`), one for each placement: the
planner decides what is kept on DEVICE and what goes to HOST. First come those that keep all regions, and none, so the
choice is no slower than either. Then come, in the order of what they save, seconds of recomputing for each byte and
second of DEVICE:

    kept                 # # # # . . . . . . . .      the first ones, for any number of them
    kept and offloaded   # # # # . # . . # . . #      and others in between, evenly, so that copies have time
    offloaded            . # . . # . . # . . # .      the same without the first ones

Numbers are tried in a grid, which gets finer around the best one; in the end, single regions change sides. No plan is
made for a choice whose computing alone takes longer than the best step so far, and none but for the first ones once
`MOST_WORK` is done.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, inf
from statistics import mean

from chunkmem.activations.kept_regions import recomputation_s, with_kept
from chunkmem.data.errors import CapacityError
from chunkmem.data.trace import Kind, Trace
from chunkmem.plan.candidate import Candidate, PlanOptions
from chunkmem.plan.candidates import Candidates
from chunkmem.plan.gaps import in_use_nbytes
from chunkmem.plan.garbage import no_collections
from chunkmem.plan.machine import Machine

_QUIET = 1e-3
"""A share of the step that is not worth hiding."""
_COARSE = 8
"""Parts that a range of numbers is cut into first."""
MOST_WORK = 2_500_000
"""Limit on the work of judging choices, in the planner's units."""
_EDIT_WORK = 15
"""Of writing down the step with another choice, for each of its moments; in the planner's units."""
_LARGE = 2000
"""Moments from which on fewer placements are tried."""
_MOST_OF_LARGE = 3

Sizes = Callable[[Collection[int]], Mapping[int, int]]
"""Returns the bytes of the chunks of regions, by index, if exactly these are kept."""


@dataclass(frozen=True)
class RegionChoice:
    """Which regions are kept, and what the step is then predicted to be."""

    kept: frozenset[int]
    """Indices into the regions of the trace; the others are recomputed."""
    candidate: Candidate
    """The plan that says so."""
    fits_s: float
    """Seconds of a step with the choice that was known to fit; inf: unknown."""
    num_plans: int
    """Made to find it."""

    @property
    def step_s(self) -> float:
        return self.candidate.step_s


@no_collections()
def choose_regions(
    trace: Trace,
    machine: Machine,
    sizes: Sizes,
    *,
    options: PlanOptions | None = None,
    fits: Collection[int] = (),
    spare_nbytes: int = 0,
) -> RegionChoice:
    """Return the fastest choice that was found; see [Note: Choosing regions].

    Args:
        trace: of a step that recomputes all of its regions.
        machine: caps and speeds.
        sizes: of the regions' chunks.
        options: of the planner.
        fits: the regions that are kept in a step that has fitted.
        spare_nbytes: bytes of DEVICE that no moment may need with any other choice.

    Raises:
        CapacityError: none fits; of all that were tried, the one with the smallest cap.
        PlanError: the trace cannot be repeated; see `as_loop`.
    """
    search = _Search(trace, machine, sizes, options or PlanOptions(), frozenset(fits), spare_nbytes)
    search.run()
    if search.found is None:
        assert search.shortage is not None
        raise search.shortage
    return RegionChoice(search.best, search.found, search.known.get(search.fits, inf), search.num_plans)


@dataclass
class _Search:
    """Judges choices, and remembers the fastest; what it is given is told by `choose_regions`."""

    trace: Trace
    machine: Machine
    sizes: Sizes
    options: PlanOptions
    fits: frozenset[int]
    spare_nbytes: int
    found: Candidate | None = None
    """Plan of `best`; None: there is none yet."""
    shortage: CapacityError | None = None
    """Error of the choice with the smallest cap, among those that do not fit."""
    num_plans: int = 0
    work: int = 0
    """Done so far, in the planner's units."""

    def __post_init__(self) -> None:
        self.best = self.fits
        """The fastest choice so far."""
        self.known: dict[frozenset[int], float] = {}
        """Seconds of a step by choice; inf: it does not fit, or computing alone takes longer than the best step."""

    def run(self) -> None:
        """Look for the fastest choice."""
        every = frozenset(range(len(self.trace.regions)))
        self.known[every] = self._try(every, most=1)
        if self.found is not None and self.found.timeline.stall_s <= _QUIET * self.found.timeline.step_s:
            return
        for kept in dict.fromkeys((self.fits, frozenset[int](), every)):
            self.known[kept] = self._try(kept)
        order = _by_density(self.trace, self.sizes(every))
        count = self._scan((), order)
        for first in dict.fromkeys((count, count // 2, 0)):
            self._scan(order[:first], sorted(order[first:]), is_spread=True)
        before = None
        while before != self.best:
            before = self.best
            for at in order:
                self._seconds(before ^ {at})
                if self.best != before:
                    break

    def _scan(self, kept: Sequence[int], others: Sequence[int], *, is_spread: bool = False) -> int:
        """Judge choices of `kept` and some of `others`, the first ones or evenly; return the best number of them."""
        step = max(1, ceil(len(others) / _COARSE))
        counts = [*range(0, len(others), step), len(others)]
        seconds: dict[int, float] = {}
        while counts:
            for count in reversed(counts):
                chosen = _spread(others, count) if is_spread else others[:count]
                seconds[count] = self._seconds(frozenset((*kept, *chosen)))
            best = min(seconds, key=lambda count: seconds[count])
            step //= 2
            counts = [count for count in (best - step, best + step) if 0 <= count <= len(others)] if step else []
        return best

    def _seconds(self, kept: frozenset[int]) -> float:
        """Return how long a step takes; inf if that is not known, and there is no time left to judge it."""
        if kept not in self.known and self.work < MOST_WORK:
            self.known[kept] = self._try(kept)
        return self.known.get(kept, inf)

    def _try(self, kept: frozenset[int], *, most: int | None = None) -> float:
        """Return how long a step takes, by a plan for each placement, but no more than `most`."""
        trace, step_s, num_plans = with_kept(self.trace, self.sizes(kept)), inf, self.num_plans
        self.work += _EDIT_WORK * len(trace.moments)
        least_s = sum(moment.duration_s for moment in trace.moments if moment.kind is not Kind.UPDATE)
        if self.found is not None and kept != self.best and least_s >= self.found.step_s:
            return inf
        most = _MOST_OF_LARGE if most is None and len(trace.moments) > _LARGE else most
        try:
            if kept != self.fits:
                self._require_spare(trace)
            for work, candidate in Candidates(trace, self.machine, self.options, is_quick=True).pieces():
                self.work += work
                if candidate is None:
                    continue
                self.num_plans += 1
                step_s = min(step_s, candidate.step_s)
                if self.found is None or candidate.step_s < self.found.step_s:
                    self.found, self.best = candidate, kept
                if self.num_plans - num_plans == most:
                    break
        except CapacityError as error:
            if self.shortage is None or error.needed_nbytes < self.shortage.needed_nbytes:
                self.shortage = error
        return step_s

    def _require_spare(self, trace: Trace) -> None:
        charges, cap_nbytes = self.machine.charges_non_model, self.machine.device_nbytes
        least_nbytes = max(in_use_nbytes(trace, charges_non_model=charges)) + self.spare_nbytes
        if least_nbytes > cap_nbytes:
            text = f"DEVICE needs {least_nbytes} bytes and has {cap_nbytes}"
            raise CapacityError(text, needed_nbytes=least_nbytes, cap_nbytes=cap_nbytes)


def _by_density(trace: Trace, nbytes: Mapping[int, int]) -> list[int]:
    """Return the regions, first those that save most seconds of recomputing for each byte and second of DEVICE.

    Those that save as much memory are taken to be alike, and to take as long.
    """
    begins_s = [0.0, *accumulate(moment.duration_s for moment in trace.moments)]
    again_s: dict[int, list[float]] = defaultdict(list)
    for at, region in enumerate(trace.regions):
        again_s[nbytes[at]].append(recomputation_s(trace, region))
    density = {}
    for at, region in enumerate(trace.regions):
        rent = nbytes[at] * (begins_s[region.backward[0]] - begins_s[region.forward[1]])
        density[at] = mean(again_s[nbytes[at]]) / rent if rent else inf
    return sorted(density, key=lambda at: (-density[at], -at))


def _spread(indices: Sequence[int], count: int) -> list[int]:
    """Return so many of them, evenly."""
    return [indices[(2 * at + 1) * len(indices) // (2 * count)] for at in range(count)]
