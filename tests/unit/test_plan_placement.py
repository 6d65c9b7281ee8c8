"""Which groups keep their optimizer states on DEVICE."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkmem.data.errors import CapacityError
from chunkmem.data.trace import Kind, Mode, Trace
from chunkmem.data.types import ChunkId, Role, Tier
from chunkmem.plan.candidate import PlanOptions
from chunkmem.plan.candidates import Candidates, candidates
from chunkmem.plan.gaps import After, budgets, find_gaps
from chunkmem.plan.intervals import find_stays
from chunkmem.plan.machine import Machine, host_links
from chunkmem.plan.placement import (
    FullPlacements,
    GroupNeed,
    first_residents,
    has_idle_states,
    most_resident,
    num_updated_on_device,
)
from chunkmem.plan.planner import make_plan
from chunkmem.plan.simulate import simulate
from tests.helpers.cpu_time import cpu_s
from tests.helpers.traces import random_trace, training_trace, with_masters


def on_device(device_nbytes: int, ratio: float, *, num_groups: int = 4) -> int:
    """Of groups in fp32 training: PARAM and GRAD of 10 bytes, beside two states of the same size."""
    trace = training_trace(num_groups, 10)
    return num_updated_on_device(trace, [device_nbytes] * len(trace.moments), ratio)


def test_all_of_them_if_everything_fits_whatever_the_ratio() -> None:
    assert on_device(160, 0.1) == 4


def test_a_ratio_of_zero_keeps_them_all_on_host() -> None:
    assert on_device(10**9, 0.0) == 0


def test_otherwise_they_share_the_ratio_of_what_is_left() -> None:
    # cap 159: PARAM and GRAD of all four take 80, 79 are left; states take 20 a group
    assert [on_device(159, ratio) for ratio in (1.0, 0.8, 0.7, 0.2)] == [3, 3, 2, 0]


def test_no_room_and_no_groups() -> None:
    assert [on_device(cap, 1.0) for cap in (80, 1)] == [0, 0]
    trace = training_trace(4, 10, mode=Mode.EVAL)
    assert num_updated_on_device(trace, [1] * len(trace.moments), 0.5) == 0


def test_chunks_of_other_ranks_leave_room_while_they_are_held() -> None:
    """The group that backward runs, with a gradient that lands, takes 20 bytes."""
    trace = training_trace(4, 10)
    own = {chunk: nbytes for chunk, nbytes in trace.chunk_nbytes.items() if chunk.group < 2 or not chunk.role.is_state}
    moments = tuple(m for m in trace.moments if m.kind is not Kind.UPDATE or m.chunk.group < 2)
    sharded = replace(trace, chunk_nbytes=own, moments=moments, remote_groups=frozenset({2, 3}))
    budgets = ([cap] * len(moments) for cap in (100, 99))
    assert [num_updated_on_device(sharded, budget, 1.0) for budget in budgets] == [2, 1]


def test_ten_times_as_many_groups_are_placed_in_not_much_more_than_ten_times_the_time() -> None:
    """Every chunk was once looked for in a list of all groups: 0.06 s of each plan for 1 500 of them."""

    def place(num_groups: int) -> float:
        return min(cpu_s(lambda: on_device(20 * num_groups, 0.8, num_groups=num_groups)) for _ in range(3))

    assert place(4000) < 25 * place(400)


# Full placements. In bf16 a group of chunks of 10 bytes has PARAM and GRAD of 10, MASTER and two states of 20: 70 bytes
# where it is resident, as the gradient takes the place of the weights; HOST needs as much of one that passes.

NBYTES = 10
GROUP_NBYTES = 70


def full(num_groups: int, device_nbytes: int, host_nbytes: int, *, ratio: float = 0.8) -> FullPlacements:
    trace = with_masters(training_trace(num_groups, NBYTES))
    return FullPlacements(trace, [device_nbytes] * len(trace.moments), host_nbytes=host_nbytes, margin_use_ratio=ratio)


@pytest.mark.parametrize(
    ("device_nbytes", "most"),
    [
        (10 * GROUP_NBYTES + 10, 10),  # an update has the group's weights next to its gradient
        (10 * GROUP_NBYTES + 9, 9),
        # Next to the resident ones: three chunks, and weights and gradient of a group whose backward runs.
        (5 * GROUP_NBYTES + 5 * NBYTES, 5),
        (5 * GROUP_NBYTES + 5 * NBYTES - 1, 4),
        (2 * NBYTES, 0),
    ],
)
def test_most_groups_leave_room_for_those_that_pass(device_nbytes: int, most: int) -> None:
    assert full(10, device_nbytes, 10 * GROUP_NBYTES).most == most


@pytest.mark.parametrize(("host_nbytes", "fewest"), [(700, 0), (699, 1), (630, 1), (629, 2), (70, 9), (69, 10)])
def test_fewest_groups_leave_what_fits_host(host_nbytes: int, fewest: int) -> None:
    assert full(10, 690, host_nbytes, ratio=1.0).fewest == fewest


@pytest.mark.parametrize(("host_nbytes", "fewest"), [(400, 0), (399, 1), (360, 1), (359, 2)])
def test_gradients_in_fp32_take_room_next_to_weights(host_nbytes: int, fewest: int) -> None:
    """There is no master to round weights from, so HOST has all four chunks of a group."""
    trace = training_trace(10, NBYTES)
    found = FullPlacements(trace, [690] * len(trace.moments), host_nbytes=host_nbytes, margin_use_ratio=1.0)
    assert found.fewest == fewest


def with_frozen(trace: Trace, groups: range) -> Trace:
    """The same step if nothing updates some groups."""
    moments = tuple(
        moment
        for moment in trace.moments
        if moment.chunk.group not in groups or moment.kind in (Kind.HOLD, Kind.RELEASE)
    )
    sizes = {c: n for c, n in trace.chunk_nbytes.items() if c.group not in groups or c.role is Role.PARAM}
    return replace(trace, moments=moments, chunk_nbytes=sizes)


def test_frozen_weights_are_resident_last() -> None:
    """Of 10 groups the first four are frozen: 40 bytes; a group that is updated has 40."""
    trace = with_frozen(training_trace(10, NBYTES), range(4))

    def found(device_nbytes: int, host_nbytes: int, ratio: float = 1.0, trace: Trace = trace) -> FullPlacements:
        budget = [device_nbytes] * len(trace.moments)
        return FullPlacements(trace, budget, host_nbytes=host_nbytes, margin_use_ratio=ratio)

    ample = found(1000, 1000)
    assert ample.placement(7).resident_groups == {4, 5, 6, 7, 8, 9, 0}
    assert ample.placement(10).resident_groups == set(range(10))
    assert set(ample.placement(10).update_tiers) == set(range(4, 10))
    # HOST has room for two of them. Where all that is updated fits DEVICE, next to one that passes, the ratio has no
    # meaning; else the others may be resident if it allows all states.
    assert [found(250, 20, ratio).fewest for ratio in (1.0, 0.1)] == [8, 8]
    assert [found(249, 20, ratio).fewest for ratio in (1.0, 0.5)] == [8, 5]
    assert most_resident([20] * 6, left_nbytes=229, margin_use_ratio=0.5) == 5
    # Another rank's weights are not of this one's tiers.
    remote = replace(trace, remote_groups=frozenset({0, 1}))
    assert found(1000, 1000, trace=remote).placement(10).resident_groups == set(range(2, 10))


@pytest.mark.parametrize(("ratio", "most"), [(1.0, 5), (0.8, 5), (0.5, 4), (0.3, 2), (0.1, 0)])
def test_states_of_resident_groups_take_no_more_than_the_ratio(ratio: float, most: int) -> None:
    """Of 400 bytes 20 are in use at the peak: 380 are left, and a group has 40 of moments; its master is a weight."""
    found = full(10, 400, 10, ratio=ratio)
    assert found.most == most
    assert found.fewest <= most_resident([40] * 10, left_nbytes=380, margin_use_ratio=ratio)


def test_everything_is_resident_if_it_fits_whatever_the_ratio() -> None:
    found = full(10, 10 * GROUP_NBYTES + 10, GROUP_NBYTES - 1, ratio=0.1)
    assert (found.fewest, found.most) == (10, 10)


def test_a_ratio_of_zero_keeps_groups_without_states_on_host_too() -> None:
    assert most_resident([0, 0, 0], left_nbytes=100, margin_use_ratio=0.0) == 0
    assert most_resident([0, 0, 0], left_nbytes=100, margin_use_ratio=0.1) == 3


def test_a_ratio_of_zero_updates_everything_on_host() -> None:
    trace = with_masters(training_trace(10, NBYTES))
    for candidate in candidates(trace, replace(FAST, host_nbytes=1000), options=PlanOptions(margin_use_ratio=0.0)):
        assert set(candidate.plan.update_tiers.values()) == {Tier.HOST}


def test_weights_that_nothing_updates_are_resident_where_host_is_too_small_for_them() -> None:
    trace = training_trace(10, NBYTES, mode=Mode.EVAL)
    fits = [FullPlacements(trace, [80] * 20, host_nbytes=host, margin_use_ratio=0.8).fewest for host in (100, 60, 5)]
    assert fits == [0, 4, 10]
    plan = make_plan(trace, replace(FAST, device_nbytes=80, host_nbytes=60))
    assert simulate(plan, trace).peak_nbytes[Tier.HOST] <= 60


@pytest.mark.parametrize("host_groups", [40, 38])
@pytest.mark.parametrize("fastest", range(3, 40, 3))
def test_the_fastest_number_is_found_where_times_fall_and_rise_again(fastest: int, host_groups: int) -> None:
    """Up to ten of 37 are tried; what is found is at most three groups off."""
    found = full(40, 36 * GROUP_NBYTES + 50, host_groups * GROUP_NBYTES, ratio=1.0)
    step_s: dict[int, float] = {}
    while (count := found.next_count(step_s)) is not None:
        assert count not in step_s
        assert found.fewest <= count <= found.most
        step_s[count] = abs(count - fastest) if count < fastest else 2.0 * (count - fastest)
    assert len(step_s) <= 10
    best = min(step_s, key=lambda count: step_s[count])
    assert abs(best - min(fastest, found.most)) <= 3


def test_of_many_groups_as_close_a_number_is_found() -> None:
    """A stride is a thirty-second of the range, and the number that is found half of one off."""
    found = full(200, 192 * GROUP_NBYTES + 50, 200 * GROUP_NBYTES, ratio=1.0)
    assert (found.fewest, found.most) == (0, 192)
    step_s: dict[int, float] = {}
    while (count := found.next_count(step_s)) is not None:
        step_s[count] = float(abs(count - 101))
    assert min(step_s.values()) <= 3


def test_of_equal_times_the_one_with_more_on_device_is_looked_around() -> None:
    """HOST has less to do, and what may be better lies below the most."""
    found = full(40, 36 * GROUP_NBYTES + 50, 40 * GROUP_NBYTES, ratio=1.0)
    assert found.most == 36
    assert found.next_count({36: 1.0, 20: 1.0}) == 28


def test_numbers_close_to_the_most_are_the_closest_first() -> None:
    found = full(10, 5 * GROUP_NBYTES + 5 * NBYTES, 10 * GROUP_NBYTES, ratio=1.0)
    assert found.most == 5
    assert found.close_to_most() == [5, 4, 6, 3, 7, 2, 8, 1, 9, 0]
    limited = full(10, 5 * GROUP_NBYTES + 5 * NBYTES, 10 * GROUP_NBYTES)
    assert limited.close_to_most() == [5, 4, 6, 3, 7, 2, 1, 0]  # the ratio allows seven


def test_states_that_the_step_does_not_update_are_of_another_kind_of_step() -> None:
    """They would take turns on DEVICE, so such a step has no residents."""
    trace = training_trace(6, NBYTES)
    machine = replace(FAST, device_nbytes=150, host_nbytes=1000)
    idle = replace(trace, chunk_nbytes={**trace.chunk_nbytes, ChunkId(Role("exp_avg"), 6): NBYTES})
    assert (has_idle_states(trace), has_idle_states(idle)) == (False, True)

    def names(of: Trace, *, with_residents: bool) -> list[object]:
        options = PlanOptions(with_residents=with_residents)
        return [candidate.plan.actions for candidate in candidates(of, machine, options=options)]

    assert names(idle, with_residents=True) == names(idle, with_residents=False)
    assert names(trace, with_residents=True) != names(trace, with_residents=False)


def test_the_number_that_a_plan_has_is_close_to_the_best_of_all() -> None:
    """Here one resident group is best: fewer leave HOST too much to update, more leave too little room to fetch."""
    trace = with_masters(training_trace(16, 1000, duration_s=2e-3, activation_nbytes=50))
    links = host_links(h2d_Bps=1e6, d2h_Bps=1e6)
    machine = Machine(37_500, 127_500, links, 3e6, host_update_Bps=4e6, charges_non_model=True)
    every = Candidates(trace, machine, PlanOptions())
    full = FullPlacements(every.trace, every.budget, host_nbytes=machine.host_nbytes, margin_use_ratio=0.8)
    step_s = {}
    for count in range(full.fewest, full.most + 1):
        way = every._placed(full.placement(count))
        assert way is not None
        list(every._by_rule(full.placement(count), (0, 2)))
        step_s[count] = way.step_s
    best = min(step_s, key=lambda count: step_s[count])
    assert full.fewest < best < full.most
    assert simulate(make_plan(trace, machine), trace).step_s <= 1.01 * step_s[best]
    assert step_s[full.most] > 1.01 * step_s[best]


FAST = Machine(10 * GROUP_NBYTES // 2, 10 * GROUP_NBYTES, host_links(h2d_Bps=1e6, d2h_Bps=1e6), host_update_Bps=1e5)


def test_the_content_of_resident_groups_never_leaves() -> None:
    """Not even when the rule that fills DEVICE knows of something that is needed sooner."""
    trace = with_masters(training_trace(6, NBYTES))
    found = full(6, 3 * GROUP_NBYTES, 6 * GROUP_NBYTES)
    where = found.placement(2)
    assert where.update_tiers == {0: Tier.DEVICE, 1: Tier.DEVICE, **dict.fromkeys(range(2, 6), Tier.HOST)}
    problem = find_gaps(trace, where.update_tiers, resident_groups=where.resident_groups)
    stays = find_stays(problem, frozenset())
    resident = {problem.chunks[chunk] for chunk in stays.resident}
    assert resident == {ChunkId(role, group) for group in (0, 1) for role in MASTER_AND_STATES}
    # Only what dies comes and goes: weights make place for their gradients, and are rounded again.
    passing = [stay for stay in stays.passing if problem.chunks[stay.chunk].group in where.resident_groups]
    assert all(stay.source is None and stay.target is None for stay in passing)
    assert not any(problem.chunks[problem.gaps[at].chunk].group < 2 for at in problem.free_to_choose)


MASTER_AND_STATES = (Role.MASTER, Role("exp_avg"), Role("exp_avg_sq"))


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_gradients_of_resident_groups_accumulate_on_device(num_micro_batches: int) -> None:
    """Those of the others go to HOST and back for each micro-batch, where DEVICE has no room for them."""
    rng = random.Random(4)
    trace = with_masters(
        random_trace(rng, num_groups=8, uniform=True, micro_batches=num_micro_batches, frozen_share=0.0)
    )
    tiers = {m.chunk.group: Tier.DEVICE for m in trace.moments if m.kind is Kind.UPDATE}
    problem = find_gaps(trace, tiers, resident_groups=tiers)
    grads = [at for at, g in enumerate(problem.gaps) if problem.chunks[g.chunk].role is Role.GRAD]
    assert {problem.gaps[at].after for at in grads if at not in problem.always_kept} <= {After.DIES}


@given(seed=st.integers(0, 10_000), share=st.floats(0, 1), host_share=st.floats(0, 1), has_masters=st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_candidate_passes_the_simulator(seed: int, share: float, host_share: float, has_masters: bool) -> None:
    """`candidates` simulates each; here the resident groups' content is looked for after every list of actions."""
    rng = random.Random(seed)
    trace = random_trace(rng, num_groups=rng.randint(1, 8), uniform=rng.random() < 0.5, micro_batches=rng.randint(1, 2))
    trace = with_masters(trace) if has_masters else trace
    every = sum(trace.chunk_nbytes.values())
    links = host_links(h2d_Bps=1e6, d2h_Bps=1e6)
    machine = Machine(int(share * every) + 1, int(host_share * every) + 1, links, host_update_Bps=1e6)
    try:
        found = list(candidates(trace, machine, options=PlanOptions()))
    except CapacityError:
        return
    for candidate in found:
        assert candidate.timeline.peak_nbytes[Tier.DEVICE] <= machine.device_nbytes
        assert candidate.timeline.peak_nbytes[Tier.HOST] <= machine.host_nbytes


