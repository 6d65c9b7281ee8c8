"""Which regions are recomputed: against all other choices, uniform policies, and with more and more memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import chain, combinations
from math import inf
from typing import Any

import pytest

from chunkmem.errors import CapacityError
from chunkmem.plan.candidate import PlanOptions
from chunkmem.plan.candidates import Candidates
from chunkmem.plan.gaps import in_use_nbytes
from chunkmem.plan.machine import Machine, host_links
from chunkmem.plan.planner import make_plan
from chunkmem.plan.regions import Policy, RegionSearch, choose_regions
from chunkmem.plan.simulate import simulate
from chunkmem.trace.model import Kind, Trace
from chunkmem.trace.recomputed import with_recomputed
from chunkmem.types import Tier
from tests.helpers.region_traces import Block, cnn_like, gpt_like, region_trace

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


def all_recomputed(blocks: list[Block]) -> Trace:
    return region_trace(blocks, range(len(blocks)))


def faster_s(trace: Trace, on: Machine, *, within_s: float) -> float | None:
    """Return the time of a choice whose step takes less than `within_s`, of all that there are; None: none does."""
    indices = range(len(trace.regions))
    for recomputed in chain.from_iterable(combinations(indices, num) for num in range(len(indices) + 1)):
        other = with_recomputed(trace, recomputed)
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
    trace = all_recomputed(MODELS[name])
    before_s = inf
    for cap in CAPS:
        on = machine(cap, link_Bps=link_Bps, charges=charges)
        try:
            found = choose_regions(trace, on)
        except CapacityError:
            assert before_s == inf, "a smaller cap was enough"
            continue
        assert faster_s(trace, on, within_s=found.step_s / 1.03) is None
        assert found.step_s <= 1.01 * before_s
        before_s = found.step_s


@pytest.mark.few(6)
@pytest.mark.parametrize("cap", [140, 200, 400])
@pytest.mark.parametrize("name", MODELS)
def test_the_plan_is_no_slower_than_those_of_uniform_policies(name: str, cap: int) -> None:
    """Plans here are those a step would follow, from all candidates, and not the few that a choice is made with."""
    trace, on = all_recomputed(MODELS[name]), machine(cap, link_Bps=2e9)
    found = choose_regions(trace, on)
    step_s = {}
    for recomputed in (found.recomputed, frozenset[int](), frozenset(range(6))):
        other = with_recomputed(trace, recomputed)
        try:
            step_s[recomputed] = simulate(make_plan(other, on), other).step_s
        except CapacityError:
            assert recomputed != found.recomputed
    assert step_s[found.recomputed] <= 1.001 * min(step_s.values())


def test_what_was_recorded_does_not_decide() -> None:
    """Any trace of the step leads to the same choice, so it can be made again."""
    on = machine(200, link_Bps=1e9)
    chosen = {choose_regions(region_trace(MODELS["gpt"], given), on).recomputed for given in ((), (0, 3), range(6))}
    assert len(chosen) == 1


def test_the_smallest_cap_that_fits_is_told() -> None:
    trace = all_recomputed(MODELS["gpt"])
    with pytest.raises(CapacityError) as raised:
        choose_regions(trace, machine(20, link_Bps=4e9))
    needed = raised.value.needed_nbytes
    links = host_links(h2d_Bps=4e9, d2h_Bps=4e9)
    fits = choose_regions(trace, Machine(needed, 16 << 30, links, charges_non_model=True))
    assert fits.peak_nbytes <= needed
    with pytest.raises(CapacityError):
        choose_regions(trace, Machine(needed - 1, 16 << 30, links, charges_non_model=True))


def test_ample_memory_keeps_everything_at_the_cost_of_one_plan() -> None:
    search = RegionSearch(all_recomputed(MODELS["gpt"]), machine(4000, link_Bps=1e9))
    for _ in search.pieces():
        pass
    found = search.choice()
    assert not found.recomputed
    assert found.moved_nbytes == 0
    assert search.num_plans == 1
    assert {region.policy for region in found.regions} == {Policy.KEEP}
    assert {region.seconds for region in found.regions} == {0.0}


def test_a_fast_link_offloads_and_a_slow_one_recomputes() -> None:
    trace = all_recomputed(MODELS["gpt"])
    fast, slow = (choose_regions(trace, machine(140, link_Bps=Bps)) for Bps in (100e9, 1e8))
    assert Policy.OFFLOAD in {region.policy for region in fast.regions}
    assert not fast.recomputed
    assert len(slow.recomputed) >= 4
    assert Policy.OFFLOAD not in {region.policy for region in slow.regions}


def test_the_summary_says_what_becomes_of_each_region() -> None:
    trace, on = all_recomputed(MODELS["gpt"]), machine(160, link_Bps=2e9)
    found = choose_regions(trace, on)
    assert [region.name for region in found.regions] == [f"blocks.{at}" for at in range(6)]
    assert {region.nbytes for region in found.regions} == {24 * MIB}
    again = {at for at, region in enumerate(found.regions) if region.policy is Policy.RECOMPUTE}
    assert again == found.recomputed
    seconds = {Policy.KEEP: 0.0, Policy.RECOMPUTE: 4e-3, Policy.OFFLOAD: 2 * 24 * MIB / 2e9}
    assert all(region.seconds == pytest.approx(seconds[region.policy]) for region in found.regions)
    offloaded = sum(region.nbytes for region in found.regions if region.policy is Policy.OFFLOAD)
    assert found.moved_nbytes >= 2 * offloaded
    assert found.peak_nbytes == found.candidate.timeline.peak_nbytes[Tier.DEVICE] <= 160 * MIB


def test_without_host_what_does_not_fit_is_recomputed() -> None:
    """Weights, gradients and states take 384 MiB, and always stay."""
    trace = all_recomputed(gpt_like(8))
    tight, ample = (choose_regions(trace, machine(cap, link_Bps=1e9, host_nbytes=0)) for cap in (220, 400))
    assert 0 < len(tight.recomputed) < 8
    assert tight.moved_nbytes == 0
    assert not ample.recomputed


@pytest.mark.parametrize("name", ["gpt", "cnn"])
@pytest.mark.parametrize("cap", [120, 200])
def test_slow_forwards_of_a_first_step_rule_nothing_out(name: str, cap: int) -> None:
    """To recompute takes a quarter of the time of forward there, whatever the sum of both is."""
    trace, on = all_recomputed(MODELS[name]), machine(cap, link_Bps=1e9)
    slow = {at for region in trace.regions for at in range(*region.forward)}
    moments = enumerate(trace.moments)
    trace = replace(
        trace, moments=tuple(replace(m, duration_s=m.duration_s * (4 if at in slow else 1)) for at, m in moments)
    )
    assert faster_s(trace, on, within_s=choose_regions(trace, on).step_s / 1.03) is None


def test_calls_of_a_block_for_many_micro_batches_are_chosen_together() -> None:
    """8 calls of each of 16 blocks: 4 at a time, so that there is as much to decide as for 32 blocks."""
    trace = all_recomputed(gpt_like(128, blocks_per_chunk=32, saved=4))
    regions = tuple(replace(region, name=f"blocks.{at // 8}") for at, region in enumerate(trace.regions))
    search = RegionSearch(replace(trace, regions=regions), machine(160, link_Bps=5e8))
    work = sum(search.pieces())
    assert search.num_plans <= 70
    assert work <= 5_000_000
    recomputed = search.choice().recomputed
    assert set(Counter(at // 4 for at in recomputed).values()) == {4}
    assert 0 < len(recomputed) < 128


@pytest.mark.parametrize("num_blocks", [8, pytest.param(48, marks=pytest.mark.full)])
def test_work_is_bounded(num_blocks: int) -> None:
    trace = all_recomputed(cnn_like(num_blocks, forward_s=2e-3))
    search = RegionSearch(trace, machine(160, link_Bps=1e9))
    work = sum(search.pieces())
    assert search.num_plans <= 12 * (num_blocks + 35)
    assert work > 0
    assert search.choice().recomputed


def test_a_trace_without_regions_has_nothing_to_choose() -> None:
    trace = region_trace(MODELS["gpt"], ())
    found = choose_regions(
        Trace(trace.mode, trace.layout, trace.chunk_nbytes, trace.moments), machine(400, link_Bps=1e9)
    )
    assert found.recomputed == frozenset()
    assert found.regions == ()


def test_no_moment_needs_spare_bytes_but_with_the_choice_until_now() -> None:
    """What a choice needs is a guess until it was recorded; what steps do now has fitted."""
    trace = all_recomputed(MODELS["cnn"])
    on = machine(260, link_Bps=50e9)

    def chosen(**options: Any) -> RegionSearch:
        search = RegionSearch(trace, on, **options)
        for _ in search.pieces():
            pass
        return search

    free = chosen().choice().recomputed
    assert len(free) < len(trace.regions)
    assert chosen(spare_nbytes=10 * MIB).choice().recomputed == free, "all fits all the same"
    least_nbytes = max(in_use_nbytes(trace, charges_non_model=True))
    spare_nbytes = on.device_nbytes - least_nbytes + 1
    assert chosen(spare_nbytes=spare_nbytes).choice().recomputed == frozenset(range(6))
    with_now = chosen(spare_nbytes=on.device_nbytes, now=free)
    assert with_now.choice().recomputed == free
    assert with_now.choice().step_s <= with_now.now_s < inf
