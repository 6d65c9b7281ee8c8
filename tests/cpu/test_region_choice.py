"""Regions are chosen again once steps have followed a plan: with their times, and with what kept regions have saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

import chunkmem
from chunkmem.plan.candidate import PlanOptions
from chunkmem.plan.machine import Machine, host_links
from chunkmem.plan.planner import make_plan
from chunkmem.steps.plan_cache import Key
from chunkmem.steps.region_choice import RegionChoices
from chunkmem.trace.model import Trace
from tests.cpu.test_activations import AMPLE_NBYTES, CASES, config, smallest_nbytes
from tests.helpers.lanes import adversarial
from tests.helpers.region_traces import Block, as_recorded, gpt_like, region_trace
from tests.helpers.training import VARIANTS, Chunked, Trainer, assert_same, train_plain
from tests.helpers.twins import cpu_only

MIB = 1 << 20
KEY = Key()
EVERY = frozenset(range(6))
NUM_STEPS = 40
"""More than a search takes."""


def blocks(*, forward_s: float) -> list[Block]:
    return gpt_like(6, forward_s=forward_s)


def choices(*, cap_mib: int, link_Bps: float) -> RegionChoices:
    links = host_links(h2d_Bps=link_Bps, d2h_Bps=link_Bps)
    machine = Machine(cap_mib * MIB, 16 << 30, links, one_processor=False)
    return RegionChoices(lambda: machine, PlanOptions())


def measured(of: list[Block], kept: frozenset[int]) -> Trace:
    """The step as it is followed, with numbers of calls."""
    trace = region_trace(of, EVERY - kept)
    return replace(trace, regions=tuple(replace(r, number=at) for at, r in enumerate(trace.regions)))


def settle(found: RegionChoices, of: list[Block]) -> Sequence[frozenset[int]]:
    """Follow plans until the choice stays; return every choice."""
    kept = found.kept(KEY)
    assert kept is not None
    seen: list[frozenset[int]] = []
    while kept not in seen[-1:]:
        seen.append(kept)
        trace = measured(of, kept)
        plan = make_plan(trace, found._machine())
        for _ in range(NUM_STEPS):
            if found.choose_again(KEY, trace, plan):
                break
        kept = found.kept(KEY)
        assert kept is not None
    return seen


@pytest.mark.parametrize(("cold_s", "warm_s", "is_more"), [(40e-3, 0.2e-3, False), (0.2e-3, 40e-3, True)])
def test_warm_times_change_the_choice(cold_s: float, warm_s: float, is_more: bool) -> None:
    """Where recomputing turns out to be fast, more is recomputed, and where it is slow, less."""
    found = choices(cap_mib=150, link_Bps=2e9)
    found.keep(KEY, found.choose(as_recorded(blocks(forward_s=cold_s), inputs_nbytes=MIB)))
    seen = settle(found, blocks(forward_s=warm_s))
    assert len(seen) in (2, 3)
    assert (len(seen[-1]) > len(seen[0])) is is_more
    expected = choices(cap_mib=150, link_Bps=2e9)
    assert len(seen[-1]) == len(expected.choose(as_recorded(blocks(forward_s=warm_s), inputs_nbytes=MIB)))


def test_what_would_save_little_is_left_as_it_is() -> None:
    found = choices(cap_mib=150, link_Bps=2e9)
    found.keep(KEY, found.choose(as_recorded(blocks(forward_s=4e-3), inputs_nbytes=MIB)))
    assert len(settle(found, blocks(forward_s=4.05e-3))) == 1


def test_an_adopted_choice_stays() -> None:
    found = choices(cap_mib=1000, link_Bps=2e9)
    of = blocks(forward_s=4e-3)
    found.adopt(measured(of, frozenset()))
    assert settle(found, of) == [frozenset()]


@cpu_only
@pytest.mark.parametrize("is_ample", [True, False])
def test_numbers_and_caps_hold_while_the_choice_changes(is_ample: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first choice, here a bad one, is followed; another one is recorded, and followed from then on."""
    case, variant, num_steps = CASES["gpt"], VARIANTS[0], 16
    least = smallest_nbytes(case, variant, "auto")
    choose = RegionChoices.choose

    def choose_badly(found: RegionChoices, trace: Trace) -> frozenset[int]:
        choose(found, trace)
        return frozenset()

    monkeypatch.setattr(RegionChoices, "choose", choose_badly)
    cap = config(case, AMPLE_NBYTES if is_ample else 2 * least, "auto")
    with chunkmem.ChunkManager(cap, make_lanes=adversarial(1)) as manager:
        side = Watched(manager)
        assert_same(Trainer(case, variant, side).run(num_steps), train_plain(case, variant, num_steps))
    num_kept = [step for step in side.num_kept if step is not None]
    assert num_kept[0] == 0 < num_kept[-1]
    assert side.num_kept[0] is None, "recorded"
    planned = "".join("-" if step is None else "p" for step in side.num_kept)
    assert planned.strip("-p") == ""
    assert planned.endswith("pp")
    assert planned.lstrip("-").count("-") == 1, "one step without a plan, for each change"


class Watched(Chunked):
    """Asserts that steps follow their plans, and notes how many regions each keeps; None: there is no plan."""

    def __init__(self, manager: chunkmem.ChunkManager) -> None:
        super().__init__(manager, follows=True)
        self.num_kept: list[int | None] = []

    def after_step(self) -> None:
        super().after_step()
        trace = None if self.manager.plan is None else self.manager.trace
        kept = None if trace is None else sum(region.recomputed is None for region in trace.regions)
        self.num_kept.append(kept)
