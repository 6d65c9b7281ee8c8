"""The interactive page: one HTML file with everything in it, which opens from a disk and asks no network."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

from chunkmem.plan.model import Lane
from chunkmem.plan.timeline import Span, Timeline
from chunkmem.report.clock import moment_starts_s, phases
from chunkmem.report.replay import replay
from chunkmem.report.run import Run, label_of, lane_of, measured_nbytes
from chunkmem.report.summary import summarize
from chunkmem.trace.model import Kind, Trace
from chunkmem.types import ChunkId

_SCRIPTS = ("data.js", "draw.js", "view.js", "lanes.js", "chunks.js", "overview.js", "tips.js", "panel.js", "main.js")
"""In this order; later ones use what earlier ones define."""
_LANES = tuple(Lane)
_NS = 1e9


def timeline_page(runs: Sequence[Run]) -> str:
    """Return the page of one run, or of two under each other on one time axis.

    [Note: Data of the page] Times are integers of nanoseconds since the step began. A sorted column is kept as its
    first value and the differences after it, which are short. Names stand once, in tables; columns have their indexes.
    """
    text = (resources.files("chunkmem.report") / "page.html").read_text(encoding="utf-8")
    parts = {
        "STYLE": _source("page.css"),
        "DATA": _embedded([_run_data(run, name) for run, name in zip(runs, _names(runs), strict=True)]),
        "SCRIPT": "\n".join(_source(name) for name in _SCRIPTS),
    }
    before, *rest = text.split("<!--")
    # Not str.replace one after the other: a label may look like a later mark.
    pieces = [before]
    for piece in rest:
        mark, after = piece.split("-->", 1)
        pieces += [parts[mark.strip()], after]
    return "".join(pieces)


def _source(name: str) -> str:
    return (resources.files("chunkmem.report") / name).read_text(encoding="utf-8")


def _embedded(value: object) -> str:
    """Return JSON that cannot end the element it stands in: labels may hold any text, ``</script>`` too."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _names(runs: Sequence[Run]) -> list[str]:
    names = [run.name for run in runs]
    return names if len(set(names)) == len(runs) else [str(run.path) for run in runs]


def _run_data(run: Run, name: str) -> dict[str, Any]:
    trace, stays = run.trace, replay(run.plan, run.trace)
    labels: dict[str, int] = {}
    rows = {chunk: index for index, chunk in enumerate(stays)}
    measured = measured_nbytes(run)
    return {
        "name": name,
        "summary": summarize(run),
        "chunks": [[str(chunk), chunk.role.value, trace.chunk_nbytes[chunk]] for chunk in stays],
        "changes": [
            [_differences(moment for moment, _ in stay.changes), [state for _, state in stay.changes]]
            for stay in stays.values()
        ],
        "held": [
            [_differences(begin for begin, _ in stay.held), [end - begin for begin, end in stay.held]]
            for stay in stays.values()
        ],
        "moments": _moment_data(trace, rows, labels),
        "phases": [[name, start] for name, start, _ in phases(trace)],
        "views": {
            "happened": _view(run, run.happened, [measured.get(at) for at in range(len(trace.moments))], rows, labels),
            "predicted": _view(run, run.predicted, run.predicted.device_nbytes, rows, labels),
        },
        "labels": list(labels),  # Last: all of them are known now.
    }  # fmt: skip


def _moment_data(trace: Trace, rows: dict[ChunkId, int], labels: dict[str, int]) -> dict[str, list[Any]]:
    moments, kinds = trace.moments, tuple(Kind)
    return {
        "kinds": [kind.value for kind in kinds],
        "kind": [kinds.index(moment.kind) for moment in moments],
        "row": [rows[moment.chunk] for moment in moments],
        "label": [labels.setdefault(str(moment), len(labels)) for moment in moments],
        "beside": [moment.non_model_peak_nbytes for moment in moments],
        "sampled": [moment.sampled_peak_nbytes for moment in moments],
    }


def _view(
    run: Run, timeline: Timeline, device_nbytes: Sequence[int | None], rows: dict[ChunkId, int], labels: dict[str, int]
) -> dict[str, Any]:
    by_lane: dict[Lane, list[Span]] = {}
    stalls: list[Span] = []
    for span in timeline.spans:
        (stalls if span.is_stall else by_lane.setdefault(lane_of(span, run), [])).append(span)
    starts = [_ns(start_s) for start_s in moment_starts_s(timeline, len(run.trace.moments))]
    lanes = [[lane.value, _spans(by_lane[lane], run.trace, rows, labels)] for lane in _LANES if lane in by_lane]
    return {
        "step": _ns(timeline.step_s),
        "starts": _differences(starts),
        "nbytes": list(device_nbytes),
        "lanes": lanes,
        "stalls": _spans(stalls, run.trace, rows, labels),
    }


def _spans(
    spans: Iterable[Span], trace: Trace, rows: dict[ChunkId, int], labels: dict[str, int]
) -> dict[str, list[int]]:
    """Return spans as columns; a span without a chunk has row -1."""
    ordered = sorted(spans, key=lambda span: (span.start_s, span.end_s))
    names = [label_of(span, trace.moments[max(0, span.moment)]) for span in ordered]
    return {
        "start": _differences(_ns(span.start_s) for span in ordered),
        "took": [_ns(span.end_s) - _ns(span.start_s) for span in ordered],
        "label": [labels.setdefault(name, len(labels)) for name in names],
        "moment": [span.moment for span in ordered],
        "row": [-1 if span.chunk is None else rows[span.chunk] for span in ordered],
        "nbytes": [span.nbytes for span in ordered],
    }


def _ns(seconds: float) -> int:
    return round(seconds * _NS)


def _differences(values: Iterable[int]) -> list[int]:
    found, last = [], 0
    for value in values:
        found.append(value - last)
        last = value
    return found
