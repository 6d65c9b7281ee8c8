"""Keep the gaps that save the most traffic: a search over what is kept when room is short. Pure.

Belady's rule is not the best once evictions may cost a write-back. Here several ways to make room are followed side by
side, as states (what is kept, whose version is below already). All of them while they are few, so small problems are
solved exactly; else the cheapest `width` at each moment.

The search is a generator, so that it can be spread over training steps: it yields the work it has done since it yielded
last, in states looked at.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from itertools import islice

from chunkmem.plan.choose import furthest_next_use, sweep, traffic_nbytes
from chunkmem.plan.gaps import After, Gap, Problem

State = tuple[int, int]
"""Bit masks over chunks: kept at present; the present version is on the tier below."""
Trail = tuple[int, "Trail"] | None
"""Gaps given up, the last first."""

Found = tuple[int, frozenset[int]]
"""Bytes moved for gaps given up, and these gaps."""

_PIECE = 5000
"""States looked at between two yields: some milliseconds."""
_ALL_STARTS = 1000
"""Up to this many states that an iteration may begin with, each is tried."""
_ALL_CROSSING = 16
"""No more chunks than this can live across an iteration's end for that."""
_ALL_VICTIMS = 8
"""Among up to this many chunks, each is tried as the one to leave; among more, the likely ones."""


def least_traffic(
    problem: Problem, room: Sequence[int], *, width: int, max_work: int | None = None
) -> Generator[int, None, frozenset[int]]:
    """Look for the gaps to keep so that least is moved; yield the work done, return the gaps.

    Exact where no more than `width` states have to be followed and `max_work` suffices, and never worse than Belady's
    rule.

    Args:
        problem: the gaps.
        room: bytes that the chunks in use leave free, by moment.
        width: most states to follow side by side.
        max_work: states to look at in all; then the best that was found is returned. None: no limit.
    """
    best = sweep(problem, room, furthest_next_use)
    best_nbytes = sum(traffic_nbytes(problem, best))
    candidates = frozenset(problem.free_to_choose)
    fixed_nbytes = sum(traffic_nbytes(problem, candidates))
    if best == candidates:
        return best
    search = _Search(problem, room, width)
    work = 0
    for start in search.starts(best):
        following = search.run(start, best_nbytes - fixed_nbytes)
        while True:
            try:
                done = next(following)
            except StopIteration as end:
                found: Found | None = end.value
                break
            work += done
            yield done
            if max_work is not None and work >= max_work:
                return best
        if found is not None:
            nbytes, let_go = found
            best, best_nbytes = candidates - let_go, nbytes + fixed_nbytes
    return best


