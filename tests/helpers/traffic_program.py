"""The least bytes that any plan has to move for a trace; it judges `chunkmem.report.bound`: a program, solved by HiGHS.

See [Note: The interval program] in `traffic_gaps.py`. The linear relaxation also bounds the mean of steps that are not
alike, as demand paging has them, for the mean of their decisions is feasible; the integer optimum is that of one step
repeated, as plans are. `brute_force` finds the same optimum by following every sequence of residencies there is, and
shares nothing with the program but which chunks are in use and which are written.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_array

from benchmarks.traffic.uses import chunks_in_use, chunks_written, rooms_beside
from chunkmem.data.trace import Kind, Trace
from chunkmem.data.types import ChunkId, Role, Tier
from tests.helpers.traffic_gaps import Gap, Problem, derive


@dataclass(frozen=True, slots=True)
class Bound:
    """Bytes moved in an iteration, H2D and D2H together."""

    lp_nbytes: float
    """No plan and no policy moves less, on the mean of its iterations."""
    integer_nbytes: int | None
    """What the best plan moves; None if not asked for, or not found in time."""
    certain_nbytes: int
    """Moved whatever is kept: what updates on HOST take and give back."""


def traffic_bound(
    trace: Trace, budgets: Sequence[int], update_tiers: Mapping[int, Tier], *, integer_within_s: float | None = None
) -> Bound:
    """Bound the bytes that an iteration moves between HOST and DEVICE.

    Args:
        budgets: bytes that chunks may take on DEVICE in each moment.
        update_tiers: where each group that the trace updates is updated.
        integer_within_s: seconds that the search for the integer optimum may take; None: no search.

    Raises:
        CapacityError: what a moment uses does not fit its budget.
        TraceError: the trace asks for what no plan can do.
    """
    problem = derive(trace, update_tiers)
    certain, unit = problem.certain_nbytes, problem.unit_nbytes
    program = _Program(problem, [room // unit for room in rooms_beside(trace, budgets, update_tiers)])
    lp_nbytes = certain + unit * program.relaxed()
    if integer_within_s is None:
        return Bound(lp_nbytes, None, certain)
    optimum = program.integer(integer_within_s)
    return Bound(lp_nbytes, None if optimum is None else certain + unit * optimum, certain)


class _Program:
    """Minimise sum h_g (1 - k_g) + sum n_e w_e over keeping k and writing back w, both in [0, 1], in units."""

    def __init__(self, problem: Problem, rooms: Sequence[int]) -> None:
        sizes = np.array([gap.nbytes // problem.unit_nbytes for gap in problem.gaps], dtype=float)
        epochs = np.array(problem.epoch_nbytes, dtype=float) / problem.unit_nbytes
        self._num_gaps, self._fetch = len(sizes), float(sizes.sum())
        self._cost = np.concatenate([-sizes, epochs])
        upper = np.ones(len(self._cost))
        covering = self._covering(problem.gaps, rooms)
        for room, covers in covering:
            # Too large for the room by itself: not kept even in part.
            for g in covers:
                upper[g] = upper[g] if sizes[g] <= room else 0.0
        self._bounds = Bounds(np.zeros(len(self._cost)), upper)
        rows = [(float(room), {g: sizes[g] for g in covers}) for room, covers in covering]
        for g, gap in enumerate(problem.gaps):
            if gap.epoch is not None:  # w >= 1 - k
                rows.append((-1.0, {g: -1.0, self._num_gaps + gap.epoch: -1.0}))
        self._right = np.array([right for right, _ in rows])
        columns = [column for _, row in rows for column in row]
        starts = np.cumsum([0, *(len(row) for _, row in rows)])
        values = [value for _, row in rows for value in row.values()]
        self._matrix = csr_array((values, columns, starts), shape=(len(rows), len(self._cost)))

    @staticmethod
    def _covering(gaps: Sequence[Gap], rooms: Sequence[int]) -> list[tuple[int, frozenset[int]]]:
        """The gaps over each moment and their room; of moments in a row only those that say more than the next."""
        begin, end = defaultdict(list), defaultdict(list)
        open_now: set[int] = set()
        for g, gap in enumerate(gaps):
            begin[gap.first].append(g)
            end[(gap.first + gap.num_moments) % len(rooms)].append(g)
            if gap.first + gap.num_moments > len(rooms):
                open_now.add(g)
        covering: list[tuple[int, frozenset[int]]] = []
        for index, room in enumerate(rooms):
            open_now.difference_update(end[index])
            open_now.update(begin[index])
            row = (room, frozenset(open_now))
            if covering and covering[-1][1] <= row[1] and covering[-1][0] >= room:
                covering[-1] = row
            elif not (covering and row[1] <= covering[-1][1] and room >= covering[-1][0]):
                covering.append(row)
        return covering

    def relaxed(self) -> float:
        if not len(self._cost):
            return 0.0
        bounds = np.column_stack([self._bounds.lb, self._bounds.ub])
        result = linprog(self._cost, A_ub=self._matrix, b_ub=self._right, bounds=bounds, method="highs")
        assert result.status == 0, result.message
        return self._fetch + float(result.fun)

    def integer(self, time_limit_s: float) -> int | None:
        if not len(self._cost):
            return 0
        result = milp(
            self._cost,
            integrality=np.arange(len(self._cost)) < self._num_gaps,
            bounds=self._bounds,
            constraints=LinearConstraint(self._matrix, -np.inf, self._right),
            options={"time_limit": time_limit_s, "mip_rel_gap": 0.0},
        )
        assert result.status in (0, 1), result.message
        return round(self._fetch + result.fun) if result.status == 0 else None


Residency = frozenset[tuple[ChunkId, bool]]
"""The chunks on DEVICE whose content is still read, each with whether HOST lacks it."""


def brute_force(trace: Trace, budgets: Sequence[int], update_tiers: Mapping[int, Tier]) -> int:
    """Return the least bytes moved by an iteration that ends as it began, of all iterations there are. For a few chunks
    only.

    Chunks come when they are used and leave when there is no room: to fetch earlier or to drop sooner saves nothing.
    How an iteration begins is decided chunk by chunk. Meanwhile the undecided ones are taken to begin on both tiers and
    may end anywhere, which costs no iteration more than it does; what already moves as much as the best iteration known
    is cut off.

    Raises:
        CapacityError: what a moment uses does not fit its budget.
    """
    search = _Search(trace, budgets, update_tiers)
    # Where there is the least room the fewest chunks can be.
    start = min(range(len(trace.moments)), key=search.rooms.__getitem__)
    least = search.least_nbytes(start, decided={}, best=None)
    assert least is not None, "every iteration can begin with all on HOST but what is in use"
    return least


class _Begin(enum.Enum):
    """Where an iteration has a chunk's content as it begins."""

    HOST = enum.auto()
    BOTH = enum.auto()
    DEVICE = enum.auto()


