"""Regions are chosen again once steps have followed a plan: with their times, and with what kept regions have saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

import chunkmem
from chunkmem.activations.region_choice import RegionChoices
from chunkmem.activations.shared_regions import kept_nbytes, outside_nbytes
from chunkmem.data.trace import Kind, Trace
from chunkmem.plan.candidate import PlanOptions
from chunkmem.plan.machine import Machine, host_links
from chunkmem.plan.planner import make_plan
from chunkmem.steps.plan_cache import Key
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


def test_where_no_step_can_be_planned_the_recorded_one_stays() -> None:
    """Training does not end with it; here a gradient is read after it was given up."""
    of = blocks(forward_s=4e-3)
    trace = as_recorded(of, inputs_nbytes=MIB)
    read = replace(trace.moments[-1], kind=Kind.HOLD, label="gather")
    trace = replace(trace, moments=(*trace.moments, read, replace(read, kind=Kind.RELEASE)))
    found = choices(cap_mib=150, link_Bps=2e9)
    with pytest.warns(UserWarning, match="stays as it is, .* has no content"):
        found.keep(KEY, found.choose(trace))
    followed = measured(of, frozenset())
    plan = make_plan(followed, found._machine())
    with pytest.warns(UserWarning, match="stays as it is, .* has no content"):
        assert not any(found.choose_again(KEY, followed, plan) for _ in range(NUM_STEPS))
    assert found.kept(KEY) == frozenset()


@pytest.mark.few(1)
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
    machine = Machine(AMPLE_NBYTES, 0, host_links(h2d_Bps=2e10, d2h_Bps=2e10))  # with slow links, nothing is kept
    with chunkmem.ChunkManager(cap, make_lanes=adversarial(1), machine=machine) as manager:
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


class Normed(nn.Module):
    """Saves its input and its output, as residual blocks of CNNs do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.second(torch.relu(self.first(x))))


@pytest.mark.parametrize(("known", "is_exact"), [((), False), ((2,), True), (range(5), True)])
def test_a_choice_is_judged_with_the_bytes_that_chunks_then_have(
    known: Sequence[int], is_exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What two neighbours have both saved is in neither's chunk: it is not taken to be copied twice."""
    recorded: list[Trace] = []
    choose = RegionChoices.choose

    def noticed(self: RegionChoices, trace: Trace) -> frozenset[int]:
        recorded.append(trace)
        return choose(self, trace)

    monkeypatch.setattr(RegionChoices, "choose", noticed)
    memory = {"device": AMPLE_NBYTES, "host": AMPLE_NBYTES}
    manager = chunkmem.ChunkManager(
        chunkmem.Config.from_dict({"memory": memory, "default_chunk_size": 1024, "activations": {"policy": "auto"}})
    )
    torch.manual_seed(0)
    with manager.init():
        model = nn.Sequential(*(Normed(16) for _ in range(5)))
    optimizer = chunkmem.AdamW(model.parameters(), manager=manager)
    for _ in range(5):
        manager.backward(model(torch.ones(64, 16)).sum())
        optimizer.step()
        optimizer.zero_grad()
    trace = manager.trace
    assert trace is not None
    true = [region.nbytes for region in trace.regions]
    assert [region.recomputed for region in trace.regions] == [None] * 5
    outside = {number: outside_nbytes(recorded[0], trace)[number] for number in known}
    found = kept_nbytes(recorded[0], outside, range(5), charges_non_model=False)
    # The batch is the loop's, and what the last one returns was kept elsewhere: known if these two are.
    ends = slice(None) if len(known) == len(true) else slice(1, -1)
    assert list(found.values())[ends] == true[ends] or not is_exact
    assert all(nbytes >= true[at] for at, nbytes in found.items())
    assert sum(true) < sum(
        kept_nbytes(recorded[0], dict.fromkeys(range(5), 0), range(5), charges_non_model=False).values()
    )
    manager.close()
