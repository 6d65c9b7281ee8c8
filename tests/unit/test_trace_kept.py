"""A step that keeps regions, against the same step written down; sizes of their chunks, and times of later steps."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

import pytest

from chunkmem.activations.kept_regions import recomputation_s, with_kept
from chunkmem.activations.retimed_regions import retimed, with_warm_forward
from chunkmem.activations.shared_regions import inputs_from, kept_nbytes, outside_nbytes
from chunkmem.data.trace import Kind, Mode, Moment, Moments, Region, Trace
from chunkmem.data.types import ChunkId, Role
from tests.helpers.region_traces import as_recorded, cnn_like, gpt_like, region_trace
from tests.helpers.traces import LAYOUT, grad, param, updated_chunks

MIB = 1 << 20
MODELS = {"gpt": gpt_like(6, blocks_per_chunk=2), "cnn": cnn_like(8)}
INPUTS_NBYTES = 3 * MIB


def keeping(trace: Trace, kept: Collection[int]) -> Trace:
    """Return the step that keeps regions, of which chunks have what the recomputation saves."""
    return with_kept(trace, {at: trace.regions[at].nbytes for at in kept})


def events(trace: Trace) -> list[tuple[Kind, Role, str]]:
    return [(m.kind, m.chunk.role, "" if m.chunk.role is Role.ACTIVATION else str(m.chunk)) for m in trace.moments]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", range(6))
def test_it_is_the_step_that_is_written_down(name: str, seed: int) -> None:
    rng, blocks = random.Random(seed), MODELS[name]
    kept = {at for at in range(len(blocks)) if rng.random() < 0.5} | {seed}
    found, expected = (
        keeping(as_recorded(blocks, inputs_nbytes=INPUTS_NBYTES), kept),
        as_recorded(blocks, kept, inputs_nbytes=INPUTS_NBYTES),
    )
    assert events(found) == events(expected)
    assert [m.duration_s for m in found.moments] == pytest.approx([m.duration_s for m in expected.moments])
    assert sorted(found.chunk_nbytes.values()) == sorted(expected.chunk_nbytes.values())
    differing = [
        (at, one.non_model_peak_nbytes, other.non_model_peak_nbytes)
        for at, (one, other) in enumerate(zip(found.moments, expected.moments, strict=True))
        if abs(one.non_model_peak_nbytes - other.non_model_peak_nbytes) > 1
    ]
    assert not differing


def test_nothing_kept_is_the_step_that_was_recorded() -> None:
    trace = as_recorded(MODELS["gpt"])
    assert keeping(trace, ()).moments == trace.moments


X, Y = ChunkId(Role.ACTIVATION, 8), ChunkId(Role.ACTIVATION, 9)


def recorded(*, has_inputs: bool, within_a_hold: bool) -> Trace:
    """One block that is recomputed, as a recorder sees it: weights may be held in backward already.

    Its forward reads chunk 0 and chunk 1; backward holds chunk 1, computes forward again, and goes on. With
    `within_a_hold` forward reads chunk 1 alone, so that recomputing it has no event. It takes 4.5 s, or 3 s.
    """
    forward = [] if within_a_hold else [(Kind.HOLD, param(0), 1.0), (Kind.RELEASE, param(0), 0.5)]
    again = [] if within_a_hold else [(Kind.HOLD, param(0), 1.0), (Kind.RELEASE, param(0), 2.5)]
    moments = [
        *forward,
        (Kind.HOLD, param(1), 2.0),
        (Kind.RELEASE, param(1), 1.0),
        *([(Kind.CREATE, X, 0.0)] if has_inputs else []),
        (Kind.HOLD, param(1), 0.25 if has_inputs else 0.25 + 3.0 - (0.0 if within_a_hold else 2.0)),
        *([(Kind.HOLD, X, 3.0 if within_a_hold else 1.0)] if has_inputs else []),
        *again,
        (Kind.CREATE, Y, 0.0),
        (Kind.HOLD, Y, 1.5),
        (Kind.CREATE, grad(1), 1.0),
        (Kind.RELEASE, param(1), 0.0),
        *((kind, chunk, 0.0) for chunk in (Y, *([X] if has_inputs else [])) for kind in (Kind.RELEASE, Kind.CONSUME)),
        (Kind.UPDATE, param(1), 1.0),
        (Kind.CONSUME, grad(1), 0.0),
    ]
    sizes = dict.fromkeys(updated_chunks(1), 100) | {param(0): 100, Y: 60} | ({X: 7} if has_inputs else {})
    made = tuple(Moment(kind, chunk, "", s, 500) for kind, chunk, s in moments)
    end = len(forward) + 2
    created = next(at for at, m in enumerate(made) if m.chunk == Y)
    start = created - len(again)
    backward = start - has_inputs, next(at for at, m in enumerate(made) if (m.kind, m.chunk) == (Kind.RELEASE, Y))
    inputs = X if has_inputs else None
    region = Region("block", Y, 60, (0, end), backward, (start, created), inputs)
    return Trace(Mode.TRAIN, LAYOUT, sizes, made, regions=(region,))


@pytest.mark.parametrize("within_a_hold", [False, True])
@pytest.mark.parametrize("has_inputs", [False, True])
def test_only_what_was_recomputed_goes(has_inputs: bool, within_a_hold: bool) -> None:
    """Without inputs, it begins within a moment, and takes as long as forward did."""
    trace = recorded(has_inputs=has_inputs, within_a_hold=within_a_hold)
    expected_s = 3.0 if within_a_hold else 4.5
    assert recomputation_s(trace, trace.regions[0]) == pytest.approx(expected_s)
    kept = with_kept(trace, {0: 67})
    assert kept.compute_s == pytest.approx(trace.compute_s - expected_s)
    (own,) = (chunk for chunk in kept.chunk_nbytes if chunk.role is Role.ACTIVATION)
    assert kept.chunk_nbytes[own] == 67
    created, held = ((m.kind, m.chunk) for m in (Moment(Kind.CREATE, own), Moment(Kind.HOLD, own)))
    order = [(m.kind, m.chunk) for m in kept.moments]
    assert order.index(created) == trace.regions[0].forward[1]
    assert order[order.index(created) + 1 : order.index(held)] == [(Kind.HOLD, param(1))]
    assert order.count((Kind.CONSUME, own)) == 1


def test_bytes_move_with_the_region() -> None:
    """Until the chunk is created, they are non-model data; what recomputing takes besides is no more."""
    trace = recorded(has_inputs=True, within_a_hold=True)
    at = trace.regions[0].backward[0]
    high = [replace(m, non_model_peak_nbytes=900) if index == at else m for index, m in enumerate(trace.moments)]
    kept = with_kept(replace(trace, moments=tuple(high)), {0: 60})
    assert [m.non_model_peak_nbytes for m in kept.moments[:4]] == [540, 560, 500, 500]
    assert kept.non_model_peak_nbytes == 560


def test_a_region_that_saves_nothing_has_no_chunk() -> None:
    trace = recorded(has_inputs=True, within_a_hold=True)
    kept = with_kept(trace, {0: 0})
    assert all(chunk.role is not Role.ACTIVATION for chunk in kept.chunk_nbytes)
    assert kept.compute_s == pytest.approx(trace.compute_s - 3.0)


def calls_recorded(calls: Sequence[int], kept: Collection[int] = ()) -> Trace:
    """A step of blocks, called in this order, whose weights backward holds until it is through all calls of a block.

    Block b reads chunk b. The calls of a block but for the last have no events of weights in their recomputation. All
    recomputed calls of a block have their inputs in one chunk each, and what they save in one of the block's.
    """
    moments: list[Moment] = []
    spans: dict[tuple[int, str], Moments] = {}

    def add(*what: tuple[Kind, ChunkId, float]) -> Moments:
        start = len(moments)
        moments.extend(Moment(kind, chunk, "", seconds, 10) for kind, chunk, seconds in what)
        return start, len(moments)

    def inputs(call: int) -> ChunkId:
        return ChunkId(Role.ACTIVATION, 20 + call)

    def own(call: int) -> ChunkId:
        return ChunkId(Role.ACTIVATION, 40 + call if call in kept else 10 + calls[call])

    sizes = {chunk: 100 for block in calls for chunk in updated_chunks(block)}
    for call, block in enumerate(calls):
        spans[call, "forward"] = add((Kind.HOLD, param(block), 2.0), (Kind.RELEASE, param(block), 0.0))
        add((Kind.CREATE, own(call) if call in kept else inputs(call), 0.0))
        sizes |= {own(call): 60} if call in kept else {own(call): 60, inputs(call): 7}
    for call in reversed(range(len(calls))):
        block, is_first = calls[call], calls[call] not in calls[call + 1 :]
        start = len(moments)
        if call not in kept:
            add((Kind.HOLD, inputs(call), 0.5 if is_first else 2.5))
            again = ((Kind.HOLD, param(block), 2.0), (Kind.RELEASE, param(block), 0.0)) if is_first else ()
            spans[call, "again"] = add(*again)
            add((Kind.CREATE, own(call), 0.0))
        add((Kind.HOLD, own(call), 1.0))
        if is_first:
            add((Kind.HOLD, param(block), 2.0))
        if block not in calls[:call]:
            add((Kind.CREATE, grad(block), 0.0), (Kind.RELEASE, param(block), 0.0))
        stop, _ = add((Kind.RELEASE, own(call), 0.0), (Kind.CONSUME, own(call), 0.0))
        if call not in kept:
            add((Kind.RELEASE, inputs(call), 0.0), (Kind.CONSUME, inputs(call), 0.0))
        spans[call, "backward"] = start, stop
    for block in sorted(set(calls)):
        add((Kind.UPDATE, param(block), 1.0), (Kind.CONSUME, grad(block), 0.0))
    regions = tuple(
        Region(
            f"call {at}", own(at), 60, spans[at, "forward"], spans[at, "backward"], spans[at, "again"], inputs(at), at
        )
        for at in range(0 if kept else len(calls))
    )
    return Trace(Mode.TRAIN, LAYOUT, sizes, tuple(moments), regions=regions)


@pytest.mark.parametrize("calls", [(0, 1, 0), (0, 0, 0), (0, 0, 1, 0), (0, 1, 1, 0)], ids=str)
def test_calls_whose_recomputation_has_no_events(calls: Sequence[int]) -> None:
    """Kept calls of a block have a chunk each: they live at a time."""
    every = range(len(calls))
    for kept in (each for count in (*every, len(calls)) for each in combinations(every, count)):
        found, expected = keeping(calls_recorded(calls), kept), calls_recorded(calls, kept)
        assert events(found) == events(expected), kept
        assert found.compute_s == pytest.approx(expected.compute_s)
        assert found.non_model_peak_nbytes <= 10 + 60


@pytest.mark.parametrize(
    ("outside", "kept", "expected"),
    [
        # Half of what one returns to the next one, of 3 MiB, is taken to be saved by both.
        ({}, range(6), [25.5, 24, 24, 24, 24, 25.5]),
        ({}, (1, 2, 4, 5), [25.5, 24, 25.5, 25.5]),
        # A block saves what it returns, and so does the next one: as many bytes are in neither.
        ({1: 3}, range(6), [24, 21, 21, 21, 21, 24]),
        ({1: 3}, (0, 2, 3, 5), [24, 24, 21, 27]),
        # Blocks save what they are given, and not what they return.
        ({1: 0, 2: 0}, range(6), [27] * 6),
        ({2: 3, 3: 0}, range(6), [25.5, 24, 22.5, 24, 25.5, 25.5]),
    ],
)
def test_what_regions_next_to_each_other_share(
    outside: Mapping[int, int], kept: Sequence[int], expected: list[float]
) -> None:
    trace = as_recorded(MODELS["gpt"], inputs_nbytes=INPUTS_NBYTES)
    known = {number: mib * MIB for number, mib in outside.items()}
    found = kept_nbytes(trace, known, kept, charges_non_model=False)
    assert [nbytes / MIB for nbytes in found.values()] == expected


@pytest.mark.parametrize(("outside", "expected"), [({}, [27] * 6), ({1: 3}, [24] * 5 + [27])])
def test_where_non_model_data_counts_it_is_charged_to_the_next_one(
    outside: Mapping[int, int], expected: list[int]
) -> None:
    trace = as_recorded(MODELS["gpt"], inputs_nbytes=INPUTS_NBYTES)
    known = {number: mib * MIB for number, mib in outside.items()}
    found = kept_nbytes(trace, known, range(6), charges_non_model=True)
    assert [nbytes // MIB for nbytes in found.values()] == expected


@pytest.mark.parametrize("kept", [(2,), (1, 2), (0, 2, 3, 5), range(6)])
def test_what_is_left_out_is_known_from_a_step_that_keeps_some(kept: Sequence[int]) -> None:
    """Blocks return 3 MiB that they have saved; the last one has saved 1 MiB that others hold as well."""
    trace = as_recorded(MODELS["gpt"], inputs_nbytes=INPUTS_NBYTES)
    true = dict.fromkeys(range(5), 3 * MIB) | {5: MIB}
    sizes = kept_nbytes(trace, true, kept, charges_non_model=False)
    regions = tuple(
        replace(region, nbytes=sizes[at], chunk=ChunkId(Role.ACTIVATION, 1000 + at), recomputed=None)
        if at in kept
        else region
        for at, region in enumerate(trace.regions)
    )
    assert outside_nbytes(trace, replace(trace, regions=regions)) == {at: true[at] for at in kept}


def test_inputs_are_those_of_a_micro_batch() -> None:
    """One micro-batch after the other, and one block after the other."""
    region = as_recorded(MODELS["gpt"]).regions[0]
    loop = [replace(region, name=name) for name in "abcabc"]
    assert inputs_from(loop) == {1: 0, 2: 1, 4: 3, 5: 4}
    layers = [replace(region, name=name) for name in "aabbcc"]
    assert inputs_from(layers) == {2: 0, 3: 1, 4: 2, 5: 3}


@pytest.mark.parametrize("kept", [(), (1, 3), range(6)])
def test_times_hold_for_any_other_choice(kept: Sequence[int]) -> None:
    """In later steps, all is faster than it was, but for one block, which is slower."""
    blocks = MODELS["gpt"]
    warm = [replace(b, forward_s=(2.0 if at == 1 else 0.25) * b.forward_s) for at, b in enumerate(blocks)]
    measured = region_trace(warm, [at for at in range(6) if at not in kept])
    numbered = tuple(replace(region, number=at) for at, region in enumerate(measured.regions))
    again = retimed(as_recorded(blocks), replace(measured, regions=numbered))
    for other in ((), (0, 4), range(6)):
        assert keeping(again, other).compute_s == pytest.approx(keeping(as_recorded(warm), other).compute_s)


def test_a_first_forward_is_taken_to_be_as_fast_as_its_recomputation() -> None:
    step = as_recorded(MODELS["gpt"], inputs_nbytes=INPUTS_NBYTES)
    cold = {at for region in step.regions for at in range(*region.forward)}
    moments = [replace(m, duration_s=(5 if at in cold else 1) * m.duration_s) for at, m in enumerate(step.moments)]
    found = with_warm_forward(replace(step, moments=tuple(moments)))
    assert [m.duration_s for m in found.moments] == pytest.approx([m.duration_s for m in step.moments])
