"""The least bytes that any plan has to move for a trace: a bound certified by Lagrange multipliers, no solver needed.

Keeping a gap takes its chunk's bytes in each of its moments; letting it go costs a fetch, and one write-back for all
gaps of a dirty epoch. Put a price on each byte of each moment instead of a limit. Then nothing ties one epoch to
another: it keeps all its gaps for their prices, or pays the write-back and, for each gap, the cheaper of fetch and
price. The sum of those, less what all the room costs at these prices, is at most what any plan moves, whatever the
prices are: a plan that keeps to the room pays no more for it than that.

    moments      0 1 2 3 4 5            price of the gap = chunk's bytes x (p1 + p2 + p3)
    chunk a      W . . . R .            bound = sum over epochs - sum over moments of price x room
    prices         p p p

Good prices are found by subgradient ascent: a moment whose room is overbooked gets dearer, one with room to spare
cheaper. The best ones meet the optimum of the linear program, because the relaxed problem has integer solutions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, gcd
from typing import Any

import numpy as np
import numpy.typing as npt

from chunkmem.data.trace import Kind, Trace
from chunkmem.data.types import Tier
from chunkmem.plan.choose import furthest_next_use, sweep, traffic_nbytes
from chunkmem.plan.gaps import After, Gap, Problem, budgets, find_gaps, require_fit
from chunkmem.plan.machine import Machine

Array = npt.NDArray[Any]

_MEMORIES = (0.97, 0.0)
"""Share of the last direction in the next, by round. With it, neighbouring moments do not trade prices to and fro, as
they do in large traces; without it, small ones with chunks of many sizes are not overshot."""
_MAX_STEPS = 1600
"""In each round."""
_PATIENCE = 60
"""Steps without a better bound before steps are halved."""
_PROGRESS = 1e-5
"""A bound is better if it is by this share."""
_SMALLEST_STEP = 1e-4
_GRAIN = 1 << 40
"""Prices are rounded to this many parts of one, so that the bound itself is integer arithmetic, without any error."""


@dataclass(frozen=True, slots=True)
class TrafficBound:
    """Bytes moved in an iteration, to DEVICE and to HOST together."""

    nbytes: int
    """No plan moves less in an iteration: `relaxed_nbytes` rounded up to what iterations that repeat can move at
    all."""
    relaxed_nbytes: float
    """The same for the mean of iterations that need not be alike."""
    certain_nbytes: int
    """Moved whatever is kept: what updates on HOST take and give back, and chunks that fit next to nothing."""


def traffic_bound(trace: Trace, machine: Machine, update_tiers: Mapping[int, Tier]) -> TrafficBound:
    """Return a lower bound on what an iteration moves between HOST and DEVICE.

    It holds for every plan of this trace within the cap on DEVICE, with each group updated on its tier of
    `update_tiers`. The cap on HOST is not looked at: a smaller one can only cost more.

    Raises:
        CapacityError: a moment does not fit DEVICE, so there is no plan.
        PlanError: the trace updates a group that `update_tiers` has no tier for.
    """
    problem = find_gaps(trace, update_tiers, one_tier=machine.host_nbytes == 0)
    budget = budgets(trace, machine)
    require_fit(problem, budget, machine)
    if machine.host_nbytes == 0:
        return TrafficBound(0, 0.0, 0)
    question = _reduce(problem, budget)
    reached_nbytes = sum(traffic_nbytes(problem, sweep(problem, _room(problem, budget), furthest_next_use)))
    certain, unit = question.certain_nbytes, question.unit_nbytes
    value = Fraction(0)
    if question.gaps:
        relaxation = _Relaxation(question)
        value = max(value, relaxation.certified(relaxation.ascend((reached_nbytes - certain) / unit)))
    return TrafficBound(certain + unit * ceil(value), float(certain + unit * value), certain)


# What there is to decide.


_Epoch = tuple[int, int]
"""Chunk and its version, as in `Gap`."""


@dataclass(frozen=True)
class _Question:
    """The gaps that may be kept or not, in units of `unit_nbytes`, and what is certain."""

    unit_nbytes: int
    """Divides the size of every chunk, so room left by used chunks can be rounded down to it."""
    certain_nbytes: int
    room: Array
    """By moment, in units."""
    gaps: tuple[Gap, ...]
    """Those of an epoch that has a write-back follow each other."""
    sizes: tuple[int, ...]
    """Of the gaps' chunks, in units."""
    epochs: tuple[_Epoch | None, ...]
    """None: letting the gap go costs no write-back, or one that is certain."""


