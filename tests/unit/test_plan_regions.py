"""Which regions are recomputed: against all other choices, uniform policies, and with more and more memory."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import chain, combinations
from math import inf
from typing import Any

import pytest

from chunkmem.activations.kept_regions import with_kept
from chunkmem.activations.plan_regions import RegionChoice, choose_regions
from chunkmem.data.errors import CapacityError
from chunkmem.data.trace import Kind, Trace
from chunkmem.data.types import ChunkId, Role, Tier
from chunkmem.plan.candidate import PlanOptions
from chunkmem.plan.candidates import Candidates
from chunkmem.plan.gaps import in_use_nbytes
from chunkmem.plan.machine import Machine, host_links
from chunkmem.plan.model import Copy
from chunkmem.plan.planner import make_plan
from chunkmem.plan.simulate import simulate
from tests.helpers.region_traces import as_recorded, cnn_like, gpt_like, region_trace

MIB = 1 << 20
MODELS = {"gpt": gpt_like(6), "large": gpt_like(6, blocks_per_chunk=2, saved=40), "cnn": cnn_like(6, forward_s=2e-3)}
CAPS = (120, 140, 160, 200, 260)
"""In MiB, from hardly enough to nearly ample."""


def machine(cap_mib: int, *, link_Bps: float, charges: bool = True, host_nbytes: int = 16 << 30) -> Machine:
    return Machine(
        cap_mib * MIB,
        host_nbytes,
        host_links(h2d_Bps=link_Bps, d2h_Bps=link_Bps),
        charges_non_model=charges,
        one_processor=False,
        host_update_Bps=10e9,
        device_update_Bps=500e9,
        shadow_nbytes=1 << 30,
    )


def chosen(trace: Trace, on: Machine, **given: Any) -> RegionChoice:
    return choose_regions(trace, on, lambda kept: {at: trace.regions[at].nbytes for at in kept}, **given)


def keeping(trace: Trace, kept: Collection[int]) -> Trace:
    return with_kept(trace, {at: trace.regions[at].nbytes for at in kept})


def offloaded(found: RegionChoice) -> set[ChunkId]:
    actions = (action for actions in found.candidate.plan.actions for action in actions)
    return {action.chunk for action in actions if isinstance(action, Copy) and action.chunk.role is Role.ACTIVATION}


def faster_s(trace: Trace, on: Machine, *, within_s: float) -> float | None:
    """Return the time of a choice whose step takes less than `within_s`, of all that there are; None: none does."""
    indices = range(len(trace.regions))
    for kept in chain.from_iterable(combinations(indices, num) for num in range(len(indices) + 1)):
        other = keeping(trace, kept)
        if sum(m.duration_s for m in other.moments if m.kind is not Kind.UPDATE) < within_s:
            try:
                pieces = list(Candidates(other, on, PlanOptions(), is_quick=True).pieces())
            except CapacityError:
                continue
            found_s = min(tried.timeline.step_s for _, tried in pieces if tried is not None)
            if found_s < within_s:
                return found_s
    return None


@pytest.mark.few(1)
@pytest.mark.parametrize("charges", [False, True])
@pytest.mark.parametrize("link_Bps", [1e9, 4e9])
@pytest.mark.parametrize("name", MODELS)
def test_close_to_the_best_of_all_choices_and_more_memory_is_never_slower(
    name: str, link_Bps: float, charges: bool
) -> None:
    trace = as_recorded(MODELS[name])
    before_s = inf
    for cap in CAPS:
        on = machine(cap, link_Bps=link_Bps, charges=charges)
        try:
            found = chosen(trace, on)
        except CapacityError:
            assert before_s == inf, "a smaller cap was enough"
            continue
        assert faster_s(trace, on, within_s=found.step_s / 1.03) is None
        assert found.step_s <= 1.01 * before_s
        before_s = found.step_s


@pytest.mark.few(3)
@pytest.mark.parametrize("cap", [140, 200, 400])
@pytest.mark.parametrize("name", MODELS)
def test_the_plan_is_no_slower_than_those_of_uniform_policies(name: str, cap: int) -> None:
    """Plans here are those a step would follow, from all candidates, and not the few that a choice is made with."""
    trace, on = as_recorded(MODELS[name]), machine(cap, link_Bps=2e9)
    found = chosen(trace, on)
    step_s = {}
    for kept in (found.kept, frozenset[int](), frozenset(range(6))):
        other = keeping(trace, kept)
        try:
            step_s[kept] = simulate(make_plan(other, on), other).step_s
        except CapacityError:
            assert kept != found.kept
    assert step_s[found.kept] <= 1.001 * min(step_s.values())


def test_the_smallest_cap_that_fits_is_told() -> None:
    trace = as_recorded(MODELS["gpt"])
    with pytest.raises(CapacityError) as raised:
        chosen(trace, machine(20, link_Bps=4e9))
    needed = raised.value.needed_nbytes
    links = host_links(h2d_Bps=4e9, d2h_Bps=4e9)
    fits = chosen(trace, Machine(needed, 16 << 30, links, charges_non_model=True))
    assert fits.candidate.timeline.peak_nbytes[Tier.DEVICE] <= needed
    with pytest.raises(CapacityError):
        chosen(trace, Machine(needed - 1, 16 << 30, links, charges_non_model=True))


def test_ample_memory_keeps_everything_at_the_cost_of_one_plan() -> None:
    found = chosen(as_recorded(MODELS["gpt"]), machine(4000, link_Bps=1e9))
    assert found.kept == frozenset(range(6))
    assert found.candidate.nbytes == 0
    assert found.num_plans == 1


def test_a_fast_link_offloads_and_a_slow_one_recomputes() -> None:
    trace = as_recorded(MODELS["gpt"], inputs_nbytes=4096)
    fast, slow = (chosen(trace, machine(140, link_Bps=Bps)) for Bps in (100e9, 1e8))
    assert offloaded(fast)
    assert fast.kept == frozenset(range(6))
    assert len(slow.kept) <= 3, "two or three take as long"
    inputs = {region.inputs for region in trace.regions}
    assert offloaded(slow) <= inputs


def test_without_host_what_does_not_fit_is_recomputed() -> None:
    """Weights, gradients and states take 384 MiB, and always stay."""
    trace = as_recorded(gpt_like(8))
    tight, ample = (chosen(trace, machine(cap, link_Bps=1e9, host_nbytes=0)) for cap in (220, 400))
    assert 0 < len(tight.kept) < 8
    assert tight.candidate.nbytes == 0
    assert len(ample.kept) == 8


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["gpt", "cnn"])
@pytest.mark.parametrize("cap", [120, 200])
def test_slow_forwards_of_a_first_step_rule_nothing_out(name: str, cap: int) -> None:
    """To recompute takes a quarter of the time of forward there, whatever the sum of both is."""
    trace, on = as_recorded(MODELS[name]), machine(cap, link_Bps=1e9)
    slow = {at for region in trace.regions for at in range(*region.forward)}
    moments = enumerate(trace.moments)
    trace = replace(
        trace, moments=tuple(replace(m, duration_s=m.duration_s * (4 if at in slow else 1)) for at, m in moments)
    )
    assert faster_s(trace, on, within_s=chosen(trace, on).step_s / 1.03) is None


def test_many_calls_take_about_as_many_plans() -> None:
    """8 calls of each of 16 blocks, of some 2800 moments."""
    trace = as_recorded(gpt_like(128, blocks_per_chunk=32, saved=4))
    found = chosen(trace, machine(160, link_Bps=5e8))
    assert found.num_plans <= 70
    assert 0 < len(found.kept) < 128


@pytest.mark.parametrize("num_blocks", [8, pytest.param(48, marks=pytest.mark.full)])
def test_work_is_bounded(num_blocks: int) -> None:
    trace = as_recorded(cnn_like(num_blocks, forward_s=2e-3))
    found = chosen(trace, machine(160, link_Bps=1e9))
    assert found.num_plans <= 12 * (num_blocks + 35)
    assert len(found.kept) < num_blocks


def test_a_trace_without_regions_has_nothing_to_choose() -> None:
    trace = region_trace(MODELS["gpt"], ())
    found = chosen(replace(trace, regions=()), machine(400, link_Bps=1e9))
    assert found.kept == frozenset()


def test_no_moment_needs_spare_bytes_but_with_the_choice_until_now() -> None:
    """What a choice needs is a guess until it was recorded; what steps do now has fitted."""
    trace = as_recorded(MODELS["cnn"])
    on = machine(260, link_Bps=50e9)
    free = chosen(trace, on).kept
    assert free
    assert chosen(trace, on, spare_nbytes=10 * MIB).kept == free, "all fits all the same"
    least_nbytes = max(in_use_nbytes(trace, charges_non_model=True))
    spare_nbytes = on.device_nbytes - least_nbytes + MIB
    assert chosen(trace, on, spare_nbytes=spare_nbytes).kept == frozenset()
    with_now = chosen(trace, on, spare_nbytes=on.device_nbytes, fits=free)
    assert with_now.kept == free
    assert with_now.step_s <= with_now.fits_s < inf
