"""Activations as chunks: a region's saved tensors are kept, or go to HOST and come back, as the planner decides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chunkmem.data.errors import TraceError
from chunkmem.data.trace import Kind, Mode, Moment, Region, Trace
from chunkmem.data.types import ChunkId, Role, Tier
from chunkmem.plan.gaps import After, find_gaps
from chunkmem.plan.intervals import find_stays, free_room, keep_slabs
from chunkmem.plan.machine import Machine, host_links
from chunkmem.plan.merge import merge
from chunkmem.plan.model import Alloc, Copy, Free, Lane, Plan, Wait
from chunkmem.plan.placement import FullPlacements
from chunkmem.plan.planner import make_plan
from chunkmem.plan.simulate import simulate
from chunkmem.plan.timeline import Timeline
from chunkmem.report.bound import traffic_bound
from chunkmem.report.summary import PlainPyTorch
from tests.helpers.orders import Reading
from tests.helpers.traces import grad, param, updated_chunks

D, H = Tier.DEVICE, Tier.HOST
X0, X1 = (ChunkId(Role.ACTIVATION, group) for group in (2, 3))
NBYTES, SAVED = 100, 100

MOMENTS = (
    Moment(Kind.HOLD, param(0), "0 forward", 2.0),
    Moment(Kind.RELEASE, param(0)),
    Moment(Kind.CREATE, X0, "0 forward"),
    Moment(Kind.HOLD, param(1), "1 forward", 2.0),
    Moment(Kind.RELEASE, param(1)),
    Moment(Kind.CREATE, X1, "1 forward"),
    Moment(Kind.HOLD, X1, "1 backward"),
    Moment(Kind.HOLD, param(1), "1 backward", 4.0),
    Moment(Kind.CREATE, grad(1), "1 backward"),
    Moment(Kind.RELEASE, param(1)),
    Moment(Kind.RELEASE, X1),
    Moment(Kind.CONSUME, X1),
    Moment(Kind.HOLD, X0, "0 backward"),
    Moment(Kind.HOLD, param(0), "0 backward", 4.0),
    Moment(Kind.CREATE, grad(0), "0 backward"),
    Moment(Kind.RELEASE, param(0)),
    Moment(Kind.RELEASE, X0),
    Moment(Kind.CONSUME, X0),
    Moment(Kind.UPDATE, param(0), "update", 1.0),
    Moment(Kind.CONSUME, grad(0)),
    Moment(Kind.UPDATE, param(1), "update", 1.0),
    Moment(Kind.CONSUME, grad(1)),
)
REGIONS = (
    Region("0", X0, SAVED, (0, 3), (12, 18), None),
    Region("1", X1, SAVED, (3, 6), (6, 12), None),
)
SIZES = {chunk: NBYTES for group in (0, 1) for chunk in updated_chunks(group)} | {X0: SAVED, X1: SAVED}
TRACE = Trace(Mode.TRAIN, "two blocks", SIZES, MOMENTS, regions=REGIONS)
"""X0 lives over the whole of block 1, X1 is needed at once. Backward of a block needs 300 bytes."""


def machine(device_nbytes: int, *, host_nbytes: int = 2000) -> Machine:
    links = host_links(h2d_Bps=100.0, d2h_Bps=100.0)
    return Machine(device_nbytes, host_nbytes, links, one_processor=False)


def planned(device_nbytes: int) -> tuple[Plan, Timeline]:
    plan = make_plan(TRACE, machine(device_nbytes))
    return plan, simulate(plan, TRACE)


def copied(plan: Plan, chunk: ChunkId) -> list[Lane]:
    return [a.lane for actions in plan.actions for a in actions if isinstance(a, Copy) and a.chunk == chunk]


def test_the_role_exists_once_and_is_no_optimizer_state() -> None:
    assert Role("activation") is Role.ACTIVATION
    assert not Role.ACTIVATION.is_state
    assert Role.MASTER.order < Role.ACTIVATION.order < Role("exp_avg").order


def test_a_region_keeps_or_moves_what_it_saved_until_backward_and_begins_anew_in_the_next_step() -> None:
    problem = find_gaps(TRACE, {0: H, 1: H})
    own = problem.chunks.index(X0)
    uses, first = problem.uses[own], problem.first_gap[own]
    assert [(use.start, use.stop, use.creates, use.writes) for use in uses] == [
        (2, 3, True, True),
        (12, 18, False, False),
    ]
    until_backward, until_next_step = problem.gaps[first : first + 2]
    assert (until_backward.after, until_backward.start, until_backward.stop) == (After.LIVES, 3, 12)
    assert until_backward.epoch == 0, "DEVICE alone has it: leaving costs a copy to HOST"
    assert until_next_step.after is After.DIES
    assert {gap.needed_below for gap in problem.gaps[first : first + 2]} == {None}


@pytest.mark.parametrize("cap", [300, 400, 1200])
def test_what_does_not_fit_is_offloaded_and_all_else_stays(cap: int) -> None:
    plan, timeline = planned(cap)
    assert timeline.peak_nbytes[D] <= cap
    assert copied(plan, X1) == [], "needed at once"
    expected = [Lane.D2H, Lane.H2D] if cap == 300 else []
    assert copied(plan, X0) == expected
    assert timeline.role_peak_nbytes[D, "activation"] >= SAVED
    update_tiers = plan.update_tiers
    assert sum(timeline.moved_nbytes.values()) >= traffic_bound(TRACE, machine(cap), update_tiers).nbytes


def test_memory_of_activations_is_never_kept_for_the_next_chunk() -> None:
    problem = find_gaps(TRACE, {0: H, 1: H})
    stays = find_stays(problem, frozenset())
    stays = keep_slabs(problem, frozenset(), stays, free_room(problem, stays, [10_000] * len(MOMENTS)))
    activations = {problem.chunks.index(chunk) for chunk in (X0, X1)}
    assert not stays.resident & activations
    assert [stay.stop - stay.start for stay in stays.passing if stay.chunk in activations] == [1, 7, 6]


def test_memory_of_activations_on_device_is_new_each_time_and_given_back() -> None:
    """A chunk of the same size never gets it, so nothing waits for what was done to it."""
    plan, _ = planned(300)
    allocs = [a for actions in plan.actions for a in actions if isinstance(a, Alloc | Free) and a.tier is D]
    assert sum(isinstance(a, Alloc) and a.chunk in (X0, X1) for a in allocs) == 3
    orders = Reading(plan, TRACE, iterations=3)
    assert not orders.races
    taken = [slab for (_, _, chunk, tier), slab in orders.taken.items() if (chunk, tier) == (X0, D)]
    assert len(set(taken)) == len(taken)
    others = {slab for (_, _, chunk, _), slab in orders.taken.items() if chunk != X0}
    assert not others & set(taken)


def test_compute_waits_before_it_gives_back_memory_that_a_copy_reads() -> None:
    """The wait is part of the step: planned, put off until a gradient needs the room, and counted by the simulator.

    COMPUTE  | 0 forward | 1 forward | 1 backward |..wait for the copy..| rest of it
    D2H                  |                 X0 to HOST                   |
    """
    created = next(at for at, m in enumerate(MOMENTS) if (m.kind, m.chunk) == (Kind.CREATE, grad(1)))
    moments = tuple(replace(m, duration_s=1.0) if at == created else m for at, m in enumerate(MOMENTS))
    trace = replace(TRACE, moments=moments)
    plan = make_plan(trace, Machine(300, 2000, host_links(h2d_Bps=100.0, d2h_Bps=10.0), one_processor=False))
    assert plan.actions[created] == (Wait(Lane.COMPUTE, Lane.D2H, 1), Free(X0, D), Alloc(grad(1), D))
    spans = simulate(plan, trace).spans
    (copy,) = (span for span in spans if span.lane is Lane.D2H and span.chunk == X0)
    (rest,) = (s for s in spans if s.lane is Lane.COMPUTE and s.moment == created and not s.is_stall)
    assert rest.start_s == copy.end_s == 12.0


def test_waits_of_an_offload_that_follows_another() -> None:
    """The fetch of X0 reads HOST's slab after its write; nothing orders it behind what DEVICE did with X1's memory."""
    plan, _ = planned(300)
    fetched = next(i for i, actions in enumerate(plan.actions) if Copy(X0, H, D) in actions)
    waits = [a for a in plan.actions[fetched] if isinstance(a, Wait) and a.lane is Lane.H2D]
    assert {wait.on for wait in waits} <= {Lane.D2H}


def test_regions_without_an_update_never_count_as_resident_groups() -> None:
    full = FullPlacements(TRACE, [400] * len(MOMENTS), host_nbytes=300, margin_use_ratio=0.8)
    residents = full.placement(4).resident_groups
    assert residents == {0, 1}


def test_activations_of_an_own_rank_are_no_states_of_plain_pytorch() -> None:
    alone = PlainPyTorch.of(TRACE)
    assert (alone.model_nbytes, alone.activation_nbytes) == (8 * NBYTES, 2 * SAVED)
    remote = PlainPyTorch.of(replace(TRACE, remote_groups=frozenset({1})))
    assert remote.model_nbytes == alone.model_nbytes + 4 * NBYTES


def test_what_backward_consumes_last_is_not_an_update() -> None:
    """Steps that differ in one block only: the moments of the updates still follow those of backward."""
    short = replace(
        TRACE,
        chunk_nbytes={chunk: n for chunk, n in SIZES.items() if chunk.group not in (1, 3)},
        moments=tuple(m for m in MOMENTS if m.chunk.group not in (1, 3)),
        regions=(),
    )
    merged = merge(short, TRACE)
    assert merged is not None
    kinds = [(m.kind, m.chunk) for m in merged.trace.moments]
    assert kinds == [(m.kind, m.chunk) for m in MOMENTS]
    assert merged.trace.regions == ()


def test_a_trace_with_regions_is_saved_and_read_again() -> None:
    data = TRACE.to_dict()
    assert Trace.from_dict(data) == TRACE
    again = replace(TRACE, regions=(replace(REGIONS[0], recomputed=(12, 13)), REGIONS[1]))
    assert Trace.from_dict(again.to_dict()) == again
    assert "regions" not in replace(TRACE, regions=()).to_dict()
    assert TRACE.digest == replace(TRACE, regions=()).digest


@pytest.mark.parametrize(
    ("region", "complaint"),
    [
        (replace(REGIONS[0], forward=(4, 3)), "forward"),
        (replace(REGIONS[0], backward=(12, 99)), "backward"),
        (replace(REGIONS[0], backward=(2, 9)), "after its forward"),
        (replace(REGIONS[0], recomputed=(11, 13)), "recomputed"),
        (replace(REGIONS[0], chunk=param(0)), "activation"),
        (replace(REGIONS[0], nbytes=SAVED + 1), "bytes"),
    ],
)
def test_a_region_that_is_no_part_of_the_trace_is_refused(region: Region, complaint: str) -> None:
    with pytest.raises(TraceError, match=complaint):
        replace(TRACE, regions=(region,))


def test_steps_whose_activations_begin_elsewhere_are_not_one_trace() -> None:
    """In both orders at once, they would be created twice."""
    created = next(m for m in MOMENTS if m.kind is Kind.CREATE and m.chunk == X1)
    moved = tuple(m for m in MOMENTS if m is not created)
    sooner = replace(TRACE, moments=(created, *moved), regions=())
    assert merge(replace(TRACE, regions=()), sooner) is None
