"""Candidates: plans that differ in where groups are updated, which chunks stay, and how much room is set aside. Pure.

Each is simulated. The work on them is counted in units, see `chunkmem.plan.planner`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf

from chunkmem.errors import CapacityError, PlanError, TraceError
from chunkmem.plan.ahead import advance_updates
from chunkmem.plan.candidate import Candidate, PlanOptions, make_program
from chunkmem.plan.choose import furthest_next_use, sweep
from chunkmem.plan.disk import least_nbytes, offload, too_small
from chunkmem.plan.gaps import Problem, budgets, find_gaps, require_fit
from chunkmem.plan.machine import Machine
from chunkmem.plan.model import Action, Lane, Plan
from chunkmem.plan.placement import FullPlacements, Placement, has_idle_states, placements
from chunkmem.plan.program import Program
from chunkmem.plan.simulate import simulate
from chunkmem.plan.waits import add_waits
from chunkmem.sizes import format_nbytes
from chunkmem.trace.loop import as_loop
from chunkmem.trace.model import Kind, Trace
from chunkmem.types import TIERS, Tier

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
    """One way to place the updates, and the candidates tried for it."""

    placement: Placement
    problem: Problem
    room: list[int]
    """Bytes that the chunks in use leave free, by moment."""
    tried: set[frozenset[int]] = field(default_factory=set)
    """Gaps kept."""
    quiet: int | None = None
    """Reserve in bytes from which on nothing stalls: a larger one only costs traffic. None: none is known."""
    is_whole: bool = False
    """Every gap can be kept."""
    step_s: float = inf
    """Predicted seconds of a step with the fastest candidate."""


@dataclass(frozen=True)
class _Outcome:
    """What came of trying a candidate."""

    step_s: float = inf
    is_quiet: bool = False
    """Nothing stalls that would be worth hiding."""


def _is_quiet(candidate: Candidate) -> bool:
    """Tell whether COMPUTE waits for so little that it is not worth hiding: for copies, or for updates on HOST."""
    timeline = candidate.timeline
    return timeline.step_s - timeline.busy_s(Lane.COMPUTE) <= _QUIET * timeline.step_s


@dataclass(frozen=True)
class _Made:
    """A candidate, and what it was made from."""

    candidate: Candidate
    way: _Placed
    program: Program


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
        self.work = _MOMENT_WORK * len(trace.moments)
        """Units to make and simulate a candidate."""
        self.is_small = len(trace.moments) <= _LARGE and not is_quick
        self.brief_reserves = (0,) if is_quick else (0, 2)
        self.has_extremes = self.is_small
        """Of a large step: one candidate each has been tried with the most groups resident, and with none."""
        self.placed: dict[tuple[frozenset[tuple[int, Tier]], frozenset[int]], _Placed | None] = {}
        """By the tiers of updates and the resident groups: candidates of that placement; None: it does not fit."""
        self.outcomes: dict[tuple[frozenset[tuple[int, Tier]], frozenset[int]], _Outcome] = {}
        """Of candidates, by where groups are updated and the gaps that are kept: nothing else makes two of them
        differ."""
        self.budget = budgets(self.trace, machine, static_nbytes=options.static_nbytes)
        self.slab_nbytes = max(trace.chunk_nbytes.values(), default=0)
        self.fastest: _Made | None = None
        """The fastest candidate that needs no DISK; None: there is none yet."""
        self.shortage: CapacityError | None = None
        self.least_nbytes: dict[Tier, int] = {}
        """By tier below DEVICE: with that cap, a candidate would fit that those above it have room for."""

    def pieces(self) -> Iterator[tuple[int, Candidate | None]]:
        """Yield pieces of work done, each with the candidate that came of it, if one did.

        Raises:
            CapacityError: no candidate fits.
        """
        ratio, host_nbytes = self.options.margin_use_ratio, self.machine.host_nbytes
        full = None
        if host_nbytes > 0 and ratio > 0.0 and self.options.with_residents and not has_idle_states(self.trace):
            full = FullPlacements(self.trace, self.budget, host_nbytes=host_nbytes, margin_use_ratio=ratio)
        is_found = False
        try:
            for work, candidate in self._pieces(full):
                is_found = is_found or candidate is not None
                yield work, candidate
                if candidate is not None and candidate.nbytes == 0 and not self._could_hide_updates(candidate):
                    return  # nothing moves: nothing can be better
            if self.is_small:
                yield from self._with_less()
            if not is_found and full is not None:
                for work, candidate in self._with_least_on_host(full):
                    is_found = is_found or candidate is not None
                    yield work, candidate
        finally:
            self.placed.clear()  # it may be large, and the planner lives on
        if not is_found:
            raise self._nothing_fits()

    def _could_hide_updates(self, candidate: Candidate) -> bool:
        """Tell whether updates on DEVICE take so long that HOST might do some of them meanwhile."""
        if self.machine.one_processor or self.machine.host_nbytes == 0:
            return False
        updates = [moment for moment in self.trace.moments if moment.kind is Kind.UPDATE]
        nbytes = sum(self.trace.chunk_nbytes[c] for m in updates for c in self.trace.update(m.chunk.group).chunks)
        given_s = sum(moment.duration_s for moment in updates) if self.machine.device_update_Bps == inf else 0.0
        return nbytes / self.machine.device_update_Bps + given_s > CLOSE * candidate.timeline.step_s

    def _pieces(self, full: FullPlacements | None) -> Iterator[tuple[int, Candidate | None]]:
        ratio = self.options.margin_use_ratio
        tiers = placements(self.trace, self.machine, self.budget, ratio, with_half=self.is_small)
        others = [Placement(each) for each in tiers]
        if not self.has_extremes:
            for where in others if full is None else (full.placement(full.most), *others):
                if (way := self._placed(where)) is not None:
                    yield next(self._by_rule(way, is_brief=True))
            self.has_extremes = True
        if full is not None:
            yield from self._by_residents(full)
        for where in others:
            if (way := self._placed(where)) is not None:
                yield from self._by_rule(way, is_brief=not self.is_small)

    def _by_residents(self, full: FullPlacements) -> Iterator[tuple[int, Candidate | None]]:
        """Try full placements, a few candidates of each, and all of the fastest one."""
        tried: dict[int, _Placed] = {}
        step_s: dict[int, float] = {}
        while (count := full.next_count(step_s)) is not None:
            step_s[count] = inf
            if (way := self._placed(full.placement(count))) is not None:
                yield from self._by_rule(way, is_brief=True)
                tried[count], step_s[count] = way, way.step_s
        if tried and self.is_small:
            yield from self._by_rule(min(tried.values(), key=lambda way: way.step_s), is_brief=False)

    def _with_least_on_host(self, full: FullPlacements) -> Iterator[tuple[int, Candidate | None]]:
        for count in full.close_to_most():
            if (way := self._placed(full.placement(count))) is not None:
                yield from self._by_rule(way, is_brief=True)

    def _with_less(self) -> Iterator[tuple[int, Candidate | None]]:
        """Try the fastest candidate with less memory than there is, where COMPUTE waits.

        To keep all that fits and to update ahead all that the shadow buffers hold is best as a
        rule, not always: copies and updates come at other times, and share HOST's memory. So what a smaller DEVICE or
        HOST would allow is tried, too: more memory should not make a step slower.
        """
        if self.fastest is None or _is_quiet(self.fastest.candidate):
            return
        way = self.fastest.way
        for reserve in (1, 2, 4) if way.is_whole else ():
            kept = sweep(way.problem, self._left(way, reserve), furthest_next_use)
            yield self._try(way, kept, "belady", reserve)
        if self.machine.one_processor:  # the same cores forward, backward and updates wait for
            return
        made = self.fastest
        most_nbytes = self._log_nbytes(made.program)
        for log in sorted({0, *(most_nbytes // part for part in (8, 4, 2))} - {most_nbytes}):
            name = f"{made.candidate.plan.name}, {format_nbytes(log)} of shadow buffers"
            yield self._timed(made.way, made.program, name, limit_nbytes=log)

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

    def _by_rule(self, way: _Placed, *, is_brief: bool) -> Iterator[tuple[int, Candidate | None]]:
        everything = frozenset(way.problem.free_to_choose)
        for reserve in self.brief_reserves if is_brief else (0, 1, 2, 3, 4):
            if way.quiet is not None and reserve > way.quiet:
                return
            yield self._try(way, sweep(way.problem, self._left(way, reserve), furthest_next_use), "belady", reserve)
            if everything in way.tried:
                way.is_whole = True
                return

    def _left(self, way: _Placed, reserve: int) -> list[int]:
        """Return the room without `reserve` chunks' worth of it, which is for prefetching."""
        return [max(0, nbytes - reserve * self.slab_nbytes) for nbytes in way.room]

    def _try(self, way: _Placed, kept: frozenset[int], name: str, reserve: int) -> tuple[int, Candidate | None]:
        """Return the work done, and the candidate that keeps these gaps, unless it was tried, or does not fit HOST."""
        work = self.work
        if kept in way.tried:
            return work // 10, None
        way.tried.add(kept)
        # Another placement with the same updates may keep the same gaps: some as it likes, and others always.
        key = frozenset(way.problem.update_tiers.items()), kept | way.problem.always_kept
        candidate = None
        if key in self.outcomes:
            work //= 10
        else:
            work, candidate = self._make(way, kept, f"{name}, {reserve} set aside")
            found = candidate and _Outcome(candidate.step_s, _is_quiet(candidate))
            self.outcomes[key] = found or _Outcome()
        way.step_s = min(way.step_s, self.outcomes[key].step_s)
        if self.outcomes[key].is_quiet:
            way.quiet = reserve if way.quiet is None else min(reserve, way.quiet)
        return work, candidate

    def _make(self, way: _Placed, kept: frozenset[int], name: str) -> tuple[int, Candidate | None]:
        """Return the work done, and the candidate that keeps these gaps, unless it does not fit HOST."""
        work = self.work
        machine = self.machine
        program = make_program(way.problem, kept, self.budget, machine)
        if program.peak_nbytes[Tier.HOST] > machine.host_nbytes:
            if (below := machine.tiers[-1]) is not Tier.HOST:
                return self._make_with_gateway(way, program, name, below)
            self._note_least(Tier.HOST, program.peak_nbytes[Tier.HOST])
            return work // 2, None
        return self._timed(way, program, name, limit_nbytes=self._log_nbytes(program))

    def _log_nbytes(self, program: Program) -> int:
        """Return the bytes that the shadow buffers may take."""
        return min(self.machine.shadow_nbytes, self.machine.host_nbytes - program.peak_nbytes[Tier.HOST])

    def _timed(self, way: _Placed, program: Program, name: str, *, limit_nbytes: int) -> tuple[int, Candidate]:
        """Return the work done, and the faster of two ways to begin updates early, with so much for shadow buffers."""
        work, machine = self.work, self.machine
        actions = advance_updates(self.trace, program.actions, limit_nbytes=limit_nbytes)
        candidate = self._candidate(program, actions, way.placement, name)
        if not machine.one_processor:  # else it is the same cores that forward, backward and updates wait for
            in_time = advance_updates(self.trace, program.actions, limit_nbytes=limit_nbytes, in_time_on=machine)
            if in_time != actions:
                work *= 2
                other = self._candidate(program, in_time, way.placement, f"{name}, updates in time")
                candidate = min(candidate, other, key=lambda tried: tried.timeline.step_s)
        if self.fastest is None or candidate.step_s < self.fastest.candidate.step_s:
            self.fastest = _Made(candidate, way, program)
        return work, candidate

    def _make_with_gateway(
        self, way: _Placed, program: Program, name: str, below: Tier
    ) -> tuple[int, Candidate | None]:
        """Return the work done, and the fastest candidate that has what HOST has no room for on the tier below it."""
        work, best, is_followable = 0, None, False
        reserves = _RESERVES if self.is_small else _FEW_RESERVES
        for reserve, states_first in product(reserves, (False, True)):
            work += self.work
            reserve_nbytes = reserve * self.slab_nbytes
            found = offload(self.trace, program, self.machine, reserve_nbytes=reserve_nbytes, states_first=states_first)
            if found is None:
                continue
            is_followable = True
            if found.peak_nbytes[below] > self.machine.cap_nbytes[below]:
                self._note_least(below, found.peak_nbytes[below])
                continue
            told = f"{name}, {reserve} set aside on HOST" + (", states first" if states_first else "")
            candidate = self._candidate(found, found.actions, way.placement, told)
            if best is None or candidate.step_s < best.step_s:
                best = candidate
        if not is_followable:
            self._note_least(Tier.HOST, least_nbytes(self.trace, program))
        return work, best

    def _candidate(
        self, program: Program, actions: Sequence[Sequence[Action]], placement: Placement, name: str
    ) -> Candidate:
        before = self.before
        if before and (before.actions, before.plan.start, before.placement) == (actions, program.start, placement):
            return replace(before, plan=replace(before.plan, name=name))
        waiting = add_waits(self.trace, program.start, actions)
        plan = Plan(self.given.digest, self.machine, program.start, waiting, placement.update_tiers, name)
        timeline = simulate(plan, self.given, iterations=3 if self.is_small else 2)
        return Candidate(plan, timeline, placement, actions)

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
