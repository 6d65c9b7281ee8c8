"""Steps whose gradients outlive them, or come from before them: as they repeat, and planned."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chunkmem.data.errors import PlanError, TraceError
from chunkmem.data.trace import Kind, Moment, Trace
from chunkmem.plan.loop import as_loop
from chunkmem.plan.machine import Machine, host_links
from chunkmem.plan.planner import make_plan
from chunkmem.plan.simulate import simulate
from tests.helpers.traces import grad, param, training_trace

NBYTES = 1 << 10
GROUPS = 4
WHOLE = training_trace(GROUPS, NBYTES)


def machine(slabs: int) -> Machine:
    return Machine(slabs * NBYTES, 1 << 30, host_links(h2d_Bps=1e6, d2h_Bps=1e6))


def without(trace: Trace, *left_out: tuple[Kind, int]) -> Trace:
    """The same step without some moments, each named by its kind and group."""
    moments = [m for m in trace.moments if (m.kind, m.chunk.group) not in left_out]
    return replace(trace, moments=tuple(moments))


def first_kinds(trace: Trace, group: int) -> list[Kind]:
    return [m.kind for m in trace.moments if m.chunk == grad(group)]


NEVER_UPDATED = without(WHOLE, (Kind.UPDATE, 1), (Kind.CONSUME, 1))
NEVER_CONSUMED = without(WHOLE, (Kind.CONSUME, 1))


def test_a_gradient_that_outlives_the_step_is_added_to_in_the_next() -> None:
    assert first_kinds(as_loop(NEVER_UPDATED), 1) == [Kind.WRITE]
    assert first_kinds(as_loop(NEVER_UPDATED), 0) == [Kind.CREATE, Kind.CONSUME]


def test_a_gradient_from_before_the_step_that_the_step_uses_up_is_begun_in_the_next() -> None:
    moments = [replace(m, kind=Kind.WRITE) if m.kind is Kind.CREATE else m for m in WHOLE.moments]
    assert as_loop(replace(WHOLE, moments=tuple(moments))) == WHOLE


def test_what_is_a_loop_stays_as_it_is() -> None:
    discarded_late = replace(NEVER_UPDATED, moments=(Moment(Kind.CONSUME, grad(1)), *NEVER_UPDATED.moments))
    for trace in (WHOLE, as_loop(NEVER_UPDATED), discarded_late, Trace(WHOLE.mode, "", {}, ())):
        assert as_loop(trace) is trace


@pytest.mark.parametrize("kind", [Kind.HOLD, Kind.UPDATE])
def test_a_gradient_that_is_read_and_never_begun_is_no_loop(kind: Kind) -> None:
    reads = (Moment(kind, param(1) if kind is Kind.UPDATE else grad(1), "clipping"),)
    reads += (Moment(Kind.RELEASE, grad(1)),) if kind is Kind.HOLD else ()
    trace = replace(WHOLE, moments=(*reads, *WHOLE.moments))
    with pytest.raises(TraceError, match=r"moment 0 \(clipping\) reads grad chunk 1, .* so record that"):
        as_loop(trace)
    with pytest.raises(PlanError, match=r"moment 0 \(clipping\) reads grad chunk 1"):
        make_plan(trace, machine(4))


@pytest.mark.parametrize("trace", [NEVER_UPDATED, NEVER_CONSUMED], ids=["never updated", "never consumed"])
@pytest.mark.parametrize("slabs", [2, 3, 4, 20])
def test_gradients_that_no_optimizer_consumes_are_planned(trace: Trace, slabs: int) -> None:
    """Once refused: 'Free grad chunk 1 on HOST: it is the only replica of the newest version'."""
    plan = make_plan(trace, machine(slabs))
    assert plan.trace_digest == trace.digest
    simulate(plan, trace)
    loop = as_loop(trace)
    simulate(make_plan(loop, machine(slabs)), loop)


@pytest.mark.parametrize("slabs", [2, 3, 4, 20])
def test_gradients_from_before_the_step_are_planned(slabs: int) -> None:
    """Once a KeyError, as the plan copied a gradient from HOST that was nowhere when the step began."""
    moments = [replace(m, kind=Kind.WRITE) if m.kind is Kind.CREATE else m for m in WHOLE.moments]
    trace = replace(WHOLE, moments=tuple(moments))
    with pytest.raises(PlanError, match=r"moment 9 .* adds to grad chunk 3"):
        make_plan(trace, machine(slabs))
    simulate(make_plan(as_loop(trace), machine(slabs)), as_loop(trace))


@pytest.mark.parametrize("kind", [Kind.CONSUME, Kind.UPDATE])
def test_a_gradient_that_was_given_up_is_of_no_use(kind: Kind) -> None:
    at = next(at for at, m in enumerate(WHOLE.moments) if (m.kind, m.chunk) == (Kind.UPDATE, param(1)))
    late = (Moment(Kind.CONSUME, grad(1)), Moment(kind, param(1) if kind is Kind.UPDATE else grad(1)))
    with pytest.raises(TraceError, match="which the step has given up before"):
        as_loop(replace(WHOLE, moments=(*WHOLE.moments[:at], *late, *WHOLE.moments[at:])))
