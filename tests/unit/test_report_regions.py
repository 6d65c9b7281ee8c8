"""What a report says of activations: kept, offloaded or recomputed, by the names of blocks."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest

from chunkmem.data.trace import Kind, Mode, Moment, Trace
from chunkmem.data.types import ChunkId, Role
from chunkmem.plan.planner import make_plan
from chunkmem.report.clock import AGAIN, phases, recomputations
from chunkmem.report.page import timeline_page
from chunkmem.report.picture import memory_picture
from chunkmem.report.regions import Policy, alike, chunk_names, region_policies
from chunkmem.report.run import Run, load_run
from chunkmem.report.summary import PlainPyTorch, summarize
from chunkmem.report.text import region_rows
from chunkmem.report.tracks import Slice, Tip, module_tracks
from tests.helpers.runs import MIB, machine_of, make_run
from tests.helpers.traces import LAYOUT, grad, param, updated_chunks

FIRST = 1 << 20
BROWN = (0x8C, 0x51, 0x0A)


def own(index: int) -> ChunkId:
    return ChunkId(Role.ACTIVATION, FIRST + index)


def step(num_blocks: int = 4, *, recomputed: int = 2) -> Trace:
    """As recorded: of the first blocks the inputs are chunks, and what they save when they are recomputed."""
    sizes = {chunk: MIB // 8 for group in range(num_blocks) for chunk in updated_chunks(group)}
    moments: list[Moment] = []

    def add(kind: Kind, chunk: ChunkId, label: str = "", s: float = 0.0) -> None:
        moments.append(Moment(kind, chunk, label, s))

    for at in range(num_blocks):
        add(Kind.HOLD, param(at), f"blocks.{at}.mlp forward", 1e-3)
        add(Kind.RELEASE, param(at))
        sizes[own(at)] = MIB // 8 if at < recomputed else MIB
        add(Kind.CREATE, own(at), f"blocks.{at} forward")
    for at in reversed(range(num_blocks)):
        label, again = f"blocks.{at} backward", own(num_blocks + at)
        add(Kind.HOLD, own(at), label)
        if at < recomputed:
            sizes[again] = MIB
            add(Kind.HOLD, param(at), f"blocks.{at}.mlp recomputation", 1e-3)
            add(Kind.RELEASE, param(at))
            add(Kind.CREATE, again, label)
            add(Kind.HOLD, again, label)
        add(Kind.HOLD, param(at), f"blocks.{at}.mlp backward", 2e-3)
        add(Kind.CREATE, grad(at), f"blocks.{at}.mlp.weight gradient")
        add(Kind.RELEASE, param(at))
        for chunk in [again, own(at)] if at < recomputed else [own(at)]:
            add(Kind.RELEASE, chunk)
            add(Kind.CONSUME, chunk)
    for group in range(num_blocks):
        add(Kind.UPDATE, param(group), f"update of group {group}", 1e-3)
        add(Kind.CONSUME, grad(group))
    return Trace(Mode.TRAIN, LAYOUT, sizes, tuple(moments))


TRACE = step()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    make_run(tmp_path / "tight", trace=TRACE, num_slabs=3)
    return load_run(tmp_path / "tight")


def test_chunks_of_activations_begin_no_backward_and_end_no_step() -> None:
    #                   4 x 3 events of forward; CONSUME of activations is part of backward
    assert [name for name, _, _ in phases(TRACE)] == ["forward", "backward", "optimizer step"]
    assert phases(TRACE)[1][1] == 12
    assert phases(TRACE)[2][1] == len(TRACE.moments) - 8


def test_what_runs_again_is_drawn_over_backward() -> None:
    spans = recomputations(TRACE)
    assert [[TRACE.moments[at].label for at in range(*span)] for span in spans] == [
        ["blocks.1.mlp recomputation", ""],
        ["blocks.0.mlp recomputation", ""],
    ]
    starts = list(range(len(TRACE.moments) + 1))
    assert module_tracks(TRACE, starts)[0].over == tuple(Slice(*span, AGAIN, Tip(AGAIN)) for span in spans)


def test_what_becomes_of_each_region() -> None:
    ample = make_plan(TRACE, machine_of(40))
    found = region_policies(ample, TRACE)
    assert [(r.name, r.policy, r.nbytes) for r in found] == [
        ("blocks.0", Policy.RECOMPUTE, MIB),
        ("blocks.1", Policy.RECOMPUTE, MIB),
        ("blocks.2", Policy.KEEP, MIB),
        ("blocks.3", Policy.KEEP, MIB),
    ]
    assert [r.seconds for r in found] == pytest.approx([1e-3, 1e-3, 0.0, 0.0])
    tight = make_plan(TRACE, machine_of(2))
    assert region_policies(tight, TRACE)[2].policy is Policy.OFFLOAD
    names = chunk_names(tight, TRACE)
    assert names[own(2)] == "blocks.2, offloaded"
    assert names[own(4)] == "blocks.0, recomputed"
    assert names[own(0)].startswith("blocks.0, inputs, ")


def test_a_region_whose_inputs_are_no_chunk_has_its_place_in_forward() -> None:
    gone = {own(0)}
    moments = tuple(moment for moment in TRACE.moments if moment.chunk not in gone)
    sizes = {chunk: nbytes for chunk, nbytes in TRACE.chunk_nbytes.items() if chunk not in gone}
    trace = replace(TRACE, moments=moments, chunk_nbytes=sizes)
    found = region_policies(make_plan(trace, machine_of(40)), trace)
    assert [region.name for region in found] == [f"blocks.{at}" for at in range(4)]


def test_regions_that_are_alike_are_one_row() -> None:
    found = region_policies(make_plan(TRACE, machine_of(40)), TRACE)
    assert list(region_rows(found)) == [
        ("blocks.0-1", "recomputed", "2.00 MiB", "2.0 ms"),
        ("blocks.2-3", "kept", "2.00 MiB", ""),
    ]
    one = replace(found[0], name="encoder")
    assert [name for name, _ in alike([one, one, replace(one, name="head.0")])] == ["encoder", "head.0"]


def test_activations_are_no_model_data() -> None:
    plain = PlainPyTorch.of(TRACE)
    inputs_nbytes, saved_nbytes = 2 * MIB // 8, 4 * MIB
    assert plain == PlainPyTorch(4 * 4 * MIB // 8, 0, inputs_nbytes + saved_nbytes)
    assert plain.nbytes == sum(TRACE.chunk_nbytes.values())


def test_a_recorded_run_tells_of_them(run: Run) -> None:
    summary = summarize(run)
    assert [region["policy"] for region in summary["regions"]][:2] == ["recompute", "recompute"]
    assert summary["predicted"]["role_peak_nbytes"]["device"]["activation"] >= MIB
    page = timeline_page([run])
    assert "of activations, and 0 B of other non-model data" in page
    assert "blocks.0, recomputed" in page
    assert "forward again" in page


def test_they_have_a_colour_of_their_own_in_the_picture(run: Run) -> None:
    pytest.importorskip("numpy")
    image = pytest.importorskip("matplotlib.image").imread(io.BytesIO(memory_picture(run)))
    pixels = (image[..., :3] * 255).round().astype(int)
    assert (pixels == BROWN).all(axis=-1).sum() > 1000
