"""Which calls of regions a kind of step recomputes: chosen once its first step has been recorded, and again later.

[Note: Choosing again] The first choice knows the times of a first step, which touches its memory for the first time and
is watched, and guesses what a region saves when it is kept. When a plan has been followed for a few steps, and refined,
both are known better: the search is repeated, some of it after each step. If it finds a step that is faster by
`_WORTH`, that is recorded, for a plan of its own. A few times at most, as each costs a step without a plan.

Where some choice leads to a step that cannot be planned, steps stay as they are, with a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from chunkmem.errors import CapacityError, PlanError, TraceError
from chunkmem.plan.candidate import PlanOptions
from chunkmem.plan.machine import Machine
from chunkmem.plan.model import Plan
from chunkmem.plan.regions import MOST_WORK, RegionSearch
from chunkmem.plan.simulate import simulate
from chunkmem.runtime.garbage import no_collections
from chunkmem.steps.plan_cache import Key
from chunkmem.steps.planning import WORK_A_STEP
from chunkmem.trace.model import Trace
from chunkmem.trace.retimed import retimed, with_warm_forward
from chunkmem.trace.shared import known_nbytes, shared_bytes
from chunkmem.trace.uncharged import uncharged

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
    """Its first step, which recomputed all; None: the choice stays."""
    kept_nbytes: dict[int, int] = field(default_factory=dict)
    """What calls had in their chunks in steps that kept them and those next to them, by number."""
    num_searches: int = 0
    """For another choice, so far."""
    search: RegionSearch | None = None
    """The one under way."""
    pieces: Iterator[int] = field(default_factory=lambda: iter(()))
    """Of that."""


class RegionChoices:
    """By kind of step: the regions that are recomputed. A first step recomputes all, so that it fits."""

    def __init__(self, machine: Callable[[], Machine], options: PlanOptions) -> None:
        """Choose for a machine, which is asked for when a choice is made."""
        self._machine = machine
        self._options = options
        self._kinds: dict[Key, _KindOfStep] = {}
        self._recorded: Trace | None = None
        """That the last choice was made from."""
        self._adopted: frozenset[int] | None = None

    def kept(self, key: Key) -> frozenset[int] | None:
        """Return the numbers of the calls that a kind of step does not recompute; None: there is no choice yet."""
        return self._kinds[key].kept if key in self._kinds else self._adopted

    def adopt(self, trace: Trace) -> None:
        """Choose for all kinds of steps what a trace of an earlier run has recomputed."""
        self._adopted = frozenset(region.number for region in trace.regions if region.recomputed is None)

    def keep(self, key: Key, kept: frozenset[int]) -> None:
        """Have a kind of step recompute all calls but these."""
        self._kinds[key] = _KindOfStep(kept, self._recorded)
        self._recorded = None

    @no_collections()
    def choose(self, trace: Trace) -> frozenset[int]:
        """Return what steps like this one, which recomputes all, had better not recompute."""
        self._recorded = trace
        try:
            search = self._search(trace, {}, most_work=MOST_WORK)
            for _ in search.pieces():
                pass
            return _kept(trace, search)
        except CapacityError:
            return frozenset()  # what comes of it is said when the plan is made
        except (PlanError, TraceError) as error:
            _warn_left_out(error)
            return frozenset()

    @no_collections()
    def choose_again(self, key: Key, trace: Trace, plan: Plan) -> bool:
        """Look for a faster choice for a while; tell whether there is one, which `kept` returns from now on.

        Args:
            key: of steps that have followed a plan.
            trace: of them, with the times that they take.
            plan: that they have followed.
        """
        kind = self._kinds.get(key)
        if kind is None or kind.recorded is None or not trace.regions:
            return False
        try:
            if kind.search is None and not self._begin(kind, kind.recorded, trace):
                return False
            work = 0
            for done in kind.pieces:
                work += done
                if work >= WORK_A_STEP:
                    return False
            search, kind.search = kind.search, None
            assert search is not None
            now_s = min(search.now_s, simulate(plan, trace).step_s)
            is_worth_it = search.choice().step_s < (1 - _WORTH) * now_s
            kept = _kept(kind.recorded, search)
        except (PlanError, TraceError) as error:
            if not isinstance(error, CapacityError):
                _warn_left_out(error)
            kind.recorded = kind.search = None
            return False
        is_worth_it = is_worth_it and kept != kind.kept
        if not is_worth_it or kind.num_searches == _MAX_AGAIN:
            kind.recorded = None
        if is_worth_it:
            kind.kept = kept
        return is_worth_it

    def _begin(self, kind: _KindOfStep, recorded: Trace, trace: Trace) -> bool:
        """Begin to look for another choice; tell whether there is a point in it."""
        is_same = {region.number for region in trace.regions} == {region.number for region in recorded.regions}
        if not is_same:
            return False
        kind.num_searches += 1
        kind.kept_nbytes |= known_nbytes(trace)
        kind.search = self._search(recorded, kind.kept_nbytes, trace)
        kind.pieces = kind.search.pieces()
        return True

    def _search(
        self,
        recorded: Trace,
        kept_nbytes: Mapping[int, int],
        measured: Trace | None = None,
        *,
        most_work: int | None = None,
    ) -> RegionSearch:
        """Return a search among the choices for steps like the recorded one, with times as measured.

        What a kept region returns to the next one, and both save, is in neither's chunk: it is non-model data until the
        first one's backward. If one of them is kept alone, it is in that chunk. So what a region needs depends a little
        on those next to it, by no more than its inputs take, and outputs where they are taken to be shared: so much of
        DEVICE is left in each moment, and where that is too much, all is recomputed as before, which has fitted.
        """
        machine = self._machine()
        step = uncharged(recorded, charges_non_model=machine.charges_non_model, kept_nbytes=kept_nbytes)
        # Where non-model data counts, there has to be memory for it as if it were in a chunk.
        shared = None if machine.charges_non_model else shared_bytes(recorded, kept_nbytes)
        now = None
        if measured is None:
            step = with_warm_forward(step)
        else:
            step = retimed(step, measured)
            again = {region.number for region in measured.regions if region.recomputed is not None}
            now = [at for at, region in enumerate(step.regions) if region.number in again]
        borders = [recorded.chunk_nbytes[region.inputs] for region in recorded.regions if region.inputs is not None]
        borders += [each.nbytes(()) for each in (shared or {}).values()]
        machine = replace(machine, charges_non_model=True)
        spare_nbytes = max(borders, default=0)
        return RegionSearch(
            step,
            machine,
            options=self._options,
            shared=shared,
            now=now,
            spare_nbytes=spare_nbytes,
            most_work=most_work,
        )


def _warn_left_out(error: Exception) -> None:
    text = f"which activations are recomputed stays as it is, as steps with another choice cannot be planned: {error}"
    warnings.warn(text, stacklevel=3)


def _kept(trace: Trace, search: RegionSearch) -> frozenset[int]:
    recomputed = search.choice().recomputed
    return frozenset(region.number for at, region in enumerate(trace.regions) if at not in recomputed)
