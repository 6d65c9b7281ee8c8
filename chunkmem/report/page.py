"""The interactive page: one HTML file with everything in it, which opens from a disk and asks no network."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any, NamedTuple

from chunkmem.data.sizes import format_nbytes
from chunkmem.plan.model import DIRECTIONS
from chunkmem.plan.timeline import Timeline
from chunkmem.report.clock import AGAIN, BACKWARD, FORWARD, STEP, phases
from chunkmem.report.regions import chunk_names
from chunkmem.report.run import Run
from chunkmem.report.summary import PlainPyTorch, summarize
from chunkmem.report.text import format_s
from chunkmem.report.tracks import (
    BOTH,
    HELD,
    LAYER,
    NO_CONTENT,
    NOWHERE,
    STALL,
    MemoryGraph,
    Slice,
    Tip,
    Track,
    chunk_track,
    lane_tracks,
    memory_graphs,
    module_tracks,
    moment_line,
    moment_tips,
    stage_tracks,
    starts_ns,
)

_SCRIPTS = ("draw.js", "page.js")
"""In this order; the later one uses what the earlier one defines."""


class Style(NamedTuple):
    """How slices of one kind, or an area or line of a graph, look."""

    color: str
    """Empty: not drawn."""
    ink: str = "#000"
    """Of the text in it."""
    height: float = 1.0
    """Of the track's."""
    least: int = 1
    """Pixels it is wide at the least."""
    pattern: str = ""
    """Slices may be ``"hatched"``, lines ``"dashed"``."""


# Okabe and Ito's colours: they keep apart for colour-blind eyes. The tiers also differ in lightness, for grey print.
# Their yellow is paler here, as it covers most of the page.
STYLES = {
    FORWARD: Style("#009E73", "#fff"),
    BACKWARD: Style("#CC79A7"),
    STEP: Style("#E69F00"),
    f"{FORWARD} {LAYER}": Style("#B5E3D5"),
    f"{BACKWARD} {LAYER}": Style("#F0D3E2"),
    AGAIN: Style("#009E73", "#fff", height=0.4, pattern="hatched"),
    STALL: Style("#D55E00", "#fff", least=2, pattern="hatched"),
    "device": Style("#0072B2", "#fff"),
    BOTH: Style("#56B4E9"),
    "host": Style("#F1E488"),
    "disk": Style("#8C6BB1", "#fff"),
    NO_CONTENT: Style("#D0D5DB"),
    NOWHERE: Style(""),
    HELD: Style("#111111", height=0.25),
    "chunks": Style("#8FA3B5"),
    "non-model data": Style("#DDDDDD"),
    "cap": Style("#D55E00"),
    "plain PyTorch": Style("#1A1F26", pattern="dashed"),
}
_STYLE_INDEX = {style: index for index, style in enumerate(STYLES)}
_LEGEND: Mapping[str, Mapping[str, str]] = {
    "computing": {
        FORWARD: "forward",
        BACKWARD: "backward",
        AGAIN: "forward again, in backward",
        STEP: "optimizer step",
        STALL: "stall: waits for a copy, or another stage",
    },
    "newest version on, copies to": {
        "device": "DEVICE",
        BOTH: "several",
        "host": "HOST",
        "disk": "DISK",
        NO_CONTENT: "none (an empty slab)",
        HELD: "in use",
    },
}


def timeline_page(runs: Sequence[Run], *, reload_s: int | None = None) -> str:
    """Return the page of one run, or of two under each other on one time axis.

    With `reload_s`, a browser loads it again after so many seconds.
    Times are integers of nanoseconds since the step began. A sorted column is kept as its
    first value and the differences after it, which are short. Texts and tips stand once, in tables; columns have their
    indexes.
    """
    tables = _Tables()
    data = [_run_data(run, tables) for run in runs]
    names = _names(runs)
    parts = {
        "RELOAD": "" if reload_s is None else f'<meta http-equiv="refresh" content="{reload_s}">',
        "STYLE": _source("page.css"),
        "TITLE": _html(" and ".join(names)),
        "LEGEND": "\n".join(_legend()),
        "PANELS": "\n".join(_panel(run, name) for run, name in zip(runs, names, strict=True)),
        "DATA": _embedded({"styles": list(STYLES.values()), **tables.columns(), "runs": data}),
        "SCRIPT": "\n".join(_source(name) for name in _SCRIPTS),
    }
    # Not str.replace one after the other: a label may look like a later mark.
    return re.sub(r"<!--(\w+)-->", lambda mark: parts[mark[1]], _source("page.html"))


