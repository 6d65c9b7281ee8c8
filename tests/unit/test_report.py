"""`chunkmem report`: its figures and its files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from chunkmem.cli.main import main
from chunkmem.data.files import replace_file
from chunkmem.data.trace import Kind, Moment, Trace
from chunkmem.data.types import Tier
from chunkmem.plan.simulate import simulate
from chunkmem.plan.timeline import Span, Timeline
from chunkmem.report.files import write_whole
from chunkmem.report.run import load_run
from chunkmem.report.summary import summarize
from chunkmem.report.text import step_rows
from tests.helpers.runs import MIB, make_run
from tests.helpers.traces import training_trace

pytest.importorskip("matplotlib.figure")
NAMES = ["memory.png", "plan.json", "timeline.html", "timeline.json", "trace.json"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run that stalls."""
    return make_run(tmp_path / "tight", Bps=2e8).path


def test_a_run_is_watched(folder: Path, tmp_path: Path) -> None:
    """A line each time that it is recorded, also if that begins later; what is half written is told and read again."""
    now = tmp_path / "now"
    command = [sys.executable, "-m", "chunkmem", "report", str(now), "--watch", "--json"]
    # Whoever starts the tests in the background of a shell has them ignore it, and what they start.
    heeds_interrupts = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heeds_interrupts
    ) as watch:
        assert watch.stdout is not None
        assert watch.stderr is not None
        assert watch.stderr.readline() == f"chunkmem: waiting until {now} is recorded\n"
        now.mkdir()
        (now / "timeline.json").write_bytes((folder / "timeline.json").read_bytes())
        assert "trace.json" in watch.stderr.readline()
        for name in ("trace.json", "plan.json", "timeline.json"):
            replace_file(now / name, (folder / name).read_bytes())
        expected = summarize(load_run(folder))
        assert json.loads(watch.stdout.readline())["run"] == {**expected, "run": str(now)}
        os.utime(now / "timeline.json")
        assert json.loads(watch.stdout.readline())["run"]["num_moments"] == expected["num_moments"]
        watch.send_signal(signal.SIGINT)
        assert watch.wait(60) == 130
    assert 'http-equiv="refresh"' in (now / "timeline.html").read_text()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# What is told.


def test_the_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = load_run(folder)
    assert main(["report", str(folder)]) == 0
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    cells = {line[0]: [cell.strip() for cell in line[1:] if cell.strip()] for line in lines}
    predicted, happened = run.predicted, run.happened
    assert cells["step time"] == [f"{1e3 * timeline.step_s:.1f} ms" for timeline in (predicted, happened)]
    num_stalls = sum(span.is_stall for span in happened.spans)
    assert num_stalls > 0
    assert cells["stalls"][1] == f"{1e3 * happened.stall_s:.1f} ms in {num_stalls}"
    assert cells["Python between units"] == ["0.0 ms", "0.0 ms"]  # all is held from one module to the next
    # 12 forwards and backwards over 6 groups, 4 of which fit.
    assert (
        cells["moved to DEVICE"]
        == [f"{sum(s.nbytes for s in happened.spans if s.lane.value == 'h2d') / MIB:.2f} MiB"] * 2
    )
    assert cells["peak on DEVICE"] == ["4.00 MiB", "4.00 MiB", "4.00 MiB"]
    assert cells["copies in time"] == [f"{predicted.prefetched} of {predicted.fetched}"] * 2
    assert cells["plan misses"] == ["0", "0"]
    assert cells["HOST exp_avg_sq"] == ["6.00 MiB", "6.00 MiB"]
    assert ["", "bytes on each link and the peak of each tier are as predicted"] in lines
    assert sorted(path.name for path in folder.iterdir()) == NAMES  # and no partial file
    assert [line[0] for line in lines[-2:]] == [f"wrote {folder / name}" for name in ("memory.png", "timeline.html")]


