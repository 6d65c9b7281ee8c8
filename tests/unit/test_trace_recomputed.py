"""A step with other regions recomputed, against the same step written down, and back again."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product

import pytest

from chunkmem.trace.model import Kind, Mode, Moment, Moments, Region, Trace
from chunkmem.trace.recomputed import with_recomputed
from chunkmem.trace.retimed import retimed, with_warm_forward
from chunkmem.trace.shared import neighbours, shared_bytes
from chunkmem.trace.uncharged import uncharged
from chunkmem.types import ChunkId, Role
from tests.helpers.region_traces import as_recorded, cnn_like, gpt_like, region_trace
from tests.helpers.traces import LAYOUT, grad, param, updated_chunks

MODELS = {"gpt": gpt_like(6, blocks_per_chunk=2), "cnn": cnn_like(8)}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", range(6))
def test_it_is_the_step_that_is_written_down(name: str, seed: int) -> None:
    rng, blocks = random.Random(seed), MODELS[name]
    before, after = ({at for at in range(len(blocks)) if rng.random() < 0.5} for _ in range(2))
    found, expected = with_recomputed(region_trace(blocks, before), after), region_trace(blocks, after)
    assert [(m.kind, m.chunk) for m in found.moments] == [(m.kind, m.chunk) for m in expected.moments]
    assert [m.duration_s for m in found.moments] == pytest.approx([m.duration_s for m in expected.moments])
    assert found.regions == expected.regions
    assert found.chunk_nbytes == expected.chunk_nbytes
    assert found.digest == expected.digest
    differing = [
        (at, one.non_model_peak_nbytes, other.non_model_peak_nbytes)
        for at, (one, other) in enumerate(zip(found.moments, expected.moments, strict=True))
        if abs(one.non_model_peak_nbytes - other.non_model_peak_nbytes) > 1
    ]
    assert not differing


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_again(name: str) -> None:
    blocks = MODELS[name]
    every, some = set(range(len(blocks))), {0, 2, 3}
    for given, other in ((set(), every), (every, set()), (some, every - some)):
        trace = region_trace(blocks, given)
        back = with_recomputed(with_recomputed(trace, other), given)
        assert back.regions == trace.regions
        assert [(m.kind, m.chunk) for m in back.moments] == [(m.kind, m.chunk) for m in trace.moments]
        assert [m.duration_s for m in back.moments] == pytest.approx([m.duration_s for m in trace.moments])


def test_nothing_to_change_is_the_same_trace() -> None:
    trace = region_trace(MODELS["gpt"], {1, 4})
    assert with_recomputed(trace, {4, 1}) is trace


X = ChunkId(Role.ACTIVATION, 9)


def recorded(*, within_a_hold: bool, nbytes: int = 60) -> Trace:
    """One block that is recomputed, as a recorder sees it: the block's own chunk is held in backward already.

    Its forward reads chunk 0 and chunk 1; backward holds chunk 1, computes forward again, and goes on. With
    `within_a_hold` forward reads chunk 1 alone, so that recomputing it has no event.
    """
    forward = [] if within_a_hold else [(Kind.HOLD, param(0), 1.0), (Kind.RELEASE, param(0), 0.5)]
    again = [] if within_a_hold else [(Kind.HOLD, param(0), 1.0), (Kind.RELEASE, param(0), 2.5 + 3.0)]
    moments = [
        *forward,
        (Kind.HOLD, param(1), 2.0),
        (Kind.RELEASE, param(1), 0.0),
        (Kind.HOLD, param(1), 0.25 if forward else 2.0 + 3.0),
        *again,
        (Kind.CREATE, grad(1), 1.0),
        (Kind.RELEASE, param(1), 0.0),
        (Kind.UPDATE, param(1), 1.0),
        (Kind.CONSUME, grad(1), 0.0),
    ]
    num = len(forward)
    sizes = dict.fromkeys(updated_chunks(1), 100) | {param(0): 100}
    start = num + 2
    region = Region("block", X, nbytes, (0, start), (start, start + 3 + num), (start + 1, start + 1 + num))
    made = tuple(Moment(kind, chunk, "", s, 500) for kind, chunk, s in moments)
    return Trace(Mode.TRAIN, LAYOUT, sizes, made, regions=(region,))


@pytest.mark.parametrize("within_a_hold", [False, True])
def test_only_what_forward_took_goes(within_a_hold: bool) -> None:
    trace = recorded(within_a_hold=within_a_hold)
    forward_s = sum(m.duration_s for m in trace.moments[: trace.regions[0].forward[1]])
    kept = with_recomputed(trace, ())
    assert kept.compute_s == pytest.approx(trace.compute_s - forward_s)
    start = kept.regions[0].backward[0]
    assert [(m.kind, m.chunk) for m in kept.moments[start : start + 2]] == [(Kind.HOLD, param(1)), (Kind.HOLD, X)]
    assert kept.moments[start + 1].duration_s == pytest.approx(3.0)
    back = with_recomputed(kept, {0})
    assert [(m.kind, m.chunk) for m in back.moments] == [(m.kind, m.chunk) for m in trace.moments]
    assert back.compute_s == pytest.approx(trace.compute_s)
    assert back.regions == trace.regions


def test_bytes_move_with_the_region() -> None:
    trace = recorded(within_a_hold=True)
    kept = with_recomputed(trace, ())
    assert kept.chunk_nbytes[X] == 60
    peaks = {(m.kind, m.chunk): m.non_model_peak_nbytes for m in kept.moments}
    assert peaks[Kind.HOLD, X] == peaks[Kind.CREATE, grad(1)] == 500 - 60
    assert peaks[Kind.CREATE, X] == 500
    assert kept.moments[1].non_model_peak_nbytes == 560, "until the CREATE"
    back = with_recomputed(kept, {0})
    assert X not in back.chunk_nbytes
    assert [m.non_model_peak_nbytes for m in back.moments] == [500, 500, 560, 500, 500, 500, 500]


def test_a_region_that_saves_nothing_has_no_chunk() -> None:
    trace = recorded(within_a_hold=True, nbytes=0)
    kept = with_recomputed(trace, ())
    assert kept.chunk_nbytes == trace.chunk_nbytes
    assert kept.compute_s == pytest.approx(trace.compute_s - 2.0)
    assert with_recomputed(kept, {0}).compute_s == pytest.approx(trace.compute_s)


def test_a_recorders_own_moments_of_a_chunk_go_wherever_they_are() -> None:
    """The CREATE may be the first moment after forward, the CONSUME the first after backward."""
    trace = region_trace(MODELS["gpt"], ())
    regions = tuple(
        replace(r, forward=(r.forward[0], r.forward[1] - 1), backward=(r.backward[0], r.backward[1] - 2))
        for r in trace.regions
    )
    found = with_recomputed(replace(trace, regions=regions), range(len(regions)))
    expected = region_trace(MODELS["gpt"], range(len(regions)))
    assert [(m.kind, m.chunk) for m in found.moments] == [(m.kind, m.chunk) for m in expected.moments]
    assert found.regions == expected.regions


def held_throughout(calls: Sequence[int], recomputed: Collection[int]) -> Trace:
    """A step of blocks, called in this order, whose weights backward holds until it is through all calls of a block.

    Block b reads chunk b. The calls of a block but for the last have no events in backward: their recomputation, and
    their gradients, are part of the moment before. Calls (0, 1, 0), all of which are recomputed:

        forward    | 0 |  | 1 |  | 0 |
        backward                        | hold 0 |  | hold 1, release 1 |              | gradient, release 0 |
                                        call 2      call 1, and then call 0
    """
    moments: list[Moment] = []
    spans: dict[tuple[int, str], Moments] = {}

    def add(*events: tuple[Kind, ChunkId, float], peak: int = 10) -> Moments:
        start = len(moments)
        moments.extend(Moment(kind, chunk, "", seconds, peak) for kind, chunk, seconds in events)
        return start, len(moments)

    def own(call: int) -> ChunkId:
        return ChunkId(Role.ACTIVATION, 9 + call)

    sizes = {chunk: 100 for block in calls for chunk in updated_chunks(block)}
    for call, block in enumerate(calls):
        kept = [] if call in recomputed else [(Kind.CREATE, own(call), 0.0)]
        start, _ = add((Kind.HOLD, param(block), 1.0))
        spans[call, "forward"] = start, add((Kind.RELEASE, param(block), 0.0), *kept)[1]
    for call in reversed(range(len(calls))):
        block, start, is_first = calls[call], len(moments), calls[call] not in calls[call + 1 :]
        is_again = call in recomputed
        if not is_again:
            sizes[own(call)] = 60
            add((Kind.HOLD, own(call), 0.0 if is_first else 2.0))
        elif is_first:
            spans[call, "again"] = add((Kind.HOLD, param(block), 1.0), (Kind.RELEASE, param(block), 0.0), peak=70)
        else:
            last = moments[-1]
            moments[-1] = replace(last, duration_s=last.duration_s + 3.0, non_model_peak_nbytes=70)
            spans[call, "again"] = start, start
        if is_first:
            add((Kind.HOLD, param(block), 2.0), peak=70 if is_again else 10)
        if is_first and block not in calls[:call]:
            add((Kind.CREATE, grad(block), 0.0), (Kind.RELEASE, param(block), 0.0), peak=70 if is_again else 10)
        if not is_again:
            add((Kind.RELEASE, own(call), 0.0), (Kind.CONSUME, own(call), 0.0))
        spans[call, "backward"] = start, len(moments)
    for block in sorted(set(calls)):
        if calls.count(block) > 1:
            add((Kind.CREATE, grad(block), 0.0), (Kind.RELEASE, param(block), 0.0))
        add((Kind.UPDATE, param(block), 1.0), (Kind.CONSUME, grad(block), 0.0))
    regions = tuple(
        Region(f"call {at}", own(at), 60, spans[at, "forward"], spans[at, "backward"], spans.get((at, "again")))
        for at in range(len(calls))
    )
    return Trace(Mode.TRAIN, LAYOUT, sizes, tuple(moments), regions=regions)


@pytest.mark.parametrize("calls", [(0, 1, 0), (0, 0, 0), (0, 0, 1, 0), (0, 1, 1, 0)], ids=str)
def test_calls_whose_backward_has_no_events(calls: Sequence[int]) -> None:
    every = range(len(calls))
    subsets = [frozenset(each) for count in (*every, len(calls)) for each in combinations(every, count)]
    for given, wanted in product(subsets, subsets):
        found, expected = with_recomputed(held_throughout(calls, given), wanted), held_throughout(calls, wanted)
        assert [(m.kind, m.chunk) for m in found.moments] == [(m.kind, m.chunk) for m in expected.moments]
        assert found.compute_s == pytest.approx(expected.compute_s), (given, wanted)
        assert [r.recomputed is None for r in found.regions] == [r.recomputed is None for r in expected.regions]
        for call in set(every) - wanted:
            span = [m.chunk for m in found.moments[slice(*found.regions[call].backward)]]
            assert span.count(found.regions[call].chunk) == 3, "HOLD, RELEASE and CONSUME"


def test_bytes_of_calls_whose_backward_has_no_events() -> None:
    """All are recomputed in one moment, one after the other: it has the bytes of one."""
    calls = (0, 0, 0)
    for wanted in ((), (2,), (1, 2), (0, 1, 2)):
        found, expected = (
            [(m.kind, m.chunk, m.non_model_peak_nbytes) for m in trace.moments[trace.regions[-1].backward[0] :]]
            for trace in (
                with_recomputed(held_throughout(calls, (0, 1, 2)), wanted),
                held_throughout(calls, wanted),
            )
        )
        assert found == expected, wanted


INPUTS_NBYTES = 3 << 20


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kept", [(), (0, 2, 3), range(8)])
def test_what_a_region_is_recomputed_from_is_no_chunk_where_it_is_kept(name: str, kept: Sequence[int]) -> None:
    """Then it is part of what that saves, and takes no more memory between forward and backward."""
    blocks = MODELS[name]
    recomputed = [at for at in range(len(blocks)) if at not in kept]
    found = with_recomputed(
        uncharged(as_recorded(blocks, inputs_nbytes=INPUTS_NBYTES), charges_non_model=True), recomputed
    )
    expected = region_trace(blocks, recomputed)
    for region, other in zip(found.regions, expected.regions, strict=True):
        assert region.nbytes == other.nbytes + INPUTS_NBYTES
        assert (region.recomputed is None) is (other.recomputed is None)
        inputs = [m.kind for m in found.moments if m.chunk == region.inputs]
        lived = [Kind.CREATE, Kind.HOLD, Kind.RELEASE, Kind.CONSUME]
        assert inputs == ([] if other.recomputed is None else lived)
    model = [m for m in found.moments if m.chunk.role is not Role.ACTIVATION]
    others = [m for m in expected.moments if m.chunk.role is not Role.ACTIVATION]
    assert [(m.kind, m.chunk) for m in model] == [(m.kind, m.chunk) for m in others]
    assert found.non_model_peak_nbytes <= expected.non_model_peak_nbytes + INPUTS_NBYTES
    assert found.compute_s == pytest.approx(expected.compute_s)


def test_what_a_kept_region_saves_may_be_known() -> None:
    """What it was given may be saved by the region before as well: then it is non-model data, which counts."""
    recorded = as_recorded(MODELS["gpt"], inputs_nbytes=INPUTS_NBYTES)
    step = uncharged(recorded, charges_non_model=True, kept_nbytes={1: 5 << 20, 3: 26 << 20})
    kept = with_recomputed(step, ())
    assert [region.nbytes >> 20 for region in kept.regions] == [27, 8, 27, 27, 27, 27]
    assert kept.chunk_nbytes[kept.regions[1].chunk] == 8 << 20


@pytest.mark.parametrize(
    ("known", "recomputed", "expected"),
    [
        # Nothing is known: inputs are taken to be shared, of 3 MiB.
        ({}, (), [27, 24, 24, 24, 24, 24]),
        ({}, (0, 3), [27, 27, 24, 27, 27, 24]),
        ({1: 24 << 20}, (), [27, 24, 24, 24, 24, 24]),
        # All of both: what the others share is guessed from it.
        ({1: 21 << 20}, (), [24, 21, 21, 21, 21, 24]),
        ({1: 21 << 20}, (1,), [27, 27, 24, 21, 21, 24]),
        ({1: 21 << 20}, (3,), [24, 21, 24, 27, 24, 24]),
        ({1: 27 << 20}, (), [27, 27, 27, 27, 27, 27]),
        ({1: 27 << 20, 2: 21 << 20, 3: 21 << 20}, (), [24, 27, 21, 21, 21, 24]),
    ],
)
def test_what_regions_next_to_each_other_share(
    known: Mapping[int, int], recomputed: Sequence[int], expected: list[int]
) -> None:
    """It is in the chunk of one of them if the other one is recomputed; where non-model data does not count, forward
    has the same peak as without any activations."""
    recorded = as_recorded(MODELS["gpt"], inputs_nbytes=INPUTS_NBYTES)
    step = uncharged(recorded, charges_non_model=False, kept_nbytes=known)
    found = with_recomputed(step, recomputed, shared=shared_bytes(recorded, known))
    assert [region.nbytes >> 20 for region in found.regions] == expected
    kept = [region for region in found.regions if region.recomputed is None]
    assert all(found.chunk_nbytes[region.chunk] == region.nbytes for region in kept)
    if not recomputed:
        assert found.non_model_peak_nbytes == 0


def test_neighbours_are_those_of_a_micro_batch() -> None:
    """One micro-batch after the other, and one block after the other."""
    region = as_recorded(MODELS["gpt"], inputs_nbytes=INPUTS_NBYTES).regions[0]
    loop = [replace(region, name=name) for name in "abcabc"]
    assert neighbours(loop) == {0: (None, 1), 1: (0, 2), 2: (1, None), 3: (None, 4), 4: (3, 5), 5: (4, None)}
    layers = [replace(region, name=name) for name in "aabbcc"]
    assert neighbours(layers) == {0: (None, 2), 1: (None, 3), 2: (0, 4), 3: (1, 5), 4: (2, None), 5: (3, None)}


def test_times_are_those_of_a_step_that_recomputes_others() -> None:
    """A region's forward is three times as slow, another one's backward half as slow."""
    blocks = MODELS["gpt"]
    trace = uncharged(as_recorded(blocks, inputs_nbytes=INPUTS_NBYTES), charges_non_model=True)
    kept = with_recomputed(trace, [0, 4])
    factors = dict.fromkeys(range(*kept.regions[1].forward), 3.0)
    factors |= dict.fromkeys(range(*kept.regions[4].backward), 0.5)
    moments = [replace(m, duration_s=factors.get(at, 1.0) * m.duration_s) for at, m in enumerate(kept.moments)]
    measured = replace(kept, moments=tuple(moments))
    again = retimed(trace, measured)
    assert with_recomputed(again, [0, 4]).compute_s == pytest.approx(measured.compute_s)
    assert again.regions == trace.regions
    for at, (was, now) in enumerate(zip(trace.moments, again.moments, strict=True)):
        assert trace.regions[1].recomputed is not None
        spans = (trace.regions[1].forward, 3.0), (trace.regions[1].recomputed, 3.0), (trace.regions[4].backward, 0.5)
        factor = next((factor for span, factor in spans if span[0] <= at < span[1]), 1.0)
        assert now.duration_s == pytest.approx(factor * was.duration_s)


@pytest.mark.parametrize("kept", [(), (1, 3), range(6)])
def test_times_hold_for_any_other_choice(kept: Sequence[int]) -> None:
    """In later steps, forward is faster than it was, unlike backward; of one block it is slower."""
    trace = uncharged(as_recorded(MODELS["gpt"], inputs_nbytes=INPUTS_NBYTES), charges_non_model=True)
    factors = {
        at: 2.0 if region.number == 1 else 0.25
        for region in trace.regions
        for span in (region.forward, region.recomputed or (0, 0))
        for at in range(*span)
    }
    step = _scaled(trace, factors)
    again = retimed(trace, with_recomputed(step, [at for at in range(6) if at not in kept]))
    for recomputed in ((), (0, 4), range(6)):
        expected = with_recomputed(step, recomputed)
        assert with_recomputed(again, recomputed).compute_s == pytest.approx(expected.compute_s)


def test_a_first_forward_is_taken_to_be_as_fast_as_its_recomputation() -> None:
    step = uncharged(as_recorded(MODELS["gpt"], inputs_nbytes=INPUTS_NBYTES), charges_non_model=True)
    found = with_warm_forward(_scaled(step, {at: 5.0 for region in step.regions for at in range(*region.forward)}))
    assert [m.duration_s for m in found.moments] == pytest.approx([m.duration_s for m in step.moments])


def _scaled(trace: Trace, factors: Mapping[int, float]) -> Trace:
    moments = enumerate(trace.moments)
    return replace(
        trace, moments=tuple(replace(m, duration_s=m.duration_s * factors.get(at, 1.0)) for at, m in moments)
    )
