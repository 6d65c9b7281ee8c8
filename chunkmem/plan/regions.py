"""Which regions are recomputed in backward, and which keep their activations: the faster step decides. Pure.

[Note: Choosing regions] Any choice is judged by candidates for its own trace (`with_recomputed`): the planner
decides what is kept on DEVICE and what goes to HOST. Those with every region recomputed, and with none, come first, so
the choice is no slower than either. Then come, in the order of what they save, seconds of recomputing for each byte and
second of DEVICE:

    kept                 # # # # . . . . . . . .      the first ones, for any number of them
    kept and offloaded   # # # # . # . . # . . #      and others in between, evenly, so that copies have time
    offloaded            # # # # # # # . . . . .      the first ones of forward: their copies have most time

and in the end single regions change sides, or two of them change places. Regions that are alike, as the blocks of a
transformer, are one class, of which the first and the last of either side come first. As many choices are judged as
there are regions, and 30 more; none whose computing alone takes longer than the best step so far.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from math import ceil, inf
from statistics import mean

from chunkmem.errors import CapacityError
from chunkmem.plan.candidates import Candidate, Candidates, PlanOptions
from chunkmem.plan.gaps import in_use_nbytes
from chunkmem.plan.machine import Machine
from chunkmem.plan.model import LINK_LANES, Copy, Plan
from chunkmem.trace.model import Kind, Region, Trace
from chunkmem.trace.recomputed import with_recomputed
from chunkmem.types import Tier

_ALIKE = 0.05
"""Durations this close are those of regions that are alike."""
_BETTER = 1e-3
"""A step is faster if it is by this share."""
_COARSE = 8
"""Parts that a range of numbers is cut into first."""


class Policy(enum.Enum):
    """What becomes of a region's activations between forward and backward."""

    KEEP = "keep"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class RegionPolicy:
    """One region's part of a choice."""

    name: str
    policy: Policy
    nbytes: int
    """Of activations."""
    seconds: float
    """Of computing again, or of copying to HOST and back; 0 if kept."""


@dataclass(frozen=True)
class RegionChoice:
    """Which regions are recomputed, and what the step is then predicted to be."""

    recomputed: frozenset[int]
    """Indices into the regions of the trace."""
    regions: tuple[RegionPolicy, ...]
    candidate: Candidate
    """The plan that says so."""

    @property
    def step_s(self) -> float:
        return self.candidate.timeline.step_s

    @property
    def peak_nbytes(self) -> int:
        """On DEVICE."""
        return self.candidate.timeline.peak_nbytes[Tier.DEVICE]

    @property
    def moved_nbytes(self) -> int:
        """In a step, over both links."""
        return self.candidate.nbytes


def choose_regions(trace: Trace, machine: Machine, *, options: PlanOptions | None = None) -> RegionChoice:
    """Return the fastest choice that was found; see [Note: Choosing regions].

    Raises:
        CapacityError: none fits; of all that were tried, the one with the smallest cap.
        PlanError: the trace cannot be repeated; see `as_loop`.
    """
    search = RegionSearch(trace, machine, options=options)
    for _ in search.pieces():
        pass
    return search.choice()


def summary(trace: Trace, choice: Collection[int], plan: Plan) -> tuple[RegionPolicy, ...]:
    """Return what becomes of each region.

    Args:
        trace: with its regions, recomputed or not.
        choice: those that are recomputed.
        plan: of the trace in which they are.
    """
    copied = {action.chunk for actions in plan.actions for action in actions if isinstance(action, Copy)}
    found = []
    for index, region in enumerate(trace.regions):
        policy, seconds = Policy.KEEP, 0.0
        if index in choice:
            policy, seconds = Policy.RECOMPUTE, forward_s(trace, region)
        elif region.chunk in copied:
            policy = Policy.OFFLOAD
            seconds = sum(plan.machine.links[link].copy_s(region.nbytes) for link in LINK_LANES)
        found.append(RegionPolicy(region.name, policy, region.nbytes, seconds))
    return tuple(found)


