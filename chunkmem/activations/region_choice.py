"""Which calls of regions a kind of step recomputes: chosen once its first step has been recorded, and again later.

The first choice knows the times of a first step, which touches its memory for the first time and is watched, and
guesses what a region saves when it is kept. When a plan has been followed for a few steps, and refined, both are known
better: the search is repeated. If it finds a step that is faster by `_WORTH`, that is recorded, for a plan of its own.
A few times at most, as each costs a step without a plan.

Where some choice leads to a step that cannot be planned, steps stay as they are, with a warning.

Decided in ADR 34.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from chunkmem.activations.plan_regions import RegionChoice, choose_regions
from chunkmem.activations.retimed_regions import retimed, with_warm_forward
from chunkmem.activations.shared_regions import kept_nbytes, outside_nbytes
from chunkmem.data.errors import CapacityError, PlanError, TraceError
from chunkmem.data.trace import Trace
from chunkmem.plan.candidate import PlanOptions
from chunkmem.plan.machine import Machine
from chunkmem.plan.model import Plan
from chunkmem.plan.simulate import simulate

_WORTH = 0.03
"""A share of the step; a choice that saves less is not worth another record."""
_MAX_AGAIN = 2
"""Searches that are made for another choice."""


@dataclass
class _KindOfStep:
    """What is known of the regions of one kind of step."""

    kept: frozenset[int]
    """Numbers of the calls that are not recomputed."""
    recorded: Trace | None
    """Trace of its first step, which recomputed all regions; None: the choice is final."""
    outside: dict[int, int] = field(default_factory=dict)
    """By number of a call: bytes it saved outside of chunks; see `outside_nbytes`."""
    num_searches: int = 0
    """Number of searches for another choice so far."""


class RegionChoices:
    """By kind of step: the regions that are recomputed. A first step recomputes all, so that it fits."""

    def __init__(self, machine: Callable[[], Machine], options: PlanOptions) -> None:
        """Choose for a machine, which is asked for when a choice is made."""
        self._machine = machine
        self._options = options
        self._kinds: dict[Hashable, _KindOfStep] = {}
        self._recorded: Trace | None = None
        """Trace from which the last choice was made."""
        self._adopted: frozenset[int] | None = None

    def kept(self, key: Hashable) -> frozenset[int] | None:
        """Return the numbers of the calls that a kind of step does not recompute; None: there is no choice yet."""
        return self._kinds[key].kept if key in self._kinds else self._adopted

    def adopt(self, trace: Trace) -> None:
        """Choose for all kinds of steps what a trace of an earlier run has recomputed."""
        self._adopted = frozenset(region.number for region in trace.regions if region.recomputed is None)

    def keep(self, key: Hashable, kept: frozenset[int]) -> None:
        """Have a kind of step recompute all calls but these."""
        self._kinds[key] = _KindOfStep(kept, self._recorded)
        self._recorded = None

    def choose(self, trace: Trace) -> frozenset[int]:
        """Return what steps like this one, which recomputes all, had better not recompute."""
        self._recorded = trace
        try:
            return _numbers(trace, self._choice(with_warm_forward(trace)).kept)
        except CapacityError:
            return frozenset()  # what comes of it is said when the plan is made
        except (PlanError, TraceError) as error:
            _warn_left_out(error)
            return frozenset()

    def choose_again(self, key: Hashable, trace: Trace, plan: Plan) -> bool:
        """Look for a faster choice; tell whether there is one, which `kept` returns from now on.

        Args:
            key: of steps that have followed a plan.
            trace: of them, with the times that they take.
            plan: that they have followed.
        """
        kind = self._kinds.get(key)
        if kind is None or kind.recorded is None:
            return False
        recorded = kind.recorded
        if {region.number for region in trace.regions} != {region.number for region in recorded.regions}:
            return False
        kind.recorded = None
        kind.num_searches += 1
        kind.outside |= outside_nbytes(recorded, trace)
        fits = [at for at, region in enumerate(recorded.regions) if region.number in kind.kept]
        try:
            choice = self._choice(retimed(recorded, trace), kind.outside, fits=fits)
        except CapacityError:
            return False
        except (PlanError, TraceError) as error:
            _warn_left_out(error)
            return False
        kept = _numbers(recorded, choice.kept)
        now_s = min(choice.fits_s, simulate(plan, trace).step_s)
        if kept == kind.kept or choice.step_s >= (1 - _WORTH) * now_s:
            return False
        kind.kept = kept
        if kind.num_searches < _MAX_AGAIN:
            kind.recorded = recorded
        return True

    def _choice(
        self, step: Trace, outside: Mapping[int, int] | None = None, *, fits: Collection[int] = ()
    ) -> RegionChoice:
        """Return a choice for steps like one that recomputes all, other than those regions `fits` that steps keep now.

        How large a chunk is depends a little on the regions next to it. As long as that is a guess, so much of DEVICE
        as their inputs and outputs take is left in each moment, and where that is too much, steps stay as they are.
        """
        machine, outside = self._machine(), outside or {}
        sizes = partial(kept_nbytes, step, outside, charges_non_model=machine.charges_non_model)
        borders = (step.chunk_nbytes[region.inputs] for region in step.regions if region.inputs is not None)
        spare_nbytes = (1 if machine.charges_non_model else 2) * max(borders, default=0)
        return choose_regions(step, machine, sizes, options=self._options, fits=fits, spare_nbytes=spare_nbytes)


def _warn_left_out(error: Exception) -> None:
    text = f"which activations are recomputed stays as it is, as steps with another choice cannot be planned: {error}"
    warnings.warn(text, stacklevel=3)


def _numbers(trace: Trace, regions: Iterable[int]) -> frozenset[int]:
    return frozenset(trace.regions[at].number for at in regions)
