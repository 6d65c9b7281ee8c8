"""What the page draws, as plain data: tracks of slices on one time axis, and graphs of bytes. Pure.

The page knows nothing of chunks, tiers and lanes: what a slice stands for is said here, in its style and its words.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from chunkmem.data.activations import activation_contents
from chunkmem.data.sizes import format_nbytes
from chunkmem.data.trace import Trace
from chunkmem.data.types import TIERS, ChunkId
from chunkmem.plan.model import LANE_LINKS, Lane
from chunkmem.plan.semantics import ABSENT, EMPTY, NEWEST
from chunkmem.plan.timeline import Span, StageWork, Timeline
from chunkmem.report.clock import AGAIN, STEP, moment_starts_s, phase_names, phases, recomputations
from chunkmem.report.modules import layer_runs, submodule_runs
from chunkmem.report.replay import ChunkHistory, States
from chunkmem.report.run import LANE_NAMES, Run, label_of, lane_of
from chunkmem.report.summary import PlainPyTorch

BOTH, NO_CONTENT, NOWHERE = "both", "no content", "nowhere"
HELD, STALL, LAYER = "in use", "stall", "layer"
"""Styles, with those of phases, and of tiers by their value."""
_COPY_STYLES = {lane: target.value for lane, (_, target) in LANE_LINKS.items()}
"""Those of the tier that a copy goes to."""
_NS = 1e9


@dataclass(frozen=True, slots=True)
class Tip:
    """The words of a slice: a title, a line of `lead` and its times, and other lines."""

    title: str
    lead: str = ""
    rest: str = ""


@dataclass(frozen=True, slots=True)
class Slice:
    """A piece of a track."""

    start_ns: int
    """Since the step began."""
    end_ns: int
    style: str
    tip: Tip
    text: str = ""
    """Written into it where it fits."""


@dataclass(frozen=True, slots=True)
class Track:
    """One row of the page; `over` is drawn upon the slices."""

    name: str
    slices: tuple[Slice, ...] = ()
    over: tuple[Slice, ...] = ()


@dataclass(frozen=True, slots=True)
class Level:
    """A horizontal line across a graph."""

    nbytes: int
    style: str
    text: str


@dataclass(frozen=True, slots=True)
class MemoryGraph:
    """Bytes by moment."""

    name: str
    note: str
    areas: tuple[tuple[str, Sequence[int]], ...]
    """Style and bytes by moment; earlier ones are drawn first, so they are the higher ones."""
    levels: tuple[Level, ...]
    top_nbytes: int
    """At the upper edge."""


def starts_ns(timeline: Timeline, num_moments: int) -> list[int]:
    """Return when each moment begins, and at the end when the last one is over."""
    return [_ns(start_s) for start_s in moment_starts_s(timeline, num_moments)]


# What runs.


def module_tracks(trace: Trace, starts: Sequence[int]) -> list[Track]:
    """Return the phases of the step, the layers under them, and the modules within layers."""
    parts = (Slice(starts[first], starts[stop], name, Tip(name), name) for name, first, stop in phases(trace))
    again = (Slice(starts[first], starts[stop], AGAIN, Tip(AGAIN)) for first, stop in recomputations(trace))
    runs = {"layers": layer_runs(trace), "modules": submodule_runs(trace)}
    tracks = [
        Track(name, _lasting(
            Slice(starts[run.first], starts[run.stop], f"{run.phase} {LAYER}", Tip(f"{run.name} {run.phase}"), run.name)
            for run in found
        ))
        for name, found in runs.items() if found
    ]  # fmt: skip
    return [Track("phase", _lasting(parts), _lasting(again)), *tracks]


def _lasting(slices: Iterable[Slice]) -> tuple[Slice, ...]:
    """Leave out slices of moments that took no time."""
    return tuple(each for each in slices if each.end_ns > each.start_ns)


def stage_tracks(run: Run, timeline: Timeline) -> list[Track]:
    """Return what each pipeline stage of a rank did: micro-batches by their numbers, and waits for other stages.

    Of what was predicted nothing is known: those tracks are empty.
    """
    found: dict[int, list[Slice]] = {call.stage: [] for call in run.happened.stage_calls}
    for call in timeline.stage_calls:
        is_wait = call.work is StageWork.WAIT
        words = "waits for another stage" if is_wait else call.work.value
        tip = Tip(f"stage {call.stage}: {words}", rest=f"micro-batch {call.micro_batch}")
        style, text = (STALL, "") if is_wait else (call.work.value, str(call.micro_batch))
        found[call.stage].append(Slice(_ns(call.start_s), _ns(call.end_s), style, tip, text))
    return [Track(f"stage {stage}", tuple(slices)) for stage, slices in sorted(found.items())]


def lane_tracks(run: Run, timeline: Timeline) -> list[Track]:
    """Return what ran on each lane that either timeline of the run uses, stalls over computing."""
    trace = run.trace
    used = {lane_of(span, run) for either in (run.happened, run.predicted) for span in either.spans}
    phase_of, contents = phase_names(trace), activation_contents(trace)
    slices: dict[Lane, list[Slice]] = {lane: [] for lane in LANE_NAMES if lane in used or lane is Lane.COMPUTE}
    stalls = []
    for span in sorted(timeline.spans, key=lambda span: (span.start_s, span.end_s)):
        chunk, lane, phase = span.chunk, lane_of(span, run), phase_of[max(0, span.moment)]
        if span.is_stall:
            stalls.append(_span(span, trace, STALL, "stall", f"for {chunk}" if chunk else ""))
            continue
        told, text = "", label_of(span, trace) if phase == STEP else ""  # else the tracks of modules have the names
        if span.nbytes:
            took_ns = _ns(span.end_s) - _ns(span.start_s)
            told = _exact(span.nbytes) + (f", {span.nbytes / took_ns:.2f} GB/s" if took_ns > 0 else "")
            if chunk is not None:
                text = contents[chunk].region if chunk in contents else f"{chunk.role.value} {chunk.group}"
        elif chunk is not None:
            told = f"{chunk}, {format_nbytes(trace.chunk_nbytes[chunk])}"
        slices[lane].append(_span(span, trace, _COPY_STYLES.get(lane, phase), LANE_NAMES[lane], told, text))
    return [
        Track(LANE_NAMES[lane], tuple(found), tuple(stalls) if lane is Lane.COMPUTE else ())
        for lane, found in slices.items()
    ]


def _span(span: Span, trace: Trace, style: str, what: str, told: str, text: str = "") -> Slice:
    lines = "\n".join(filter(None, (told, moment_line(trace, span.moment))))
    tip = Tip(f"{what}: {label_of(span, trace)}", rest=lines)
    return Slice(_ns(span.start_s), _ns(span.end_s), style, tip, text)


def moment_line(trace: Trace, index: int) -> str:
    """Return a moment in words; copies may be issued before the first."""
    if index < 0:
        return "before the first moment"
    moment = trace.moments[index]
    return f"moment {index}: {moment} ({moment.kind.value} {moment.chunk})"


# Where chunks are.


def chunk_track(chunk: ChunkId, history: ChunkHistory, trace: Trace, starts: Sequence[int], *, name: str = "") -> Track:
    """Return the states of a chunk over a step, by its own name or another; those that last no time are left out."""
    title = f"{chunk} ({name})" if name else str(chunk)
    size, last = _exact(trace.chunk_nbytes[chunk]), len(starts) - 1
    ends = [*(moment for moment, _ in history.changes[1:]), last]
    states = (
        Slice(starts[first], starts[stop], state_style(states), Tip(title, f"{where(states)}: ", size))
        for (first, states), stop in zip(history.changes, ends, strict=True)
    )
    uses = (Slice(starts[first], starts[stop], HELD, Tip(title, "in use: ")) for first, stop in history.held)
    return Track(name or str(chunk), _lasting(states), _lasting(uses))


def state_style(states: States) -> str:
    """Return which tiers have the newest version: one, several, or none of those that have memory for it."""
    newest = [tier for tier, state in zip(TIERS, states, strict=False) if state == NEWEST]
    if newest:
        return newest[0].value if len(newest) == 1 else BOTH
    return NO_CONTENT if EMPTY in states else NOWHERE


def where(states: States) -> str:
    """Return the tiers that have memory for a chunk, in words."""
    names = [
        tier.name + (" (a slab, no content)" if state == EMPTY else "")
        for tier, state in zip(TIERS, states, strict=False)
        if state != ABSENT
    ]
    return " and ".join(names) or "nowhere"


# How much memory is taken.


def moment_tips(run: Run, chunk_nbytes: Sequence[int | None]) -> list[Tip]:
    """Return what is told of the bytes on DEVICE in each moment."""
    machine = run.plan.machine
    covers = "also of non-model data" if machine.charges_non_model else "of chunks only"
    tips = []
    for moment, nbytes in zip(run.trace.moments, chunk_nbytes, strict=True):
        sampled = f", sampled {format_nbytes(moment.sampled_peak_nbytes)}" if moment.sampled_peak_nbytes else ""
        lines = (
            f"chunks: {'not written down' if nbytes is None else _exact(nbytes)}",
            f"cap: {format_nbytes(machine.device_nbytes)}, {covers}",
            f"non-model data: up to {format_nbytes(moment.non_model_peak_nbytes)}{sampled}",
        )
        tips.append(Tip("bytes on DEVICE", rest="\n".join(lines)))
    return tips


def memory_graphs(run: Run, chunk_nbytes: Sequence[int | None], plain: PlainPyTorch) -> tuple[MemoryGraph, MemoryGraph]:
    """Return the bytes of chunks on DEVICE; and the same with non-model data, below what plain PyTorch would hold."""
    machine = run.plan.machine
    chunks = [nbytes or 0 for nbytes in chunk_nbytes]
    totals = [n + moment.non_model_peak_nbytes for n, moment in zip(chunks, run.trace.moments, strict=True)]
    cap = Level(machine.device_nbytes, "cap", f"cap {format_nbytes(machine.device_nbytes)}")
    held = f"plain PyTorch would hold {format_nbytes(plain.nbytes)}: all chunks, and the highest non-model data"
    ghost = Level(plain.nbytes, "plain PyTorch", held)
    charges = machine.charges_non_model
    return (
        _graph("chunks on DEVICE", (("chunks", chunks),), () if charges else (cap,)),
        _graph(
            "with non-model data",
            (("non-model data", totals), ("chunks", chunks)),
            (ghost, cap) if charges else (ghost,),
        ),
    )


def _graph(name: str, areas: tuple[tuple[str, Sequence[int]], ...], levels: tuple[Level, ...]) -> MemoryGraph:
    peak = max(areas[0][1], default=0)
    rest = max([peak, 1, *(level.nbytes for level in levels if level.style != "cap")])
    # A cap far above everything else would flatten it.
    shown = tuple(level for level in levels if level.style != "cap" or level.nbytes <= 2 * rest)
    top = max([rest, *(level.nbytes for level in shown)])
    return MemoryGraph(name, f"up to {format_nbytes(peak)}", areas, shown, top + top // 10)


def _exact(nbytes: int) -> str:
    return f"{format_nbytes(nbytes)} ({nbytes:,} bytes)"


def _ns(seconds: float) -> int:
    return round(seconds * _NS)
