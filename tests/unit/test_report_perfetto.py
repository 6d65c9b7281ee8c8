"""The Chrome trace of a run: all that the timelines have, in a form that Perfetto draws."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from chunkmem.cli.main import main
from chunkmem.data.types import Tier
from chunkmem.report.perfetto import perfetto_trace
from chunkmem.report.run import Run, load_run
from tests.helpers.runs import make_run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """One that stalls."""
    return load_run(make_run(tmp_path / "tight", Bps=2e8).path)


def events_of(*runs: Run) -> list[dict[str, Any]]:
    found = json.loads(perfetto_trace(runs))["traceEvents"]
    assert isinstance(found, list)
    return found


def names(events: list[dict[str, Any]], kind: str) -> dict[tuple[int, int | None], str]:
    return {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["name"] == kind}


def test_every_span_is_there_on_the_row_of_its_lane(run: Run) -> None:
    events = events_of(run)
    rows = names(events, "thread_name")
    drawn = Counter((e["pid"], rows[e["pid"], e["tid"]]) for e in events if e["ph"] == "X")
    for pid, timeline in ((1, run.happened), (2, run.predicted)):
        stalls = sum(span.is_stall for span in timeline.spans)
        assert stalls > 0
        assert drawn[pid, "stalls"] == stalls
        by_row = {"copies to DEVICE": "h2d", "copies to HOST": "d2h"}
        for row, lane in by_row.items():
            spans = [span for span in timeline.spans if span.lane.value == lane]
            assert drawn[pid, row] == len(spans)
            moved = [
                e["args"]["bytes"]
                for e in events
                if e["pid"] == pid and rows.get((pid, e.get("tid"))) == row and e["ph"] == "X"
            ]
            assert sum(moved) == sum(span.nbytes for span in spans)
        assert drawn[pid, "compute"] + drawn[pid, "updates on HOST"] == sum(
            not span.is_stall and span.lane.value in ("compute", "host-update") for span in timeline.spans
        )
        assert drawn[pid, "step"] >= 3, "forward, backward, optimizer step"


def test_times_are_in_microseconds(run: Run) -> None:
    rows = names(events := events_of(run), "thread_name")
    drawn = [e for e in events if e["ph"] == "X" and e["pid"] == 1 and rows[1, e["tid"]] != "step"]
    times = sorted((e["ts"], e["ts"] + e["dur"]) for e in drawn)
    expected = sorted((1e6 * span.start_s, 1e6 * span.end_s) for span in run.happened.spans)
    assert times == [pytest.approx(pair) for pair in expected]


def test_what_is_on_one_row_is_nested_or_apart(run: Run) -> None:
    """Else a viewer drops it."""
    rows: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for e in events_of(run):
        if e["ph"] == "X":
            rows[e["pid"], e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
    for row, spans in rows.items():
        open_until: list[float] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= start + 1e-6:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-6, row
            open_until.append(end)


def test_the_counters_are_the_bytes_on_device(run: Run) -> None:
    events = events_of(run)
    counters = {pid: [sum(e["args"].values()) for e in events if e["ph"] == "C" and e["pid"] == pid] for pid in (1, 2)}
    assert counters[2] == list(run.predicted.device_nbytes)
    assert max(counters[1]) == run.happened.peak_nbytes[Tier.DEVICE]


def test_two_runs_are_four_processes(run: Run, tmp_path: Path) -> None:
    other = load_run(make_run(tmp_path / "roomy", num_slabs=8).path)
    assert list(names(events_of(run, other), "process_name").values()) == [
        "tight: happened",
        "tight: predicted",
        "roomy: happened",
        "roomy: predicted",
    ]


def test_the_command_writes_it_where_it_is_asked_to(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib.figure")
    assert main(["report", str(run.path), "--out", str(tmp_path / "out"), "--perfetto", "--json"]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    assert json.loads(Path(files["perfetto"]).read_text())["displayTimeUnit"] == "ms"
    assert main(["report", str(run.path), "--json"]) == 0
    assert "perfetto" not in json.loads(capsys.readouterr().out)["files"]