class _Search:
    """What happens at each moment, as masks over chunks, and the states followed through them."""

    def __init__(self, problem: Problem, room: Sequence[int], width: int) -> None:
        self.problem = problem
        self.room = room
        self.width = width
        n = self.n = len(room)
        self.ends = [0] * (n + 1)
        self.starts_at: list[list[int]] = [[] for _ in range(n)]
        """Gaps that begin, by moment."""
        self.new_versions: list[tuple[int, int]] = [(0, 0)] * n
        """Chunks written on DEVICE, by moment: those whose version goes below in any case, and the others."""
        self.crossing: dict[int, int] = {}
        """By chunk, the gap that reaches into the next iteration."""
        gaps = problem.gaps
        for at in problem.free_to_choose:
            gap = gaps[at]
            self.starts_at[gap.start].append(at)
            self.ends[gap.stop if gap.stop <= n else gap.stop - n] |= 1 << gap.chunk
            if gap.stop > n:
                self.crossing[gap.chunk] = at
        needed = {(gap.chunk, gap.epoch) for gap in gaps if gap.needed_below is not None}
        for chunk, chain in enumerate(problem.uses):
            for index, use in enumerate(chain):
                if use.writes:
                    saved, not_yet = self.new_versions[use.start]
                    if (chunk, index) in needed:
                        saved |= 1 << chunk
                    else:
                        not_yet |= 1 << chunk
                    self.new_versions[use.start] = saved, not_yet
        self.calm = [
            not self.starts_at[at] and at > 0 and room[at] >= room[at - 1]  # what fitted the moment before fits
            for at in range(n)
        ]
        self.dirty = sum(1 << gap.chunk for gap in {g.chunk: g for g in gaps if g.epoch >= 0}.values())
        self.carried = {chunk: gap.epoch for chunk, gap in self._last_gaps() if gap.after is After.LIVES}
        """By chunk whose content lives across an iteration's end, its version then; those in use at that point
        included, those that never leave not."""
        self._loads: dict[int, int] = {0: 0}
        self._known_chunks: dict[int, list[int]] = {}
        """By mask, those in it."""
        self._work = 0
        """States looked at since the last yield."""

    def _last_gaps(self) -> Iterator[tuple[int, Gap]]:
        for chunk, chain in enumerate(self.problem.uses):
            last = self.problem.first_gap[chunk] + len(chain) - 1
            if chain and last not in self.problem.always_kept:
                yield chunk, self.problem.gaps[last]

    def starts(self, known: frozenset[int]) -> Iterator[State]:
        """Yield states an iteration may begin with: that of a known solution, then every other one where they are
        few."""
        kept = sum(1 << c for c, at in self.crossing.items() if at in known)
        likely = kept, self._saved_at_end(known)
        yield likely
        undecided = sorted({*self.crossing, *(c for c in self.carried if self.dirty >> c & 1)})
        if len(undecided) <= _ALL_CROSSING:
            limit = min(_ALL_STARTS, 200_000 // self.n)
            found = list(islice(self._possible_starts(undecided, (0, 0)), limit + 1))
            if len(found) <= limit:
                yield from (start for start in found if start != likely)

    def _possible_starts(self, undecided: Sequence[int], state: State) -> Iterator[State]:
        if not undecided:
            yield state
            return
        (kept, saved), bit, others = state, 1 << undecided[0], undecided[1:]
        may_leave = undecided[0] in self.crossing
        if may_leave:  # what left has its newest version below
            yield from self._possible_starts(others, (kept, saved | self.dirty & bit))
            kept |= bit
        if self.load(kept & ~self.ends[0]) <= self.room[0]:
            yield from self._possible_starts(others, (kept, saved))
            if self.dirty & bit:
                yield from self._possible_starts(others, (kept, saved | bit))

    def _saved_at_end(self, known: frozenset[int]) -> int:
        """Chunks whose last version of an iteration has been written to the tier below by its end."""
        gaps = self.problem.gaps
        mask = 0
        for at in range(len(gaps)):
            gap = gaps[at]
            if gap.epoch >= 0 and self.carried.get(gap.chunk) == gap.epoch and gap.start < gap.stop:
                # Else the version is of the iteration before, or leaves in the next.
                begun = gap.use >= gap.epoch and gap.start > 0
                if begun and (at not in known or gap.needed_below is not None):
                    mask |= 1 << gap.chunk
        return mask

    def load(self, mask: int) -> int:
        """Bytes of the chunks in a mask."""
        found = self._loads.get(mask)
        if found is None:
            lowest = mask & -mask
            found = self._loads[mask] = self.load(mask ^ lowest) + self.problem.nbytes[lowest.bit_length() - 1]
        return found

    def run(self, start: State, limit_nbytes: int) -> Generator[int, None, Found | None]:
        """Follow one iteration from `start` back to `start`; return None if none moves fewer than `limit_nbytes`.

        Yields the work done, now and then.
        """
        gaps = self.problem.gaps
        kept_at_start = locked = start[0]  # what crosses the boundary is settled by `start`
        open_gap = {c: at for c, at in self.crossing.items() if kept_at_start >> c & 1}
        doomed_nbytes = sum(self.problem.nbytes[c] for c in self.crossing if not kept_at_start >> c & 1)
        """Of gaps that reach into the next iteration, which does not begin with them."""
        states: dict[State, tuple[int, Trail]] = {start: (0, None)}
        for moment in range(self.n):
            ends = self.ends[moment]
            saved, not_yet = self.new_versions[moment]
            starts = 0
            for at in self.starts_at[moment]:
                chunk = gaps[at].chunk
                open_gap[chunk] = at
                starts |= 1 << chunk
            if ends or saved or not_yet or starts:
                locked &= ~ends
                states = self._advance(states, ~ends, saved, ~not_yet, starts)
                for at in self.starts_at[moment]:
                    if gaps[at].stop > self.n:
                        bit = 1 << gaps[at].chunk
                        if kept_at_start & bit:
                            locked |= bit
                        else:
                            states = self._drop(states, at)
                            doomed_nbytes -= self.problem.nbytes[gaps[at].chunk]
            if self.calm[moment]:
                self._work += len(states)
            else:
                states = self._make_room(states, moment, locked, open_gap, limit_nbytes - doomed_nbytes)
            if self._work >= _PIECE or not states:
                yield self._take_work()
            if not states:
                return None
        yield self._take_work()
        ends = ~self.ends[self.n]
        carried = sum(1 << c for c in self.carried) & self.dirty
        finals = [
            (nbytes, trail)
            for (kept, paid), (nbytes, trail) in states.items()
            if kept & ends == kept_at_start and paid & carried == start[1] & carried
        ]
        if not finals:
            return None
        nbytes, trail = min(finals, key=lambda final: final[0])
        let_go = set()
        while trail is not None:
            at, trail = trail
            let_go.add(at)
        return nbytes, frozenset(let_go)

    def _take_work(self) -> int:
        work, self._work = self._work, 0
        return work

    def _advance(
        self, states: dict[State, tuple[int, Trail]], ends: int, saved: int, not_yet: int, starts: int
    ) -> dict[State, tuple[int, Trail]]:
        self._work += len(states)
        moved: dict[State, tuple[int, Trail]] = {}
        for (kept, paid), way in states.items():
            state = kept & ends | starts, (paid | saved) & not_yet
            if state not in moved or way[0] < moved[state][0]:
                moved[state] = way
        return moved

    def _leave(self, state: State, way: tuple[int, Trail], at: int) -> tuple[State, tuple[int, Trail]]:
        kept, paid = state
        chunk = self.problem.gaps[at].chunk
        bit, nbytes = 1 << chunk, self.problem.nbytes[chunk]
        cost = nbytes
        if self.dirty & bit and not paid & bit:
            cost += nbytes
            paid |= bit
        return (kept & ~bit, paid), (way[0] + cost, (at, way[1]))

    def _drop(self, states: dict[State, tuple[int, Trail]], at: int) -> dict[State, tuple[int, Trail]]:
        dropped: dict[State, tuple[int, Trail]] = {}
        for state, way in states.items():
            after, longer = self._leave(state, way, at)
            if after not in dropped or longer[0] < dropped[after][0]:
                dropped[after] = longer
        return dropped

    def _make_room(
        self,
        states: dict[State, tuple[int, Trail]],
        moment: int,
        locked: int,
        open_gap: dict[int, int],
        limit_nbytes: int,
    ) -> dict[State, tuple[int, Trail]]:
        room, loads, sizes, dirty = self.room[moment], self._loads, self.problem.nbytes, self.dirty
        chunks_in = self._known_chunks
        fitting: dict[State, tuple[int, Trail]] = {}
        while states:
            beyond: dict[State, tuple[int, Trail]] = {}
            self._work += len(states)
            for state, way in states.items():
                cost, trail = way
                if cost >= limit_nbytes:
                    continue
                kept, paid = state
                load = loads.get(kept)
                if (self.load(kept) if load is None else load) <= room:
                    if state not in fitting or cost < fitting[state][0]:
                        fitting[state] = way
                    continue
                free = kept & ~locked
                victims = chunks_in.get(free) or self._chunks_in(free)
                if len(victims) > _ALL_VICTIMS:
                    victims = self._likely(victims, paid, open_gap)
                self._work += len(victims)
                for chunk in victims:  # as `_leave`, which is too slow to be called here
                    bit, nbytes = 1 << chunk, cost + sizes[chunk]
                    if dirty & bit and not paid & bit:
                        nbytes += sizes[chunk]
                        after = kept ^ bit, paid | bit
                    else:
                        after = kept ^ bit, paid
                    if nbytes >= limit_nbytes:
                        continue
                    known = beyond.get(after)
                    if known is None or nbytes < known[0]:
                        beyond[after] = nbytes, (open_gap[chunk], trail)
            states = self._cheapest(beyond)
        return self._cheapest(fitting)

    def _cheapest(self, states: dict[State, tuple[int, Trail]]) -> dict[State, tuple[int, Trail]]:
        if len(states) <= self.width:
            return states
        order = sorted([(way[0], state) for state, way in states.items()])
        return {state: states[state] for _, state in order[: self.width]}

    def _chunks_in(self, mask: int) -> list[int]:
        """Return the chunks in a mask, and remember them."""
        found = self._known_chunks[mask] = []
        while mask:
            lowest = mask & -mask
            found.append(lowest.bit_length() - 1)
            mask ^= lowest
        return found

    def _likely(self, chunks: Sequence[int], paid: int, open_gap: dict[int, int]) -> list[int]:
        """Return those of many chunks which are likely to be the one to leave."""
        gaps = self.problem.gaps
        now = min(gaps[open_gap[chunk]].start for chunk in chunks)
        later = {}
        for chunk in chunks:
            at = open_gap[chunk]
            stop = gaps[at].stop
            later[chunk] = -(stop + self.n if stop <= now else stop), at
        found = sorted(chunks, key=later.__getitem__)
        clean = [chunk for chunk in found if (paid | ~self.dirty) >> chunk & 1]
        return clean[:3] + [chunk for chunk in found if chunk not in clean][:3]
