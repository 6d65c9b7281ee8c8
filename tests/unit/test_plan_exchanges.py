"""Plans of a rank that exchanges chunks with others: its own ones move as always, those of others come and go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from chunkmem.data.errors import CapacityError, PlanError
from chunkmem.data.trace import Kind, Mode, Moment, Trace
from chunkmem.data.types import ChunkId, Role, Tier
from chunkmem.plan.machine import Machine, host_links
from chunkmem.plan.model import Alloc, Copy, Free, Lane, Plan, Wait
from chunkmem.plan.planner import make_plan
from chunkmem.plan.semantics import residency_before
from chunkmem.plan.simulate import simulate

NBYTES = 100
REMOTE = frozenset({1, 3})
GATHER_S = 2.0
"""Of one chunk."""
COMPUTE_S = 1.0
"""Of one unit, forward or backward."""


def chunk(role: Role, group: int) -> ChunkId:
    return ChunkId(role, group)


def unit_of(unit: int) -> tuple[ChunkId, ...]:
    """Two units of one own chunk and one of another rank each."""
    return tuple(chunk(Role.PARAM, group) for group in (2 * unit, 2 * unit + 1))


def held(unit: int) -> Iterator[Moment]:
    yield from (Moment(Kind.HOLD, own, f"unit {unit}") for own in unit_of(unit))


def sent(unit: int) -> Iterator[Moment]:
    yield from (Moment(Kind.EXCHANGE, own, f"unit {unit}") for own in unit_of(unit))


def arrived(unit: int) -> Iterator[Moment]:
    first, last = unit_of(unit)
    yield from (Moment(Kind.ARRIVE, first, f"unit {unit}"), Moment(Kind.ARRIVE, last, f"unit {unit}", COMPUTE_S))


def released(unit: int) -> Iterator[Moment]:
    yield from (Moment(Kind.RELEASE, own) for own in unit_of(unit))


def landed(unit: int) -> Iterator[Moment]:
    yield from (Moment(Kind.CREATE, chunk(Role.GRAD, own.group), "backward") for own in unit_of(unit))


def reduced(unit: int) -> Iterator[Moment]:
    grads = [chunk(Role.GRAD, own.group) for own in unit_of(unit)]
    for kind in (Kind.WRITE, Kind.HOLD, Kind.EXCHANGE, Kind.ARRIVE, Kind.RELEASE):
        yield from (Moment(kind, grad, "reduction") for grad in grads)
    yield Moment(Kind.CONSUME, grads[1])


def updated(group: int) -> Iterator[Moment]:
    yield Moment(Kind.UPDATE, chunk(Role.PARAM, group), f"update of group {group}", 0.1)
    yield Moment(Kind.CONSUME, chunk(Role.GRAD, group))


def step(*, ahead: bool) -> Trace:
    """Forward and backward of both units; with `ahead`, the second one is gathered while the first computes."""
    moments = [*held(0), *sent(0)]
    if ahead:
        first, last = arrived(0)
        moments += [first, Moment(last.kind, last.chunk, last.label), *held(1), *sent(1)]
        moments[-1] = Moment(Kind.EXCHANGE, moments[-1].chunk, "unit 1", COMPUTE_S)
        moments += [*released(0)]
    else:
        moments += [*arrived(0), *released(0), *held(1), *sent(1)]
    moments += [*arrived(1), *landed(1), *released(1), *reduced(1)]
    moments += [*held(0), *sent(0), *arrived(0), *landed(0), *released(0), *reduced(0), *updated(0), *updated(2)]
    roles = {0: (Role.PARAM, Role.GRAD, Role("exp_avg"), Role("exp_avg_sq")), 1: (Role.PARAM, Role.GRAD)}
    sizes = {chunk(role, group): NBYTES for group in range(4) for role in roles[group % 2]}
    return Trace(Mode.TRAIN, "", sizes, tuple(moments), remote_groups=REMOTE)


def machine(slabs: float) -> Machine:
    return Machine(
        int(slabs * NBYTES),
        100 * NBYTES,
        host_links(h2d_Bps=4.0 * NBYTES, d2h_Bps=4.0 * NBYTES),
        one_processor=False,
        exchange_Bps=NBYTES / GATHER_S,
    )


@pytest.mark.parametrize("slabs", [3, 4, 5, 6, 8, 20])
@pytest.mark.parametrize("ahead", [False, True])
def test_what_others_own_comes_by_exchange_alone(slabs: int, *, ahead: bool) -> None:
    trace = step(ahead=ahead)
    if ahead and slabs < 4:
        with pytest.raises(CapacityError, match="400 B of chunks are in use at once"):
            make_plan(trace, machine(slabs))
        return
    plan = make_plan(trace, machine(slabs))
    simulate(plan, trace)
    for actions in plan.actions:
        copied = [action.chunk for action in actions if isinstance(action, Copy)]
        assert not any(trace.is_remote(chunk) for chunk in copied)
    assert not any(trace.is_remote(placed.chunk) for placed in plan.start)
    assert all(placed.chunk.group in (0, 2) for placed in plan.start)


@pytest.mark.parametrize("slabs", [4, 5, 20])
@pytest.mark.parametrize("ahead", [False, True])
def test_others_chunks_leave_with_their_release(slabs: int, *, ahead: bool) -> None:
    trace = step(ahead=ahead)
    plan = make_plan(trace, machine(slabs))
    for at, moment in enumerate(trace.moments):
        if trace.is_remote(moment.chunk) and moment.kind is Kind.RELEASE and moment.chunk.role is Role.PARAM:
            assert Free(moment.chunk, Tier.DEVICE) in plan.actions[at]
        if trace.is_remote(moment.chunk) and moment.kind is Kind.CONSUME:
            assert Free(moment.chunk, Tier.DEVICE) in plan.actions[at + 1]


def test_an_exchange_takes_its_time_and_hides_behind_what_is_computed() -> None:
    """Two chunks a gather, one after the other; the one ahead has a unit's computing to hide behind."""
    lazy, ahead = (simulate(make_plan(t, machine(20)), t) for t in (step(ahead=False), step(ahead=True)))
    exchanges = 3 * 2 * GATHER_S + 2 * 2 * GATHER_S
    assert lazy.step_s == pytest.approx(3 * COMPUTE_S + 2 * 0.1 + exchanges)
    assert ahead.step_s == pytest.approx(lazy.step_s - COMPUTE_S)
    assert lazy.exchanged_nbytes == 10 * NBYTES
    assert lazy.moved_nbytes == {Lane.H2D: 0, Lane.D2H: 0}
    spans = [span for span in lazy.spans if span.lane is Lane.COLLECTIVE]
    assert sum(span.end_s - span.start_s for span in spans) == pytest.approx(exchanges)