class RegionSearch:
    """Looks for a choice piece by piece."""

    def __init__(
        self,
        trace: Trace,
        machine: Machine,
        *,
        options: PlanOptions | None = None,
        now: Collection[int] | None = None,
        spare_nbytes: int = 0,
    ) -> None:
        """Begin.

        Args:
            trace: of the step, whichever regions are recomputed in it.
            machine: caps and speeds.
            options: of the planner.
            now: the regions that are recomputed in steps until now, which fit; None: all of them.
            spare_nbytes: bytes of DEVICE that no moment may need with any other choice.
        """
        self._now = frozenset(range(len(trace.regions)) if now is None else now)
        self._judge = _Judge(trace, machine, options or PlanOptions(), fits=self._now, spare_nbytes=spare_nbytes)
        self._regions = trace.regions
        self._classes = _classes(trace)
        self._order = _by_density(with_recomputed(trace, ()), self._classes)

    @property
    def num_plans(self) -> int:
        """Plans made so far."""
        return self._judge.num_plans

    @property
    def now_s(self) -> float:
        """How long a step takes with the choice until now; inf before it was judged, or if it has no plan."""
        return self._judge.known.get(self._now, inf)

    def choice(self) -> RegionChoice:
        """Return the fastest one so far.

        Raises:
            CapacityError: none fits.
        """
        return self._judge.choice()

    def pieces(self) -> Iterator[int]:
        """Yield the work done, in the planner's units, until the search is over."""
        judge, every = self._judge, range(len(self._regions))
        uniform = frozenset[int](), frozenset(every)
        for recomputed in dict.fromkeys((*uniform, self._now)):
            yield from judge.seconds(recomputed)
            if judge.is_best_of_all:
                return
        count = yield from self._scan((), self._order)
        yield from self._scan((), every)
        for kept in sorted({count, count // 2, 0}, reverse=True):
            yield from self._scan(self._order[:kept], sorted(self._order[kept:]), is_spread=True)
        before = None
        while before != judge.best:
            before = judge.best
            for changed in self._moves(before):
                yield from judge.seconds(before ^ changed)
                if judge.best != before:
                    break
        for recomputed in dict.fromkeys((judge.best, *uniform, self._now)):
            yield from judge.seconds(recomputed, is_quick=False)

    def _scan(
        self, kept: Sequence[int], others: Sequence[int], *, is_spread: bool = False
    ) -> Generator[int, None, int]:
        """Judge choices that keep `kept` and some of `others`, the first ones or evenly; return the best number of
        them."""
        step = max(1, ceil(len(others) / _COARSE))
        counts = [*range(0, len(others), step), len(others)]
        seconds: dict[int, float] = {}
        while counts:
            for count in reversed(counts):
                chosen = _spread(others, count) if is_spread else others[:count]
                recomputed = frozenset(range(len(self._regions))) - {*kept, *chosen}
                seconds[count] = yield from self._judge.seconds(recomputed)
            best = min(seconds, key=lambda count: seconds[count])
            step //= 2
            counts = [count for count in (best - step, best + step) if 0 <= count <= len(others)] if step else []
        return best

    def _moves(self, recomputed: frozenset[int]) -> Iterator[frozenset[int]]:
        """Yield sets of regions to change sides: the ends of each class, then any, each single ones before pairs."""
        sides: list[tuple[list[int], list[int]]] = []
        for alike in self._classes:
            there = [index for index in alike if index in recomputed]
            here = [index for index in alike if index not in recomputed]
            sides.append((_ends(there), _ends(here)))
        every = [index for index in self._order if index in recomputed]
        others = [index for index in reversed(self._order) if index not in recomputed]
        for there, here in (*sides, (every, others)):
            yield from (frozenset({index}) for index in (*there, *here))
        for there, here in (*sides, (every, others)):
            yield from map(frozenset, product(there, here))


class _Judge:
    """Says how long a step takes if some regions are recomputed, and remembers the fastest choice."""

    def __init__(
        self, trace: Trace, machine: Machine, options: PlanOptions, *, fits: frozenset[int], spare_nbytes: int
    ) -> None:
        self._trace, self._machine, self._options = trace, machine, options
        self._fits, self._spare_nbytes = fits, spare_nbytes
        self.known: dict[frozenset[int], float] = {}
        self._found: Candidate | None = None
        self._shortage: CapacityError | None = None
        self._kept_s = sum(m.duration_s for m in with_recomputed(trace, ()).moments if m.kind is not Kind.UPDATE)
        self._again_s = [forward_s(trace, region) for region in trace.regions]
        self._num_left = len(trace.regions) + 30
        """Choices that may still be judged."""
        self.best = frozenset(range(len(trace.regions)))
        """The regions that are recomputed in the fastest choice."""
        self.num_plans = 0

    @property
    def is_best_of_all(self) -> bool:
        """Nothing is recomputed, and nothing stalls."""
        if self._found is None or self.best:
            return False
        return self._found.timeline.stall_s <= _BETTER * self._found.timeline.step_s

    def choice(self) -> RegionChoice:
        if self._found is None:
            assert self._shortage is not None
            raise self._shortage
        return RegionChoice(self.best, summary(self._trace, self.best, self._found.plan), self._found)

    def seconds(self, recomputed: frozenset[int], *, is_quick: bool = True) -> Generator[int, None, float]:
        """Return how long a step takes, inf if it does not fit or cannot be the fastest; yield the work done.

        Args:
            recomputed: the choice.
            is_quick: take few candidates, and stop when as many choices have been judged as may be.
        """
        if is_quick and recomputed in self.known:
            return self.known[recomputed]
        least_s = self._kept_s + sum(self._again_s[index] for index in recomputed)
        is_hopeless = self._found is not None and least_s >= self._found.timeline.step_s
        if is_quick and (is_hopeless or self._num_left <= 0):
            return inf
        self._num_left -= 1
        found: Candidate | None = None
        trace = with_recomputed(self._trace, recomputed)
        try:
            self._require_spare(trace, recomputed)
            for work, candidate in Candidates(trace, self._machine, self._options, {}, is_quick=is_quick).pieces():
                yield work
                self.num_plans += candidate is not None
                if candidate is not None and (found is None or candidate.timeline.step_s < found.timeline.step_s):
                    found = candidate
        except CapacityError as error:
            if self._shortage is None or error.needed_nbytes < self._shortage.needed_nbytes:
                self._shortage = error
        step_s = inf if found is None else found.timeline.step_s
        self.known[recomputed] = step_s
        if found is not None and (self._found is None or step_s < self._found.timeline.step_s):
            self._found, self.best = found, recomputed
        return step_s

    def _require_spare(self, trace: Trace, recomputed: frozenset[int]) -> None:
        if self._spare_nbytes == 0 or recomputed == self._fits:
            return
        charges, cap_nbytes = self._machine.charges_non_model, self._machine.device_nbytes
        least_nbytes = max(in_use_nbytes(trace, charges_non_model=charges)) + self._spare_nbytes
        if least_nbytes > cap_nbytes:
            text = f"DEVICE needs {least_nbytes} bytes and has {cap_nbytes}"
            raise CapacityError(text, needed_nbytes=least_nbytes, cap_nbytes=cap_nbytes)


def forward_s(trace: Trace, region: Region) -> float:
    """Return the seconds that a region's forward takes."""
    return sum(moment.duration_s for moment in trace.moments[slice(*region.forward)] if moment.chunk != region.chunk)


def _classes(trace: Trace) -> list[list[int]]:
    """Return regions that are alike together, each class in their order."""
    seconds = [forward_s(trace, region) for region in trace.regions]
    classes: list[list[int]] = []
    for index in sorted(range(len(seconds)), key=lambda index: (trace.regions[index].nbytes, seconds[index])):
        first = classes[-1][0] if classes else index
        is_alike = trace.regions[index].nbytes == trace.regions[first].nbytes
        if classes and is_alike and seconds[index] <= (1 + _ALIKE) * seconds[first]:
            classes[-1].append(index)
        else:
            classes.append([index])
    return [sorted(alike) for alike in classes]


def _by_density(kept: Trace, classes: Sequence[Sequence[int]]) -> list[int]:
    """Return the regions of a trace that keeps them all, first those that save most for each byte and second."""
    begins_s = [0.0, *accumulate(moment.duration_s for moment in kept.moments)]
    density = {}
    for alike in classes:
        again_s = mean(forward_s(kept, kept.regions[index]) for index in alike)
        for index in alike:
            region = kept.regions[index]
            rent = region.nbytes * (begins_s[region.backward[0]] - begins_s[region.forward[1]])
            density[index] = again_s / rent if rent else inf
    return sorted(density, key=lambda index: (-density[index], -index))


def _spread(indices: Sequence[int], count: int) -> list[int]:
    """Return so many of them, evenly."""
    return [indices[(2 * at + 1) * len(indices) // (2 * count)] for at in range(count)]


def _ends(indices: Sequence[int]) -> list[int]:
    return [*indices[:1], *indices[1:][-1:]]
