"""Speculative updates, before their moment: which, when, and what the simulator says of them."""

from __future__ import annotations

import contextlib
import itertools
import random
from dataclasses import replace

import pytest

from chunkmem.data.errors import CapacityError, PlanError
from chunkmem.data.trace import Kind
from chunkmem.data.types import Role, Tier
from chunkmem.plan.ahead import SHADOW, advance_updates, log_nbytes, updates_ahead
from chunkmem.plan.candidate import PlanOptions
from chunkmem.plan.candidates import candidates
from chunkmem.plan.machine import Machine, host_links
from chunkmem.plan.model import Action, Copy, Free, Lane, Plan, Update, Wait
from chunkmem.plan.planner import make_plan
from chunkmem.plan.simulate import peak_nbytes, simulate
from tests.helpers.cpu_time import cpu_s
from tests.helpers.spread import spread
from tests.helpers.traces import grad, training_trace, with_masters
from tests.unit.test_plan_properties import check_candidate, drawn_machine, drawn_options, drawn_trace

NBYTES = 100
GROUPS = 6
ON_HOST = PlanOptions(margin_use_ratio=0.0)
TRACE = training_trace(GROUPS, NBYTES, duration_s=1.0)
"""Forward takes 6 s, backward 12, the updates 6."""


def machine(log_slabs: int, **keys: float) -> Machine:
    return Machine(
        4 * NBYTES,
        10**6,
        links=host_links(h2d_Bps=1e6, d2h_Bps=1e6),
        one_processor=False,
        shadow_nbytes=log_slabs * NBYTES,
        **keys,
    )  # type: ignore[arg-type]


def planned(log_slabs: int) -> Plan:
    return make_plan(TRACE, machine(log_slabs), options=ON_HOST)


def place_of(plan: Plan, group: int) -> int:
    return next(at for at, listed in enumerate(plan.actions) for a in listed if a == Update(group, Tier.HOST))


def test_nothing_is_ahead_without_a_log() -> None:
    assert updates_ahead(TRACE, planned(0).actions) == {}
    assert simulate(planned(0), TRACE).step_s == pytest.approx(24, rel=0.01)


def test_updates_stand_where_the_gradient_leaves() -> None:
    plan = planned(3 * GROUPS)
    ahead = updates_ahead(TRACE, plan.actions)
    left = {a.chunk.group: at for at, listed in enumerate(plan.actions) for a in listed
            if isinstance(a, Copy) and a.chunk.role is Role.GRAD and a.target is Tier.HOST}  # fmt: skip
    assert ahead == left
    assert len(ahead) == GROUPS


def test_what_is_ahead_costs_no_time_but_the_last() -> None:
    """Backward is twice as long as the updates: only the one of the first block has nothing to hide behind."""
    timeline = simulate(planned(3 * GROUPS), TRACE)
    assert timeline.step_s == pytest.approx(6 + 12 + 1, rel=0.01)
    assert timeline.stall_s == pytest.approx(1, rel=0.01)
    updates = [span for span in timeline.spans if span.lane is Lane.HOST_UPDATE]
    assert len(updates) == GROUPS
    assert all(span.end_s - span.start_s == pytest.approx(1) for span in updates)


def test_a_small_log_takes_those_that_can_be_first() -> None:
    plan = planned(3 * 2 + 2)
    assert updates_ahead(TRACE, plan.actions).keys() == {GROUPS - 1, GROUPS - 2}
    timeline = simulate(plan, TRACE)
    assert timeline.role_peak_nbytes[Tier.HOST, SHADOW] == 2 * log_nbytes(TRACE, 0) == 6 * NBYTES
    without = simulate(planned(0), TRACE)
    assert timeline.peak_nbytes[Tier.HOST] == without.peak_nbytes[Tier.HOST] + 6 * NBYTES