def test_gradients_are_reduced_no_faster_than_they_can_be() -> None:
    trace = step(ahead=False)
    usual = simulate(make_plan(trace, machine(20)), trace)
    for reduce_Bps, more_s in ((NBYTES / GATHER_S / 3, 2 * 4 * GATHER_S), (NBYTES / GATHER_S * 3, 0.0)):
        slow = simulate(make_plan(trace, replace(machine(20), reduce_Bps=reduce_Bps)), trace)
        assert slow.step_s == pytest.approx(usual.step_s + more_s)


@pytest.mark.parametrize("slabs", [4, 5])
def test_every_wait_is_needed(slabs: int) -> None:
    trace = step(ahead=True)
    plan = make_plan(trace, machine(slabs))
    waits = [(at, action) for at, listed in enumerate(plan.actions) for action in listed if isinstance(action, Wait)]
    assert waits
    for at, wait in waits:
        listed = list(plan.actions[at])
        listed.remove(wait)
        spoiled = with_actions(plan, at, listed)
        with pytest.raises(PlanError, match="is missing"):
            simulate(spoiled, trace)


def with_actions(plan: Plan, at: int, listed: list[object]) -> Plan:
    actions = (*plan.actions[:at], tuple(listed), *plan.actions[at + 1 :])
    return Plan(plan.trace_digest, plan.machine, plan.start, actions, plan.update_tiers, plan.name)  # type: ignore[arg-type]


def test_others_weights_need_a_slab_to_arrive_in() -> None:
    trace = step(ahead=False)
    plan = make_plan(trace, machine(20))
    at, alloc = next(
        (at, action)
        for at, listed in enumerate(plan.actions)
        for action in listed
        if isinstance(action, Alloc) and action.chunk == chunk(Role.PARAM, 1)
    )
    spoiled = with_actions(plan, at, [action for action in plan.actions[at] if action is not alloc])
    with pytest.raises(PlanError, match="HOLD param chunk 1: the chunk has no slab on DEVICE; an Alloc is missing"):
        simulate(spoiled, trace)


def test_a_mean_is_copied_to_host_only_when_it_has_arrived() -> None:
    """The copy of the gradient waits for COMPUTE, which has waited for the exchange."""
    trace = step(ahead=False)
    plan = make_plan(trace, machine(4))
    grad = chunk(Role.GRAD, 0)
    arrival = max(at for at, m in enumerate(trace.moments) if m.kind is Kind.ARRIVE and m.chunk == grad)
    copied = [at for at, listed in enumerate(plan.actions) if Copy(grad, Tier.DEVICE, Tier.HOST) in listed]
    assert copied
    assert min(copied) > arrival


def test_what_is_where_while_others_weights_are_held() -> None:
    trace = step(ahead=False)
    plan = make_plan(trace, machine(20))
    remote = chunk(Role.PARAM, 1)
    before, after = (residency_before(plan, trace, at).newest.get((remote, Tier.DEVICE)) for at in (0, 2))
    assert (before, after) == (None, True)
    release = next(at for at, m in enumerate(trace.moments) if m.kind is Kind.RELEASE and m.chunk == remote)
    assert residency_before(plan, trace, release + 1).newest.get((remote, Tier.DEVICE)) is None