def _source(name: str) -> str:
    return (resources.files("chunkmem.report") / name).read_text(encoding="utf-8")


def _embedded(value: object) -> str:
    """Return JSON that cannot end the element it stands in: labels may hold any text, ``</script>`` too."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _html(text: str) -> str:
    """Return any text as HTML, lone surrogates too, which no file can hold."""
    return escape(text).encode("ascii", "xmlcharrefreplace").decode()


def _names(runs: Sequence[Run]) -> list[str]:
    names = [run.name for run in runs]
    return names if len(set(names)) == len(runs) else [str(run.path) for run in runs]


# Words.


def _legend() -> Iterator[str]:
    for group, entries in _LEGEND.items():
        yield f'<span class="group">{group}</span>'
        for style, text in entries.items():
            look, color = STYLES[style], STYLES[style].color
            paint = f"linear-gradient(#fff 65%, {color} 65%)" if look.height < 1 else color
            if look.pattern == "hatched":
                paint = f"repeating-linear-gradient(45deg, {color} 0 3px, #fff 3px 4px)"
            yield f'<span><i style="background: {paint}"></i>{text}</span>'


def _panel(run: Run, name: str) -> str:
    summary = summarize(run)
    lines = [f'<section class="panel">\n<h2 title="{_html(summary["run"])}">{_html(name)}</h2>']
    for mode, other in (("happened", "predicted"), ("predicted", "happened")):
        figures = "\n".join(_figures(summary, mode, other))
        lines.append(f'<p class="figures" data-of="{mode}">{figures}</p>')
    lines.append(f'<p class="notes">{"".join(_notes(summary, PlainPyTorch.of(run.trace)))}</p>')
    label = _html(f"{name}: what ran when, and the residency of each chunk")
    lines.append(f'<div class="plot"><canvas aria-label="{label}"></canvas><div class="cross"></div>')
    lines.append('<div class="scroll"><div></div></div></div>\n</section>')
    return "\n".join(lines)


def _figures(summary: Mapping[str, Any], mode: str, other: str) -> Iterator[str]:
    """Yield the figures of one view, and in brackets the other's where it differs."""
    cap, others = f" of {format_nbytes(summary['cap_nbytes']['device'])} on DEVICE", _cells(summary[other])
    for name, text in _cells(summary[mode]).items():
        two = others.get(name, "0 B")
        rest = (cap if name == "peak" else "") + (f" ({other} {two})" if two != text else "")
        yield f"<span>{name} <b>{text}</b><small>{rest}</small></span>"


def _cells(view: Mapping[str, Any]) -> dict[str, str]:
    """Return the figures of a view by what they are called."""
    moved = view["moved_nbytes"]
    stalls = f"{format_s(view['stall_s'])} in {view['num_stalls']}" if view["num_stalls"] else "none"
    return {
        "step": format_s(view["step_s"]),
        "stalls": stalls,
        **{name: format_nbytes(moved[lane.value]) for lane, name in DIRECTIONS.items() if lane.value in moved},
        "in time": f"{view['prefetched']} of {view['fetched']}",
        "peak": format_nbytes(view["peak_nbytes"]["device"]),
    }


def _notes(summary: Mapping[str, Any], plain: PlainPyTorch) -> Iterator[str]:
    if number := summary["happened"]["plan_misses"]:
        yield (
            '<span class="warning">Not all of the plan was followed: '
            f"{'1 access was' if number == 1 else f'{number} accesses were'} not foreseen. "
            "Chunks are drawn where the plan has them, also where they were not.</span>"
        )
    as_predicted = "Bytes on each link and the peak of each tier are as predicted."
    yield " \u00b7 ".join(map(_html, summary["differences"])) or as_predicted
    more = f" {format_nbytes(plain.activation_nbytes)} of activations," if plain.activation_nbytes else ""
    yield (
        f" Plain PyTorch would hold {format_nbytes(plain.nbytes)}: {format_nbytes(plain.model_nbytes)} of weights, "
        f"gradients and optimizer states,{more} and {format_nbytes(plain.non_model_nbytes)} of "
        f"{'other ' if more else ''}non-model data at its highest."
    )