def test_the_log_takes_only_what_the_chunks_leave_of_host() -> None:
    needed = simulate(planned(0), TRACE).peak_nbytes[Tier.HOST]
    small = replace(machine(100), host_nbytes=needed + 3 * NBYTES + 1)
    plan = make_plan(TRACE, small, options=ON_HOST)
    assert len(updates_ahead(TRACE, plan.actions)) == 1
    assert make_plan(TRACE, replace(small, host_nbytes=needed), options=ON_HOST).actions


def test_with_masters_the_log_takes_them_the_states_and_the_weights() -> None:
    trace = with_masters(TRACE)
    assert log_nbytes(trace, 0) == (1 + 2 + 2 + 2) * NBYTES
    plan = make_plan(trace, replace(machine(7 * GROUPS), device_nbytes=3 * NBYTES), options=ON_HOST)
    assert len(updates_ahead(trace, plan.actions)) == GROUPS
    simulate(plan, trace, iterations=6)


@pytest.mark.few(3)
@spread(block=range(6), lowered=(False, True))
def test_candidates_keep_the_caps_and_end_as_they_begin(block: int, *, lowered: bool) -> None:
    num_ahead = 0
    for seed in range(block * 10, block * 10 + 10):
        rng = random.Random(seed)
        trace = with_masters(drawn_trace(rng)) if lowered else drawn_trace(rng)
        log = rng.choice((500, 5_000, 10**6))
        small = replace(drawn_machine(rng, trace), shadow_nbytes=log)
        for candidate in candidates(trace, small, options=drawn_options(rng, trace)):
            ahead = updates_ahead(trace, candidate.plan.actions)
            aside = sum(log_nbytes(trace, group) for group in ahead)
            assert aside <= log
            check_candidate(candidate, trace, aside_nbytes=aside)
            simulate(candidate.plan, trace, iterations=6)
            num_ahead += len(ahead)
    assert num_ahead >= 5


def test_no_wait_is_implied_by_others() -> None:
    removed = 0
    for seed in range(30):
        rng = random.Random(seed)
        trace = with_masters(drawn_trace(rng)) if seed % 2 else drawn_trace(rng)
        roomy = replace(drawn_machine(rng, trace), shadow_nbytes=10**6)
        plan = make_plan(trace, roomy, options=ON_HOST)
        waits = [(m, at) for m, actions in enumerate(plan.actions) for at, a in enumerate(actions) if type(a) is Wait]
        for moment, at in rng.sample(waits, min(8, len(waits))):
            actions = list(plan.actions)
            actions[moment] = actions[moment][:at] + actions[moment][at + 1 :]
            with pytest.raises(PlanError):
                simulate(replace(plan, actions=tuple(actions)), trace)
                pytest.fail(f"seed {seed}: nothing needs {plan.actions[moment][at]} in moment {moment}")
            removed += 1
    assert removed >= 100


def edited(moment: int, *added: Action, without: Action | None = None) -> Plan:
    plan = planned(3 * GROUPS)
    listed = tuple(action for action in plan.actions[moment] if action != without)
    return replace(plan, actions=(*plan.actions[:moment], (*listed, *added), *plan.actions[moment + 1 :]))


def moment_of(kind: Kind, group: int) -> int:
    return max(at for at, m in enumerate(TRACE.moments) if m.kind is kind and m.chunk.group == group)


def test_what_an_update_ahead_reads_stays_as_it_is() -> None:
    last = GROUPS - 1
    at = moment_of(Kind.UPDATE, last)
    free = Free(grad(last), Tier.HOST)
    with pytest.raises(PlanError, match=f"group {last} is being updated speculatively"):
        simulate(edited(at - 1, free), TRACE)


def test_a_second_update_is_refused() -> None:
    plan = planned(3 * GROUPS)
    first = place_of(plan, 3)
    with pytest.raises(PlanError, match="updated twice"):
        simulate(edited(first + 1, Update(3, Tier.HOST)), TRACE)
    with pytest.raises(PlanError, match="updated twice"):
        simulate(edited(moment_of(Kind.UPDATE, 3), Update(3, Tier.HOST)), TRACE)


