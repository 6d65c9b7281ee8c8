"""What the page draws: states, modules, spans and bytes as slices of tracks, exact to the nanosecond."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from chunkmem.data.trace import Kind, Mode, Moment, Trace
from chunkmem.data.types import ChunkId, Role, Tier
from chunkmem.plan.model import Alloc, Copy, Free, Lane, Placed, Plan, Update
from chunkmem.plan.semantics import ABSENT, EMPTY, NEWEST, TIERS, ReplicaState
from chunkmem.plan.timeline import Span, StageCall, StageWork, Timeline
from chunkmem.report import page
from chunkmem.report.clock import AGAIN, BACKWARD, FORWARD, STEP
from chunkmem.report.modules import ModuleRun, layer_runs, submodule_runs
from chunkmem.report.page import STYLES
from chunkmem.report.replay import ChunkHistory, States, replay
from chunkmem.report.run import Run
from chunkmem.report.summary import PlainPyTorch
from chunkmem.report.tracks import (
    BOTH,
    HELD,
    LAYER,
    NO_CONTENT,
    NOWHERE,
    STALL,
    Level,
    Slice,
    Tip,
    Track,
    chunk_track,
    lane_tracks,
    memory_graphs,
    module_tracks,
    moment_tips,
    stage_tracks,
    starts_ns,
    state_style,
    where,
)
from tests.helpers.runs import MIB, machine_of
from tests.helpers.traces import grad, param, training_trace

DEVICE, HOST = Tier.DEVICE, Tier.HOST
W, G = param(0), grad(0)
MS = 10**6
TRACE = Trace(
    Mode.TRAIN,
    "",
    {W: 2 * MIB, G: 2 * MIB},
    (
        Moment(Kind.HOLD, W, "blocks.0.up forward", non_model_peak_nbytes=MIB),
        Moment(Kind.RELEASE, W, non_model_peak_nbytes=3 * MIB),
        Moment(Kind.HOLD, W, "blocks.0.up backward", non_model_peak_nbytes=5 * MIB),
        Moment(Kind.CREATE, G, "blocks.0.up.weight gradient", non_model_peak_nbytes=MIB),
        Moment(Kind.RELEASE, W),
        Moment(Kind.UPDATE, W, "update of group 0"),
        Moment(Kind.CONSUME, G),
    ),
)
ACTIONS = (
    (Alloc(W, DEVICE), Copy(W, HOST, DEVICE)),
    (),
    (),
    (Alloc(G, DEVICE),),
    (Alloc(G, HOST), Copy(G, DEVICE, HOST), Free(W, DEVICE)),
    (Free(G, DEVICE), Update(0, HOST)),
    (),
)
# ms           0       10     12         20   24      30       40
# COMPUTE      | 0      | 1   |stall| 2   | 3  | 4     |
# H2D       |W |
# HOST_UPDATE                                          | 5      |   the last moment takes no time
SPANS = (
    Span(Lane.H2D, "param chunk 0 to DEVICE", -0.004, 0.0, 0, W, 2 * MIB),
    Span(Lane.COMPUTE, "blocks.0.up forward", 0.0, 0.010, 0, W),
    Span(Lane.COMPUTE, "release param chunk 0", 0.010, 0.012, 1, W),
    Span(Lane.COMPUTE, "waits for h2d", 0.012, 0.015, 2, W, is_stall=True),
    Span(Lane.COMPUTE, "blocks.0.up backward", 0.015, 0.020, 2, W),
    Span(Lane.COMPUTE, "blocks.0.up.weight gradient", 0.020, 0.024, 3, G),
    Span(Lane.COMPUTE, "", 0.024, 0.030, 4, W),
    Span(Lane.HOST_UPDATE, "update of group 0", 0.030, 0.040, 5, W),
)
STARTS = [0, 10 * MS, 12 * MS, 20 * MS, 24 * MS, 30 * MS, 40 * MS, 40 * MS]
NBYTES = (2 * MIB, 2 * MIB, 2 * MIB, 4 * MIB, 2 * MIB, 0, 0)


def run_of(**machine: bool) -> Run:
    plan = Plan(TRACE.digest, replace(machine_of(5), **machine), frozenset({Placed(W, HOST, True)}), ACTIONS, {0: HOST})
    timeline = Timeline(SPANS, 0.040, {DEVICE: 4 * MIB}, {}, {DEVICE: 5 * MIB}, NBYTES)
    return Run(Path("run"), TRACE, plan, timeline, timeline)


RUN = run_of()


def test_moments_begin_in_whole_nanoseconds() -> None:
    assert starts_ns(RUN.happened, 7) == STARTS


# Stages.


def test_a_stage_shows_its_micro_batches_and_where_it_waits() -> None:
    #   stage 1 | wait F0 B0 |
    calls = (
        StageCall(StageWork.WAIT, 1, 0, 0.000, 0.010),
        StageCall(StageWork.FORWARD, 1, 0, 0.010, 0.012),
        StageCall(StageWork.BACKWARD, 1, 0, 0.015, 0.030),
    )
    run = replace(RUN, happened=replace(RUN.happened, stage_calls=calls))
    (track,) = stage_tracks(run, run.happened)
    assert track.name == "stage 1"
    assert [(piece.style, piece.text, piece.start_ns, piece.end_ns) for piece in track.slices] == [
        (STALL, "", 0, 10 * MS),
        ("forward", "0", 10 * MS, 12 * MS),
        ("backward", "0", 15 * MS, 30 * MS),
    ]
    assert [piece.tip.title for piece in track.slices][:2] == ["stage 1: waits for another stage", "stage 1: forward"]
    assert stage_tracks(run, run.predicted) == [Track("stage 1")]  # so that both views have the same rows
    assert stage_tracks(RUN, RUN.happened) == []


# States.


def test_the_states_of_a_chunk_are_those_of_the_plan() -> None:
    histories = replay(RUN.plan, TRACE)
    weights, gradient = (chunk_track(chunk, histories[chunk], TRACE, STARTS) for chunk in (W, G))
    size = "2.00 MiB (2,097,152 bytes)"
    assert weights.name == "param chunk 0"
    # On both tiers from its fetch on, until its slab is freed for good.
    assert weights.slices == (
        Slice(0, 24 * MS, BOTH, Tip("param chunk 0", "DEVICE and HOST: ", size)),
        Slice(24 * MS, 40 * MS, "host", Tip("param chunk 0", "HOST: ", size)),
    )
    in_use = Tip("param chunk 0", "in use: ")
    assert weights.over == (
        Slice(0, 10 * MS, HELD, in_use),
        Slice(12 * MS, 24 * MS, HELD, in_use),
        Slice(30 * MS, 40 * MS, HELD, in_use),
    )
    assert [(s.start_ns // MS, s.end_ns // MS, s.style) for s in gradient.slices] == [
        (0, 20, NOWHERE), (20, 24, "device"), (24, 30, BOTH), (30, 40, "host")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("states", "style", "words"),
    [
        ((ABSENT, ABSENT), NOWHERE, "nowhere"),
        ((ABSENT, NEWEST), "host", "HOST"),
        ((NEWEST, ABSENT), "device", "DEVICE"),
        ((NEWEST, NEWEST), BOTH, "DEVICE and HOST"),
        # The slab on HOST has an old version: only DEVICE could serve a read.
        ((NEWEST, EMPTY), "device", "DEVICE and HOST (a slab, no content)"),
        ((EMPTY, NEWEST), "host", "DEVICE (a slab, no content) and HOST"),
        ((EMPTY, ABSENT), NO_CONTENT, "DEVICE (a slab, no content)"),
        ((EMPTY, EMPTY), NO_CONTENT, "DEVICE (a slab, no content) and HOST (a slab, no content)"),
    ],
)
def test_every_state_has_a_style_and_words(states: States, style: str, words: str) -> None:
    assert (state_style(states), where(states)) == (style, words)


def test_states_that_last_no_time_are_left_out() -> None:
    history = ChunkHistory([(0, (ABSENT, NEWEST)), (6, (NEWEST, NEWEST))], [(6, 7)])
    track = chunk_track(W, history, TRACE, STARTS)
    assert [(s.start_ns, s.end_ns, s.style) for s in track.slices] == [(0, 40 * MS, "host")]
    assert track.over == ()


# What runs.


def test_phases_layers_and_modules() -> None:
    phase, layers, modules = module_tracks(TRACE, STARTS)
    assert [track.name for track in (phase, layers, modules)] == ["phase", "layers", "modules"]
    assert phase.slices == (
        Slice(0, 12 * MS, FORWARD, Tip(FORWARD), FORWARD),
        Slice(12 * MS, 30 * MS, BACKWARD, Tip(BACKWARD), BACKWARD),
        Slice(30 * MS, 40 * MS, STEP, Tip(STEP), STEP),
    )
    assert layers.slices == (
        Slice(0, 12 * MS, "forward layer", Tip("blocks.0 forward"), "blocks.0"),
        Slice(12 * MS, 30 * MS, "backward layer", Tip("blocks.0 backward"), "blocks.0"),
    )
    assert [(s.start_ns, s.end_ns, s.text) for s in modules.slices] == [(0, 12 * MS, "up"), (12 * MS, 30 * MS, "up")]


def traced(*labels: str) -> Trace:
    """A trace whose moments hold and release a chunk in turn."""
    kinds = (Kind.HOLD, Kind.RELEASE)
    moments = tuple(Moment(kinds[at % 2], W, label) for at, label in enumerate(labels))
    return Trace(Mode.TRAIN, "", {W: 1}, moments)


def test_a_layer_lasts_as_long_as_its_modules_follow_each_other() -> None:
    trace = traced(
        *("embedding forward", "", "model.layers.0.attention.qkv forward", "", "model.layers.0.up forward", ""),
        *("model.layers.11.up forward", "", "model.layers.11.up backward", "", "model.layers.11.up recomputation", ""),
    )
    assert layer_runs(trace) == [
        ModuleRun("embedding", FORWARD, 0, 2),
        ModuleRun("model.layers.0", FORWARD, 2, 6),
        ModuleRun("model.layers.11", FORWARD, 6, 8),
        ModuleRun("model.layers.11", BACKWARD, 8, 12),
    ]
    assert submodule_runs(trace) == [
        ModuleRun("attention.qkv", FORWARD, 2, 4),
        ModuleRun("up", FORWARD, 4, 6),
        ModuleRun("up", FORWARD, 6, 8),
        ModuleRun("up", BACKWARD, 8, 12),
    ]


@pytest.mark.parametrize(
    ("path", "layer", "rest"),
    [
        ("0", "0", []),
        ("encoder.conv1", "encoder.conv1", []),
        ("h.3.mlp.fc2", "h.3", ["mlp.fc2"]),
        ("blocks.1.experts.7.up", "blocks.1", ["experts.7.up"]),
    ],
)
def test_a_layer_ends_with_the_first_number(path: str, layer: str, rest: list[str]) -> None:
    trace = traced(f"{path} forward", "")
    assert [run.name for run in layer_runs(trace)] == [layer]
    assert [run.name for run in submodule_runs(trace)] == rest


def test_a_step_without_names_has_no_layers() -> None:
    assert [track.name for track in module_tracks(traced("", ""), [0, 1, 2])] == ["phase"]


def test_spans_are_on_the_tracks_of_their_lanes_and_stalls_over_computing() -> None:
    tracks = {track.name: track for track in lane_tracks(RUN, RUN.happened)}
    assert list(tracks) == ["compute", "copies to DEVICE", "updates on HOST"]
    hold = "moment 2: blocks.0.up backward (hold param chunk 0)"
    assert tracks["compute"].slices[2] == Slice(
        15 * MS,
        20 * MS,
        BACKWARD,
        Tip("compute: blocks.0.up backward", rest=f"param chunk 0, 2.00 MiB\n{hold}"),
    )
    assert [(s.start_ns // MS, s.style) for s in tracks["compute"].slices] == [
        (0, FORWARD), (10, FORWARD), (15, BACKWARD), (20, BACKWARD), (24, BACKWARD)
    ]  # fmt: skip
    stall = Tip("stall: waits for h2d", rest=f"for param chunk 0\n{hold}")
    assert tracks["compute"].over == (Slice(12 * MS, 15 * MS, STALL, stall),)
    told = "2.00 MiB (2,097,152 bytes), 0.52 GB/s\nmoment 0: blocks.0.up forward (hold param chunk 0)"
    tip = Tip("copies to DEVICE: param chunk 0 to DEVICE", rest=told)
    assert tracks["copies to DEVICE"].slices == (Slice(-4 * MS, 0, "device", tip, "param 0"),)
    (update,) = tracks["updates on HOST"].slices
    assert (update.start_ns, update.end_ns, update.style, update.text) == (30 * MS, 40 * MS, STEP, "update of group 0")


def test_a_lane_that_only_the_prediction_uses_is_there_too() -> None:
    copy = Span(Lane.D2H, "", 0.0, 0.001, 0, W, 2 * MIB)
    run = replace(RUN, predicted=replace(RUN.predicted, spans=(*SPANS, copy)))
    assert [track.name for track in lane_tracks(run, run.happened)][2] == "copies to HOST"


# Bytes.


def test_plain_pytorch_holds_all_chunks_and_the_highest_non_model_data() -> None:
    assert PlainPyTorch.of(TRACE) == PlainPyTorch(model_nbytes=4 * MIB, non_model_nbytes=5 * MIB)
    assert PlainPyTorch.of(TRACE).nbytes == 9 * MIB
    # Weights, gradients and two states of each of 6 groups; 12 blocks' activations are there at once.
    trace = training_trace(6, MIB, modules_per_group=2, activation_nbytes=1000)
    assert PlainPyTorch.of(trace) == PlainPyTorch(6 * 4 * MIB, 12 * 1000)


def test_plain_pytorch_on_several_ranks_holds_the_states_of_all() -> None:
    # This rank has optimizer states of group 0 alone; group 2 is frozen.
    sizes = {param(group): 100 * (group + 1) for group in range(3)} | {grad(0): 100, grad(1): 200}
    sizes |= {ChunkId(role, 0): 200 for role in (Role.MASTER, Role("exp_avg"), Role("exp_avg_sq"))}
    moments = (Moment(Kind.CREATE, G),)
    trace = Trace(Mode.TRAIN, "", sizes, moments, remote_groups=frozenset({1}))
    assert PlainPyTorch.of(trace).model_nbytes == (100 + 200 + 300) + (100 + 200) + 3 * (200 + 400)


def test_graphs_of_bytes() -> None:
    chunks, total = memory_graphs(RUN, NBYTES, PlainPyTorch.of(TRACE))
    assert chunks.areas == (("chunks", list(NBYTES)),)
    assert chunks.levels == (Level(5 * MIB, "cap", "cap 5.00 MiB"),)
    assert (chunks.note, chunks.top_nbytes) == ("up to 4.00 MiB", 5 * MIB + MIB // 2)
    assert total.areas == (
        ("non-model data", [3 * MIB, 5 * MIB, 7 * MIB, 5 * MIB, 2 * MIB, 0, 0]),
        ("chunks", list(NBYTES)),
    )
    text = "plain PyTorch would hold 9.00 MiB: all chunks, and the highest non-model data"
    assert total.levels == (Level(9 * MIB, "plain PyTorch", text),)
    assert (total.note, total.top_nbytes) == ("up to 7.00 MiB", 9 * MIB + 9 * MIB // 10)


def test_the_cap_is_drawn_where_it_counts_and_if_it_is_near() -> None:
    charged, plain = run_of(charges_non_model=True), PlainPyTorch.of(TRACE)
    assert [[level.style for level in graph.levels] for graph in memory_graphs(charged, NBYTES, plain)] == [
        [], ["plain PyTorch", "cap"]
    ]  # fmt: skip
    few = [nbytes // 2 for nbytes in NBYTES]
    assert memory_graphs(RUN, few, plain)[0].levels == ()


def test_what_is_told_of_a_moment_s_bytes() -> None:
    tips = moment_tips(RUN, [*NBYTES[:6], None])
    assert tips[2] == Tip(
        "bytes on DEVICE",
        rest="chunks: 2.00 MiB (2,097,152 bytes)\ncap: 5.00 MiB, of chunks only\nnon-model data: up to 5.00 MiB",
    )
    assert tips[6].rest.startswith("chunks: not written down\n")
    assert "cap: 5.00 MiB, also of non-model data" in moment_tips(run_of(charges_non_model=True), NBYTES)[0].rest


# Looks.


def test_all_that_can_be_drawn_has_a_style_and_every_style_a_use() -> None:
    states = {state_style(states) for states in product((ABSENT, EMPTY, NEWEST), repeat=len(TIERS))}
    phases = {FORWARD, BACKWARD, AGAIN, STEP, f"{FORWARD} {LAYER}", f"{BACKWARD} {LAYER}"}
    graphs = {"chunks", "non-model data", "cap", "plain PyTorch"}
    assert set(STYLES) == states | phases | graphs | {HELD, STALL}


def test_the_scripts_know_no_tiers_roles_and_states() -> None:
    roles = (Role.PARAM, Role.GRAD, Role.MASTER, Role("exp_avg"), Role("exp_avg_sq"))
    words = {member.value for member in (*Tier, *roles, *Lane)} | {state.name.lower() for state in ReplicaState}
    scripts = "".join(path.read_text() for path in Path(page.__file__).parent.glob("*.js")).lower()
    assert {word for word in words if re.search(rf"\b{word}\b", scripts)} == set()
