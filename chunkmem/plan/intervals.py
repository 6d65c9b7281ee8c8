"""From kept gaps to stays: when each chunk is on a tier, where it comes from, and how early it is fetched. Pure.

A stretch can be as long as the step, so going through it moment by moment would make planning quadratic. The moments
are the leaves of a tree; a node has the least of its two children plus what was added to its stretch as a whole. Both
operations look at two nodes a level.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

from chunkmem.data.types import Tier
from chunkmem.plan.gaps import After, Gap, Problem
from chunkmem.plan.machine import Machine
from chunkmem.plan.model import is_reused


class Room:
    """Bytes by moment. Moments are counted on into the iterations before and after: of `n`, -1 is the last."""

    def __init__(self, nbytes: Sequence[int]) -> None:
        self._n = len(nbytes)
        self._size = size = 1 << max(0, self._n - 1).bit_length()
        self._least = [0] * size + list(nbytes) + [0] * (size - self._n)
        self._added = [0] * size
        """To the stretch of an inner node, and already in its own `_least`, but in none of those below it."""
        for node in range(size - 1, 0, -1):
            self._least[node] = min(self._least[2 * node], self._least[2 * node + 1])

    def take(self, start: int, stop: int, nbytes: int) -> None:
        """Take `nbytes` of each moment of `[start, stop)`, which is an iteration long at most."""
        if start >= stop:
            return
        start, length = start % self._n, stop - start
        self._take(start, min(start + length, self._n), nbytes)
        if start + length > self._n:
            self._take(0, start + length - self._n, nbytes)

    def last_short(self, start: int, stop: int, nbytes: int) -> int | None:
        """Return the last moment of `[start, stop)`, an iteration at most, with less than `nbytes`; None if all have
        that."""
        if start >= stop:
            return None
        first = start % self._n
        base, length = start - first, stop - start
        if first + length > self._n:
            found = self._last_short(first + length - self._n, nbytes)
            if found is not None:
                return base + self._n + found
        found = self._last_short(min(first + length, self._n), nbytes)
        return None if found is None or found < first else base + found

    def _take(self, start: int, stop: int, nbytes: int) -> None:
        least, added, size = self._least, self._added, self._size
        left, right = start + size, stop + size
        ends = left >> 1, (right - 1) >> 1
        while left < right:
            if left & 1:
                least[left] -= nbytes
                if left < size:
                    added[left] -= nbytes
                left += 1
            if right & 1:
                right -= 1
                least[right] -= nbytes
                if right < size:
                    added[right] -= nbytes
            left >>= 1
            right >>= 1
        for node in ends:
            while node:
                one, other = least[2 * node], least[2 * node + 1]
                least[node] = (one if one < other else other) + added[node]
                node >>= 1

    def _last_short(self, stop: int, nbytes: int) -> int | None:
        """Return the last moment of `[0, stop)` with less than `nbytes`."""
        least, added, size = self._least, self._added, self._size
        leaf = stop - 1 + size
        # What was added above each node on the way from the root to the leaf, the leaf's own last.
        above = [0]
        for level in range(size.bit_length() - 1, 0, -1):
            above.append(above[-1] + added[leaf >> level])
        node = leaf
        if least[node] + above.pop() < nbytes:
            return stop - 1
        while above:
            rest = above.pop() + added[node >> 1]
            if node & 1 and least[node - 1] + rest < nbytes:
                return self._last_below(node - 1, nbytes - rest)
            node >>= 1
        return None

    def _last_below(self, node: int, nbytes: int) -> int:
        """Return the last leaf below `node` with less than `nbytes`, where there is one."""
        while node < self._size:
            nbytes -= self._added[node]
            node = 2 * node + (self._least[2 * node + 1] < nbytes)
        return node - self._size


@dataclass(slots=True)
class Stay:
    """One stay of a chunk on the tier where it is used: uses joined by gaps that are kept."""

    chunk: int
    start: int
    """Moment of the stay's first use; within the trace."""
    stop: int
    """The moment in whose list it may be freed, and a copy to the tier below stands; past the trace's end if it lasts
    into the next iteration."""
    source: Tier | None
    """Where its content is copied from; None: the first use begins new content, in a slab that is taken then."""
    earliest: int
    """First moment in whose list the copy may stand; below 0 if that is in the iteration before."""
    target: Tier | None
    """Tier to which its content is copied at the end; None: that tier has it, or nothing reads it again."""
    issued: int = 0
    """The moment in whose list its slab is taken; below 0 if that is in the iteration before."""
    freed: int = 0
    """The moment in whose list it is freed: `stop`, or later so that nobody takes a slab that is still copied from."""


ByMoment = defaultdict[int, list[Stay]]