def test_an_update_before_its_gradient_is_refused() -> None:
    plan = planned(3 * GROUPS)
    at = place_of(plan, 3)
    moved = edited(at, without=Update(3, Tier.HOST))
    early = (Update(3, Tier.HOST), *moved.actions[2])
    with pytest.raises(PlanError, match="no content"):
        simulate(replace(moved, actions=(*moved.actions[:2], early, *moved.actions[3:])), TRACE)


def test_an_update_that_waits_for_no_copy_of_its_gradient_is_refused() -> None:
    plan = planned(3 * GROUPS)
    at = place_of(plan, 3)
    waits = [action for action in plan.actions[at] if isinstance(action, Wait) and action.lane is Lane.HOST_UPDATE]
    assert waits
    with pytest.raises(PlanError, match="Update group 3 on HOST: it reads the slab of grad chunk 3"):
        simulate(edited(at, without=waits[-1]), TRACE)


def test_only_what_host_updates_later_can_be_ahead() -> None:
    plan, after = planned(0), moment_of(Kind.CONSUME, 3)
    late = (*plan.actions[after], Update(3, Tier.HOST))
    with pytest.raises(PlanError, match="this moment updates nothing, and ahead goes only what HOST updates once"):
        simulate(replace(plan, actions=(*plan.actions[:after], late, *plan.actions[after + 1 :])), TRACE)


def test_more_than_the_log_is_refused() -> None:
    plan = planned(3 * GROUPS)
    less = replace(plan.machine, shadow_nbytes=3 * GROUPS * NBYTES - 1)
    with pytest.raises(PlanError, match="1800 bytes pass the shadow buffers of 1799"):
        simulate(plan, TRACE, machine=less)
    host = replace(plan.machine, host_nbytes=simulate(plan, TRACE).peak_nbytes[Tier.HOST] - 1)
    with pytest.raises(CapacityError, match="on HOST pass the cap"):
        simulate(plan, TRACE, machine=host)


def test_a_group_that_is_updated_twice_waits_for_its_moments() -> None:
    """Two optimizers may share a group."""
    update = TRACE.moments[moment_of(Kind.UPDATE, 2)]
    index = moment_of(Kind.UPDATE, 2)
    twice = replace(TRACE, moments=(*TRACE.moments[:index], update, *TRACE.moments[index:]))
    plan = make_plan(twice, machine(3 * GROUPS), options=ON_HOST)
    assert updates_ahead(twice, plan.actions).keys() == set(range(GROUPS)) - {2}


def test_a_gradient_written_late_holds_its_update_back() -> None:
    actions: list[list[Action]] = [[] for _ in TRACE.moments]
    for group in range(GROUPS):
        actions[moment_of(Kind.UPDATE, group)].append(Update(group, Tier.HOST))
    moved = advance_updates(TRACE, actions, limit_nbytes=10**6)
    for group, at in updates_ahead(TRACE, moved).items():
        assert at == moment_of(Kind.CREATE, group) + 1


@pytest.mark.full
def test_eight_times_as_many_updates_ahead_are_read_in_not_much_more_than_eight_times_the_time() -> None:
    """Each one once looked at all moments for its own: half of the time of `chunkmem estimate` for 1 500 groups."""

    def read(num_groups: int) -> float:
        trace = training_trace(num_groups, NBYTES)
        roomy = replace(machine(3 * num_groups), device_nbytes=num_groups * NBYTES)
        plan = replace(make_plan(trace, roomy, options=ON_HOST), machine=roomy)
        assert len(updates_ahead(trace, plan.actions)) > num_groups // 2
        return min(cpu_s(lambda: peak_nbytes(plan, trace)) for _ in range(3))

    assert read(1600) < 20 * read(200)