def _reduce(problem: Problem, budget: Sequence[int]) -> _Question:
    unit = gcd(*(nbytes for nbytes, uses in zip(problem.nbytes, problem.uses, strict=True) if uses)) or 1
    room = (np.array(budget, dtype=np.int64) - _in_use(problem)) // unit
    certain = sum(problem.nbytes[gap.chunk] for gap in problem.gaps if gap.after is After.RENEWED)
    paid = {(gap.chunk, gap.epoch) for gap in problem.gaps if gap.epoch >= 0 and _is_read_by_host(problem, gap)}
    open_gaps = [gap for gap in problem.gaps if gap.after is After.LIVES and gap.start < gap.stop]
    two_steps = np.tile(room, 2)
    kept = []
    for gap in open_gaps:
        if problem.nbytes[gap.chunk] // unit <= two_steps[gap.start : gap.stop].min():
            kept.append(gap)
        else:
            certain += problem.nbytes[gap.chunk]
            paid |= {(gap.chunk, gap.epoch)} if gap.epoch >= 0 else set()
    certain += sum(problem.nbytes[chunk] for chunk, _ in paid)

    def epoch(gap: Gap) -> _Epoch | None:
        return None if gap.epoch < 0 or (gap.chunk, gap.epoch) in paid else (gap.chunk, gap.epoch)

    kept.sort(key=lambda gap: (gap.chunk, gap.epoch))
    return _Question(
        unit_nbytes=unit,
        certain_nbytes=certain,
        room=room,
        gaps=tuple(kept),
        sizes=tuple(problem.nbytes[gap.chunk] // unit for gap in kept),
        epochs=tuple(map(epoch, kept)),
    )


def _room(problem: Problem, budget: Sequence[int]) -> list[int]:
    return [have - need for have, need in zip(budget, problem.required, strict=True)]


def _in_use(problem: Problem) -> Array:
    """Return the bytes in use by moment; what an update on DEVICE used may leave before it is consumed."""
    moments = problem.trace.moments
    change = np.zeros(len(moments) + 1, dtype=np.int64)
    for nbytes, uses in zip(problem.nbytes, problem.uses, strict=True):
        for use in uses:
            change[use.start] += nbytes
            change[use.start + 1 if moments[use.start].kind is Kind.UPDATE else use.stop] -= nbytes
    result: Array = np.cumsum(change[:-1])
    return result


def _is_read_by_host(problem: Problem, gap: Gap) -> bool:
    """Tell whether an update on HOST reads what DEVICE wrote: a gradient, or weights that were written to besides."""
    if gap.after is After.RENEWED:
        return True
    moments = problem.trace.moments
    return gap.needed_below is not None and moments[gap.needed_below % len(moments)].kind is Kind.UPDATE


# The ascent.


class _Relaxation:
    """The relaxed problem as arrays: prices in, a bound and the gaps kept at these prices out."""

    def __init__(self, question: _Question) -> None:
        self._rooms = question.room
        self._num = len(question.room)
        self._sizes = np.array(question.sizes, dtype=np.int64)
        # Moments of two steps: a gap that reaches into the next step ends there.
        self._starts = np.array([gap.start for gap in question.gaps])
        self._stops = np.array([gap.stop for gap in question.gaps])
        epochs = question.epochs
        heads = [at for at, epoch in enumerate(epochs) if epoch is None or at == 0 or epoch != epochs[at - 1]]
        self._heads = np.array(heads)
        self._write_back = np.array([0 if epochs[at] is None else question.sizes[at] for at in heads], dtype=np.int64)
        self._epoch_of = np.repeat(np.arange(len(heads)), np.diff([*heads, len(epochs)]))

    def _at(self, prices: Array, *, one: int = 1) -> tuple[Any, Array]:
        """Return the bound at `prices` and which gaps are kept; with prices of `1 / one`, so is the bound."""
        sums = np.concatenate([[0], np.cumsum(np.tile(prices, 2))])
        fetches = self._sizes.astype(prices.dtype) * one
        rents = self._sizes * (sums[self._stops] - sums[self._starts])
        some = np.add.reduceat(np.minimum(rents, fetches), self._heads) + self._write_back * one
        everything = np.add.reduceat(rents, self._heads)
        value = np.minimum(some, everything).sum() - (prices * self._rooms).sum()
        return value, (everything <= some)[self._epoch_of] | (rents < fetches)

    def _overbooked(self, kept: Array) -> Array:
        """Return by moment what the kept gaps take beyond the room."""
        taken = np.where(kept, self._sizes, 0)
        length = 2 * self._num + 1
        change = np.bincount(self._starts, taken, length) - np.bincount(self._stops, taken, length)
        sums = np.cumsum(change)
        result: Array = sums[: self._num] + sums[self._num : -1] - self._rooms
        return result

    def ascend(self, reached: float) -> Array:
        """Return prices whose bound is about the best there is; `reached` is what some plan moves.

        Source: Polyak, USSR Comput. Math. Math. Phys. 9(3), 1969; directions with memory are those of Camerini, Fratta
        and Maffioli, Math. Programming Study 3, 1975.
        """
        best, prices = 0.0, np.zeros(self._num)
        for memory in _MEMORIES:
            best, prices = self._climb(best, prices, reached, memory)
        return prices

    def _climb(self, best: float, best_prices: Array, reached: float, memory: float) -> tuple[float, Array]:
        """Return a bound and its prices, no worse than those given."""
        prices, direction = best_prices, np.zeros(self._num)
        step, num_failed = 1.0, 0
        for _ in range(_MAX_STEPS):
            value, kept = self._at(prices)
            num_failed = num_failed + 1 if value <= best * (1 + _PROGRESS) else 0
            if value > best:
                best, best_prices = value, prices
            if best >= reached or step < _SMALLEST_STEP:
                break
            if num_failed >= _PATIENCE:
                step, num_failed = step / 2, 0
                prices, direction = best_prices, np.zeros(self._num)
                value, kept = self._at(prices)
            direction = self._overbooked(kept) + memory * direction
            uphill = np.where((prices <= 0) & (direction < 0), 0.0, direction)
            norm = float(uphill @ uphill)
            if norm == 0:
                break  # no price would change
            prices = np.maximum(0.0, prices + step * max(reached - value, 0.0) / norm * uphill)
        return best, best_prices

    def certified(self, prices: Array) -> Fraction:
        """Return the bound at prices close to these, without rounding error."""
        # Python's own integers: sums over many moments pass those of the processor.
        whole = np.array([round(price * _GRAIN) for price in prices.tolist()], dtype=object)
        value, _ = self._at(whole, one=_GRAIN)
        return Fraction(value, _GRAIN)
