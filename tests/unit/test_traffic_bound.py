"""The judge of traffic: exact answers by hand, the program against brute force, and no policy below the bound."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from benchmarks.traffic.policies import POLICIES, page
from benchmarks.traffic.uses import chunks_in_use, device_budgets
from chunkmem.data.errors import CapacityError, TraceError
from chunkmem.data.trace import Kind, Mode, Moment, Trace
from chunkmem.data.types import ChunkId, Role, Tier
from tests.helpers.traces import STATES, grad, param, random_trace, training_trace
from tests.helpers.traffic_gaps import derive
from tests.helpers.traffic_program import brute_force, traffic_bound

NBYTES = 64
A, B, C, D, E = (param(group) for group in range(5))
HOLD, RELEASE, CREATE, WRITE, UPDATE, CONSUME, *_ = Kind


def loop(*events: tuple[Kind, ChunkId]) -> Trace:
    """A trace of these events whose chunks all have `NBYTES`."""
    moments = tuple(Moment(kind, chunk) for kind, chunk in events)
    return Trace(Mode.TRAIN, "", dict.fromkeys((chunk for _, chunk in events), NBYTES), moments)


def read(chunk: ChunkId) -> list[tuple[Kind, ChunkId]]:
    return [(HOLD, chunk), (RELEASE, chunk)]


def least(trace: Trace, num_slabs: int, tier: Tier = Tier.HOST) -> int:
    """Copies of an iteration at the least; the program and brute force have to agree."""
    tiers = tiers_of(trace, tier)
    budgets = device_budgets(trace, num_slabs * NBYTES, charges_non_model=False)
    bound = traffic_bound(trace, budgets, tiers, integer_within_s=10)
    assert bound.integer_nbytes is not None
    assert bound.certain_nbytes <= bound.lp_nbytes <= bound.integer_nbytes == brute_force(trace, budgets, tiers)
    assert bound.integer_nbytes % NBYTES == 0
    return bound.integer_nbytes // NBYTES


def paged(trace: Trace, num_slabs: int, policy: str, tier: Tier = Tier.HOST) -> tuple[float, float]:
    """Copies of an iteration to DEVICE and back."""
    budgets = device_budgets(trace, num_slabs * NBYTES, charges_non_model=False)
    traffic = page(trace, budgets, tiers_of(trace, tier), POLICIES[policy])
    return traffic.h2d_nbytes / NBYTES, traffic.d2h_nbytes / NBYTES


def tiers_of(trace: Trace, tier: Tier) -> dict[int, Tier]:
    return {moment.chunk.group: tier for moment in trace.moments if moment.kind is UPDATE}


def drawn(seed: int, *, max_groups: int = 5) -> tuple[Trace, tuple[int, ...], dict[int, Tier]]:
    """A random trace, budgets between the least that works and all that it uses, and tiers."""
    rng = random.Random(seed)
    trace = random_trace(
        rng,
        num_groups=rng.randint(1, max_groups),
        uniform=rng.random() < 0.5,
        micro_batches=rng.choice((1, 1, 2)),
        max_held=rng.randint(1, 3),
        max_non_model_nbytes=rng.choice((0, 300)),
    )
    tiers = {
        moment.chunk.group: rng.choice((Tier.HOST, Tier.DEVICE)) for moment in trace.moments if moment.kind is UPDATE
    }
    in_use = chunks_in_use(trace, tiers)
    smallest = max(
        moment.non_model_peak_nbytes + sum(trace.chunk_nbytes[chunk] for chunk in used)
        for moment, used in zip(trace.moments, in_use, strict=True)
    )
    total = sum(trace.chunk_nbytes[chunk] for chunk in set().union(*in_use))
    cap = smallest + int(rng.random() ** 2 * max(0, total - smallest))
    return trace, device_budgets(trace, cap, charges_non_model=True), tiers


# One iteration; . is a gap, and what stands above it may stay meanwhile.
#
#     A  h . . .        two slabs: only one of the three can stay through the other two's turns,
#     B  . . h .        so an iteration that repeats fetches two. Iterations that differ can keep each in turn:
#     C  . . . . h .    half of them on the mean, which is what the relaxation says and Belady does.
def test_laps_that_differ_can_move_less_than_one_repeated_but_never_less_than_the_relaxation() -> None:
    trace = loop(*read(A), *read(B), *read(C))
    assert least(trace, 2) == 2
    assert traffic_bound(trace, [2 * NBYTES] * 6, {}).lp_nbytes == pytest.approx(1.5 * NBYTES)
    assert paged(trace, 2, "Belady") == (1.5, 0)
    assert paged(trace, 2, "LRU") == (3, 0)


def test_nothing_moves_where_all_fits() -> None:
    trace = training_trace(3, NBYTES, modules_per_group=2)
    assert least(trace, 12, Tier.DEVICE) == 0
    assert all(paged(trace, 12, policy, Tier.DEVICE) == (0, 0) for policy in POLICIES)


def test_an_update_on_host_takes_the_gradient_and_gives_the_weights_back_however_large_the_cap() -> None:
    trace = training_trace(3, NBYTES)
    assert least(trace, 12) == 3 * 2
    assert all(paged(trace, 12, policy) == (3, 3) for policy in POLICIES)


def test_where_only_one_update_fits_all_of_the_other_group_leaves() -> None:
    # Both groups' states go and come: 8. Each group's weights are written back and fetched once: 4. Gradients of
    # the group updated second leave for the first: 2.
    assert least(training_trace(2, NBYTES), 4, Tier.DEVICE) == 14


def test_a_dirty_epoch_is_written_back_once() -> None:
    # A: back once, fetched for its read and for the next WRITE, which reads too. B: fetched twice.
    assert least(loop((WRITE, A), *read(B), *read(A), *read(B)), 1) == 5


def test_content_begun_anew_is_not_fetched() -> None:
    assert least(loop((CREATE, A), *read(B), *read(A), *read(B)), 1) == 4


def test_content_that_nobody_reads_is_not_written_back() -> None:
    trace = loop((CREATE, A), *read(B))
    assert least(trace, 1) == 1
    # Who does not know the future has to.
    assert paged(trace, 1, "LRU") == (1, 1)


def test_consumed_content_is_gone() -> None:
    trace = loop(*read(A), (CREATE, grad(0)), (UPDATE, A), (CONSUME, grad(0)), *read(B))
    # B leaves for the gradient and is fetched again; the gradient is worth no copy.
    assert least(trace, 2, Tier.DEVICE) == 1
    assert paged(trace, 2, "LRU", Tier.DEVICE) == (1, 0)


def test_a_write_begins_a_new_epoch() -> None:
    # Both gaps of A begin after a write: two come back, two go.
    assert least(loop((WRITE, A), *read(B), (WRITE, A), *read(B)), 1) == 2 + 2 + 2


def test_a_gradient_that_host_takes_is_copied_there_once() -> None:
    trace = loop((CREATE, grad(0)), *read(B), *read(grad(0)), (UPDATE, A), (CONSUME, grad(0)))
    assert least(trace, 1) == 1 + 1 + 1  # Back for B and for the update alike; in for its read; B in.


def test_what_host_updated_is_clean_there() -> None:
    # A: back for the update, in twice, and its leaving for the second B costs nothing more. B: in twice.
    assert least(loop((WRITE, A), (UPDATE, A), *read(B), *read(A), *read(B)), 1) == 5


def test_states_stay_on_host_when_the_update_is_there() -> None:
    trace = training_trace(1, NBYTES)
    assert {gap.chunk.role for gap in derive(trace, {0: Tier.HOST}).gaps} <= {Role.PARAM, Role.GRAD}
    assert {gap.chunk for gap in derive(trace, {0: Tier.DEVICE}).gaps} >= {ChunkId(role, 0) for role in STATES}


def test_adjacent_uses_have_no_gap_between_them() -> None:
    problem = derive(loop((HOLD, A), (HOLD, B), (RELEASE, A), (RELEASE, B)), {})
    assert [(gap.chunk, gap.first, gap.num_moments) for gap in problem.gaps] == [(A, 2, 2), (B, 3, 2)]


def test_a_chunk_that_fits_beside_nothing_is_not_kept_in_part() -> None:
    trace = loop(*read(A), *read(B))
    sizes = {A: 3 * NBYTES, B: 2 * NBYTES}
    uneven = Trace(Mode.TRAIN, "", sizes, trace.moments)
    budgets = [4 * NBYTES] * 4
    assert traffic_bound(uneven, budgets, {}).lp_nbytes == pytest.approx(5 * NBYTES)
    assert brute_force(uneven, budgets, {}) == 5 * NBYTES


def test_a_budget_is_as_good_as_the_multiple_of_the_slab_below_it() -> None:
    trace = loop(*read(A), *read(B), *read(C))
    exact, more = (traffic_bound(trace, [nbytes] * 6, {}).lp_nbytes for nbytes in (2 * NBYTES, 3 * NBYTES - 1))
    assert more == exact


def test_budgets_leave_out_what_the_model_takes_if_asked() -> None:
    trace = training_trace(2, NBYTES, activation_nbytes=10)
    assert set(device_budgets(trace, 500, charges_non_model=False)) == {500}
    assert device_budgets(trace, 500, charges_non_model=True)[:3] == (490, 490, 480)


def test_a_moment_that_does_not_fit_is_named() -> None:
    trace = training_trace(1, NBYTES)
    with pytest.raises(CapacityError, match=r"group 0 update uses 256 bytes.*has 255.*by 1 bytes") as caught:
        traffic_bound(trace, [4 * NBYTES - 1] * len(trace.moments), {0: Tier.DEVICE})
    assert caught.value.needed_nbytes == 4 * NBYTES


def test_consumed_content_cannot_be_read() -> None:
    trace = loop((CREATE, A), (CONSUME, A), *read(A))
    with pytest.raises(TraceError, match=r"moment 2 .*is consumed"):
        derive(trace, {})


def test_host_cannot_update_what_device_uses() -> None:
    state = ChunkId(Role("exp_avg"), 0)
    trace = loop((HOLD, state), (CREATE, grad(0)), (UPDATE, A), (RELEASE, state))
    with pytest.raises(TraceError, match="while DEVICE uses it"):
        derive(trace, {0: Tier.HOST})


@pytest.mark.few(3)
@pytest.mark.parametrize("start", range(0, 200, 20))
def test_the_integer_optimum_is_brute_force_s(start: int) -> None:
    num_checked = 0
    for seed in range(start, start + 20):
        trace, budgets, tiers = drawn(seed)
        if len(set().union(*chunks_in_use(trace, tiers))) > 8 or len(trace.moments) > 34:
            continue  # Brute force would take minutes.
        bound = traffic_bound(trace, budgets, tiers, integer_within_s=10)
        optimum = brute_force(trace, budgets, tiers)
        assert bound.integer_nbytes == optimum, f"seed {seed}"
        assert bound.lp_nbytes <= optimum * (1 + 1e-9), f"seed {seed}"
        num_checked += 1
    assert num_checked >= 10


@pytest.mark.few(40)
@pytest.mark.parametrize("seed", range(100))
def test_no_policy_moves_less_than_the_relaxation(seed: int) -> None:
    trace, budgets, tiers = drawn(seed, max_groups=9)
    bound = traffic_bound(trace, budgets, tiers)
    for name, policy in POLICIES.items():
        assert page(trace, budgets, tiers, policy).nbytes >= bound.lp_nbytes * (1 - 1e-9), name


@pytest.mark.parametrize("seed", range(30))
def test_more_room_never_moves_more(seed: int) -> None:
    trace, budgets, tiers = drawn(seed, max_groups=9)
    moved = [
        traffic_bound(trace, [budget + extra for budget in budgets], tiers).lp_nbytes for extra in (0, 64, 640, 10**9)
    ]
    assert all(more <= less * (1 + 1e-9) for less, more in pairwise(moved))
    assert moved[-1] == derive(trace, tiers).certain_nbytes


# An iteration on two slabs; who leaves for C and for the second A tells the policies apart.
#
#     A B A C
def test_who_leaves() -> None:
    trace = loop(*read(A), *read(B), *read(A), *read(C))
    assert paged(trace, 2, "LRU") == (2, 0)  # B leaves for C, C for B.
    assert paged(trace, 2, "Belady") == (2, 0)
    assert paged(trace, 2, "FIFO") == (3, 0)  # Every second A is missed: the oldest leaves, however often it is used.


# On three slabs, as D is read, A, its gradient g and B are there. Of them B is used last but for A itself, which
# Belady lets go. In PatrickStar A and g are one chunk, whose next use is g's: B leaves, and is missed.
#
#     A g B D E+g B C
def test_patrickstar_s_gradient_is_where_its_weights_are() -> None:
    landing = [(HOLD, E), (WRITE, grad(0)), (RELEASE, E)]
    trace = loop(*read(A), (CREATE, grad(0)), *read(B), *read(D), *landing, *read(B), *read(C))
    assert paged(trace, 3, "Belady") == (4, 0)
    assert paged(trace, 3, "PatrickStar's choice") == (5, 0)


# On three slabs, as D is read, A is held and its gradient g and B are there. PatrickStar's clock does not tick for the
# g that lands next, so by the clock B is needed first. But g is where A is, and that is in use: B leaves.
#
#     A g B A+D+g B
def test_patrickstar_s_gradient_stays_while_its_weights_are_in_use() -> None:
    landing = [(HOLD, A), (HOLD, D), (WRITE, grad(0)), (RELEASE, D), (RELEASE, A)]
    trace = loop(*read(A), (CREATE, grad(0)), *read(B), *landing, *read(B))
    assert paged(trace, 3, "PatrickStar's choice") == (2, 0)


def test_patrickstar_copies_back_what_host_has() -> None:
    trace = loop(*read(A), *read(B))
    assert paged(trace, 1, "PatrickStar's choice") == (2, 0)
    assert paged(trace, 1, "PatrickStar") == (2, 2)


def test_random_traces_have_all_that_the_rules_allow() -> None:
    traces = [random_trace(random.Random(seed), num_groups=5, uniform=seed % 2 == 0) for seed in range(50)]
    of_one_rank = set(Kind) - {Kind.EXCHANGE, Kind.ARRIVE}
    assert {moment.kind for trace in traces for moment in trace.moments} == of_one_rank
    assert {len(set(trace.chunk_nbytes.values())) == 1 for trace in traces} == {True, False}
    held_together = {max(map(len, chunks_in_use(trace, tiers_of(trace, Tier.HOST)))) for trace in traces}
    assert max(held_together) >= 3
    assert any(grad(chunk.group) not in trace.chunk_nbytes for trace in traces for chunk in trace.chunk_nbytes)
    repeated = [[m.chunk for m in trace.moments if m.kind is HOLD] for trace in traces]
    assert any(max(map(holds.count, holds)) > 2 for holds in repeated)
    assert random_trace(random.Random(0), num_groups=5, uniform=True) == traces[0]
