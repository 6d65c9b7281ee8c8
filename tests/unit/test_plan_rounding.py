"""Plans that round weights from their master weights for each fetch, where HOST has no room to keep them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from chunkmem.data.errors import CapacityError, PlanError
from chunkmem.data.trace import Kind, Mode, Moment, Trace
from chunkmem.data.types import ChunkId, Role, Tier
from chunkmem.plan.candidate import PlanOptions
from chunkmem.plan.facts import PlanFacts
from chunkmem.plan.machine import Machine, host_links
from chunkmem.plan.model import LANE_LINKS, Action, Alloc, Copy, Free, Lane, Plan, Round, Update, Wait
from chunkmem.plan.planner import make_plan
from chunkmem.plan.semantics import residency_before
from chunkmem.plan.simulate import simulate

NUM_GROUPS = 6
LOW_NBYTES, FULL_NBYTES = 128, 256
STATES = (Role("exp_avg"), Role("exp_avg_sq"))
FULL_ROLES = (Role.MASTER, *STATES)
HOST_NBYTES = NUM_GROUPS * 3 * FULL_NBYTES + 3 * LOW_NBYTES
"""For master weights and states, and for a group that is updated and another one that is fetched."""


def trace_of(*, in_backward: bool = True) -> Trace:
    """One layer a group: forward, then backward from the last one, with its update inside of it or at the end."""
    groups = range(NUM_GROUPS)
    events: list[tuple[Kind, ChunkId]] = []
    updates: list[tuple[Kind, ChunkId]] = []
    for group in groups:
        events += [(Kind.HOLD, ChunkId(Role.PARAM, group)), (Kind.RELEASE, ChunkId(Role.PARAM, group))]
    for group in reversed(groups):
        param, grad = ChunkId(Role.PARAM, group), ChunkId(Role.GRAD, group)
        events += [(Kind.HOLD, param), (Kind.CREATE, grad), (Kind.RELEASE, param)]
        update = [(Kind.UPDATE, param), (Kind.CONSUME, grad)]
        events += update if in_backward else []
        updates += [] if in_backward else update
    sizes = {ChunkId(role, group): LOW_NBYTES for group in groups for role in (Role.PARAM, Role.GRAD)}
    sizes |= {ChunkId(role, group): FULL_NBYTES for group in groups for role in FULL_ROLES}
    moments = tuple(
        Moment(kind, chunk, f"{at}: {kind.value}", 1e-3) for at, (kind, chunk) in enumerate([*events, *updates])
    )
    return Trace(Mode.TRAIN, "layout", sizes, moments)


def machine_of(host_nbytes: int = HOST_NBYTES, *, one_processor: bool = True) -> Machine:
    links = host_links(h2d_Bps=1e6, d2h_Bps=1e6)
    return Machine(4 * LOW_NBYTES, host_nbytes, links, host_update_Bps=1e7, one_processor=one_processor)


@pytest.mark.parametrize("one_processor", [True, False])
def test_weights_are_on_host_while_they_are_fetched(one_processor: bool) -> None:
    trace = trace_of()
    plan = make_plan(trace, machine_of(one_processor=one_processor), options=PlanOptions())
    timeline = simulate(plan, trace)
    assert timeline.peak_nbytes[Tier.HOST] <= HOST_NBYTES
    fetched = [action.chunk for actions in plan.actions for action in actions if isinstance(action, Copy)
               and action.chunk.role is Role.PARAM]  # fmt: skip
    rounded = [action.chunk for actions in plan.actions for action in actions if isinstance(action, Round)]
    assert rounded == fetched
    assert rounded
    for moment in range(len(trace.moments)):
        there = [key for key, is_newest in residency_before(plan, trace, moment).newest.items() if is_newest]
        assert sum(tier is Tier.HOST and chunk.role is Role.PARAM for chunk, tier in there) <= 1


def test_with_room_they_stay() -> None:
    trace = trace_of()
    plan = make_plan(trace, machine_of(HOST_NBYTES + NUM_GROUPS * LOW_NBYTES), options=PlanOptions())
    assert not any(isinstance(action, Round) for actions in plan.actions for action in actions)


def test_gradients_that_wait_for_the_step_take_their_place_anyway() -> None:
    with pytest.raises(CapacityError):
        make_plan(trace_of(in_backward=False), machine_of(), options=PlanOptions())


def mutants(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Leave out one action each, or have a rounding come where it cannot."""

    def with_list(at: int, actions: list[Action]) -> Plan:
        return replace(plan, actions=(*plan.actions[:at], tuple(actions), *plan.actions[at + 1 :]))

    for at, listed in enumerate(plan.actions):
        for index, action in enumerate(listed):
            name = f"moment {at}, {action}"
            is_update_on_device = isinstance(action, Update) and action.tier is Tier.DEVICE
            if not is_update_on_device:
                yield f"without {name}", with_list(at, [*listed[:index], *listed[index + 1 :]])
            if isinstance(action, Round):
                yield f"twice {name}", with_list(at, [*listed[: index + 1], *listed[index:]])
                for other in (Role.GRAD, Role.MASTER):
                    wrong = Round(ChunkId(other, action.chunk.group))
                    yield f"of {other}, {name}", with_list(at, [*listed[:index], wrong, *listed[index + 1 :]])
                before = next(i for i in range(index - 1, -1, -1) if isinstance(listed[i], Alloc))
                moved = [*listed[:before], action, *listed[before:index], *listed[index + 1 :]]
                yield f"before its slab, {name}", with_list(at, moved)
                after = next(i for i in range(index, len(listed)) if isinstance(listed[i], Free | Copy))
                moved = [*listed[:index], *listed[index + 1 : after + 1], action, *listed[after + 1 :]]
                yield f"after what needs it, {name}", with_list(at, moved)


@pytest.mark.parametrize("one_processor", [True, False])
def test_no_action_can_be_left_out_or_be_elsewhere(one_processor: bool) -> None:
    trace = trace_of()
    plan = make_plan(trace, machine_of(one_processor=one_processor), options=PlanOptions())
    assert any(isinstance(action, Wait) for actions in plan.actions for action in actions)
    survivors = []
    for name, mutant in mutants(plan):
        try:
            simulate(mutant, trace)
        except PlanError:
            continue
        survivors.append(name)
    assert survivors == []


def test_waits_count_roundings_where_a_plan_is_taken_up_again() -> None:
    """Whoever follows it from a moment on has to know how many operations of each lane came before."""
    trace = trace_of()
    plan = make_plan(trace, machine_of(), options=PlanOptions())
    facts = PlanFacts.of(plan, trace, tuple(LANE_LINKS))
    issued = 0
    for at, (moment, actions) in enumerate(zip(trace.moments, plan.actions, strict=True)):
        assert facts.copies_before[at][Lane.HOST_UPDATE] == issued
        issued += sum(isinstance(action, Round) for action in actions)
        issued += moment.kind is Kind.UPDATE and plan.update_tiers[moment.chunk.group] is Tier.HOST
    assert facts.copies_before[-1][Lane.HOST_UPDATE] == issued > NUM_GROUPS


def test_a_plan_with_roundings_is_read_as_it_was_written() -> None:
    plan = make_plan(trace_of(), machine_of(), options=PlanOptions())
    assert Plan.from_dict(plan.to_dict()) == plan