# Data.


class _Tables:
    """Texts and tips, each once."""

    def __init__(self) -> None:
        self._texts: dict[str, int] = {"": 0}
        self._tips: dict[Tip, int] = {}

    def text(self, text: str) -> int:
        return self._texts.setdefault(text, len(self._texts))

    def tip(self, tip: Tip) -> int:
        return self._tips.setdefault(tip, len(self._tips))

    def columns(self) -> dict[str, list[Any]]:
        tips = [[self.text(text) for text in (tip.title, tip.lead, tip.rest)] for tip in self._tips]
        return {"texts": list(self._texts), "tips": tips}


def _run_data(run: Run, tables: _Tables) -> dict[str, Any]:
    groups: dict[str, list[int]] = {}
    for row, chunk in enumerate(run.histories):
        groups.setdefault(chunk.role.value, []).append(row)
    return {
        "groups": [[f"{name} \u00b7 {len(rows)}", rows[0], rows[-1] + 1] for name, rows in groups.items()],
        "phases": [start for _, start, _ in phases(run.trace)],
        "views": {
            "happened": _view(run, run.happened, run.measured_nbytes, tables),
            "predicted": _view(run, run.predicted, run.predicted.device_nbytes, tables),
        },
    }


def _view(run: Run, timeline: Timeline, nbytes: Sequence[int | None], tables: _Tables) -> dict[str, Any]:
    trace, names = run.trace, chunk_names(run.plan, run.trace)
    starts = starts_ns(timeline, len(trace.moments))
    lanes, stages = lane_tracks(run, timeline), stage_tracks(run, timeline)
    ends = [(piece.start_ns, piece.end_ns) for track in lanes for piece in (*track.slices, *track.over)]
    return {
        "range": [min([0, *(span[0] for span in ends)]), max([starts[-1], *(span[1] for span in ends)])],
        "starts": _differences(starts),
        "moments": {
            "line": [tables.text(moment_line(trace, index)) for index in range(len(trace.moments))],
            "tip": [tables.tip(tip) for tip in moment_tips(run, nbytes)],
        },
        "graphs": [_graph(graph) for graph in memory_graphs(run, nbytes, PlainPyTorch.of(trace))],
        "lanes": [_track(track, tables) for track in (*stages, *module_tracks(trace, starts), *lanes)],
        "chunks": [
            _track(chunk_track(chunk, history, trace, starts, name=names.get(chunk, "")), tables)
            for chunk, history in run.histories.items()
        ],
    }


def _track(track: Track, tables: _Tables) -> dict[str, Any]:
    return {"name": track.name, "layers": [_slices(layer, tables) for layer in (track.slices, track.over) if layer]}


def _slices(slices: Sequence[Slice], tables: _Tables) -> dict[str, list[int]]:
    return {
        "start": _differences(piece.start_ns for piece in slices),
        "took": [piece.end_ns - piece.start_ns for piece in slices],
        "style": [_STYLE_INDEX[piece.style] for piece in slices],
        "text": [tables.text(piece.text) for piece in slices],
        "tip": [tables.tip(piece.tip) for piece in slices],
    }


def _graph(graph: MemoryGraph) -> dict[str, Any]:
    return {
        "name": graph.name,
        "note": graph.note,
        "areas": [[_STYLE_INDEX[style], list(nbytes)] for style, nbytes in graph.areas],
        "levels": [[level.nbytes, _STYLE_INDEX[level.style], level.text] for level in graph.levels],
        "top": graph.top_nbytes,
    }


def _differences(values: Iterable[int]) -> list[int]:
    found, last = [], 0
    for value in values:
        found.append(value - last)
        last = value
    return found
