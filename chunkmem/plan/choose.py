"""Which gaps to keep. Pure: a problem and the room of each moment in, indices of gaps out.

Only gaps whose content lives are candidates; the others cost the same either way. All choosers treat the step as a
loop: what is kept at the end of an iteration is what the next one begins with.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from chunkmem.plan.gaps import After, Problem

Order = Callable[[int, int, int], tuple[int, ...]]


def furthest_next_use(start: int, stop: int, chunk: int) -> tuple[int, ...]:
    """Order for `sweep`: the chunk needed last leaves first. Source: Belady, IBM Systems Journal 5(2), 1966."""
    return (-stop, chunk)


def sweep(problem: Problem, room: Sequence[int], order: Order) -> frozenset[int]:
    """Keep every gap until room is short, then give up the open one that comes first in `order`.

    Args:
        problem: the gaps.
        room: bytes that the chunks in use leave free, by moment.
        order: called with the moments in which an open gap begins and ends, and its chunk; the least leaves first.
    """
    wrapping = {at for at in problem.free_to_choose if problem.gaps[at].stop > len(room)}
    # What is open at an iteration's end is what the next one begins with. Giving up more of it later only makes
    # room.
    _, wrapping = _one_iteration(problem, room, order, wrapping)
    kept, wrapping = _one_iteration(problem, room, order, wrapping)
    return frozenset(kept | wrapping)


def _one_iteration(
    problem: Problem, room: Sequence[int], order: Order, open_at_start: set[int]
) -> tuple[set[int], set[int]]:
    """Return the gaps kept that lie within the iteration, and those kept that reach into the next one.

    Of the latter only `open_at_start` may be kept; each is met twice, its end before its beginning.
    """
    n = len(room)
    starting: list[list[int]] = [[] for _ in range(n)]
    ending: list[list[int]] = [[] for _ in range(n + 1)]
    heap: list[tuple[tuple[int, ...], int]] = []
    is_open: dict[int, tuple[int, ...]] = {}
    """By open gap: its key, which tells two occurrences of the gap apart."""
    kept: set[int] = set()
    load = 0
    for at in problem.free_to_choose:
        gap = problem.gaps[at]
        if gap.stop <= n or at in open_at_start:
            starting[gap.start].append(at)
    for at in sorted(open_at_start):
        gap = problem.gaps[at]
        is_open[at] = order(gap.start - n, gap.stop - n, gap.chunk)
        ending[gap.stop - n].append(at)
        heapq.heappush(heap, (is_open[at], at))
        load += problem.nbytes[gap.chunk]
    let_go: set[int] = set()
    for moment in range(n):
        for at in ending[moment]:
            if at in is_open:
                del is_open[at]
                kept.add(at)
                load -= problem.nbytes[problem.gaps[at].chunk]
        for at in starting[moment]:
            gap = problem.gaps[at]
            if at not in let_go:
                is_open[at] = order(gap.start, gap.stop, gap.chunk)
                if gap.stop <= n:
                    ending[gap.stop].append(at)
                heapq.heappush(heap, (is_open[at], at))
                load += problem.nbytes[gap.chunk]
        while load > room[moment]:
            key, at = heapq.heappop(heap)
            if is_open.get(at) == key:
                del is_open[at]
                let_go.add(at)
                load -= problem.nbytes[problem.gaps[at].chunk]
    kept.update(at for at in is_open if problem.gaps[at].stop == n)
    return kept - open_at_start, {at for at in is_open if problem.gaps[at].stop > n}


def traffic_nbytes(problem: Problem, kept: frozenset[int]) -> tuple[int, int]:
    """Return the bytes an iteration moves to DEVICE and to the tier below if exactly `kept` gaps are kept, and those
    that are empty or always kept."""
    fetched = saved = 0
    kept |= problem.always_kept
    written: set[tuple[int, int]] = set()
    for at, gap in enumerate(problem.gaps):
        if at not in kept and gap.start < gap.stop:
            fetched += problem.fetch_nbytes(gap)
            if gap.after is After.LIVES and gap.epoch >= 0 and (gap.chunk, gap.epoch) not in written:
                written.add((gap.chunk, gap.epoch))
                saved += problem.nbytes[gap.chunk]
        if gap.needed_below is not None and (gap.chunk, gap.epoch) not in written:
            written.add((gap.chunk, gap.epoch))
            saved += problem.nbytes[gap.chunk]
    return fetched, saved