def test_python_between_units_is_told_by_layer(folder: Path) -> None:
    """The three layers after which it is longest; a step whose moments nobody has heard of has none."""
    run, known = load_run(folder), {"updates": 0.5e-3, "blocks.2": 2e-3, "head": 0.1e-3, "blocks.10": 1e-3}
    predicted = replace(run.predicted, python_by_layer={"blocks.2": 4e-3})
    told = [
        list(
            step_rows(
                summarize(replace(run, predicted=predicted, happened=replace(run.happened, python_by_layer=each)))
            )
        )
        for each in (known, None)
    ]
    assert told[0][2:6] == [
        ("Python between units", "4.0 ms", "3.6 ms", ""),
        ("  after blocks.2", "4.0 ms", "2.0 ms", ""),
        ("  after blocks.10", "not measured", "1.0 ms", ""),
        ("  after updates", "not measured", "500 us", ""),
    ]
    assert told[1][2:4] == [
        ("Python between units", "4.0 ms", "not measured", ""),
        ("  after blocks.2", "4.0 ms", "not measured", ""),
    ]


def test_json_is_one_object_with_the_files(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "out"
    before = contents(folder)
    assert main(["report", str(folder), "--against", str(folder), "--out", str(out), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["files"] == {"memory": str(out / "memory.png"), "timeline": str(out / "timeline.html")}
    assert data["run"] == data["against"] == json.loads(json.dumps(summarize(load_run(folder))))
    assert data["run"]["happened"]["step_s"] == load_run(folder).happened.step_s
    assert data["notes"] == []
    assert sorted(path.name for path in out.iterdir()) == ["memory.png", "timeline.html"]
    assert contents(folder) == before
    assert (out / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_what_differs_from_the_prediction_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timeline = Timeline.load(folder / "timeline.json")
    copy = next(span for span in timeline.spans if span.lane.value == "h2d")
    more = replace(timeline, spans=(*timeline.spans, copy), plan_misses=2, peak_nbytes={Tier.DEVICE: 5 * MIB})
    more.save(folder / "timeline.json")
    assert main(["report", str(folder)]) == 0
    text = capsys.readouterr().out
    moved = timeline.moved_nbytes[copy.lane]
    assert f"  h2d: {moved} bytes predicted, {moved + MIB} moved\n" in text
    assert f"  DEVICE: a peak of {4 * MIB} bytes predicted, {5 * MIB} seen\n" in text
    assert "  2 times the step missed its plan" in text
    assert "2 accesses were not foreseen" in (folder / "timeline.html").read_text()


def peaks(*pairs: tuple[int, int]) -> Trace:
    trace = training_trace(2, MIB)
    moments = list(trace.moments)
    for index, (probe, sampled) in enumerate(pairs):
        moments[index] = replace(moments[index], non_model_peak_nbytes=probe, sampled_peak_nbytes=sampled)
    return replace(trace, moments=tuple(moments))


def test_non_model_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = peaks((MIB, 2 * MIB), (7 * MIB, 7 * MIB), (4 * MIB, 9 * MIB), (9 * MIB, 4 * MIB))
    make_run(tmp_path, trace=replace(trace, sampling_interval_s=4.26e-3))
    assert main(["report", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert text.split("non-model memory\n")[1].splitlines()[:5] == [
        "  highest at operator boundaries: 9.00 MiB in moment 3, blocks.1 forward release",
        "  highest by the sampling thread: 9.00 MiB in moment 2, blocks.1 forward hold",
        "  they differ most in moment 2, blocks.1 forward hold: 4.00 MiB at boundaries, 9.00 MiB sampled",
        "  the sampling thread looked at least every 4.3 ms; what lives shorter may be missed",
        "  the cap of 4.00 MiB on DEVICE does not cover them",
    ]


NO_THREAD = "did not run, or saw nothing (client.mem_tracer.use_async_mem_monitor)"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("sampled_nbytes", "interval_s", "lines"),
    [
        (0, 0.0, [f"the sampling thread {NO_THREAD}"]),
        (
            0,
            0.02,
            [
                "the sampling thread saw no non-model data",
                "the sampling thread looked at least every 20.0 ms; what lives shorter may be missed",
            ],
        ),
        (
            MIB,
            0.0,
            [
                "highest by the sampling thread: 1.00 MiB in moment 0, blocks.0 forward hold",
                "they differ most in moment 0, blocks.0 forward hold: 1.00 MiB at boundaries, 1.00 MiB sampled",
                "how often the sampling thread looked is not in this trace, so neither is what it may have missed",
            ],
        ),
    ],
    ids=["no thread", "a thread that saw nothing", "a trace of before"],
)
def test_what_the_sampling_thread_may_have_missed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sampled_nbytes: int, interval_s: float, lines: list[str]
) -> None:
    make_run(tmp_path, trace=replace(peaks((MIB, sampled_nbytes)), sampling_interval_s=interval_s))
    assert main(["report", str(tmp_path)]) == 0
    told = capsys.readouterr().out.split("non-model memory\n")[1].split("\n\n")[0].splitlines()
    assert [line.strip() for line in told[1:-1]] == lines
    assert main(["report", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["run"]["non_model"]
    was_seen = sampled_nbytes > 0
    assert (found["sampled"] is not None, found["differ_most"] is not None) == (was_seen, was_seen)
    assert (found["probe"]["nbytes"], found["sampling_interval_s"]) == (MIB, interval_s or None)


def test_labels_that_cannot_be_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = peaks((MIB, 0))
    trace = replace(trace, moments=(replace(trace.moments[0], label="a\ud800\nb"), *trace.moments[1:]))
    make_run(tmp_path, trace=trace)
    assert main(["report", str(tmp_path)]) == 0
    assert "in moment 0, a\\ud800\n" in capsys.readouterr().out.replace("\nb", "\n")


# Files.


def test_without_matplotlib_all_but_the_picture_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    (folder / "memory.png").write_bytes(b"of an earlier run")
    assert main(["report", str(folder)]) == 0
    text = capsys.readouterr().out
    assert text.endswith(
        'no memory.png: matplotlib is missing, which draws memory.png; pip install -e ".[plot]" brings it\n'
    )
    assert (folder / "memory.png").read_bytes() == b"of an earlier run"
    assert (folder / "timeline.html").exists()
    assert f"wrote {folder}/memory.png" not in text


def test_a_file_that_cannot_be_written_is_as_it_was(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "timeline.html").write_bytes(b"before")

    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    before = contents(folder)
    assert main(["report", str(folder)]) == 2
    why = "cannot be written: No space left on device; name another directory with --out"
    assert capsys.readouterr().err == f"chunkmem: {folder}/timeline.html {why}\n"
    assert contents(folder) == before


def test_a_link_stays_one_and_a_directory_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_whole(tmp_path / "link", b"content")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_bytes() == b"content"
    (tmp_path / "folder").mkdir()
    with pytest.raises(Exception, match="folder cannot be written: it is not a regular file"):
        write_whole(tmp_path / "folder", b"content")


# Runs of another kind.


def test_a_step_that_was_recorded_and_not_followed_has_no_names(folder: Path) -> None:
    timeline = Timeline.load(folder / "timeline.json")
    nameless = [replace(s, label="", chunk=None) if s.lane.value == "compute" else s for s in timeline.spans]
    num_moments = len(Trace.load(folder / "trace.json").moments)
    # Its step log has a span for every moment.
    nameless += [Span(nameless[0].lane, "", 0.0, 0.0, moment) for moment in range(num_moments)]
    replace(timeline, spans=tuple(nameless), device_nbytes=()).save(folder / "timeline.json")
    assert main(["report", str(folder)]) == 0


def test_a_trace_of_one_moment(tmp_path: Path) -> None:
    chunk = training_trace(1, MIB).moments[0].chunk
    make_run(tmp_path, trace=Trace(training_trace(1, 1).mode, "", {chunk: MIB}, (Moment(Kind.CREATE, chunk),)))
    assert main(["report", str(tmp_path)]) == 0
    assert simulate(load_run(tmp_path).plan, load_run(tmp_path).trace).step_s == 0
