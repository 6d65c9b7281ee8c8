"""A step with other regions recomputed, against the same step written down, and back again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from chunkmem.trace.model import Kind, Mode, Moment, Region, Trace
from chunkmem.trace.recomputed import with_recomputed
from chunkmem.trace.retimed import retimed
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
    blocks = MODELS["gpt"]
    step = uncharged(as_recorded(blocks, inputs_nbytes=INPUTS_NBYTES), charges_non_model=True, kept_nbytes={1: 5 << 20})
    kept = with_recomputed(step, ())
    assert [region.nbytes >> 20 for region in kept.regions] == [27, 5, 27, 27, 27, 27]
    assert kept.chunk_nbytes[kept.regions[1].chunk] == 5 << 20


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
        spans = {1: trace.regions[1].forward, 4: trace.regions[4].backward}
        factor = next((f for number, f in ((1, 3.0), (4, 0.5)) if spans[number][0] <= at < spans[number][1]), 1.0)
        assert now.duration_s == pytest.approx(factor * was.duration_s)
