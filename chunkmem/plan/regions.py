"""Which regions are recomputed in backward, and which keep their activations: the faster step decides. Pure.

[Note: Choosing regions] Any choice is judged by candidates for its own trace (`with_recomputed`): the planner
decides what is kept on DEVICE and what goes to HOST. Those with every region recomputed, and with none, come first, so
the choice is no slower than either. Then come, in the order of what they save, seconds of recomputing for each byte and
second of DEVICE:

    kept                 # # # # . . . . . . . .      the first ones, for any number of them
    kept and offloaded   # # # # . # . . # . . #      and others in between, evenly, so that copies have time
    offloaded            # # # # # # # . . . . .      the first ones of forward: their copies have most time

and in the end single regions change sides, or two of them change places. Regions that are alike, as the blocks of a
transformer, are one class, of which the first and the last of either side come first. Where a block is called for many
micro-batches, its calls change sides together, so that the search grows with blocks.

What a choice is worth depends on how many groups are resident. First it is judged with the updates where the best
choice has them, and with as many groups resident as fit. Only one that is about as fast there gets all placements, and
so does each choice that keeps one region more than the best one: that may take a group less. None is judged whose
computing alone takes longer than the best step so far. The search ends when none is better, or at `MOST_WORK`.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from math import ceil, inf
from statistics import mean

from chunkmem.plan.candidate import Candidate, PlanOptions
from chunkmem.plan.machine import Machine
from chunkmem.plan.model import Copy, Plan
from chunkmem.plan.region_judge import RegionJudge
from chunkmem.trace.model import Region, Trace
from chunkmem.trace.recomputed import with_recomputed
from chunkmem.trace.shared import Shared
from chunkmem.types import DEVICE_LINKS, Tier

_ALIKE = 0.05
"""Durations this close are those of regions that are alike."""
_BETTER = 1e-3
"""A step is faster if it is by this share."""
_COARSE = 8
"""Parts that a range of numbers is cut into first."""
_MANY = 32
"""Regions from which on calls of one block are chosen together."""
MOST_WORK = 1_500_000
"""Of judging choices, in the planner's units."""
_MOST_PASSES = 2500
"""Work for each moment of the trace, if that is more: some fifty plans."""


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
        return self.candidate.step_s

    @property
    def peak_nbytes(self) -> int:
        """On DEVICE."""
        return self.candidate.timeline.peak_nbytes[Tier.DEVICE]

    @property
    def moved_nbytes(self) -> int:
        """In a step, over both links."""
        return self.candidate.nbytes