@dataclass(frozen=True)
class Stays:
    """Where chunks are on DEVICE. Chunks without an entry in either are not, ever."""

    passing: tuple[Stay, ...]
    """Stays of chunks that leave DEVICE, in the order of their first use."""
    resident: frozenset[int]
    """Chunks that never leave."""

    def by_moment(self, n: int) -> tuple[ByMoment, ByMoment, ByMoment, ByMoment]:
        """Return, of a step of `n` moments, which of those that pass begin new content, are copied away, end and are
        fetched in each."""
        creating, leaving, ending, fetching = ByMoment(list), ByMoment(list), ByMoment(list), ByMoment(list)
        for stay in self.passing:
            if stay.target is not None:
                leaving[stay.stop % n].append(stay)
            ending[stay.freed % n].append(stay)
            if stay.source is not None:
                fetching[stay.issued % n].append(stay)
            else:
                creating[stay.start].append(stay)
        return creating, leaving, ending, fetching


def find_stays(problem: Problem, kept: frozenset[int]) -> Stays:
    """Join uses over the gaps in `kept`, those that are always kept, and empty ones."""
    kept |= problem.always_kept
    passing: list[Stay] = []
    resident = set()
    for chunk, chain in enumerate(problem.uses):
        if not chain:
            continue
        first = problem.first_gap[chunk]
        gaps = problem.gaps[first : first + len(chain)]
        joined = [first + at in kept or gap.start == gap.stop for at, gap in enumerate(gaps)]
        if all(joined):
            resident.add(chunk)
        else:
            passing += _chain_of_stays(problem, chunk, gaps, joined)
    return Stays(tuple(sorted(passing, key=lambda stay: (stay.start, stay.chunk))), frozenset(resident))


def _chain_of_stays(problem: Problem, chunk: int, gaps: Sequence[Gap], joined: Sequence[bool]) -> Iterable[Stay]:
    n = len(problem.durations_s)
    chain = problem.uses[chunk]
    count = len(chain)
    breaks = [at for at in range(count) if not joined[at]]
    written: set[int] = set()
    """Epochs that are below already, walking through an iteration."""
    for _ in range(2):  # the second time round, what was written late in the iteration before is known
        found = []
        for index, last in enumerate(breaks):
            previous = breaks[index - 1]
            first = (previous + 1) % count
            for use in _between(first, last, count):
                if chain[use].writes:
                    written.discard(use)
            gap = gaps[last]
            dirty = gap.epoch >= 0 and gap.epoch not in written
            is_saved = dirty and (gap.after is After.LIVES or gap.needed_below is not None)
            if is_saved:
                written.add(gap.epoch)
            start = chain[first].start
            stop = chain[last].stop + (n if last < first else 0)
            before = gaps[previous]
            ready = before.ready - (n if before.stop > start else 0)
            source = None if chain[first].creates else problem.below
            found.append(Stay(chunk, start, stop, source, ready, problem.below if is_saved else None, start, stop))
    return found


def _between(first: int, last: int, count: int) -> Iterable[int]:
    return range(first, last + 1) if first <= last else (*range(first, count), *range(last + 1))


def prefetch(problem: Problem, stays: Stays, free: Room, machine: Machine, *, lead: float) -> None:
    """Set when each fetch is issued: early enough to arrive in time, as far as there is room. Changes `stays` and
    `free`.

    Walking backward through the step, each copy gets the latest start at which it, and all copies needed after it,
    arrive in time if copies on the link follow each other; `lead` multiplies the time it takes, against jitter. Room
    is then given in the order of need.

    Args:
        problem: the trace and its chunks.
        stays: whose `issued` is set.
        free: what they leave of DEVICE.
        machine: the speed of the link.
        lead: 0 to fetch at the moment of need.
    """
    fetches = [stay for stay in stays.passing if stay.source is not None]
    if lead <= 0 or not fetches:
        return
    n = len(problem.durations_s)
    begins = [0.0, *accumulate(problem.durations_s)]
    wanted = _latest_starts(problem, fetches, begins, machine, lead)
    last_issued = -n
    for stay, start_s in zip(fetches, wanted, strict=True):
        nbytes = problem.nbytes[stay.chunk]
        floor = max(stay.earliest, last_issued, stay.start - n + 1, _moment_at(begins, start_s, stay.start))
        short = free.last_short(floor, stay.start, nbytes)
        at = min(stay.start, floor if short is None else short + 1)
        free.take(at, stay.start, nbytes)
        stay.issued = last_issued = at


def linger(problem: Problem, stays: Stays, free: Room, machine: Machine) -> None:
    """Free what is copied to the tier below when the copy is over, where there is room for so long. Changes `stays` and
    `free`.

    A slab freed sooner is the next to be taken, and computing would wait for the copy. Memory of activations is given
    back when it is freed, so computing waits then: that is put off for as long as there is room at all.
    """
    n = len(problem.durations_s)
    begins = [0.0, *accumulate(problem.durations_s)]
    limits = _last_frees(problem, stays)
    link = machine.links[problem.tier, problem.below]
    over_s = 0.0
    for stay in sorted((stay for stay in stays.passing if stay.target is not None), key=lambda stay: stay.stop % n):
        stop = stay.stop % n
        nbytes = problem.nbytes[stay.chunk]
        over_s = max(over_s, begins[stop]) + link.copy_s(nbytes)
        freed = min(bisect_left(begins, over_s, hi=n), limits[stay.chunk, stay.start] - stay.stop + stop)
        if not is_reused(problem.chunks[stay.chunk], problem.tier):
            short = partial(_is_short_up_to, free, stop, nbytes)
            freed = stop + bisect_left(range(stop, freed), True, key=short)
        if stop < freed and free.last_short(stop, freed, nbytes) is None:
            free.take(stop, freed, nbytes)
            stay.freed = stay.stop + freed - stop