@pytest.mark.parametrize("activation_nbytes", [0, 15])
@pytest.mark.parametrize("device_nbytes", range(40, 760, 90))
def test_the_first_step_places_as_a_plan_does(activation_nbytes: int, device_nbytes: int) -> None:
    """It knows sizes, and the peak of activations: not when that comes, and which chunks are in use then."""
    trace = with_masters(training_trace(10, NBYTES, activation_nbytes=activation_nbytes // 10))
    machine = Machine(device_nbytes, 700, FAST.links, charges_non_model=True)
    budget = budgets(trace, machine)
    planned = FullPlacements(trace, budget, host_nbytes=700, margin_use_ratio=0.8).most
    needs = [GroupNeed(GROUP_NBYTES, NBYTES, 40)] * 10
    first = first_residents(needs, cap_nbytes=min(budget), margin_use_ratio=0.8)
    assert first in (planned, planned + 1)
    assert first_residents(needs, cap_nbytes=device_nbytes, margin_use_ratio=0.0) == 0


def test_the_first_step_leaves_room_for_three_chunks_of_the_usual_size() -> None:
    needs = [GroupNeed(GROUP_NBYTES, weights, 40) for weights in (10, 10, 10, 5, 30)]
    caps = (2 * GROUP_NBYTES + 30, 2 * GROUP_NBYTES + 29, 5 * GROUP_NBYTES)
    assert [first_residents(needs, cap_nbytes=cap, margin_use_ratio=1.0) for cap in caps] == [2, 1, 5]
    assert first_residents(needs, cap_nbytes=5 * GROUP_NBYTES, margin_use_ratio=0.0) == 0


def test_no_groups_are_placed_nowhere() -> None:
    assert first_residents([], cap_nbytes=100, margin_use_ratio=0.8) == 0


def test_no_more_memory_makes_a_step_slower() -> None:
    """Over a grid of caps: a hundredth is what the planner takes for equal."""
    trace = with_masters(training_trace(12, 1000, duration_s=2e-3, activation_nbytes=50))
    machine = Machine(0, 0, host_links(h2d_Bps=2e6, d2h_Bps=2e6), host_update_Bps=4e6, charges_non_model=True)
    step_s: dict[tuple[int, int], float] = {}
    for device in range(1, 13):
        for host in range(0, 13, 2):
            caps = replace(machine, device_nbytes=device * 7500, host_nbytes=1 + host * 7500)
            with suppress(CapacityError):
                step_s[device, host] = simulate(make_plan(trace, caps), trace).step_s
    assert len(step_s) > 40
    for (device, host), found_s in step_s.items():
        for larger in ((device + 1, host), (device, host + 2)):
            if larger[0] <= 12 and larger[1] <= 12:
                assert step_s[larger] <= 1.01 * found_s, f"{device}, {host} -> {larger}"