def choose_regions(
    trace: Trace,
    machine: Machine,
    *,
    options: PlanOptions | None = None,
    shared: Mapping[int, Shared] | None = None,
) -> RegionChoice:
    """Return the fastest choice that was found; see [Note: Choosing regions], and `with_recomputed` for `shared`.

    Raises:
        CapacityError: none fits; of all that were tried, the one with the smallest cap.
        PlanError: the trace cannot be repeated; see `as_loop`.
    """
    search = RegionSearch(trace, machine, options=options, shared=shared)
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
            seconds = sum(plan.machine.links[link].copy_s(region.nbytes) for link in DEVICE_LINKS)
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
        shared: Mapping[int, Shared] | None = None,
        now: Collection[int] | None = None,
        spare_nbytes: int = 0,
        most_work: int | None = None,
    ) -> None:
        """Begin.

        Args:
            trace: of the step, whichever regions are recomputed in it.
            machine: caps and speeds.
            options: of the planner.
            shared: see `with_recomputed`.
            now: the regions that are recomputed in steps until now, which fit; None: all of them.
            spare_nbytes: bytes of DEVICE that no moment may need with any other choice.
            most_work: of judging others than the uniform choices; None: enough to look at each kind of them.
        """
        self._trace = trace
        self._every = frozenset(range(len(trace.regions)))
        self._now = self._every if now is None else frozenset(now)
        self._judge = RegionJudge(
            trace,
            machine,
            options or PlanOptions(),
            shared=shared,
            fits=self._now,
            spare_nbytes=spare_nbytes,
        )
        self._units = _units(trace)
        self._classes = _classes(trace, self._units)
        self._order = _by_density(with_recomputed(trace, (), shared=shared), self._units, self._classes)
        self._most_work = max(MOST_WORK, _MOST_PASSES * len(trace.moments)) if most_work is None else most_work

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
        best, found = self._judge.best, self._judge.found
        if found is None:
            assert self._judge.shortage is not None
            raise self._judge.shortage
        return RegionChoice(best, summary(self._trace, best, found.plan), found)

    def pieces(self) -> Iterator[int]:
        """Yield the work done, in the planner's units, until the search is over."""
        judge = self._judge
        kept_s = yield from judge.probe(frozenset())
        if self._is_best_of_all:
            judge.known[frozenset()] = kept_s
            return
        uniform = tuple(dict.fromkeys((self._now, self._every, frozenset[int]())))
        for recomputed in uniform:
            yield from judge.seconds(recomputed, is_thorough=True)
        count = yield from self._scan((), self._order)
        for kept in sorted({count, count // 2, 0}, reverse=True):
            yield from self._scan(self._order[:kept], sorted(self._order[kept:]), is_spread=True)
        yield from self._scan((), range(len(self._units)))
        before = None
        while before != judge.best:
            before = judge.best
            yield from self._improve()
        if not judge.is_large or judge.work < self._most_work:
            yield from judge.settle(uniform)

    @property
    def _is_best_of_all(self) -> bool:
        """Nothing is recomputed, and nothing stalls."""
        if self._judge.found is None or self._judge.best:
            return False
        timeline = self._judge.found.timeline
        return timeline.stall_s <= _BETTER * timeline.step_s

    def _seconds(self, recomputed: frozenset[int], *, is_thorough: bool = False) -> Generator[int, None, float]:
        """Return how long a step takes; inf if that is not known, and there is no time left to judge it."""
        if self._judge.work >= self._most_work:
            return self._judge.known.get(recomputed, inf)
        return (yield from self._judge.seconds(recomputed, is_thorough=is_thorough))

    def _improve(self) -> Iterator[int]:
        """Judge choices that are almost the best one, until one is better."""
        best = self._judge.best
        for changed in self._moves(best):
            yield from self._seconds(changed)
            if self._judge.best != best:
                return
        for alike in self._classes:  # to keep one more may take fewer resident groups
            for at in _ends([at for at in alike if self._units[at] <= best]):
                yield from self._seconds(best - self._units[at], is_thorough=True)
                if self._judge.best != best:
                    return

    def _scan(
        self, kept: Sequence[int], others: Sequence[int], *, is_spread: bool = False
    ) -> Generator[int, None, int]:
        """Judge choices that keep units `kept` and some of `others`, the first ones or evenly; return the best number
        of them."""
        step = max(1, ceil(len(others) / (_COARSE // 2 if self._judge.is_large else _COARSE)))
        counts = [*range(0, len(others), step), len(others)]
        seconds: dict[int, float] = {}
        while counts:
            for count in reversed(counts):
                chosen = _spread(others, count) if is_spread else others[:count]
                left = set(range(len(self._units))) - {*kept, *chosen}
                seconds[count] = yield from self._seconds(frozenset().union(*(self._units[at] for at in left)))
            best = min(seconds, key=lambda count: seconds[count])
            step //= 2
            counts = [count for count in (best - step, best + step) if 0 <= count <= len(others)] if step else []
        return best

    def _moves(self, recomputed: frozenset[int]) -> Iterator[frozenset[int]]:
        """Yield choices with units that change sides: the ends of each class, then any, each single ones before
        pairs."""
        again = {at for at, unit in enumerate(self._units) if unit <= recomputed}
        sides: list[tuple[list[int], list[int]]] = []
        for alike in self._classes:
            there = [at for at in alike if at in again]
            here = [at for at in alike if at not in again]
            sides.append((_ends(there), _ends(here)))
        every = [at for at in self._order if at in again]
        others = [at for at in reversed(self._order) if at not in again]
        for there, here in (*sides, (every, others)):
            yield from (recomputed - self._units[at] for at in there)
            yield from (recomputed | self._units[at] for at in here)
        for there, here in (*sides, (every, others)):
            yield from (recomputed - self._units[out] | self._units[at] for out, at in product(there, here))


def forward_s(trace: Trace, region: Region) -> float:
    """Return the seconds that a region's forward takes."""
    return sum(moment.duration_s for moment in trace.moments[slice(*region.forward)] if moment.chunk != region.chunk)


def _units(trace: Trace) -> list[frozenset[int]]:
    """Return the regions that are chosen together: calls of one block that follow each other, where there are many."""
    by_name: dict[str, list[int]] = {}
    for index, region in enumerate(trace.regions):
        by_name.setdefault(region.name, []).append(index)
    size = ceil(len(trace.regions) / _MANY)
    found: list[frozenset[int]] = []
    for calls in by_name.values():
        num_parts = max(1, len(calls) // size) if size else 1
        ends = [len(calls) * part // num_parts for part in range(num_parts + 1)]
        found += (frozenset(calls[start:stop]) for start, stop in pairwise(ends))
    return sorted(found, key=min)


def _classes(trace: Trace, units: Sequence[Collection[int]]) -> list[list[int]]:
    """Return units that are alike together, each class in their order."""
    nbytes = [sum(trace.regions[index].nbytes for index in unit) for unit in units]
    seconds = [sum(forward_s(trace, trace.regions[index]) for index in unit) for unit in units]
    classes: list[list[int]] = []
    for at in sorted(range(len(units)), key=lambda at: (nbytes[at], seconds[at])):
        first = classes[-1][0] if classes else at
        if classes and nbytes[at] == nbytes[first] and seconds[at] <= (1 + _ALIKE) * seconds[first]:
            classes[-1].append(at)
        else:
            classes.append([at])
    return [sorted(alike) for alike in classes]


def _by_density(kept: Trace, units: Sequence[Collection[int]], classes: Sequence[Sequence[int]]) -> list[int]:
    """Return the units of a trace that keeps them all, first those that save most for each byte and second."""
    begins_s = [0.0, *accumulate(moment.duration_s for moment in kept.moments)]
    density = {}
    for alike in classes:
        again_s = mean(sum(forward_s(kept, kept.regions[index]) for index in units[at]) for at in alike)
        for at in alike:
            regions = [kept.regions[index] for index in units[at]]
            rent = sum(r.nbytes * (begins_s[r.backward[0]] - begins_s[r.forward[1]]) for r in regions)
            density[at] = again_s / rent if rent else inf
    return sorted(density, key=lambda at: (-density[at], -at))


def _spread(indices: Sequence[int], count: int) -> list[int]:
    """Return so many of them, evenly."""
    return [indices[(2 * at + 1) * len(indices) // (2 * count)] for at in range(count)]


def _ends(indices: Sequence[int]) -> list[int]:
    return [*indices[:1], *indices[1:][-1:]]
