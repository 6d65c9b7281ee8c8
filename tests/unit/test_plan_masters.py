"""Plans of steps in half precision: weights are rounded from masters, so gradients may take their place."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from chunkmem.data.errors import PlanError
from chunkmem.data.trace import Kind, Trace
from chunkmem.data.types import ChunkId, Role, Tier
from chunkmem.plan.candidate import PlanOptions
from chunkmem.plan.candidates import candidates
from chunkmem.plan.machine import Machine, host_links
from chunkmem.plan.model import Alloc, Free
from chunkmem.plan.planner import make_plan
from chunkmem.plan.resync import resync
from chunkmem.plan.semantics import Residency
from chunkmem.plan.simulate import simulate
from tests.helpers.traces import grad, param, training_trace, with_masters
from tests.unit.test_plan_properties import check_candidate, drawn_machine, drawn_options, drawn_trace

NBYTES = 100
GROUPS = 6
ON_HOST = PlanOptions(margin_use_ratio=0.0)


def lowered(**keys: int) -> Trace:
    return with_masters(training_trace(GROUPS, NBYTES, **keys))


def machine(slabs: int) -> Machine:
    return Machine(slabs * NBYTES, 10**6, links=host_links(h2d_Bps=1e6, d2h_Bps=1e6))


def test_host_holds_fourteen_bytes_a_parameter_and_one_chunk() -> None:
    """2 a weight or its gradient, 12 of master and states; while a group is updated it has both."""
    trace = lowered()
    peak = simulate(make_plan(trace, machine(3), options=ON_HOST), trace).peak_nbytes[Tier.HOST]
    assert peak <= GROUPS * 7 * NBYTES + NBYTES
    in_full = training_trace(GROUPS, NBYTES)
    assert simulate(make_plan(in_full, machine(3), options=ON_HOST), in_full).peak_nbytes[Tier.HOST] == 24 * NBYTES


def test_device_holds_no_more_where_updates_run_there() -> None:
    """DEVICE has room for a gradient and what is held besides everything but the weights that are through."""
    trace = lowered()
    room = machine(GROUPS * 7 + 2)
    plan = make_plan(trace, replace(room, host_nbytes=0), options=PlanOptions(1.0))
    timeline = simulate(plan, trace)
    assert set(plan.update_tiers.values()) == {Tier.DEVICE}
    assert not any(timeline.moved_nbytes.values())
    assert timeline.peak_nbytes[Tier.DEVICE] <= room.device_nbytes


@pytest.mark.few(4)
@pytest.mark.parametrize("block", range(8))
def test_candidates_keep_the_caps_and_end_as_they_begin(block: int) -> None:
    for seed in range(block * 20, block * 20 + 20):
        rng = random.Random(seed)
        trace = with_masters(drawn_trace(rng))
        small = drawn_machine(rng, trace)
        options = drawn_options(rng, trace)
        for candidate in candidates(trace, small, options=options):
            check_candidate(candidate, trace)
            simulate(candidate.plan, trace, iterations=6)


def test_only_weights_with_a_master_may_be_dropped() -> None:
    trace = lowered()
    plan = make_plan(trace, machine(3), options=ON_HOST)
    simulate(plan, trace)
    sizes = {chunk: nbytes for chunk, nbytes in trace.chunk_nbytes.items() if chunk.role is not Role.MASTER}
    masterless = replace(trace, chunk_nbytes=sizes)
    start = frozenset(placed for placed in plan.start if placed.chunk.role is not Role.MASTER)
    with pytest.raises(PlanError, match="only replica of the newest version"):
        simulate(replace(plan, start=start, trace_digest=masterless.digest), masterless)


def test_an_update_needs_a_slab_for_the_weights_it_rounds() -> None:
    trace = lowered()
    plan = make_plan(trace, machine(3), options=ON_HOST)
    at = next(i for i, moment in enumerate(trace.moments) if moment.kind is Kind.UPDATE)
    without = tuple(a for a in plan.actions[at] if not (isinstance(a, Alloc) and a.chunk.role is Role.PARAM))
    with pytest.raises(PlanError, match="Alloc is missing"):
        simulate(replace(plan, actions=(*plan.actions[:at], without, *plan.actions[at + 1 :])), trace)


def test_weights_that_a_plan_has_dropped_are_dropped_on_the_way_back_to_it() -> None:
    sizes = {param(0): 1, grad(0): 1}
    wanted = Residency({(grad(0), Tier.HOST): True})
    now = Residency({(grad(0), Tier.HOST): True, (param(0), Tier.HOST): True})
    wanted.newest[param(0), Tier.DEVICE] = False

    def way(rounded: frozenset[ChunkId]) -> object:
        return resync(now, wanted, held=frozenset(), chunk_nbytes=sizes, free_nbytes={Tier.DEVICE: 1, Tier.HOST: 0},
                      peak_nbytes={}, keep_duplicates=False, rounded=rounded)  # fmt: skip

    with pytest.raises(PlanError, match="param chunk 0 holds something, and the plan has used it up"):
        way(frozenset())
    assert way(frozenset({param(0)})) == [Free(param(0), Tier.HOST), Alloc(param(0), Tier.DEVICE)]


def test_weights_that_a_plan_has_dropped_are_no_bystanders() -> None:
    """Nothing of them is wanted anywhere, and HOST would have room for one: the plan's own peak needs it."""
    sizes = {param(0): 1, param(1): 1, grad(0): 1}
    wanted = Residency({(grad(0), Tier.HOST): True})
    now = Residency(dict.fromkeys(((grad(0), Tier.HOST), (param(0), Tier.HOST), (param(1), Tier.HOST)), True))
    found = resync(
        now,
        wanted,
        held=frozenset(),
        chunk_nbytes=sizes,
        free_nbytes={Tier.DEVICE: 0, Tier.HOST: 0},
        peak_nbytes={Tier.HOST: 2},
        keep_duplicates=False,
        rounded=frozenset({param(0), param(1)}),
    )
    assert found == [Free(param(0), Tier.HOST), Free(param(1), Tier.HOST)]
