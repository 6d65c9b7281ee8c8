"""One line for whatever is wrong with what `chunkmem report` is given, and nothing written."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from chunkmem.cli.main import main
from chunkmem.data.trace import Trace
from chunkmem.plan.timeline import Span, Timeline
from chunkmem.report.run import load_run
from tests.helpers.rights import ordinary_rights
from tests.helpers.runs import make_run
from tests.helpers.traces import training_trace

pytest.importorskip("matplotlib.figure")
STRANGER = training_trace(9, 1).moments[-2].chunk


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run to break."""
    return make_run(tmp_path / "tight").path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def spoil_json(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def evaluation(folder: Path) -> None:
    """Only the forward sweep has been followed, as evaluations do: every moment of it fits the training step."""
    timeline = Timeline.load(folder / "timeline.json")
    spans = tuple(span for span in timeline.spans if span.moment < 24)
    replace(timeline, spans=spans, device_nbytes=timeline.device_nbytes[:24]).save(folder / "timeline.json")


def other_span(**changes: object) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        timeline = Timeline.load(folder / "timeline.json")
        first = next(span for span in timeline.spans if span.lane.value == "compute" and not span.is_stall)
        other: Span = replace(first, **changes)
        replace(timeline, spans=(other, *timeline.spans)).save(folder / "timeline.json")

    return spoil


def other_plan(folder: Path) -> None:
    other = make_run(folder.parent / "other", num_groups=5)
    other.plan.save(folder / "plan.json")


def unsound_plan(folder: Path) -> None:
    run = load_run(folder)
    replace(run.plan, start=frozenset()).save(folder / "plan.json")


def no_moments(folder: Path) -> None:
    trace = Trace.load(folder / "trace.json")
    replace(trace, moments=()).save(folder / "trace.json")


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


BAD = {
    "no trace": (remove("trace.json"), r"trace\.json: cannot be read: No such file"),
    "no plan": (remove("plan.json"), r"plan\.json: cannot be read: No such file"),
    "no timeline": (remove("timeline.json"), r"timeline\.json: cannot be read: No such file"),
    "cut off": (spoil_json("timeline.json", lambda text: text[:-9]), r"timeline\.json: the file looks truncated"),
    "not json": (spoil_json("plan.json", lambda text: b"hello"), r"plan\.json: not JSON"),
    "exchanged": (
        spoil_json("plan.json", lambda text: b'{"format": "chunkmem trace", "version": 1}'),
        r'plan\.json: this has the format \'chunkmem trace\', but a "chunkmem plan" is needed here',
    ),
    "not text": (spoil_json("trace.json", lambda text: b"\xff" + text), r"trace\.json: byte 0 is not UTF-8"),
    "another's plan": (other_plan, r"plan\.json was made from trace \w+, and trace\.json next to it is \w+; record"),
    "unsound plan": (unsound_plan, r"plan\.json cannot be followed: moment 0"),
    "no moments": (no_moments, r"trace\.json has no moments"),
    "evaluation": (
        evaluation,
        r"timeline\.json is of another step than trace\.json: it has 24 moments, and the trace has 72; call",
    ),
    "another moment": (other_span(moment=72), r"it has a moment 72, and the trace has 72"),
    "another label": (other_span(label="head"), r'its moment 0 is "head", and the trace\'s is "blocks\.0'),
    "another chunk": (other_span(chunk=STRANGER), r"its moment 0 is of param chunk 8, and the trace's is of"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_with_a_run_is_one_line(
    case: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, expected = BAD[case]
    good = Path(shutil.copytree(folder, tmp_path / "good"))
    spoil(folder)
    (folder / "memory.png").write_bytes(b"before")
    before = contents(tmp_path)
    for arguments in ([str(folder)], [str(good), "--against", str(folder)]):
        assert main(["report", *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert re.fullmatch(rf"chunkmem: {re.escape(str(folder))}/.*{expected}.*\n", err), err
        assert contents(tmp_path) == before


def test_directories_that_are_none(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, missing = folder / "plan.json", folder / "missing"
    give = "give a directory that manager.record() wrote"
    cannot = "cannot be made: No such file or directory; name another directory"
    no_place = "is not a directory, so nothing can be written into it; name another one"
    cases = [
        ([str(missing)], f"{missing} does not exist; {give}"),
        ([str(file)], f"{file} is not a directory; {give}"),
        ([str(folder), "--against", str(missing)], f"{missing} does not exist; {give}"),
        ([str(folder), "--out", str(file)], f"{file} {no_place}"),
        ([str(folder), "--out", f"{file}/deep"], f"{file}/deep {no_place}"),
        ([str(folder), "--out", "/proc/none"], f"/proc/none {cannot}"),
    ]
    before = contents(folder)
    for arguments, expected in cases:
        assert main(["report", *arguments]) == 2
        assert capsys.readouterr() == ("", f"chunkmem: {expected}\n")
    assert contents(folder) == before


def test_directories_without_rights(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        place.chmod(0o755)
        open_run, closed_run = (Path(shutil.copytree(folder, place / n)) for n in ("open", "closed"))
        open_run.chmod(0o555)
        closed_run.chmod(0o000)
        try:
            with ordinary_rights():
                assert main(["report", str(closed_run)]) == 2
                assert "cannot be read: Permission denied" in capsys.readouterr().err
                assert main(["report", str(open_run)]) == 2
                assert capsys.readouterr().err == (
                    f"chunkmem: {open_run} cannot be written to; name another directory with --out\n"
                )
        finally:
            open_run.chmod(0o755)
            closed_run.chmod(0o755)
        assert contents(open_run) == contents(folder)
