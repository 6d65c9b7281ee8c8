"""Make a plan from a trace: try candidates, keep the one that simulates fastest. Pure and deterministic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from chunkmem.errors import CapacityError, PlanError, TraceError
from chunkmem.plan.ahead import advance_updates
from chunkmem.plan.choose import free_to_choose, furthest_next_use, least_recently_used, sweep
from chunkmem.plan.gaps import After, Problem, budgets, find_gaps, require_fit
from chunkmem.plan.machine import Machine
from chunkmem.plan.model import Plan
from chunkmem.plan.placement import GroupBytes, place_states
from chunkmem.plan.program import Program, emit
from chunkmem.plan.search import least_traffic
from chunkmem.plan.simulate import simulate
from chunkmem.plan.stays import Stays, find_stays, free_room, linger, prefetch
from chunkmem.plan.timeline import Timeline
from chunkmem.plan.waits import add_waits
from chunkmem.trace.loop import as_loop
from chunkmem.trace.model import Kind, Mode, Trace
from chunkmem.types import ChunkId, Role, Tier
from chunkmem.units import format_nbytes

_CLOSE = 0.01
"""Times this close are equal, for measured durations are no better than that: there, what is moved decides."""
_QUIET = 0.001
"""A share of the step that is not worth hiding."""
_LEAD = 2.0
"""Copies are issued this many times earlier than they would have to be, against jitter."""
_LARGE = 2000
"""Moments from which on fewer candidates are tried, so that planning stays a matter of seconds."""


@dataclass(frozen=True)
class PlanOptions:
    """What a user's configuration decides about plans."""

    margin_use_ratio: float = 0.8
    """Share of the space left on DEVICE at the traced peak that optimizer states may take; 0: all updates on HOST."""
    static_nbytes: int | None = None
    """A fixed share of DEVICE for chunks instead of what each moment leaves."""


@dataclass(frozen=True)
class Candidate:
    """A plan that was tried, and what the simulator says of it."""

    plan: Plan
    timeline: Timeline

    @property
    def nbytes(self) -> int:
        """Bytes moved in a lap, over both links."""
        return sum(self.timeline.moved_nbytes.values())


def make_plan(trace: Trace, machine: Machine, *, options: PlanOptions | None = None) -> Plan:
    """Return the candidate that simulates fastest; of equals the one that moves least, then the first.

    Raises:
        CapacityError: a moment does not fit DEVICE, or what has to be on HOST does not fit there; with the smallest
            cap that works.
        PlanError: the trace cannot be repeated; see `as_loop`.
    """
    found = list(candidates(trace, machine, options=options or PlanOptions()))
    fastest_s = min(candidate.timeline.step_s for candidate in found)
    close = [candidate for candidate in found if candidate.timeline.step_s <= (1 + _CLOSE) * fastest_s]
    return min(close, key=lambda candidate: candidate.nbytes).plan


def candidates(trace: Trace, machine: Machine, *, options: PlanOptions) -> Iterator[Candidate]:
    """Yield every candidate that fits.

    Raises:
        CapacityError, PlanError: none does; see `make_plan`.
    """
    given, trace = trace, _repeating(trace)
    budget = budgets(trace, machine, static_nbytes=options.static_nbytes)
    found = False
    shortage: CapacityError | None = None
    least_host_nbytes: int | None = None
    for update_tiers in _placements(trace, machine, budget, options.margin_use_ratio):
        problem = find_gaps(trace, update_tiers, one_tier=machine.host_nbytes == 0)
        try:
            require_fit(problem, budget, machine)
        except CapacityError as error:
            shortage = error
            continue
        quiet: int | None = None
        for reserve, name, kept in _ways(problem, budget):
            if quiet is not None and reserve > quiet:
                break  # more room for prefetching cannot hide more, and costs traffic
            program = _program(problem, kept, budget, machine, lead=_LEAD)
            if program.host_peak_nbytes > machine.host_nbytes:
                if least_host_nbytes is None or program.host_peak_nbytes < least_host_nbytes:
                    least_host_nbytes = program.host_peak_nbytes
                continue
            log = min(machine.undo_log_nbytes, machine.host_nbytes - program.host_peak_nbytes)
            actions = advance_updates(trace, program.actions, limit_nbytes=log)
            waiting = add_waits(trace, program.start, actions)
            plan = Plan(given.digest, machine, program.start, waiting, update_tiers, name)
            found = True
            candidate = Candidate(plan, simulate(plan, given, laps=3 if len(trace.moments) <= _LARGE else 2))
            yield candidate
            if candidate.nbytes == 0:
                return  # nothing moves: nothing can be better
            if candidate.timeline.stall_s <= _QUIET * candidate.timeline.step_s:
                quiet = reserve
    if found:
        return
    if least_host_nbytes is None:
        # The last placement has all updates on HOST, which needs least of DEVICE.
        assert shortage is not None
        raise shortage
    raise CapacityError(
        f"a plan would have {format_nbytes(least_host_nbytes)} on HOST, which may hold "
        f"{format_nbytes(machine.host_nbytes)}; raise memory.host to at least "
        f"{format_nbytes(least_host_nbytes)} ({least_host_nbytes} bytes)",
        needed_nbytes=least_host_nbytes,
        cap_nbytes=machine.host_nbytes,
        on_host=True,
    )


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


