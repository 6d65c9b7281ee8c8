"""Planning in pieces: bounded work at a time, the same plan in the end, nothing searched for twice."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from chunkmem.data.errors import CapacityError
from chunkmem.data.trace import Trace
from chunkmem.data.types import Role
from chunkmem.plan.candidate import Candidate, PlanOptions
from chunkmem.plan.candidates import CLOSE, Candidates, candidates
from chunkmem.plan.machine import Machine, host_links
from chunkmem.plan.model import Plan
from chunkmem.plan.planner import Planner, make_plan
from chunkmem.plan.simulate import simulate, with_waits
from tests.helpers.traces import by_layer_trace, random_trace, training_trace

LARGEST_PIECE = 60_000
"""Units: one candidate of some hundred moments, or a piece of a search."""


def uneven(seed: int, *, num_groups: int, num_uses: int, cap_share: float = 0.3) -> tuple[Trace, Machine]:
    """Repeated modules and frozen groups; weights take 50 ms on a link."""
    rng = random.Random(seed)
    frozen_share = rng.choice((0.0, 0.25, 0.5, 0.8))
    trace = random_trace(
        rng, num_groups=num_groups, uniform=seed % 2 == 0, num_uses=num_uses, frozen_share=frozen_share
    )
    weights = sum(nbytes for chunk, nbytes in trace.chunk_nbytes.items() if chunk.role is Role.PARAM)
    largest = max(trace.chunk_nbytes.values())
    return trace, Machine(
        max(5 * largest, int(cap_share * weights)),
        1 << 50,
        host_links(h2d_Bps=weights / 50e-3, d2h_Bps=weights / 50e-3),
    )


def retimed(trace: Trace, factor: float) -> Trace:
    return replace(trace, moments=tuple(replace(m, duration_s=factor * m.duration_s) for m in trace.moments))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("work", [1, 1_000, 30_000])
def test_pieces_of_any_size_lead_to_the_plan_made_at_once(seed: int, work: int) -> None:
    trace, machine = uneven(seed, num_groups=6, num_uses=9)
    planner = Planner(trace, machine)
    while not planner.is_done:
        simulate(planner.improve(work), trace)
    assert planner.plan == make_plan(trace, machine)


def test_the_first_plan_is_of_beladys_rule() -> None:
    trace, machine = uneven(4, num_groups=35, num_uses=100)
    planner = Planner(trace, machine)
    assert planner.plan is None
    assert planner.improve(0).name == "belady, 0 set aside"
    assert planner.work_done <= LARGEST_PIECE
    assert not planner.is_done


def test_a_call_does_no_more_work_than_asked_for_but_its_last_piece() -> None:
    """35 groups in 100 uses, some of them frozen: once 42 s and 1140 searches in one call."""
    trace, machine = uneven(4, num_groups=35, num_uses=100)
    planner = Planner(trace, machine)
    while not planner.is_done and planner.work_done < 1_000_000:
        before = planner.work_done
        planner.improve(50_000)
        assert planner.work_done - before < 50_000 + LARGEST_PIECE


def test_planning_ends_within_its_bound() -> None:
    trace, machine = uneven(4, num_groups=35, num_uses=100)
    planner = Planner(trace, machine)
    planner.improve()
    assert planner.is_done
    assert planner.work_done < 250_000


@pytest.mark.parametrize("seed", [0, 2])
def test_other_durations_are_planned_for(seed: int) -> None:
    trace, machine = uneven(seed, num_groups=10, num_uses=24)
    planner = Planner(trace, machine)
    planner.improve()
    shorter = retimed(trace, 0.5)
    again, fresh = planner.retimed(shorter), Planner(shorter, machine)
    assert again.improve() == fresh.improve()


@pytest.mark.parametrize("factor", [1.0, 0.5, 1e-4])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_taken_from_a_plan_before_is_what_would_be_made_again(
    seed: int, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waits and times of a program that is the same with other durations."""
    trace, machine = uneven(seed, num_groups=10, num_uses=24)
    shorter = retimed(trace, factor)
    planner = Planner(trace, machine)
    planner.improve()
    before = planner.retimed(shorter)._before
    num_made = [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        num_made[0] += 1
        return with_waits(*args, **kwargs)

    monkeypatch.setattr("chunkmem.plan.candidates.with_waits", counted)

    def made(before: Candidate | None) -> tuple[list[Candidate | None], int]:
        num_made[0] = 0
        pieces = Candidates(shorter, machine, PlanOptions(), before=before).pieces()
        return [candidate for _, candidate in pieces], num_made[0]

    (afresh, num_afresh), (again, num_again) = made(None), made(before)
    assert again == afresh
    assert num_again < num_afresh or factor != 1.0


def test_a_planner_in_pieces_says_what_does_not_fit() -> None:
    planner = Planner(training_trace(4, 1024), Machine(1024, 1 << 30, host_links(h2d_Bps=1e6, d2h_Bps=1e6)))
    with pytest.raises(CapacityError, match=r"raise memory.device to at least 2.00 KiB"):
        planner.improve(1)


def test_a_host_that_computes_itself_has_no_time_for_many_copies() -> None:
    """By layer, a plan stalled for 1.3 % less of a step by twice as many copies: handing those over took longer."""
    trace, machine = uneven(2, num_groups=8, num_uses=16)
    machine = replace(machine, links=host_links(h2d_Bps=1e6, d2h_Bps=1e6, latency_s=1e-3))
    found = list(candidates(trace, machine, options=PlanOptions()))
    few, many = (pick(found, key=lambda candidate: candidate.num_copies) for pick in (min, max))
    assert 2 * few.num_copies > many.num_copies > few.num_copies + 15

    def chosen(faster_s: float, *, one_processor: bool) -> Plan:
        on = replace(machine, one_processor=one_processor)
        planner = Planner(trace, on)
        times_s = 1.0, 1.0 - faster_s
        for candidate, step_s in zip((few, many), times_s, strict=True):
            plan, timeline = replace(candidate.plan, machine=on), replace(candidate.timeline, step_s=step_s)
            planner._add(replace(candidate, plan=plan, timeline=timeline))
        assert planner.plan is not None
        return planner.plan

    is_few = [
        chosen(faster_s, one_processor=alone).actions == few.plan.actions
        for faster_s in (0.013, 0.05)
        for alone in (True, False)
    ]
    assert is_few == [True, False, False, False]


def test_a_plan_for_other_durations_moves_no_more_unless_it_is_faster() -> None:
    """The best plan of a search was thrown away for the first one by rule, until the search was over again."""
    for seed in range(8):
        trace, machine = uneven(seed, num_groups=10, num_uses=24)
        planner = Planner(trace, machine)
        before = simulate(planner.improve(), trace)
        again = planner.retimed(retimed(trace, 1.001))
        after = simulate(again.improve(0), trace)
        is_faster = after.step_s < before.step_s / (1 + CLOSE)
        assert is_faster or sum(after.moved_nbytes.values()) <= sum(before.moved_nbytes.values()), seed


def moved_nbytes(plan: Plan, trace: Trace) -> int:
    return sum(simulate(plan, trace).moved_nbytes.values())


@pytest.mark.few(1)
@pytest.mark.parametrize("cap_slabs", [16, 30, 100])
def test_the_first_plan_of_a_large_step_moves_little_more_than_the_last(cap_slabs: int) -> None:
    """By layer, with as many groups resident as fit, the gradients of a block came and went for each micro-batch: 3 to
    4 times the traffic, until other placements were tried some steps later."""
    trace = by_layer_trace(8, 1 << 18, micro_batches=8)
    machine = Machine(cap_slabs << 18, 1 << 50, host_links(h2d_Bps=16e9, d2h_Bps=16e9, latency_s=3e-5))
    planner = Planner(trace, machine)
    first = moved_nbytes(planner.improve(0), trace)
    assert not planner.is_done
    assert first <= 1.25 * moved_nbytes(planner.improve(), trace)


def test_a_plan_for_other_durations_is_no_slower_than_the_one_before() -> None:
    """A plan that was faster, and moved more, was followed again only when it was found again."""
    for seed in range(8):
        trace, machine = uneven(seed, num_groups=10, num_uses=24)
        planner = Planner(trace, machine)
        plan, other = planner.improve(), retimed(trace, 1.001)
        again = planner.retimed(other).improve(0)
        assert simulate(again, other).step_s <= (1 + CLOSE) * simulate(plan, other).step_s, seed
