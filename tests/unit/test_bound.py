"""The traffic bound without a solver: exact by hand, never above what HiGHS or brute force find, and close to it."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from benchmarks.traffic.uses import device_budgets
from chunkmem.data.errors import CapacityError, PlanError
from chunkmem.data.trace import Kind, Mode, Moment, Trace
from chunkmem.data.types import ChunkId, Tier
from chunkmem.plan.candidate import PlanOptions
from chunkmem.plan.candidates import candidates
from chunkmem.plan.gaps import budgets, find_gaps
from chunkmem.plan.machine import Machine, host_links
from chunkmem.report.bound import _reduce, _Relaxation, traffic_bound
from tests.helpers.traces import grad, param, random_trace, training_trace
from tests.helpers.traffic_program import brute_force
from tests.helpers.traffic_program import traffic_bound as solved_bound

NBYTES = 64
A, B, C = (param(group) for group in range(3))
HOLD, RELEASE, CREATE, WRITE, UPDATE, CONSUME, *_ = Kind
AMPLE = 1 << 50

Events = list[tuple[Kind, ChunkId]]


def loop(*events: tuple[Kind, ChunkId], sizes: dict[ChunkId, int] | None = None) -> Trace:
    """A trace of these events; its chunks have `NBYTES` unless `sizes` says otherwise."""
    nbytes = dict.fromkeys((chunk for _, chunk in events), NBYTES) | (sizes or {})
    return Trace(Mode.TRAIN, "", nbytes, tuple(Moment(kind, chunk) for kind, chunk in events))


def read(chunk: ChunkId) -> Events:
    return [(HOLD, chunk), (RELEASE, chunk)]


def capped(device_nbytes: int, **options: bool) -> Machine:
    return Machine(device_nbytes, AMPLE, host_links(h2d_Bps=1e9, d2h_Bps=1e9), **options)


def tiers_of(trace: Trace, tier: Tier) -> dict[int, Tier]:
    return {moment.chunk.group: tier for moment in trace.moments if moment.kind is UPDATE}


def drawn(seed: int, *, max_groups: int) -> tuple[Trace, Machine, dict[int, Tier]]:
    """A random trace, tiers, and a machine whose cap is somewhere between the least that works and all there is."""
    rng = random.Random(seed)
    trace = random_trace(
        rng,
        num_groups=rng.randint(1, max_groups),
        uniform=rng.random() < 0.5,
        micro_batches=rng.choice((1, 1, 2)),
        max_held=rng.randint(1, 3),
        max_non_model_nbytes=rng.choice((0, 300)),
    )
    tiers = {m.chunk.group: rng.choice((Tier.HOST, Tier.DEVICE)) for m in trace.moments if m.kind is UPDATE}
    needed = zip(find_gaps(trace, tiers).required, trace.moments, strict=True)
    least = max(nbytes + moment.non_model_peak_nbytes for nbytes, moment in needed)
    cap = least + int(rng.random() ** 2 * max(0, sum(trace.chunk_nbytes.values()) - least))
    return trace, capped(cap, charges_non_model=True), tiers


def budgets_of(trace: Trace, machine: Machine) -> tuple[int, ...]:
    return device_budgets(trace, machine.device_nbytes, charges_non_model=machine.charges_non_model)


# By hand. One iteration; . is a gap, and what stands above it may stay meanwhile.
#
#     A  h . . .        two slabs: only one of the three can stay through the other two's turns,
#     B  . . h .        so an iteration that repeats fetches two. Iterations that differ can keep each in turn:
#     C  . . . . h .    half of them on the mean.
def test_laps_that_repeat_move_whole_chunks() -> None:
    bound = traffic_bound(loop(*read(A), *read(B), *read(C)), capped(2 * NBYTES), {})
    assert bound.relaxed_nbytes == pytest.approx(1.5 * NBYTES, rel=1e-3)
    assert bound.relaxed_nbytes <= 1.5 * NBYTES
    assert (bound.nbytes, bound.certain_nbytes) == (2 * NBYTES, 0)


@pytest.mark.parametrize(
    ("trace", "num_slabs", "tier", "copies"),
    [
        pytest.param(loop(*read(A), *read(B)), 2, Tier.HOST, 0, id="both fit"),
        pytest.param(loop(*read(A), *read(B)), 1, Tier.HOST, 2, id="neither beside the other"),
        pytest.param(training_trace(3, NBYTES), 12, Tier.DEVICE, 0, id="all of a model fits"),
        pytest.param(training_trace(3, NBYTES), 12, Tier.HOST, 6, id="an update on HOST takes and gives back"),
        # Both groups' states go and come, 8; their weights are written back and fetched once, 4; and the gradients of
        # the group that is updated second leave for the first, 2.
        pytest.param(training_trace(2, NBYTES), 4, Tier.DEVICE, 14, id="one update fits"),
        # A: back once, fetched for its read and for the next WRITE, which reads too. B: fetched twice.
        pytest.param(loop((WRITE, A), *read(B), *read(A), *read(B)), 1, Tier.HOST, 5, id="an epoch is back once"),
        pytest.param(loop((CREATE, A), *read(B), *read(A), *read(B)), 1, Tier.HOST, 4, id="begun again, not fetched"),
        pytest.param(loop((CREATE, A), *read(B)), 1, Tier.HOST, 1, id="nobody reads it, not written back"),
        pytest.param(loop((WRITE, A), *read(B), (WRITE, A), *read(B)), 1, Tier.HOST, 6, id="each write is an epoch"),
        # Back for B and for the update alike; in for its read; B in.
        pytest.param(
            loop((CREATE, grad(0)), *read(B), *read(grad(0)), (UPDATE, A), (CONSUME, grad(0))),
            1, Tier.HOST, 3, id="a gradient is back once",
        ),
        # A: back for the update, in twice; its leaving for the second B costs nothing more. B: in twice.
        pytest.param(
            loop((WRITE, A), (UPDATE, A), *read(B), *read(A), *read(B)), 1, Tier.HOST, 5, id="HOST's update is clean",
        ),
        # HOST reads what was written and makes a new version, however large the cap.
        pytest.param(loop((WRITE, A), (UPDATE, A), *read(A), *read(B)), 2, Tier.HOST, 2, id="HOST updates a write"),
        pytest.param(loop((CREATE, grad(0)), *read(B), (CONSUME, grad(0))), 2, Tier.HOST, 0, id="used up by nobody"),
        # B leaves for the gradient and is fetched again; the gradient is worth no copy.
        pytest.param(
            loop(*read(A), (CREATE, grad(0)), (UPDATE, A), (CONSUME, grad(0)), *read(B)),
            2, Tier.DEVICE, 1, id="what is consumed is gone",
        ),
        # The gradient does not have to stay until it is consumed: its update has read it.
        pytest.param(
            loop((CREATE, grad(0)), (UPDATE, A), *read(B), (CONSUME, grad(0))),
            2, Tier.DEVICE, 1, id="what was updated may leave",
        ),
    ],
)  # fmt: skip
def test_exact_by_hand(trace: Trace, num_slabs: int, tier: Tier, copies: int) -> None:
    machine, tiers = capped(num_slabs * NBYTES), tiers_of(trace, tier)
    assert brute_force(trace, budgets_of(trace, machine), tiers) == copies * NBYTES
    assert traffic_bound(trace, machine, tiers).nbytes == copies * NBYTES


def test_a_chunk_that_fits_beside_nothing_is_not_kept_in_part() -> None:
    trace = loop(*read(A), *read(B), sizes={A: 3 * NBYTES, B: 2 * NBYTES})
    bound = traffic_bound(trace, capped(4 * NBYTES), {})
    assert (bound.nbytes, bound.certain_nbytes) == (5 * NBYTES, 5 * NBYTES)


def test_the_least_room_may_be_anywhere_in_a_gap() -> None:
    # A and B do not fit beside each other; C fits beside each.
    trace = loop(*read(A), *read(C), *read(C), *read(B), sizes={A: 3 * NBYTES, B: 2 * NBYTES})
    bound = traffic_bound(trace, capped(4 * NBYTES), {})
    assert (bound.nbytes, bound.certain_nbytes) == (5 * NBYTES, 5 * NBYTES)


def test_sizes_without_a_common_part_lose_nothing_to_rounding() -> None:
    sizes = {chunk: (1 << 52) + odd for chunk, odd in ((A, 1), (B, 2), (C, 4))}
    trace = loop(*read(A), *read(B), *read(C), sizes=sizes)
    machine = capped(2 * max(sizes.values()))
    optimum = brute_force(trace, budgets_of(trace, machine), {})
    assert optimum == sizes[A] + sizes[B]
    assert 0.74 * optimum < traffic_bound(trace, machine, {}).nbytes <= optimum


def test_activations_take_room_where_the_cap_covers_them() -> None:
    events = [*read(A), *read(B), *read(C)]
    moments = tuple(Moment(kind, chunk, non_model_peak_nbytes=NBYTES) for kind, chunk in events)
    trace = Trace(Mode.TRAIN, "", dict.fromkeys((A, B, C), NBYTES), moments)
    beside, apart = (
        traffic_bound(trace, capped(3 * NBYTES, charges_non_model=charges), {}).nbytes for charges in (True, False)
    )
    assert (beside, apart) == (2 * NBYTES, 0)


def test_without_host_nothing_moves() -> None:
    trace = training_trace(3, NBYTES)
    one_tier = replace(capped(12 * NBYTES), host_nbytes=0)
    assert traffic_bound(trace, one_tier, tiers_of(trace, Tier.DEVICE)).nbytes == 0


def test_what_does_not_fit_has_no_bound() -> None:
    trace = training_trace(1, NBYTES)
    with pytest.raises(CapacityError, match="group 0 update") as caught:
        traffic_bound(trace, capped(4 * NBYTES - 1), {0: Tier.DEVICE})
    assert caught.value.needed_nbytes == 4 * NBYTES
    with pytest.raises(PlanError, match="no tier is given for the update of group 0"):
        traffic_bound(trace, capped(4 * NBYTES), {})


# Beside others' answers.


@pytest.mark.few(3)
@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
@pytest.mark.parametrize("percent", [30, 70, 150, 300])
@pytest.mark.parametrize(("num_groups", "modules_per_group"), [(12, 1), (80, 1), (16, 6)])
def test_close_to_the_linear_program(num_groups: int, modules_per_group: int, percent: int, tier: Tier) -> None:
    trace = training_trace(num_groups, NBYTES, modules_per_group=modules_per_group)
    machine, tiers = capped(max(4, num_groups * percent // 100) * NBYTES), tiers_of(trace, tier)
    solved = solved_bound(trace, budgets_of(trace, machine), tiers)
    bound = traffic_bound(trace, machine, tiers)
    assert 0.98 * solved.lp_nbytes <= bound.relaxed_nbytes <= solved.lp_nbytes * (1 + 1e-9)
    assert bound.relaxed_nbytes <= bound.nbytes < bound.relaxed_nbytes + NBYTES
    assert bound.certain_nbytes <= bound.nbytes


@pytest.mark.few(1)
@pytest.mark.parametrize("start", range(0, 100, 20))
def test_never_above_the_optimum_of_random_traces(start: int) -> None:
    ratios = []
    for seed in range(start, start + 20):
        trace, machine, tiers = drawn(seed, max_groups=7)
        solved = solved_bound(trace, budgets_of(trace, machine), tiers, integer_within_s=10)
        bound = traffic_bound(trace, machine, tiers)
        assert bound.relaxed_nbytes <= solved.lp_nbytes * (1 + 1e-9), f"seed {seed}"
        assert solved.integer_nbytes is None or bound.nbytes <= solved.integer_nbytes, f"seed {seed}"
        ratios.append(bound.relaxed_nbytes / solved.lp_nbytes if solved.lp_nbytes else 1.0)
    assert min(ratios) >= 0.98
    assert sum(ratios) / len(ratios) >= 0.995


@pytest.mark.few(20)
@pytest.mark.parametrize("seed", range(40))
def test_no_candidate_moves_less(seed: int) -> None:
    trace, machine, _ = drawn(1000 + seed, max_groups=6)
    known: dict[tuple[tuple[int, Tier], ...], int] = {}
    for candidate in candidates(trace, machine, options=PlanOptions()):
        tiers = candidate.plan.update_tiers
        key = tuple(sorted(tiers.items(), key=lambda item: item[0]))
        known.setdefault(key, traffic_bound(trace, machine, tiers).nbytes)
        assert known[key] <= candidate.nbytes, candidate.plan.name
    assert known


@pytest.mark.parametrize("seed", range(20))
def test_every_price_gives_a_bound(seed: int) -> None:
    # What makes the bound safe: a bad ascent finds a low one, never a wrong one.
    trace, machine, tiers = drawn(seed, max_groups=7)
    question = _reduce(find_gaps(trace, tiers), budgets(trace, machine))
    if not question.gaps:
        return
    optimum = solved_bound(trace, budgets_of(trace, machine), tiers).lp_nbytes
    relaxation, rng = _Relaxation(question), np.random.default_rng(seed)
    num = len(relaxation.ascend(0.0))
    for scale in (0.0, 1e-3, 1e-2, 0.1, 1.0):
        value = relaxation.certified(scale * rng.random(num))
        assert question.certain_nbytes + question.unit_nbytes * float(value) <= optimum * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_a_larger_cap_is_not_bound_higher(seed: int) -> None:
    trace, machine, tiers = drawn(seed, max_groups=7)
    found = [
        traffic_bound(trace, replace(machine, device_nbytes=machine.device_nbytes + extra), tiers)
        for extra in (0, 640, 10**9)
    ]
    # As close as ascents end.
    assert all(more.relaxed_nbytes <= 1.02 * less.relaxed_nbytes for less, more in pairwise(found))
    assert found[-1].nbytes == found[-1].certain_nbytes
