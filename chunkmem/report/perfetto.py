"""A run as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open, also next to torch.profiler's.

Source: "Trace Event Format", the Chromium project; complete ("X"), counter ("C") and metadata ("M") events.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from chunkmem.data.types import Tier
from chunkmem.plan.timeline import Timeline
from chunkmem.report.clock import moment_starts_s, phases
from chunkmem.report.replay import role_nbytes
from chunkmem.report.run import LANE_NAMES, Run, label_of, lane_of

_PHASES, _STALLS, _STAGES = "step", "stalls", "pipeline stages"
_COMPUTE, *_OTHERS = LANE_NAMES.values()
_ROWS = (_PHASES, _COMPUTE, _STALLS, *_OTHERS, _STAGES)
_US = 1e6

Event = dict[str, Any]


def perfetto_trace(runs: Sequence[Run]) -> str:
    """Return the JSON of a trace with two processes for each run: what happened, and what was predicted."""
    events: list[Event] = []
    for index, run in enumerate(runs):
        happened, predicted = 2 * index + 1, 2 * index + 2
        on_device = [{} if nbytes is None else {"chunks": nbytes} for nbytes in run.measured_nbytes]
        events += _process(run, run.happened, happened, "happened", on_device)
        events += _process(run, run.predicted, predicted, "predicted", _planned(run))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, allow_nan=False)


def _planned(run: Run) -> list[dict[str, int]]:
    roles = role_nbytes(run.histories, run.trace, Tier.DEVICE)
    return [{role.value: nbytes[at] for role, nbytes in roles.items()} for at in range(len(run.trace.moments))]


def _process(
    run: Run, timeline: Timeline, pid: int, view: str, on_device: Sequence[Mapping[str, int]]
) -> Iterator[Event]:
    yield from _named("process", f"{run.name}: {view}", pid, pid=pid)
    used = {_PHASES}
    starts_s = moment_starts_s(timeline, len(run.trace.moments))
    for name, first, stop in phases(run.trace):
        yield _complete(pid, _PHASES, name, starts_s[first], starts_s[stop], {})
    for span in timeline.spans:
        row = _STALLS if span.is_stall else LANE_NAMES[lane_of(span, run)]
        used.add(row)
        told: dict[str, Any] = {"moment": span.moment}
        if span.chunk is not None:
            told["chunk"] = str(span.chunk)
        if span.nbytes:
            told["bytes"] = span.nbytes
        yield _complete(pid, row, label_of(span, run.trace), span.start_s, span.end_s, told)
    for call in timeline.stage_calls:
        used.add(_STAGES)
        label = f"stage {call.stage}: {call.work.value} of micro-batch {call.micro_batch}"
        yield _complete(pid, _STAGES, label, call.start_s, call.end_s, {})
    for at, row in enumerate(_ROWS):
        if row in used:
            yield from _named("thread", row, at, pid=pid, tid=at)
    for start_s, nbytes in zip(starts_s, on_device, strict=False):
        if nbytes:
            yield {"ph": "C", "pid": pid, "name": "bytes on DEVICE", "ts": _US * start_s, "args": dict(nbytes)}


def _named(what: str, name: str, place: int, **of: int) -> Iterator[Event]:
    """Yield what a process or a thread is called, and its place among others."""
    yield {"ph": "M", **of, "name": f"{what}_name", "args": {"name": name}}
    yield {"ph": "M", **of, "name": f"{what}_sort_index", "args": {"sort_index": place}}


def _complete(pid: int, row: str, name: str, start_s: float, end_s: float, told: Mapping[str, Any]) -> Event:
    times = {"ts": _US * start_s, "dur": _US * max(0.0, end_s - start_s)}
    return {"ph": "X", "pid": pid, "tid": _ROWS.index(row), "name": name, **times, "args": dict(told)}
