"""Steps that leave out different things become one trace, of which each of them leaves out some."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from dataclasses import replace

import pytest

from chunkmem.data.trace import Kind, Mode, Moment, Trace
from chunkmem.plan.candidate import PlanOptions
from chunkmem.plan.cursor import TraceCursor
from chunkmem.plan.machine import Machine, host_links
from chunkmem.plan.merge import merge
from chunkmem.plan.planner import make_plan
from tests.helpers.traces import LAYOUT, grad, param, updated_chunks

NUM_GROUPS = 8
MACHINE = Machine(device_nbytes=1600, host_nbytes=10_000, links=host_links(h2d_Bps=1e9, d2h_Bps=1e9))


def moments(groups: Collection[int], shared: bool) -> Iterator[Moment]:
    """Forward, backward and updates of the blocks that are not left out; if `shared`, two blocks share a group."""
    chunk_of = {block: block // 2 if shared else block for block in groups}
    for block, group in chunk_of.items():
        yield Moment(Kind.HOLD, param(group), f"{block} forward", 1e-3)
        yield Moment(Kind.RELEASE, param(group))
    begun = set()
    for block, group in reversed(chunk_of.items()):
        yield Moment(Kind.HOLD, param(group), f"{block} backward", 1e-3)
        yield Moment(Kind.WRITE if group in begun else Kind.CREATE, grad(group), f"{block}.weight gradient")
        begun.add(group)
        yield Moment(Kind.RELEASE, param(group))
    for group in sorted(begun):
        yield Moment(Kind.UPDATE, param(group), f"update of group {group}", 1e-3)
        yield Moment(Kind.CONSUME, grad(group))


def step(groups: Collection[int], *, shared: bool = False) -> Trace:
    num_groups = NUM_GROUPS // 2 if shared else NUM_GROUPS
    sizes = {chunk: 100 for group in range(num_groups) for chunk in updated_chunks(group)}
    return Trace(Mode.TRAIN, LAYOUT, sizes, tuple(moments(groups, shared)))


def said(trace: Trace) -> list[tuple[Kind, object, str]]:
    return [(moment.kind, moment.chunk, moment.label) for moment in trace.moments]


def told(trace: Trace) -> list[tuple[Kind, object, str]]:
    """What places a step in a trace: who releases a chunk says nothing."""
    return [event for event in said(trace) if event[0] is not Kind.RELEASE]


def fits(trace: Trace, found: Trace) -> bool:
    """Tell whether a step is a trace with some moments left out."""
    return TraceCursor(trace).num_left_out(told(found)) is not None  # type: ignore[arg-type]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_all_that_was_merged_is_the_trace_with_something_left_out(seed: int, shared: bool) -> None:
    drawn = random.Random(seed)
    found = [step([b for b in range(NUM_GROUPS) if drawn.random() < 0.8], shared=shared) for _ in range(5)]
    known = found[0]
    merged_with = [known]
    for trace in found[1:]:
        merged = merge(known, trace)
        if merged is not None:
            known = merged.trace
            merged_with.append(trace)
    assert len(merged_with) >= 4
    assert all(fits(known, trace) for trace in merged_with)
    assert make_plan(known, MACHINE, options=PlanOptions()).actions


def test_blocks_are_merged_in_the_order_of_the_model() -> None:
    merged = merge(step([0, 1, 3, 4, 6, 7]), step([0, 2, 3, 4, 5, 6, 7]))
    assert merged is not None
    assert merged.is_longer
    assert said(merged.trace) == said(step(range(NUM_GROUPS)))


def test_of_a_shared_chunk_the_first_gradient_begins_the_content() -> None:
    """Block 7 was left out when the first one was recorded: the gradient of 6 was the first in their chunk."""
    merged = merge(step([0, 1, 2, 3, 4, 5, 6], shared=True), step(range(NUM_GROUPS), shared=True))
    assert merged is not None
    landed = [m for m in merged.trace.moments if m.chunk == grad(3) and m.kind in (Kind.CREATE, Kind.WRITE)]
    assert [(m.kind, m.label) for m in landed] == [
        (Kind.CREATE, "7.weight gradient"),
        (Kind.WRITE, "6.weight gradient"),
    ]
    assert fits(merged.trace, step([0, 1, 2, 3, 4, 5, 6], shared=True))


def test_a_step_that_accumulates_is_not_merged_with_one_that_begins() -> None:
    """Gradients that wait from the step before are there when it begins: no plan could be for both."""
    begins = step(range(NUM_GROUPS))
    moments = [replace(m, kind=Kind.WRITE) if m.kind is Kind.CREATE else m for m in begins.moments]
    adds = replace(begins, moments=tuple(m for m in moments if m.kind not in (Kind.UPDATE, Kind.CONSUME)))
    assert merge(begins, replace(begins, moments=tuple(moments))) is None
    assert merge(adds, adds) is not None
    assert merge(adds, replace(adds, moments=adds.moments + begins.moments)) is None


def test_what_adds_nothing_changes_nothing() -> None:
    known = step(range(NUM_GROUPS))
    merged = merge(known, step([0, 1, 2, 3, 5, 6]))
    assert merged is not None
    assert not merged.is_longer
    assert merged.trace is known


def test_steps_of_different_kinds_are_not_merged() -> None:
    assert merge(step(range(4)), step(range(4, 8))) is None
    assert merge(step([0]), replace(step([0]), layout="another")) is None


def test_events_of_another_order_do_not_fit() -> None:
    trace = step(range(NUM_GROUPS))
    assert fits(trace, step([1, 2, 5]))
    assert not fits(trace, step([2, 1]))
    events = told(step([0, 1, 2, 3, 4, 5, 6]))
    assert TraceCursor(trace).num_left_out(events[:7]) == 0  # type: ignore[arg-type]
    assert TraceCursor(trace).num_left_out(events[:8]) == 3  # type: ignore[arg-type]