def _is_short_up_to(free: Room, start: int, nbytes: int, at: int) -> bool:
    return free.last_short(start, at + 1, nbytes) is not None


def free_room(problem: Problem, stays: Stays, budget: Sequence[int]) -> Room:
    """Return the bytes that stays leave of `budget`, from when their slabs are taken to when they are freed."""
    resident_nbytes = sum(problem.nbytes[chunk] for chunk in stays.resident)
    free = Room([have - resident_nbytes for have in budget])
    for stay in stays.passing:
        free.take(stay.issued, stay.freed, problem.nbytes[stay.chunk])
    return free


def _last_frees(problem: Problem, stays: Stays) -> dict[tuple[int, int], int]:
    """By (chunk, start) of a stay: the last moment it may be freed in, as another begins or the tier below writes."""
    n = len(problem.durations_s)
    chains: dict[int, list[Stay]] = {}
    for stay in stays.passing:
        chains.setdefault(stay.chunk, []).append(stay)
    by_use = {}
    for gap in problem.gaps:
        by_use[gap.chunk, gap.start % n] = gap
    last = {}
    for chunk, chain in chains.items():
        for at, stay in enumerate(chain):
            following = chain[(at + 1) % len(chain)]
            begins = following.issued if following.source is not None else following.start
            while begins < stay.stop:
                begins += n
            gap = by_use[chunk, stay.stop % n]
            if gap.after is After.RENEWED:
                begins = min(begins, gap.ready - 1 - gap.start + stay.stop)
            if gap.needed_below is not None:
                begins = min(begins, gap.needed_below - gap.start + stay.stop)
            last[chunk, stay.start] = begins
    return last


def _moment_at(begins: Sequence[float], at_s: float, last: int) -> int:
    """Return the last moment up to `last` that begins at `at_s` or before, below 0 if it lies in the iteration
    before."""
    n = len(begins) - 1
    found = bisect_right(begins, at_s, hi=last + 1) - 1
    if found >= 0:
        return found
    return bisect_right(begins, at_s, hi=n, key=lambda begin_s: begin_s - begins[-1]) - 1 - n


def _latest_starts(
    problem: Problem, fetches: Sequence[Stay], begins: Sequence[float], machine: Machine, lead: float
) -> list[float]:
    iteration_s = begins[-1]
    link = machine.links[problem.below, problem.tier]
    starts = [0.0] * len(fetches)
    # The first copies of the next iteration queue behind the last ones of this: go round twice.
    limit_s = float("inf")
    for iteration in (1, 0):
        for at in range(len(fetches) - 1, -1, -1):
            stay = fetches[at]
            takes_s = link.copy_s(problem.nbytes[stay.chunk])
            limit_s = min(begins[stay.start] + iteration * iteration_s, limit_s) - lead * takes_s
            limit_s = max(
                limit_s, (iteration - 1) * iteration_s
            )  # a link that cannot keep up does not push need back for ever
            starts[at] = limit_s - iteration * iteration_s
    return starts


def keep_slabs(problem: Problem, kept: frozenset[int], stays: Stays, free: Room) -> Stays:
    """Let chunks whose content dies keep their slab until the next content begins, where room is left over. Changes
    `free`."""
    spare = set()
    dying = [
        at
        for at, g in enumerate(problem.gaps)
        if g.after is After.DIES
        and g.needed_below is None
        and g.start < g.stop
        and not problem.trace.is_remote(problem.chunks[g.chunk])
        and is_reused(problem.chunks[g.chunk], problem.tier)
    ]
    for at in sorted(dying, key=lambda at: (problem.gaps[at].stop - problem.gaps[at].start, at)):
        gap = problem.gaps[at]
        nbytes = problem.nbytes[gap.chunk]
        if free.last_short(gap.start, gap.stop, nbytes) is None:
            spare.add(at)
            free.take(gap.start, gap.stop, nbytes)
    if not spare:
        return stays
    issued = {(stay.chunk, stay.start): stay.issued for stay in stays.passing if stay.source is not None}
    freed = {(stay.chunk, stay.stop): stay.freed for stay in stays.passing}
    joined = find_stays(problem, kept | spare)
    for stay in joined.passing:
        stay.freed = freed.get((stay.chunk, stay.stop), stay.stop)
        stay.issued = issued.get((stay.chunk, stay.start), stay.issued)
    return joined