class _Search:
    """All courses of residency, moment by moment."""

    def __init__(self, trace: Trace, budgets: Sequence[int], update_tiers: Mapping[int, Tier]) -> None:
        self.trace, self.update_tiers = trace, update_tiers
        self.rooms = rooms_beside(trace, budgets, update_tiers)
        self.in_use = chunks_in_use(trace, update_tiers)
        self._live = self._live_after()
        self._ways_known: dict[tuple[int, Residency], list[tuple[Residency, int]]] = {}
        self._written = {chunk for index in range(len(trace.moments)) for chunk in chunks_written(trace, index)}

    def nbytes_of(self, chunks: Iterable[ChunkId]) -> int:
        return sum(self.trace.chunk_nbytes[chunk] for chunk in chunks)

    def _is_host_update(self, index: int) -> bool:
        moment = self.trace.moments[index]
        return moment.kind is Kind.UPDATE and self.update_tiers[moment.chunk.group] is Tier.HOST

    def _live_after(self) -> list[frozenset[ChunkId]]:
        """The chunks whose content after each moment is read before it is consumed or begun again."""
        live: set[ChunkId] = set()
        after: list[frozenset[ChunkId]] = [frozenset()] * len(self.trace.moments)
        for _ in range(2):
            for index in reversed(range(len(self.trace.moments))):
                after[index] = frozenset(live)
                moment = self.trace.moments[index]
                live |= self.in_use[index]
                if self._is_host_update(index):
                    live |= set(self.trace.update(moment.chunk.group).chunks)
                if moment.kind in (Kind.CREATE, Kind.CONSUME):
                    live.discard(moment.chunk)
        return after

    def least_nbytes(self, start: int, *, decided: dict[ChunkId, _Begin], best: int | None) -> int | None:
        """Return the least bytes of an iteration from the end of moment `start` to it again, or `best` if none is
        better."""
        undecided = [chunk for chunk in self._present_after(start, decided) if chunk not in decided]
        first = {**decided, **dict.fromkeys(undecided, _Begin.BOTH)}
        costs = {frozenset((c, how is _Begin.DEVICE) for c, how in first.items() if how is not _Begin.HOST): 0}
        for step in range(1, len(self.rooms) + 1):
            costs = self._after_moment((start + step) % len(self.rooms), costs, below=best)
        closings = {last: self._closing_nbytes(last, decided) for last in costs}
        iterations = [cost + closing for last, cost in costs.items() if (closing := closings[last]) is not None]
        if not iterations or (best is not None and min(iterations) >= best):
            return best
        if not undecided:
            return min(iterations)
        for how in _Begin:
            if how is not _Begin.DEVICE or undecided[0] in self._written:
                best = self.least_nbytes(start, decided={**decided, undecided[0]: how}, best=best)
        return best

    def _present_after(self, index: int, decided: Mapping[ChunkId, _Begin]) -> list[ChunkId]:
        """The chunks that may be on DEVICE after a moment, content and all, if those decided to be are; large first."""
        taken = {c for c, how in decided.items() if how is not _Begin.HOST and c not in self.in_use[index]}
        room = self.rooms[index] - self.nbytes_of(taken)
        size = self.trace.chunk_nbytes
        present = [c for c in self._live[index] if c in self.in_use[index] or size[c] <= room]
        return sorted(present, key=lambda chunk: (-size[chunk], str(chunk)))

    def _after_moment(self, index: int, costs: Mapping[Residency, int], *, below: int | None) -> dict[Residency, int]:
        """Take every residency through a moment in every way, and keep the cheapest way to each that results."""
        after: dict[Residency, int] = {}
        for residency, cost in costs.items():
            for result, moved_nbytes in self._ways(index, residency):
                total = cost + moved_nbytes
                if (below is None or total < below) and total < after.get(result, total + 1):
                    after[result] = total
        return after

    def _ways(self, index: int, residency: Residency) -> list[tuple[Residency, int]]:
        """What a moment can make of a residency, and the bytes moved."""
        if (index, residency) not in self._ways_known:
            self._ways_known[index, residency] = [
                (result, spilled_nbytes + moved_nbytes)
                for kept, spilled_nbytes in self._make_room(index, residency)
                for result, moved_nbytes in [self._run(index, kept)]
            ]
        return self._ways_known[index, residency]

    def _make_room(self, index: int, residency: Residency) -> Iterator[tuple[Residency, int]]:
        """What may stay, by every smallest set of leavers, and the bytes their leaving moves."""
        idle = sorted((item for item in residency if item[0] not in self.in_use[index]), key=str)
        excess = self.nbytes_of({chunk for chunk, _ in idle}) - self.rooms[index]
        for number in range(len(idle) + 1):
            for leaving in combinations(idle, number):
                left = self.nbytes_of({chunk for chunk, _ in leaving})
                if left >= excess and all(left - self.nbytes_of((chunk,)) < excess for chunk, _ in leaving):
                    yield residency - set(leaving), self.nbytes_of({chunk for chunk, dirty in leaving if dirty})

    def _run(self, index: int, residency: Residency) -> tuple[Residency, int]:
        """Fetch what the moment uses and let it write; return what is there after it and the bytes moved."""
        moment, state = self.trace.moments[index], dict(residency)
        moved = 0
        for chunk in self.in_use[index] - state.keys():
            creates = moment.kind is Kind.CREATE and moment.chunk == chunk
            moved += 0 if creates else self.trace.chunk_nbytes[chunk]
            state[chunk] = False
        if self._is_host_update(index):
            for chunk in self.trace.update(moment.chunk.group).chunks:
                if chunk in state:
                    moved += state[chunk] * self.trace.chunk_nbytes[chunk]
                    state[chunk] = False
                    if chunk.role is not Role.GRAD:
                        del state[chunk]
        else:
            state.update(dict.fromkeys(chunks_written(self.trace, index), True))
        return frozenset(item for item in state.items() if item[0] in self._live[index]), moved

    def _closing_nbytes(self, last: Residency, decided: Mapping[ChunkId, _Begin]) -> int | None:
        """Bytes that make the end of an iteration its beginning; None if something would have to be fetched."""
        ended, moved = dict(last), 0
        for chunk, how in decided.items():
            if how is not _Begin.HOST and chunk not in ended:
                return None
            # What is clean at the end serves an iteration that begins with it dirty: that costs no more.
            if how is not _Begin.DEVICE and ended.get(chunk, False):
                moved += self.trace.chunk_nbytes[chunk]
        return moved
