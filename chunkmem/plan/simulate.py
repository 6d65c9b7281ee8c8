"""Interpreter 1 of plans: verify one against its trace, and time it. Knows nothing of how plans are made.

First one iteration in program order, for everything that is book-keeping: residency, versions, caps. It is the same in
every iteration, for an iteration ends as it begins. Then some iterations on lanes, for what overlaps with what, and
when.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from chunkmem.data.errors import PlanError
from chunkmem.data.trace import Trace
from chunkmem.data.types import PLACE, Tier
from chunkmem.plan.hazards import FETCHES, LANES, Await, LaneProgram, SimulatedLanes
from chunkmem.plan.lane_times import Bandwidth
from chunkmem.plan.machine import Machine
from chunkmem.plan.model import Plan, Wait
from chunkmem.plan.timeline import Timeline, python_between_s
from chunkmem.plan.verify import Reader


def simulate(plan: Plan, trace: Trace, *, machine: Machine | None = None, iterations: int = 3) -> Timeline:
    """Verify `plan` against `trace` and return the last of `iterations` iterations as a machine of these speeds would
    run it.

    Args:
        machine: caps and speeds to judge by, if not those that the plan was made for.
        iterations: 2 to see every conflict between one iteration and the next; each further one brings the times closer
            to the steady state.

    Raises:
        CapacityError: a tier's cap is passed.
        PlanError: the plan does not belong to the trace, or would read or lose something wrong; the message names the
            moment, the action, and what is missing.
    """
    if iterations < 1:
        raise PlanError(f"{iterations} iterations cannot be simulated; give 1 or more")
    reader, program = _read(plan, trace, plan.machine if machine is None else machine)
    return _timeline(reader, program, trace, iterations)


def with_waits(plan: Plan, trace: Trace, *, iterations: int = 3) -> tuple[Plan, Timeline]:
    """Return a plan that has no waits with those that it needs, and no others; and what `simulate` says of it."""
    reader, program = _read(plan, trace, plan.machine)
    before: dict[int, list[Await]] = defaultdict(list)
    actions = list(plan.actions)
    for at, wait in reversed(_lanes(reader, program).needed_waits()):
        before[at].insert(0, wait)
        moment, number = reader.places[at]
        own = actions[moment]
        actions[moment] = (*own[:number], Wait(LANES[wait.lane], LANES[wait.on], wait.number), *own[number:])
    entries = [each for at, entry in enumerate(program.entries) for each in (*before.get(at, ()), entry)]
    waiting = replace(plan, actions=tuple(actions))
    return waiting, _timeline(reader, replace(program, entries=entries), trace, iterations)


def _lanes(reader: Reader, program: LaneProgram) -> SimulatedLanes:
    machine = reader.machine
    bandwidth = Bandwidth(machine.host_memory_Bps, machine.duplex_Bps)
    return SimulatedLanes(program, one_processor=machine.one_processor, bandwidth=bandwidth)


def _timeline(reader: Reader, program: LaneProgram, trace: Trace, iterations: int) -> Timeline:
    machine, iteration = reader.machine, _lanes(reader, program).run(iterations)
    state, fetched = reader.state, reader.num_issued[FETCHES]
    return Timeline(
        spans=tuple(iteration.spans),
        step_s=iteration.step_s,
        peak_nbytes=_peaks(reader),
        role_peak_nbytes={key: nbytes for key, nbytes in state.role_peak_nbytes.items() if nbytes},
        cap_nbytes={tier: machine.cap_nbytes[tier] for tier in machine.tiers},
        device_nbytes=tuple(reader.device_nbytes),
        prefetched=fetched - iteration.late,
        fetched=fetched,
        python_by_layer=python_between_s(iteration.spans, trace),
    )


def peak_nbytes(plan: Plan, trace: Trace) -> Mapping[Tier, int]:
    """Return the highest sum of chunk bytes on each tier in an iteration that follows `plan`: that part of `simulate`
    alone.

    Raises: what `simulate` does, but for conflicts between lanes, which are not looked for.
    """
    reader, _ = _read(plan, trace, plan.machine)
    return _peaks(reader)


def _peaks(reader: Reader) -> dict[Tier, int]:
    return {tier: reader.state.peak_nbytes[PLACE[tier]] for tier in reader.machine.tiers}


def _read(plan: Plan, trace: Trace, machine: Machine) -> tuple[Reader, LaneProgram]:
    if plan.trace_digest != trace.digest:
        raise PlanError(f"the plan was made from trace {plan.trace_digest}, this one is {trace.digest}; plan again")
    if len(plan.actions) != len(trace.moments):
        raise PlanError(
            f"the plan has actions for {len(plan.actions)} moments, the trace has {len(trace.moments)}; plan again"
        )
    reader = Reader(plan, trace, machine)
    return reader, reader.read()
