"""How long a step takes if some of its regions are recomputed, by plans for it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping
from math import inf

from chunkmem.errors import CapacityError
from chunkmem.plan.candidate import Candidate, PlanOptions
from chunkmem.plan.candidates import Candidates
from chunkmem.plan.gaps import in_use_nbytes
from chunkmem.plan.machine import Machine
from chunkmem.plan.placement import Placement
from chunkmem.trace.model import Kind, Trace
from chunkmem.trace.recomputed import with_recomputed
from chunkmem.trace.shared import Shared

_NEAR = 0.05
"""A choice that is slower than the best one by this share is not judged further."""
_LARGE = 2000
"""Moments from which on fewer candidates are tried."""
_MOST = 100
"""Candidates of one choice: more than there are placements."""
_MOST_OF_LARGE = 3
"""The same of a large step."""
_EDIT_WORK = 15
"""Of writing down the step with another choice, for each of its moments; in the planner's units."""


class RegionJudge:
    """Judges choices of the regions that are recomputed, and remembers the fastest."""

    def __init__(
        self,
        trace: Trace,
        machine: Machine,
        options: PlanOptions,
        *,
        shared: Mapping[int, Shared] | None,
        fits: frozenset[int],
        spare_nbytes: int,
    ) -> None:
        """Begin.

        Args:
            trace: of the step, whichever regions are recomputed in it.
            machine: caps and speeds.
            options: of the planner.
            shared: see `with_recomputed`.
            fits: a choice that needs no spare bytes.
            spare_nbytes: bytes of DEVICE that no moment may need with any other choice.
        """
        self._trace, self._machine, self._options = trace, machine, options
        self._shared = shared
        self.is_large = len(trace.moments) > _LARGE
        """One or two candidates have to do for each choice, but for the best one in the end."""
        self._fits, self._spare_nbytes = fits, spare_nbytes
        self._edited: tuple[frozenset[int], Trace] | None = None
        """The last choice, and the step with it."""
        self.known: dict[frozenset[int], float] = {}
        """Seconds of a step by choice; inf: it does not fit, or computing alone takes longer than the best step."""
        self._left: set[frozenset[int]] = set()
        """Choices that were judged by one or two candidates."""
        self.best = fits
        """The fastest choice so far."""
        self.found: Candidate | None = None
        """Its plan; None: there is none yet."""
        self.shortage: CapacityError | None = None
        """Of the choice with the smallest cap, of those that do not fit."""
        self.num_plans = 0
        self.work = 0
        """Done so far, in the planner's units."""

    def seconds(self, recomputed: frozenset[int], *, is_thorough: bool = False) -> Generator[int, None, float]:
        """Return how long a step takes, by a candidate for each of a few placements; yield the work done.

        Args:
            recomputed: the choice.
            is_thorough: look further than at the best plan's placement, and at that with most on DEVICE, even if the
                choice is not about as fast as the best one there.
        """
        if recomputed in self.known and not (is_thorough and recomputed in self._left):
            return self.known[recomputed]
        step_s = inf
        if self.found is not None and not is_thorough:
            step_s = yield from self._try(recomputed, most=1, placement=self.found.placement)
            if self._is_far(step_s):
                step_s = min(step_s, (yield from self.probe(recomputed)))
        self._left.discard(recomputed)
        if self._is_far(step_s):
            self._left.add(recomputed)
        else:
            step_s = yield from self._try(recomputed, most=_MOST_OF_LARGE if self.is_large else _MOST)
        self.known[recomputed] = step_s
        return step_s

    def probe(self, recomputed: frozenset[int]) -> Generator[int, None, float]:
        """Return how long a step takes by the first candidate; yield the work done."""
        return (yield from self._try(recomputed, most=1))

    def settle(self, choices: Collection[frozenset[int]]) -> Iterator[int]:
        """Compare the best choice with those of `choices` that are about as fast by all candidates; yield the work
        done."""
        close = [choice for choice in choices if choice != self.best and not self._is_far(self.known.get(choice, inf))]
        for recomputed in (self.best, *close) if close or self.is_large else ():
            self.known[recomputed] = yield from self._try(recomputed, most=_MOST if self.is_large else None)

    def _is_far(self, step_s: float) -> bool:
        """Tell whether a step has a plan, and no good one."""
        near = 0.0 if self.is_large else _NEAR
        return self.found is not None and (1 + near) * self.found.step_s < step_s < inf

    def _try(
        self, recomputed: frozenset[int], *, most: int | None, placement: Placement | None = None
    ) -> Generator[int, None, float]:
        """Make plans for a choice; return the least seconds, and yield the work done.

        Args:
            recomputed: the choice.
            most: that many plans, by one for each placement; None: all there are.
            placement: of another choice. A planner may not come to it for this one, so the best one is not changed.
        """
        if self._edited is None or self._edited[0] != recomputed:
            self._edited = recomputed, with_recomputed(self._trace, recomputed, shared=self._shared)
            self.work += _EDIT_WORK * len(self._trace.moments)
            yield _EDIT_WORK * len(self._trace.moments)
        trace, step_s, num_plans = self._edited[1], inf, self.num_plans
        least_s = sum(moment.duration_s for moment in trace.moments if moment.kind is not Kind.UPDATE)
        if self.found is not None and recomputed != self.best and least_s >= self.found.step_s:
            return inf
        try:
            self._require_spare(trace, recomputed)
            is_quick = most is not None
            made = Candidates(trace, self._machine, self._options, is_quick=is_quick, placement=placement)
            for work, candidate in made.pieces():
                self.work += work
                yield work
                if candidate is None:
                    continue
                self.num_plans += 1
                step_s = min(step_s, candidate.step_s)
                if placement is None and (self.found is None or candidate.step_s < self.found.step_s):
                    self.found, self.best = candidate, recomputed
                if self.num_plans - num_plans == most:
                    break
        except CapacityError as error:
            if self.shortage is None or error.needed_nbytes < self.shortage.needed_nbytes:
                self.shortage = error
        return step_s

    def _require_spare(self, trace: Trace, recomputed: frozenset[int]) -> None:
        if self._spare_nbytes == 0 or recomputed == self._fits:
            return
        charges, cap_nbytes = self._machine.charges_non_model, self._machine.device_nbytes
        least_nbytes = max(in_use_nbytes(trace, charges_non_model=charges)) + self._spare_nbytes
        if least_nbytes > cap_nbytes:
            text = f"DEVICE needs {least_nbytes} bytes and has {cap_nbytes}"
            raise CapacityError(text, needed_nbytes=least_nbytes, cap_nbytes=cap_nbytes)
