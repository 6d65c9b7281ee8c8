"""What of HOST goes to DISK: plans that keep within three caps, and whose every wait, copy and free is needed."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest

from chunkmem.data.errors import CapacityError, PlanError
from chunkmem.data.trace import Kind, Mode, Moment, Trace
from chunkmem.data.types import ChunkId, Role, Tier
from chunkmem.plan.choose import furthest_next_use, sweep
from chunkmem.plan.disk import least_nbytes, offload
from chunkmem.plan.disk_bound import DiskBound, disk_bound
from chunkmem.plan.gaps import find_gaps
from chunkmem.plan.intervals import find_stays, free_room, prefetch
from chunkmem.plan.machine import Machine, host_links, links_below
from chunkmem.plan.model import Action, Alloc, Copy, Free, Lane, Placed, Plan, Update, Wait
from chunkmem.plan.planner import make_plan
from chunkmem.plan.program import Program, emit
from chunkmem.plan.simulate import simulate, with_waits
from tests.helpers.traces import grad, param, random_trace, training_trace

DEVICE, HOST, DISK = Tier
NUM_TRACES, FEW_TRACES = 60, 16


def machine_of(device_nbytes: int, host_nbytes: int, *, disk_nbytes: int = 2**40, disk_Bps: float = 1e6) -> Machine:
    links = host_links(h2d_Bps=1e6, d2h_Bps=1e6)
    links |= links_below(Tier.HOST, Tier.DISK, read_Bps=disk_Bps, write_Bps=disk_Bps)
    return Machine(device_nbytes=device_nbytes, host_nbytes=host_nbytes, links=links, disk_nbytes=disk_nbytes)


def group_nbytes(trace: Trace) -> int:
    """What the update of the largest group touches."""
    groups = {chunk.group for chunk in trace.chunk_nbytes}
    return max(sum(trace.chunk_nbytes[chunk] for chunk in trace.update(group).chunks) for group in groups)


def smallest_device(trace: Trace) -> int:
    tiers = {moment.chunk.group: HOST for moment in trace.moments if moment.kind is Kind.UPDATE}
    return max(find_gaps(trace, tiers).required)


@cache
def subjects(num: int = NUM_TRACES) -> tuple[tuple[Plan, Trace], ...]:
    """Plans of random traces under caps that make chunks move between all tiers."""
    rng = random.Random(19)
    found: list[tuple[Plan, Trace]] = []
    while len(found) < num:
        trace = random_trace(
            rng,
            num_groups=rng.randint(2, 5),
            uniform=rng.random() < 0.6,
            max_held=rng.randint(1, 2),
            micro_batches=rng.randint(1, 2),
            max_non_model_nbytes=0,
        )
        device = smallest_device(trace) + rng.choice((0, 1, 3)) * max(trace.chunk_nbytes.values())
        host = int(group_nbytes(trace) * rng.choice((1.0, 1.0, 1.3, 2.0)))
        plan = make_plan(trace, machine_of(device, host, disk_Bps=10 ** rng.uniform(4, 7)))
        if lanes_of(plan) >= {Lane.DISK_READ, Lane.DISK_WRITE}:
            found.append((plan, trace))
    return tuple(found)


def lanes_of(plan: Plan) -> set[Lane]:
    return {action.lane for actions in plan.actions for action in actions if isinstance(action, Copy)}


@pytest.mark.full
def test_three_caps_are_kept() -> None:
    for plan, trace in subjects():
        timeline = simulate(plan, trace)
        assert all(timeline.peak_nbytes[tier] <= plan.machine.cap_nbytes[tier] for tier in Tier)
        assert timeline.peak_nbytes[DISK] > 0


def without(plan: Plan, moment: int, at: int) -> Plan:
    actions = list(plan.actions)
    actions[moment] = (*actions[moment][:at], *actions[moment][at + 1 :])
    return replace(plan, actions=tuple(actions))


@pytest.mark.few(1)
@pytest.mark.parametrize("num_traces", [FEW_TRACES, pytest.param(NUM_TRACES, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", [Wait, Copy, Alloc, Free])
def test_nothing_that_disk_does_can_be_left_out(kind: type[Action], num_traces: int) -> None:
    """Of what touches DISK or waits for it, each action by itself: without it, something would be read too early, or
    from where it is not."""
    num = 0
    for plan, trace in subjects(num_traces):
        for moment, actions in enumerate(plan.actions):
            for at, action in enumerate(actions):
                if not (isinstance(action, kind) and touches_disk(action)):
                    continue
                num += 1
                with pytest.raises(PlanError):
                    simulate(without(plan, moment, at), trace, iterations=4)
    assert num > 100


def touches_disk(action: Action) -> bool:
    if isinstance(action, Wait):
        return bool({action.lane, action.on} & {Lane.DISK_READ, Lane.DISK_WRITE})
    if isinstance(action, Copy):
        return DISK in (action.source, action.target)
    return isinstance(action, Alloc | Free) and action.tier is DISK


def test_nothing_is_updated_on_disk() -> None:
    plan, trace = subjects(FEW_TRACES)[0]
    tiers = dict.fromkeys(plan.update_tiers, DISK)
    actions = tuple(
        tuple(replace(action, tier=DISK) if isinstance(action, Update) else action for action in listed)
        for listed in plan.actions
    )
    with pytest.raises(PlanError, match="nothing is updated on DISK"):
        simulate(replace(plan, update_tiers=tiers, actions=actions), trace)


def test_without_a_disk_it_is_an_error_that_names_the_cap() -> None:
    trace = training_trace(4, 1)
    machine = machine_of(smallest_device(trace), group_nbytes(trace))
    assert make_plan(trace, machine).machine is machine
    with pytest.raises(CapacityError, match="on HOST"):
        make_plan(trace, replace(machine, disk_nbytes=0))


def test_the_smallest_host_is_what_an_update_touches() -> None:
    trace = training_trace(4, 1)
    needed = group_nbytes(trace)
    make_plan(trace, machine_of(smallest_device(trace), needed))
    with pytest.raises(CapacityError, match="on HOST") as raised:
        make_plan(trace, machine_of(smallest_device(trace), needed - 1))
    assert raised.value.needed_nbytes == needed


def test_a_small_disk_is_no_plan() -> None:
    trace = training_trace(4, 1)
    with pytest.raises(CapacityError):
        make_plan(trace, machine_of(smallest_device(trace), group_nbytes(trace), disk_nbytes=1))


# By hand.

W0, W1, G0, G1 = param(0), param(1), grad(0), grad(1)
M0 = ChunkId(Role("exp_avg"), 0)
M1 = ChunkId(Role("exp_avg"), 1)
BY_HAND = Trace(
    Mode.TRAIN,
    "",
    dict.fromkeys((W0, W1, G0, G1, M0, M1), 4),
    (
        Moment(Kind.HOLD, W0, "0 forward", duration_s=1.0),
        Moment(Kind.CREATE, G0, duration_s=1.0),
        Moment(Kind.RELEASE, W0, duration_s=1.0),
        Moment(Kind.HOLD, W1, "1 forward", duration_s=1.0),
        Moment(Kind.CREATE, G1, duration_s=1.0),
        Moment(Kind.RELEASE, W1, duration_s=1.0),
        Moment(Kind.UPDATE, W0, "update of group 0", duration_s=1.0),
        Moment(Kind.CONSUME, G0),
        Moment(Kind.UPDATE, W1, "update of group 1", duration_s=1.0),
        Moment(Kind.CONSUME, G1),
    ),
)


def test_states_alone_leave_where_that_is_enough() -> None:
    """HOST has room for all but one state: it is read for its update, while the other one leaves for it."""
    machine = machine_of(8, 20)
    plan = make_plan(BY_HAND, machine)
    copies = [action for actions in plan.actions for action in actions if isinstance(action, Copy)]
    to_disk = {copy.chunk for copy in copies if copy.target is DISK}
    assert sum(4 for copy in copies if DISK in (copy.source, copy.target)) <= 16
    assert {chunk.role for chunk in to_disk} <= {Role.PARAM, Role.GRAD, Role("exp_avg")}
    assert simulate(plan, BY_HAND).peak_nbytes[HOST] <= 20


def program_by_hand() -> Program:
    """All chunks on HOST: weights are fetched and dropped, gradients written back."""
    actions: list[list[Action]] = [[] for _ in BY_HAND.moments]
    for at, weights, gradients in ((0, W0, G0), (3, W1, G1)):
        actions[at] += [Alloc(weights, DEVICE), Copy(weights, HOST, DEVICE)]
        actions[at + 1] += [Alloc(gradients, DEVICE)]
        actions[at + 2] += [
            Alloc(gradients, HOST), Copy(gradients, DEVICE, HOST), Free(gradients, DEVICE), Free(weights, DEVICE),
        ]  # fmt: skip
    actions[6].append(Update(0, HOST))
    actions[8].append(Update(1, HOST))
    start = frozenset(Placed(chunk, HOST, True) for chunk in (W0, W1, M0, M1))
    return Program(start, tuple(map(tuple, actions)), {HOST: 24})


@pytest.mark.parametrize("host_nbytes", [12, 16, 20, 24])
def test_a_program_is_rewritten_for_any_cap_that_holds_an_update(host_nbytes: int) -> None:
    program, machine = program_by_hand(), machine_of(8, host_nbytes)
    assert least_nbytes(BY_HAND, program) == 12
    found = offload(BY_HAND, program, machine, reserve_nbytes=0)
    assert found is not None
    assert found.peak_nbytes[HOST] <= host_nbytes
    plan = Plan(BY_HAND.digest, machine, found.start, found.actions, {0: HOST, 1: HOST})
    moved = simulate(with_waits(plan, BY_HAND)[0], BY_HAND).moved_nbytes
    assert (moved[Lane.H2D], moved[Lane.D2H]) == (8, 8), "nothing more between DEVICE and HOST"
    assert (moved[Lane.DISK_READ] > 0) is (host_nbytes < 24)


def test_a_program_that_cannot_be_followed_with_so_little_is_none() -> None:
    assert offload(BY_HAND, program_by_hand(), machine_of(8, 11), reserve_nbytes=0) is None


def test_gradients_that_an_update_has_read_are_not_written_to_be_used_up() -> None:
    """With room for all but a state or two, states alone pass between HOST and DISK."""
    found = offload(BY_HAND, program_by_hand(), machine_of(8, 20), reserve_nbytes=0)
    assert found is not None
    written = {
        action.chunk.role
        for actions in found.actions
        for action in actions
        if isinstance(action, Copy) and action.target is DISK
    }
    assert written
    assert Role.GRAD not in written


@pytest.mark.parametrize(("shadow_nbytes", "step_s"), [(0, 9.0), (1, 7.0)])
def test_updates_left_to_their_lane_hold_nobody_up_while_states_are_read(shadow_nbytes: int, step_s: float) -> None:
    """HOST has room for all but the second state, which is read, in 1 s, when the first update is over.

    COMPUTE      |forward, backward: 6 s                |           |forward ...    the host makes the updates
    HOST_UPDATE                                         |0|   |1|                   itself: 6 + 2 + 1 s
    DISK_READ                                             |M1|

    COMPUTE      |forward, backward: 6 s                | |forward of 0 ...         they are left to their lane:
    HOST_UPDATE                                         |0|   |1|                   that of group 0 is waited for
    DISK_READ                                             |M1|
    """
    machine = replace(machine_of(8, 20, disk_Bps=4.0), shadow_nbytes=shadow_nbytes)
    found = offload(BY_HAND, program_by_hand(), machine, reserve_nbytes=0)
    assert found is not None
    plan, _ = with_waits(Plan(BY_HAND.digest, machine, found.start, found.actions, {0: HOST, 1: HOST}), BY_HAND)
    assert simulate(plan, BY_HAND, iterations=6).step_s == pytest.approx(step_s, abs=1e-3)


def test_with_states_first_gradients_stay_where_states_can_go() -> None:
    """Of 16 chunks of four groups HOST has room for 12. By their next use alone, all of the last group would leave."""
    trace = training_trace(4, 1, duration_s=1.0)
    tiers = {moment.chunk.group: HOST for moment in trace.moments if moment.kind is Kind.UPDATE}
    device = smallest_device(trace)
    machine = machine_of(device, 12, disk_Bps=10.0)
    problem = find_gaps(trace, tiers)
    budget = [device] * len(trace.moments)
    stays = find_stays(problem, sweep(problem, [device - need for need in problem.required], furthest_next_use))
    free = free_room(problem, stays, budget)
    prefetch(problem, stays, free, machine, lead=1.0)
    program = emit(problem, stays, home_residents=True)
    left: dict[bool, set[bool]] = {}
    for states_first in (False, True):
        found = offload(trace, program, machine, reserve_nbytes=0, states_first=states_first)
        assert found is not None
        copies = (action for actions in found.actions for action in actions if isinstance(action, Copy))
        left[states_first] = {copy.chunk.role.is_state for copy in copies if copy.target is DISK}
        plan, _ = with_waits(Plan(trace.digest, machine, found.start, found.actions, tiers), trace)
        simulate(plan, trace)
    assert left == {False: {False, True}, True: {True}}


def test_a_disk_that_is_too_small_is_named() -> None:
    trace = training_trace(4, 1)
    machine = machine_of(smallest_device(trace), group_nbytes(trace), disk_nbytes=1)
    with pytest.raises(CapacityError, match=r"on DISK, which may hold 1 B; raise memory\.disk\.capacity") as raised:
        make_plan(trace, machine)
    assert raised.value.tier is Tier.DISK
    assert raised.value.on_host
    assert raised.value.on_disk
    assert raised.value.cap_nbytes == 1
    make_plan(trace, replace(machine, disk_nbytes=raised.value.needed_nbytes))


@pytest.mark.parametrize("num_traces", [FEW_TRACES, pytest.param(NUM_TRACES, marks=pytest.mark.full)])
def test_no_plan_moves_less_than_the_bound(num_traces: int) -> None:
    """Whatever the trace, its caps and the speed of the disk."""
    num_bound = 0
    for plan, trace in subjects(num_traces):
        bound, moved = disk_bound(trace, plan.machine), simulate(plan, trace).moved_nbytes
        assert bound.read_nbytes <= moved[Lane.DISK_READ]
        assert bound.write_nbytes <= moved[Lane.DISK_WRITE]
        num_bound += bound.read_nbytes > 0
    assert num_bound > num_traces // 4


@pytest.mark.parametrize("num_on_host", [4, 6, 9])
def test_the_bound_of_a_disk_by_hand(num_on_host: int) -> None:
    """Six groups of a weight and two states, one of which is on DEVICE and some on HOST: the others pass twice."""
    trace = training_trace(6, 64)
    lasting = sum(nbytes for chunk, nbytes in trace.chunk_nbytes.items() if chunk.role is not Role.GRAD)
    assert lasting == 18 * 64
    bound = disk_bound(trace, machine_of(2 * 64, num_on_host * 64))
    assert bound == DiskBound((16 - num_on_host) * 64, (16 - num_on_host) * 64)
    assert disk_bound(trace, machine_of(2 * 64, 16 * 64)) == DiskBound(0, 0)
    assert disk_bound(trace, machine_of(2 * 64, 64, disk_nbytes=0)) == DiskBound(0, 0)


def test_weights_of_another_rank_do_not_last() -> None:
    trace = training_trace(2, 64)
    shared = replace(trace, remote_groups=frozenset({1}))
    assert disk_bound(shared, machine_of(64, 64)).read_nbytes == (3 - 2) * 64


def test_weights_that_are_rounded_need_not_last() -> None:
    """In mixed precision, master weights and states count, and weights do not."""
    trace = training_trace(2, 64)
    low = {ChunkId(Role.MASTER, group): 128 for group in range(2)}
    mixed = replace(trace, chunk_nbytes=trace.chunk_nbytes | low)
    assert disk_bound(trace, machine_of(64, 64)).read_nbytes == (6 - 2) * 64
    assert disk_bound(mixed, machine_of(64, 64)).read_nbytes == (4 + 4 - 2) * 64