def test_without_room_ahead_updates_run_under_the_next_forward() -> None:
    """Of 24 s, as without an overlap, forward hides the updates but for the first, and the second's as the host waits
    for it when it issues the fetch.

    COMPUTE      | forward 0 .. 5 | backward 5 .. 0 | stall | forward 0 ..
    HOST_UPDATE                                     | 0 | 1 | 2 | ..
    """
    full = replace(machine(1), device_nbytes=8 * NBYTES)
    plan = make_plan(TRACE, full, options=ON_HOST)
    assert updates_ahead(TRACE, plan.actions) == {}
    timeline = simulate(plan, TRACE, iterations=6)
    assert timeline.step_s == pytest.approx(6 + 12 + 2, rel=0.01)


def test_what_the_next_forward_needs_first_does_not_queue_behind_the_others() -> None:
    """Updates that take longer than backward: all of them ahead would end with the one that is needed first.

    COMPUTE      | forward 0 .. 5 | backward 5 .. 0 | forward waits for 0
    HOST_UPDATE                some, from 8 s: | 5 | 4 | 3 | 0 | 1 | 2 |
    """
    slow = replace(machine(100, host_update_Bps=4 * NBYTES / 4.0), device_nbytes=8 * NBYTES)
    begins, steps_s = [], []
    for each in (slow, replace(slow, one_processor=True)):  # where the order is not looked at
        plan = make_plan(TRACE, each, options=ON_HOST)
        timeline = simulate(plan, TRACE, machine=slow, iterations=6)
        begins.append({s.chunk.group: s.start_s for s in timeline.spans if s.chunk and s.lane is Lane.HOST_UPDATE})
        steps_s.append(timeline.step_s)
    some_ahead, all_ahead = begins
    assert sorted(some_ahead, key=some_ahead.__getitem__) == [5, 4, 3, 0, 1, 2]
    assert sorted(all_ahead, key=all_ahead.__getitem__) == [5, 4, 3, 2, 1, 0]
    assert steps_s[0] <= steps_s[1]


def test_updates_left_to_the_lane_are_read_after_them() -> None:
    plan = make_plan(TRACE, machine(1), options=ON_HOST)
    waits = [(m, a) for m, listed in enumerate(plan.actions) for a in listed
             if isinstance(a, Wait) and a.on is Lane.HOST_UPDATE]  # fmt: skip
    assert waits
    for moment, wait in waits:
        actions = list(plan.actions)
        actions[moment] = tuple(action for action in actions[moment] if action is not wait)
        with pytest.raises(PlanError, match="on HOST_UPDATE may still"):
            simulate(replace(plan, actions=tuple(actions)), TRACE)


@pytest.mark.few(1)
@pytest.mark.parametrize("slowness", [1.0, 2.0, 4.0, 8.0])
def test_more_memory_makes_no_step_much_slower(slowness: float) -> None:
    """What a smaller HOST or DEVICE would allow is a candidate: to keep all and to update all ahead is not always best.

    Updates on HOST take longer than backward. Without such candidates it was up to 3.5 %.
    """
    steps_s: dict[tuple[int, int], float] = {}
    for device, host in itertools.product((4, 6, 8, 12, 16), (24, 30, 36, 48, 72)):
        caps = {"device_nbytes": device * NBYTES, "host_nbytes": host * NBYTES}
        slow = replace(machine(100, host_update_Bps=NBYTES / slowness), **caps)
        with contextlib.suppress(CapacityError):
            steps_s[device, host] = simulate(make_plan(TRACE, slow), TRACE, iterations=6).step_s
    assert len(steps_s) > 15
    pairs = [(a, b) for a in steps_s for b in steps_s if a[0] <= b[0] and a[1] <= b[1]]
    slower = {(a, b): steps_s[b] / steps_s[a] for a, b in pairs if steps_s[b] > 1.02 * steps_s[a]}
    assert slower == {}
