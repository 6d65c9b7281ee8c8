"""How one plan is made, from which chunks stay on DEVICE where: of many that are tried. Pure.

The life of one chunk that two blocks read, one after the other, and that is not updated in between:

    moments        0    1    2    3    4    5    6    7    8    9
    uses           |read|                             |read|
    gap                 |<------ reuse interval ----->|
    kept           [=========================================]     takes room all the time, moves nothing
    evicted        [====]                     [h2d====|====]       `find_stays`: two stays; the gap is given up
    prefetched     [====]              [h2d===========|====]       in free room, `_FETCH_LEAD` times a copy earlier
    lingering      [========]          [h2d===========|====]       leaves when its room is needed, and not before
    slabs kept     [====]    [other chunk]  [h2d======|====]       who comes next takes the slab: no Free, no Alloc

`emit` turns stays into actions, `with_waits` adds what orders the lanes, and says how long the step takes.
Which gaps are kept is decided before, by Belady's rule in less or more room (`choose.py`), for each way to place
updates (`placement.py`); `candidates.py` says which of them are tried, and `planner.py` keeps the fastest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from chunkmem.data.trace import Mode
from chunkmem.data.types import Tier
from chunkmem.plan.gaps import Problem
from chunkmem.plan.intervals import find_stays, free_room, keep_slabs, linger, prefetch
from chunkmem.plan.machine import Machine
from chunkmem.plan.model import FETCH, LANE_LINKS, Action, Copy, Plan
from chunkmem.plan.placement import Placement
from chunkmem.plan.program import Program, emit
from chunkmem.plan.timeline import Timeline

_FETCH_LEAD = 2.0
"""Each fetch is planned to take this many times its own duration, as slack against jitter. DISK has its own, in
`chunkmem.plan.disk`."""


@dataclass(frozen=True)
class PlanOptions:
    """What a user's configuration, and what else there is to train, decide about plans."""

    margin_use_ratio: float = 0.8
    """Share of the space left on DEVICE at the traced peak that optimizer states may take; 0: all updates on HOST."""
    static_nbytes: int | None = None
    """A fixed share of DEVICE for chunks instead of what each moment leaves."""
    with_residents: bool = True
    """Groups may stay on DEVICE for good. Where steps of other kinds update other groups, they would take turns."""


@dataclass(frozen=True)
class Candidate:
    """A plan that was tried, and what the simulator says of it."""

    plan: Plan
    timeline: Timeline
    placement: Placement
    actions: Sequence[Sequence[Action]]
    """Those of the plan, without waits."""

    @property
    def nbytes(self) -> int:
        """Bytes moved in an iteration, over both links."""
        return sum(self.timeline.moved_nbytes.values())

    @cached_property
    def num_copies(self) -> int:
        """Copies in an iteration."""
        return sum(isinstance(action, Copy) for actions in self.plan.actions for action in actions)

    @property
    def step_s(self) -> float:
        """Seconds of a step; where the host computes itself, with those that it takes to hand copies over."""
        machine = self.plan.machine
        latency_s = machine.links[LANE_LINKS[FETCH]].latency_s if machine.one_processor else 0.0
        return self.timeline.step_s + latency_s * self.num_copies


def make_program(problem: Problem, kept: frozenset[int], budget: Sequence[int], machine: Machine) -> Program:
    """Return the actions on DEVICE and the tier below that keep some gaps, as drawn above; no waits yet."""
    stays = find_stays(problem, kept)
    free = free_room(problem, stays, budget)
    prefetch(problem, stays, free, machine, lead=_FETCH_LEAD)
    linger(problem, stays, free, machine)
    stays = keep_slabs(problem, kept, stays, free)
    # While an evaluation runs, what never leaves DEVICE need not be on HOST: training will say whether it should.
    program = emit(problem, stays, home_residents=problem.trace.mode is Mode.TRAIN)
    if program.peak_nbytes[Tier.HOST] > machine.host_nbytes:
        program = emit(problem, stays, home_residents=False)
    if program.peak_nbytes[Tier.HOST] > machine.host_nbytes and machine.tiers[-1] is Tier.HOST:
        other = emit(problem, stays, home_residents=False, rounds=True)
        program = min(program, other, key=lambda each: each.peak_nbytes[Tier.HOST])
    return program
