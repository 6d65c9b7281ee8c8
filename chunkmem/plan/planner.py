"""Make a plan from a trace: try candidates, keep the one that simulates fastest. Pure and deterministic.

Planning is counted in units of work, about a microsecond each on the machine this was written on, and not by a clock:
the same trace, machine and amounts of work give the same plan. `Planner.improve` continues where it stopped.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from chunkmem.data.trace import Trace
from chunkmem.plan.candidate import Candidate, PlanOptions
from chunkmem.plan.candidates import CLOSE, Candidates
from chunkmem.plan.garbage import no_collections
from chunkmem.plan.machine import Machine
from chunkmem.plan.model import Plan
from chunkmem.plan.simulate import simulate


class Planner:
    """An anytime planner: Belady's plan first, then refined incrementally."""

    def __init__(
        self,
        trace: Trace,
        machine: Machine,
        *,
        options: PlanOptions | None = None,
        before: Candidate | None = None,
    ) -> None:
        """Begin; nothing is planned yet.

        Args:
            trace: of the step.
            machine: caps and speeds to plan for.
            options: of a user's configuration.
            before: the best of a planner for the same step with other durations, see `retimed`.
        """
        self._machine = machine
        self._options = options or PlanOptions()
        self._candidates = Candidates(trace, machine, self._options, before=before)
        self._pieces = self._candidates.pieces()
        self._close: list[Candidate] = []
        """Candidates that are about as fast as the fastest, in the order they were found."""
        self._before = before
        self.is_done = False
        """Every candidate has been tried."""
        self.work_done = 0
        """Work done so far, in the planner's units."""

    @property
    def plan(self) -> Plan | None:
        """The best plan so far: of those as fast as the fastest the one that moves least, then the first, and last the
        one before."""
        return self._best().plan if self._close else None

    def retimed(self, trace: Trace) -> Planner:
        """Return a planner for the same step with other durations, which begins with the best plan of this one."""
        before = None
        if self._close:
            best = self._best()
            before = replace(best, timeline=simulate(best.plan, trace))
        return Planner(trace, self._machine, options=self._options, before=before)

    @no_collections()
    def improve(self, work: int | None = None) -> Plan:
        """Try candidates for about `work` units; None: all of them. As long as there is no plan yet, those that differ
        most are tried, however much work that is.

        Returns:
            The best plan so far.

        Raises:
            CapacityError: a moment does not fit DEVICE, or what has to be on HOST does not fit there; with the smallest
                cap that works.
            PlanError: the trace cannot be repeated; see `as_loop`.
        """
        last = inf if work is None else self.work_done + work
        while not self.is_done and (self.work_done < last or not self._has_choice):
            piece = next(self._pieces, None)
            if piece is None:
                self.is_done = True
                self._close = [self._best()]
                break
            done, candidate = piece
            self.work_done += done
            if candidate is not None:
                self._add(candidate)
        return self._best().plan

    @property
    def _has_choice(self) -> bool:
        return bool(self._close) and (self._before is not None or self._candidates.has_extremes)

    def _best(self) -> Candidate:
        tried = self._close if self._before is None else [*self._close, self._before]
        close_s = (1 + CLOSE) * min(candidate.step_s for candidate in tried)
        return min((each for each in tried if each.step_s <= close_s), key=lambda candidate: candidate.nbytes)

    def _add(self, candidate: Candidate) -> None:
        self._close.append(candidate)
        fastest_s = min(candidate.step_s for candidate in self._close)
        self._close = [candidate for candidate in self._close if candidate.step_s <= (1 + CLOSE) * fastest_s]


def make_plan(trace: Trace, machine: Machine, *, options: PlanOptions | None = None) -> Plan:
    """Return the candidate that simulates fastest; of equals the one that moves least, then the first.

    Raises:
        CapacityError, PlanError: see `Planner.improve`.
    """
    return Planner(trace, machine, options=options).improve()