def _placements(
    trace: Trace, machine: Machine, budget: Sequence[int], margin_use_ratio: float
) -> Iterator[dict[int, Tier]]:
    """Yield tiers for the updates: as many on DEVICE as allowed, half of them (not for large traces), none."""
    groups = sorted({moment.chunk.group for moment in trace.moments if moment.kind is Kind.UPDATE})
    if machine.host_nbytes == 0:
        yield dict.fromkeys(groups, Tier.DEVICE)
        return
    sizes = [_group_bytes(trace, group) for group in groups]
    own = {chunk: n for chunk, n in trace.chunk_nbytes.items() if not trace.is_remote(chunk)}
    others = sum(n for chunk, n in own.items() if chunk.group not in groups) + _remote_nbytes(trace)
    allowed = place_states(sizes, cap_nbytes=min(budget, default=0) - others, margin_use_ratio=margin_use_ratio)
    tried = []
    small = len(trace.moments) <= _LARGE
    for count in (len(allowed), len(allowed) // 2, 0) if small else (len(allowed), 0):
        on_device = set(sorted(allowed)[:count])
        if on_device not in tried:
            tried.append(on_device)
            yield {group: Tier.DEVICE if group in on_device else Tier.HOST for group in groups}


def _remote_nbytes(trace: Trace) -> int:
    """Return the most bytes that chunks of other ranks take on DEVICE at a time."""
    now = peak = 0
    there: set[ChunkId] = set()
    for moment in trace.moments if trace.remote_groups else ():
        chunk = moment.chunk
        if trace.is_remote(chunk) and moment.kind in (Kind.HOLD, Kind.CREATE) and chunk not in there:
            there.add(chunk)
            now += trace.chunk_nbytes[chunk]
        elif chunk in there and moment.kind is (Kind.RELEASE if chunk.role is Role.PARAM else Kind.CONSUME):
            there.remove(chunk)
            now -= trace.chunk_nbytes[chunk]
        peak = max(peak, now)
    return peak


def _group_bytes(trace: Trace, group: int) -> GroupBytes:
    chunks = trace.update_chunks(group)
    model = sum(trace.chunk_nbytes[c] for c in chunks if c.role in (Role.PARAM, Role.GRAD))
    return GroupBytes(group, model, sum(trace.chunk_nbytes[c] for c in chunks) - model)


def _ways(problem: Problem, budget: Sequence[int]) -> Iterator[tuple[int, str, frozenset[int]]]:
    """Yield (chunks' worth of room set aside for prefetching, name, gaps to keep), with the least set aside first."""
    everything = frozenset(free_to_choose(problem))
    room = [have - need for have, need in zip(budget, problem.required, strict=True)]
    n = len(problem.trace.moments)
    slab = max(problem.nbytes, default=0)
    small = n <= _LARGE
    seen: set[frozenset[int]] = set()
    for reserve in (0, 1, 2, 3, 4) if small else (0, 2):
        left = [max(0, nbytes - reserve * slab) for nbytes in room]
        ways = [("belady", sweep(problem, left, furthest_next_use))]
        if small:
            width = _width(problem) if reserve == 0 else _width(problem) // 8 + 1
            ways.append(("least-traffic", least_traffic(problem, left, width=width)))
            ways.append(("lru", sweep(problem, left, least_recently_used)))
        for name, kept in ways:
            if kept in seen:
                continue
            seen.add(kept)
            yield reserve, f"{name}, {reserve} set aside", kept
        if everything in seen:
            return


def _width(problem: Problem) -> int:
    """States to follow side by side: all of a small problem, few of a large one, where each also costs more."""
    work = len(problem.trace.moments) * max(1, sum(1 for chain in problem.uses if chain))
    return max(4, min(2000, 10**11 // max(1, work * work)))


def _program(
    problem: Problem, kept: frozenset[int], budget: Sequence[int], machine: Machine, *, lead: float
) -> Program:
    stays = find_stays(problem, kept)
    prefetch(problem, stays, budget, machine, lead=lead)
    linger(problem, stays, budget, machine)
    stays = _keep_slabs(problem, kept, stays, budget)
    # While an evaluation runs, what never leaves DEVICE need not be on HOST: training will say whether it should.
    program = emit(problem, stays, home_residents=problem.trace.mode is Mode.TRAIN)
    if program.host_peak_nbytes > machine.host_nbytes:
        program = emit(problem, stays, home_residents=False)
    return program


def _keep_slabs(problem: Problem, kept: frozenset[int], stays: Stays, budget: Sequence[int]) -> Stays:
    """Let chunks whose content dies keep their slab until the next content begins, where room is left over."""
    free = free_room(problem, stays, budget)
    spare = set()
    dying = [
        at
        for at, g in enumerate(problem.gaps)
        if g.after is After.DIES
        and g.hosted_by is None
        and g.start < g.stop
        and not problem.trace.is_remote(problem.chunks[g.chunk])
    ]
    for at in sorted(dying, key=lambda at: (problem.gaps[at].stop - problem.gaps[at].start, at)):
        gap = problem.gaps[at]
        nbytes = problem.nbytes[gap.chunk]
        if free.last_short(gap.start, gap.stop, nbytes) is None:
            spare.add(at)
            free.take(gap.start, gap.stop, nbytes)
    if not spare:
        return stays
    issued = {(stay.chunk, stay.start): stay.issued for stay in stays.passing if stay.fetched}
    freed = {(stay.chunk, stay.stop): stay.freed for stay in stays.passing}
    joined = find_stays(problem, kept | spare)
    for stay in joined.passing:
        stay.freed = freed.get((stay.chunk, stay.stop), stay.stop)
        stay.issued = issued.get((stay.chunk, stay.start), stay.issued)
    return joined
