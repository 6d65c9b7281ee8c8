"""Candidates: plans that differ in where groups are updated, which chunks stay, and how much room is set aside. Pure.

Each is simulated. The work on them is counted in units, see `chunkmem.plan.planner`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf

from chunkmem.data.errors import CapacityError, PlanError, TraceError
from chunkmem.data.sizes import format_nbytes
from chunkmem.data.trace import Kind, Trace
from chunkmem.data.types import TIERS, Tier, neighbor
from chunkmem.plan.ahead import advance_updates, log_nbytes, updates_ahead
from chunkmem.plan.candidate import Candidate, PlanOptions, make_program
from chunkmem.plan.choose import furthest_next_use, sweep
from chunkmem.plan.disk import least_nbytes, offload, too_small
from chunkmem.plan.gaps import Problem, budgets, find_gaps, require_fit
from chunkmem.plan.loop import as_loop
from chunkmem.plan.machine import Machine
from chunkmem.plan.model import Action, Lane, Plan
from chunkmem.plan.placement import (
    FullPlacements,
    Placement,
    has_idle_states,
    num_updated_on_device,
    tiers_of_updates,
)
from chunkmem.plan.program import Program
from chunkmem.plan.simulate import with_waits

CLOSE = 0.01
"""Times this close are equal, for measured durations are no better than that: there, what is moved decides."""
_QUIET = 0.001
"""A share of the step that is not worth hiding."""
_LARGE = 2000
"""Moments from which on fewer candidates are tried, so that planning stays a matter of seconds."""
_RESERVES = (0, 3, 6, 12)
_FEW_RESERVES = (0, 3)
"""Slabs of HOST that are set aside for what passes between DEVICE and DISK; of a large step, the few."""
_MOMENT_WORK = 40
"""Units of work for a candidate, for each moment of the trace."""


def candidates(trace: Trace, machine: Machine, *, options: PlanOptions) -> Iterator[Candidate]:
    """Yield every candidate that fits.

    Raises:
        CapacityError, PlanError: none does; see `Planner.improve`.
    """
    for _, candidate in Candidates(trace, machine, options).pieces():
        if candidate is not None:
            yield candidate


@dataclass(eq=False)
class _Placed:
    """One way to place the updates."""

    placement: Placement
    problem: Problem
    room: list[int]
    """Bytes that the chunks in use leave free, by moment."""
    quiet: float = inf
    """Reserve in chunks from which on nothing stalls: a larger one only costs traffic; inf: none is known."""
    step_s: float = inf
    """Predicted seconds of a step with the fastest candidate."""


def _is_quiet(candidate: Candidate) -> bool:
    """Tell whether COMPUTE waits for so little that it is not worth hiding: for copies, or for updates on HOST."""
    timeline = candidate.timeline
    return timeline.step_s - timeline.busy_s(Lane.COMPUTE) <= _QUIET * timeline.step_s


class Candidates:
    """Makes candidates one after the other."""

    def __init__(
        self,
        trace: Trace,
        machine: Machine,
        options: PlanOptions,
        *,
        before: Candidate | None = None,
        is_quick: bool = False,
    ) -> None:
        """Begin.

        Args:
            trace: of the step.
            machine: caps and speeds to plan for.
            options: of a user's configuration.
            before: one for the same machine and the same step with other durations, with a timeline for those of
                `trace`. What has the same actions is neither made nor simulated again.
            is_quick: make one candidate for each placement, to compare traces rather than to follow the plan.
        """
        self.given = trace
        self.trace = _repeating(trace)
        self.machine = machine
        self.options = options
        self.before = before
        self.work = 0
        """Units of work since the last piece."""
        self.unit = _MOMENT_WORK * len(trace.moments)
        """Units to make and simulate a candidate."""
        self.is_small = len(trace.moments) <= _LARGE and not is_quick
        self.brief_reserves = (0,) if is_quick else (0, 2)
        self.reserves = (0, 1, 2, 3, 4) if self.is_small else self.brief_reserves
        """Chunks' worth of room that is set aside for prefetching."""
        self.is_found = self.has_extremes = False
        """A candidate fits; one each has been tried with the most groups resident, and with none."""
        self.placed: dict[tuple[frozenset[tuple[int, Tier]], frozenset[int]], _Placed | None] = {}
        """By the tiers of updates and the resident groups: what there is to decide; None: it does not fit."""
        self.outcomes: dict[tuple[frozenset[tuple[int, Tier]], frozenset[int]], tuple[float, bool]] = {}
        """Seconds of a step, and whether nothing stalls that would be worth hiding, by where groups are updated and the
        gaps that are kept: nothing else makes two candidates differ."""
        self.budget = budgets(self.trace, machine, static_nbytes=options.static_nbytes)
        self.slab_nbytes = max(trace.chunk_nbytes.values(), default=0)
        self.fastest: tuple[Candidate, Program] | None = None
        """The fastest candidate that needs no DISK, and its program; None: there is none yet."""
        self.shortage: CapacityError | None = None
        self.least_nbytes: dict[Tier, int] = {}
        """By tier below DEVICE: with that cap, a candidate would fit that those above it have room for."""

    def pieces(self) -> Iterator[tuple[int, Candidate | None]]:
        """Yield pieces of work done, each with the candidate that came of it, if one did.

        Raises:
            CapacityError: no candidate fits.
        """
        try:
            for candidate in self._tried():
                work, self.work = self.work, 0
                self.is_found = self.is_found or candidate is not None
                yield work, candidate
                if candidate is not None and candidate.nbytes == 0 and not self._could_hide_updates(candidate):
                    return  # nothing moves: nothing can be better
        finally:
            self.placed.clear()  # it may be large, and the planner lives on
        if not self.is_found:
            raise self._nothing_fits()

    def _tried(self) -> Iterator[Candidate | None]:
        """Yield what comes of each candidate that is tried; None: it does not fit, or another one is the same."""
        trace, host_nbytes, ratio = self.trace, self.machine.host_nbytes, self.options.margin_use_ratio
        counts, full = [len(trace.update_moments)], None
        if host_nbytes and ratio > 0.0 and self.options.with_residents and not has_idle_states(trace):
            full = FullPlacements(trace, self.budget, host_nbytes=host_nbytes, margin_use_ratio=ratio)
            counts = [0]
        elif host_nbytes:
            counts = [num_updated_on_device(trace, self.budget, ratio), 0]
        others = [Placement(tiers_of_updates(trace, count)) for count in dict.fromkeys(counts)]
        for where in others if full is None else (full.placement(full.most), *others):
            yield from self._by_rule(where, (0,))
        self.has_extremes = True
        step_s: dict[int, float] = {}
        while full is not None and (count := full.next_count(step_s)) is not None:
            yield from self._by_rule(full.placement(count), self.brief_reserves)
            way = self._placed(full.placement(count))
            step_s[count] = inf if way is None else way.step_s
        if full is not None:
            others.insert(0, full.placement(min(step_s, key=lambda count: step_s[count])))
        for where in others:
            yield from self._by_rule(where, self.reserves)
        if self.is_small:
            yield from self._with_less()
        if full is not None and not self.is_found:
            for count in full.close_to_most():
                yield from self._by_rule(full.placement(count), self.brief_reserves)

    def _could_hide_updates(self, candidate: Candidate) -> bool:
        """Tell whether updates on DEVICE take so long that HOST might do some of them meanwhile."""
        if self.machine.one_processor or self.machine.host_nbytes == 0:
            return False
        trace, Bps = self.trace, self.machine.device_update_Bps
        updates = [(group, trace.moments[at]) for group, moments in trace.update_moments.items() for at in moments]
        nbytes = sum(trace.nbytes(trace.update(group).chunks) for group, _ in updates)
        given_s = sum(moment.duration_s for _, moment in updates) if Bps == inf else 0.0
        return nbytes / Bps + given_s > CLOSE * candidate.timeline.step_s

    def _with_less(self) -> Iterator[Candidate]:
        """Try the fastest candidate with fewer updates ahead, where COMPUTE waits.

        To update ahead all that the shadow buffers hold is best as a rule, not always: updates share HOST's memory with
        copies, and those that take longer than backward keep what the next forward needs first waiting. More memory
        should not make a step slower.
        """
        # On one processor it is the same cores that forward, backward and updates wait for.
        if self.fastest is None or self.machine.one_processor or _is_quiet(self.fastest[0]):
            return
        fastest, program = self.fastest
        used_nbytes = sum(log_nbytes(self.trace, group) for group in updates_ahead(self.trace, fastest.actions))
        for eighths in (0, 1, 2, 3, 4, 6) if used_nbytes else ():
            limit_nbytes = used_nbytes * eighths // 8
            name = f"{fastest.plan.name}, {format_nbytes(limit_nbytes)} of shadow buffers"
            yield self._timed(fastest.placement, program, name, limit_nbytes=limit_nbytes)

    def _placed(self, where: Placement) -> _Placed | None:
        """Return what there is to decide for a placement; None if a moment of it does not fit DEVICE."""
        tiers, residents = where.update_tiers, where.resident_groups
        key = frozenset(tiers.items()), residents
        if key in self.placed:
            return self.placed[key]
        is_one_tier = self.machine.host_nbytes == 0
        problem = find_gaps(self.trace, tiers, one_tier=is_one_tier, resident_groups=residents)
        room = [have - need for have, need in zip(self.budget, problem.required, strict=True)]
        self.placed[key] = _Placed(where, problem, room)
        try:
            require_fit(problem, self.budget, self.machine)
        except CapacityError as error:
            if self.shortage is None or error.needed_nbytes < self.shortage.needed_nbytes:
                self.shortage = error
            self.placed[key] = None
        return self.placed[key]

    def _by_rule(self, where: Placement, reserves: Sequence[int]) -> Iterator[Candidate | None]:
        if (way := self._placed(where)) is None:
            return
        for reserve in reserves:
            if reserve > way.quiet:
                return
            room = [max(0, nbytes - reserve * self.slab_nbytes) for nbytes in way.room]
            kept = sweep(way.problem, room, furthest_next_use)
            yield self._try(way, kept, reserve)
            if len(kept) == len(way.problem.free_to_choose):
                return

    def _try(self, way: _Placed, kept: frozenset[int], reserve: int) -> Candidate | None:
        """Return the candidate that keeps these gaps, unless it was tried, or does not fit HOST."""
        # Another placement with the same updates may keep the same gaps: some as it likes, and others always.
        key = frozenset(way.problem.update_tiers.items()), kept | way.problem.always_kept
        candidate = None
        if key in self.outcomes:
            self.work += self.unit // 10
        else:
            candidate = self._make(way, kept, f"belady, {reserve} set aside")
            self.outcomes[key] = (inf, False) if candidate is None else (candidate.step_s, _is_quiet(candidate))
        step_s, is_quiet = self.outcomes[key]
        way.step_s = min(way.step_s, step_s)
        if is_quiet:
            way.quiet = min(reserve, way.quiet)
        return candidate

    def _make(self, way: _Placed, kept: frozenset[int], name: str) -> Candidate | None:
        """Return the candidate that keeps these gaps, unless it does not fit HOST."""
        machine = self.machine
        program = make_program(way.problem, kept, self.budget, machine)
        if program.peak_nbytes[Tier.HOST] <= machine.host_nbytes:
            limit_nbytes = min(machine.shadow_nbytes, machine.host_nbytes - program.peak_nbytes[Tier.HOST])
            return self._timed(way.placement, program, name, limit_nbytes=limit_nbytes)
        return self._within_caps(way, program, name, Tier.HOST)

    def _timed(self, where: Placement, program: Program, name: str, *, limit_nbytes: int) -> Candidate:
        """Return the candidate whose updates begin as early as they can, with so much for shadow buffers."""
        actions = advance_updates(self.trace, program.actions, limit_nbytes=limit_nbytes)
        candidate = self._candidate(program, actions, where, name)
        if self.fastest is None or candidate.step_s < self.fastest[0].step_s:
            self.fastest = candidate, program
        return candidate

    def _within_caps(self, way: _Placed, program: Program, name: str, tier: Tier) -> Candidate | None:
        """Return the fastest candidate that has what a tier has no room for on those below it; None: they have none."""
        machine = self.machine
        if program.peak_nbytes[tier] <= machine.cap_nbytes[tier]:
            return self._candidate(program, program.actions, way.placement, name)
        if tier is machine.tiers[-1]:
            self.work += self.unit // 2
            self._note_least(tier, program.peak_nbytes[tier])
            return None
        best, is_followable = None, False
        for reserve, states_first in product(_RESERVES if self.is_small else _FEW_RESERVES, (False, True)):
            reserve_nbytes = reserve * self.slab_nbytes
            found = offload(
                self.trace, program, machine, tier=tier, reserve_nbytes=reserve_nbytes, states_first=states_first
            )
            if found is None:
                self.work += self.unit // 2
                continue
            is_followable = True
            told = f"{name}, {reserve} set aside on {tier.name}" + (", states first" if states_first else "")
            candidate = self._within_caps(way, found, told, neighbor(tier, machine.tiers))
            if best is None or (candidate is not None and candidate.step_s < best.step_s):
                best = candidate
        if not is_followable:
            self._note_least(tier, least_nbytes(self.trace, program, tier=tier))
        return best

    def _candidate(
        self, program: Program, actions: tuple[tuple[Action, ...], ...], placement: Placement, name: str
    ) -> Candidate:
        before = self.before
        self.work += self.unit
        if before and (before.actions, before.plan.start, before.placement) == (actions, program.start, placement):
            return replace(before, plan=replace(before.plan, name=name))
        plan = Plan(self.given.digest, self.machine, program.start, actions, placement.update_tiers, name)
        return Candidate(*with_waits(plan, self.given, iterations=3 if self.is_small else 2), placement, actions)

    def _note_least(self, tier: Tier, nbytes: int) -> None:
        self.least_nbytes[tier] = min(nbytes, self.least_nbytes.get(tier, nbytes))

    def _nothing_fits(self) -> CapacityError:
        for tier in reversed(TIERS):
            if tier in self.least_nbytes:
                return too_small(tier, self.least_nbytes[tier], self.machine)
        # Of a placement that has all updates on HOST, which needs least of DEVICE.
        assert self.shortage is not None
        return self.shortage


def _repeating(trace: Trace) -> Trace:
    """Return a trace as it repeats. A plan for that serves a step that begins a gradient which it leaves behind."""
    try:
        loop = as_loop(trace)
    except TraceError as error:
        raise PlanError(str(error)) from None
    for at, (given, repeated) in enumerate(zip(trace.moments, loop.moments, strict=True)):
        if given.kind is Kind.WRITE and repeated.kind is Kind.CREATE:
            raise PlanError(
                f"moment {at} ({given}) adds to {given.chunk}, which nothing in the step begins, and which the step "
                "uses up: the next step will be another one, so record that"
            )
    return loop
