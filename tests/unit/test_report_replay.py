"""What is where at each moment, when each moment begins, and which part of the step it is."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from chunkmem.data.trace import Kind, Mode, Moment, Trace
from chunkmem.data.types import ChunkId, Role, Tier
from chunkmem.plan.ahead import SHADOW
from chunkmem.plan.candidate import PlanOptions
from chunkmem.plan.model import Alloc, Copy, Free, Lane, Placed, Plan, Update
from chunkmem.plan.planner import make_plan
from chunkmem.plan.semantics import ABSENT, EMPTY, TIERS, ReplicaState, residency_before
from chunkmem.plan.semantics import NEWEST as FILLED
from chunkmem.plan.simulate import simulate
from chunkmem.plan.timeline import Span, Timeline
from chunkmem.report.clock import moment_starts_s, phases
from chunkmem.report.replay import States, replay, role_nbytes, row_order
from tests.helpers.runs import machine_of
from tests.helpers.traces import grad, param, random_trace, training_trace, with_masters
from tests.unit import test_plan_exchanges as exchanges

DEVICE, HOST = Tier.DEVICE, Tier.HOST
ROOMY = machine_of(100, nbytes=1)


NOWHERE = ABSENT, ABSENT


def state(device: ReplicaState, host: ReplicaState) -> States:
    return device, host


def test_a_lap_by_hand() -> None:
    w, g = param(0), grad(0)
    trace = Trace(
        Mode.TRAIN,
        "",
        {g: 3, w: 5},
        (
            Moment(Kind.HOLD, w),  # 0: w arrives
            Moment(Kind.CREATE, g),  # 1: g begins
            Moment(Kind.RELEASE, w),  # 2: g goes to HOST, and w from DEVICE
            Moment(Kind.UPDATE, w),  # 3: on HOST, once g has left DEVICE
            Moment(Kind.CONSUME, g),  # 4
            Moment(Kind.HOLD, w),  # 5: there is no g any more
            Moment(Kind.RELEASE, w),  # 6
        ),
    )
    actions = (
        (Alloc(w, DEVICE), Copy(w, HOST, DEVICE)),
        (Alloc(g, DEVICE),),
        (Alloc(g, HOST), Copy(g, DEVICE, HOST), Free(w, DEVICE)),
        (Free(g, DEVICE), Update(0, HOST)),
        (),
        (Alloc(w, DEVICE), Copy(w, HOST, DEVICE)),
        (Free(w, DEVICE),),
    )
    plan = Plan(trace.digest, ROOMY, frozenset({Placed(w, HOST, True)}), actions, {0: HOST})
    stays = replay(plan, trace)
    both = state(FILLED, FILLED)
    assert list(stays) == [w, g]
    assert stays[w].changes == [(0, both), (2, state(ABSENT, FILLED)), (5, both), (6, state(ABSENT, FILLED))]
    assert stays[g].changes == [
        (0, NOWHERE), (1, state(FILLED, ABSENT)), (2, both), (3, state(ABSENT, FILLED)), (5, NOWHERE)
    ]  # fmt: skip
    assert stays[w].held == [(0, 2), (3, 4), (5, 6)]
    assert stays[g].held == [(1, 2), (3, 4)]
    assert role_nbytes(stays, trace, DEVICE) == {Role.PARAM: [5, 5, 0, 0, 0, 5, 0], Role.GRAD: [0, 3, 3, 0, 0, 0, 0]}
    assert role_nbytes(stays, trace, HOST) == {Role.PARAM: [5] * 7, Role.GRAD: [0, 0, 3, 3, 3, 0, 0]}


def test_a_consumed_slab_on_the_device_stays_without_content() -> None:
    w, g = param(0), grad(0)
    moments = (Moment(Kind.CREATE, g), Moment(Kind.CONSUME, g), Moment(Kind.HOLD, w), Moment(Kind.RELEASE, w))
    trace = Trace(Mode.TRAIN, "", {w: 5, g: 3}, moments)
    start = frozenset({Placed(g, DEVICE, False), Placed(w, DEVICE, True)})
    stays = replay(Plan(trace.digest, ROOMY, start, ((), (), (), ()), {}), trace)
    assert stays[g].changes == [(0, state(FILLED, ABSENT)), (2, state(EMPTY, ABSENT))]
    assert stays[w].changes == [(0, state(FILLED, ABSENT))]


@pytest.mark.parametrize("seed", range(12))
def test_the_bytes_are_those_of_the_simulator(seed: int) -> None:
    rng = random.Random(seed)
    trace = random_trace(rng, num_groups=rng.randint(2, 9), uniform=rng.random() < 0.5, micro_batches=rng.randint(1, 2))
    plan = make_plan(trace, machine_of(1, nbytes=2 * sum(trace.chunk_nbytes.values()) // 3))
    predicted, stays = simulate(plan, trace), replay(plan, trace)
    columns = role_nbytes(stays, trace, DEVICE)
    assert tuple(map(sum, zip(*columns.values(), strict=True))) == predicted.device_nbytes
    for tier in (DEVICE, HOST):
        for role, nbytes in role_nbytes(stays, trace, tier).items():
            assert max(nbytes) <= predicted.role_peak_nbytes[tier, role.value]


def test_rows_are_by_role_then_by_group() -> None:
    assert row_order(training_trace(2, 1)) == [
        ChunkId(role, group)
        for role in (Role.PARAM, Role.GRAD, Role("exp_avg"), Role("exp_avg_sq"))
        for group in (0, 1)
    ]


# Times.


def timeline_of(*spans: Span, step_s: float) -> Timeline:
    return Timeline(spans, step_s, {DEVICE: 0}, {}, {DEVICE: 0})


def test_moments_begin_where_their_spans_do_stalls_included() -> None:
    # COMPUTE      |0 0|s 1 1|- - -|3 3|
    # HOST_UPDATE              |2 2|        moment 4 takes no time
    found = timeline_of(
        Span(Lane.COMPUTE, "", 0.0, 2.0, 0),
        Span(Lane.COMPUTE, "", 2.0, 3.0, 1, is_stall=True),
        Span(Lane.COMPUTE, "", 3.0, 5.0, 1),
        Span(Lane.H2D, "", -1.0, 9.0, 2, nbytes=1),
        Span(Lane.HOST_UPDATE, "", 5.5, 7.0, 2),
        Span(Lane.COMPUTE, "", 7.0, 8.0, 3),
        step_s=8.5,
    )
    assert moment_starts_s(found, 5) == [0.0, 2.0, 5.5, 7.0, 8.0, 8.5]


def test_moments_never_begin_before_the_one_before() -> None:
    # The host is ahead: it updates while COMPUTE is still at moment 0.
    found = timeline_of(Span(Lane.COMPUTE, "", 0.0, 4.0, 0), Span(Lane.HOST_UPDATE, "", 1.0, 3.0, 1), step_s=4.0)
    assert moment_starts_s(found, 3) == [0.0, 1.0, 4.0, 4.0]
    found = timeline_of(Span(Lane.COMPUTE, "", 3.0, 4.0, 0), Span(Lane.HOST_UPDATE, "", 1.0, 2.0, 1), step_s=4.0)
    assert moment_starts_s(found, 2) == [3.0, 3.0, 4.0]


def test_an_empty_timeline_has_moments_of_no_time() -> None:
    assert moment_starts_s(timeline_of(step_s=0.0), 3) == [0.0] * 4


def test_phases_of_two_micro_batches_with_recomputation() -> None:
    w, g = param(0), grad(0)
    labels = [(Kind.HOLD, w, "a forward"), (Kind.RELEASE, w, ""), (Kind.HOLD, w, "a backward")]
    labels += [(Kind.RELEASE, w, ""), (Kind.HOLD, w, "b recomputation"), (Kind.RELEASE, w, "")]
    labels += [(Kind.CREATE, g, "a.weight gradient"), (Kind.HOLD, w, "a forward"), (Kind.RELEASE, w, "")]
    labels += [(Kind.WRITE, g, ""), (Kind.UPDATE, w, "update of group 0"), (Kind.CONSUME, g, "")]
    trace = Trace(Mode.TRAIN, "", {w: 1, g: 1}, tuple(Moment(*label) for label in labels))
    assert phases(trace) == [
        ("forward", 0, 2), ("backward", 2, 7), ("forward", 7, 9), ("backward", 9, 10), ("optimizer step", 10, 12)
    ]  # fmt: skip


# One meaning of a plan: where the report has chunks, where a plan that is gone on with takes them to be, and the bytes
# of the simulator.


def assert_one_meaning(plan: Plan, trace: Trace) -> None:
    """Compare every cell (chunk, tier, moment) with the residency that a departed step goes on from."""
    stays, predicted = replay(plan, trace), simulate(plan, trace)
    rows: dict[ChunkId, list[States]] = {chunk: [] for chunk in stays}
    for chunk, stay in stays.items():
        ends = [moment for moment, _ in stay.changes[1:]] + [len(trace.moments)]
        for (begin, found), end in zip(stay.changes, ends, strict=True):
            rows[chunk] += [found] * (end - begin)
    for at, moment in enumerate(trace.moments):
        if moment.kind is Kind.CONSUME:  # in the report, the content is there while it is used up
            continue
        after = residency_before(plan, trace, at + 1)
        for chunk, row in rows.items():
            for tier in (DEVICE, HOST):
                is_newest = after.newest.get((chunk, tier))
                wanted = ABSENT if is_newest is None else FILLED if is_newest else EMPTY
                assert row[at][TIERS.index(tier)] == wanted, f"moment {at} ({moment}): {chunk} on {tier.name}"
    columns = role_nbytes(stays, trace, DEVICE)
    assert tuple(map(sum, zip(*columns.values(), strict=True))) == predicted.device_nbytes
    for tier in (DEVICE, HOST):
        roles = role_nbytes(stays, trace, tier)
        assert {(tier, role.value): max(n) for role, n in roles.items() if max(n)} == {
            key: n for key, n in predicted.role_peak_nbytes.items() if key[0] is tier and n and key[1] != SHADOW
        }


@pytest.mark.parametrize("lowered", [False, True])
@pytest.mark.parametrize("log", [0, 10**6])
@pytest.mark.parametrize("seed", range(8))
def test_there_is_one_meaning_of_a_plan(seed: int, log: int, lowered: bool) -> None:
    rng = random.Random(seed)
    trace = random_trace(rng, num_groups=rng.randint(2, 9), uniform=rng.random() < 0.5, micro_batches=rng.randint(1, 3))
    trace = with_masters(trace) if lowered else trace
    total = sum(trace.chunk_nbytes.values())
    machine = replace(machine_of(1, nbytes=rng.choice((2, 4)) * total // 5), shadow_nbytes=log)
    assert_one_meaning(make_plan(trace, machine, options=PlanOptions(rng.choice((0.0, 0.8)))), trace)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("lowered", [False, True])
@pytest.mark.parametrize("slabs", [4, 6, 30])
def test_over_ranks_too(slabs: int, lowered: bool, ahead: bool) -> None:
    """What another rank owns is there while it is held, though no copy has brought it."""
    trace = exchanges.step(ahead=ahead)
    if lowered:
        trace = with_masters(trace)
    assert_one_meaning(make_plan(trace, exchanges.machine(slabs)), trace)
