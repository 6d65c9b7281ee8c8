"""Calls of the GPU suite that are killed, cut and paused lose no row, and continue where they were."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu import archive as archives
from benchmarks.gpu import stages
from benchmarks.gpu.archive import Archive
from benchmarks.gpu.harness import Choice, Task
from benchmarks.gpu.rows import Store, StoreError
from benchmarks.gpu.setting import GIB, Card, Setting
from benchmarks.gpu.stages import Pause, Progress, Stage, digest, run_stages
from chunkmem.runtime.own_folder import require_own
from tests.helpers.gpu_half_hour import KEYS, MACHINE, TOLD, plain_table
from tests.helpers.processes import assert_end

ROOT = Path(__file__).parents[2]


# The archive.


def contents(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as packed:
        return {member.name: packed.extractfile(member).read() for member in packed}  # type: ignore[union-attr]


def test_a_folder_is_packed_and_taken_up_again(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "logs").mkdir(parents=True)
    (here / "probe.json").write_text("{}")
    (here / "logs" / "a.txt").write_text("x" * 100_000 + "last words")
    Archive(tmp_path / "r.tgz", here).save()
    there.mkdir()
    Archive(tmp_path / "r.tgz", there).open()
    assert (there / "probe.json").read_text() == "{}"
    assert len((there / "logs" / "a.txt").read_text()) == archives.MOST_LOG_NBYTES
    assert (there / "logs" / "a.txt").read_text().endswith("last words")


def test_what_is_too_large_is_left_out_and_named_but_no_row_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(archives, "MOST_NBYTES", 3000)
    here = tmp_path / "here"
    (here / "profile").mkdir(parents=True)
    (here / "speed.json").write_bytes(os.urandom(1500))
    (here / "profile" / "small.gz").write_bytes(os.urandom(1000))
    (here / "profile" / "trace.json.gz").write_bytes(os.urandom(1400))
    archive = Archive(tmp_path / "r.tgz", here)
    archive.save()
    assert list(contents(archive.path)) == ["speed.json", "profile/small.gz"]
    assert archive.left_out == ["profile/trace.json.gz"]
    assert archive.path.stat().st_size < 3500


def test_what_is_compiled_is_taken_along_and_speeds_of_a_machine_are_not(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    kept = Path(archives.CACHE) / "chunkmem" / "native" / "kernels-1.so"
    (here / kept).parent.mkdir(parents=True)
    (here / kept).write_bytes(b"compiled")
    (here / kept).chmod(0o700)
    (here / archives.CACHE / "chunkmem" / "machine-1.json").write_text("{}")
    Archive(tmp_path / "r.tgz", here).save()
    there.mkdir()
    before = os.umask(0o002)
    try:
        Archive(tmp_path / "r.tgz", there).open()
    finally:
        os.umask(before)
    assert [path for path in there.rglob("*") if path.is_file()] == [there / kept]
    require_own((there / kept).parent)
    require_own(there / kept)


@pytest.mark.parametrize("content", [b"", b"no archive", b"\x1f\x8b\x08\x00half of one"])
def test_what_is_no_archive_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "r.tgz").write_bytes(content)
    with pytest.raises(StoreError, match=r"r\.tgz is no archive of rows"):
        Archive(tmp_path / "r.tgz", tmp_path).open()


# Stages.


def stage(name: str, rows: Mapping[str, dict[str, Any]], **how: Any) -> Stage:
    """A stage over rows that call a function of tests/helpers/gpu_rows.py."""

    def tasks(_setting: Setting, _store: Store) -> Any:
        for key, (function, arguments) in ((key, next(iter(row.items()))) for key, row in rows.items()):
            yield Task(key, f"tests.helpers.gpu_rows:{function}", arguments, 20, needs_gpu=False)

    return Stage(SimpleNamespace(NAME=name, tasks=tasks, table=plain_table), **how)


def call(folder: Path, *asked: Stage, **choice: Any) -> Progress:
    progress = Progress()

    def open_store(part: Any) -> Store:
        return Store(folder / f"{part.NAME}.json", machine=MACHINE, told=TOLD)

    setting = Setting(None, 2**34, 2, folder)
    run_stages(asked, setting, Choice(**{"budget_s": 60, **choice}), open_store=open_store, progress=progress)
    return progress


def rows_of(folder: Path, name: str) -> dict[str, Any]:
    return dict(json.loads((folder / f"{name}.json").read_text())["rows"])


def test_a_call_pauses_where_something_failed_and_the_next_goes_on(tmp_path: Path) -> None:
    asked = (
        stage("first", {"good": {"give": {"x": 1}}, "bad": {"leave": {}}}, pause=Pause.FAILED),
        stage("second", {"more": {"give": {"x": 2}}}, pause=Pause.MEASURED),
        stage("third", {"last": {"give": {"x": 3}}}, pause=Pause.MEASURED),
    )
    progress = call(tmp_path, *asked)
    assert not progress.is_over
    assert progress.failed == [("first", "bad")]
    assert [part.NAME for part in progress.begun] == ["first"]
    assert progress.lines[0].startswith("first: 1 with figures, 1 failed, 0 left;")
    said = digest(progress, Setting(None, 2**34, 2, tmp_path))
    assert "| bad | failed: its process ended with exit status 7: last words |" in said
    assert "## log of first: bad\nlast words" in said
    progress = call(tmp_path, *asked)
    assert not progress.is_over
    assert [part.NAME for part in progress.begun] == ["first", "second"]
    progress = call(tmp_path, *asked)
    assert progress.is_over
    assert progress.has_failed
    assert rows_of(tmp_path, "third")["last"]["figures"] == {"x": 3}


def test_a_call_pauses_for_some_rows_alone(tmp_path: Path) -> None:
    rows = {"bits": {"give": {"x": 1}}, "speed": {"leave": {}}}
    for name, pauses_for, begun in (("one", ("bits",), 2), ("two", ("sp*",), 1)):
        first = stage(name, rows, pause=Pause.FAILED, pauses_for=pauses_for)
        progress = call(tmp_path, first, stage(f"after {name}", {"a": {"give": {}}}))
        assert progress.failed == [(name, "speed")]
        assert len(progress.begun) == begun


def test_what_is_built_is_built_in_each_call(tmp_path: Path) -> None:
    path = tmp_path / "begun"
    row = {"built": {"count": {"path": str(path), "seconds": 0}}}
    asked = (stage("probe", row, only=("built",), in_each_call=True), stage("probe", {"other": {"give": {}}}))
    for num in (1, 2):
        assert call(tmp_path, *asked).is_over
        assert len(path.read_text().splitlines()) == num
    assert list(rows_of(tmp_path, "probe")) == ["built", "other"]


def test_a_stage_has_its_seconds_and_leaves_the_rest_to_others(tmp_path: Path) -> None:
    long = {str(index): {"count": {"path": str(tmp_path / "begun"), "seconds": 1.2}} for index in range(3)}
    asked = (stage("long", long, seconds=6.5), stage("after", {"a": {"give": {}}}))
    progress = call(tmp_path, *asked)
    assert progress.is_over
    # A row is begun while a quarter of its limit of 20 s is left.
    assert len(rows_of(tmp_path, "long")) < 3
    assert " left; " in progress.lines[0]
    assert list(rows_of(tmp_path, "after")) == ["a"]
    # The time was the stage's own, of all calls: another one gets no further.
    assert call(tmp_path, *asked).is_over


def test_what_only_the_call_had_no_time_for_is_left_to_the_next(tmp_path: Path) -> None:
    asked = (stage("first", {"a": {"give": {}}}), stage("second", {"b": {"give": {}}}))
    assert not call(tmp_path, *asked, budget_s=1).is_over
    assert not (tmp_path / "second.json").exists()
    assert call(tmp_path, *asked).is_over


def test_the_digest_fits_whatever_there_is_and_ends_with_the_stages(tmp_path: Path) -> None:
    rows = {f"row {index} {'x' * 200}": {"give": {"y": "z" * 300}} for index in range(3)}
    progress = call(tmp_path, stage("first", rows), stage("second", {"b": {"give": {"x": "w" * 200}}}))
    path = tmp_path / "first.json"
    content = json.loads(path.read_text())
    content["rows"] = {f"{key} {copy}": row for copy in range(20) for key, row in content["rows"].items()}
    path.write_text(json.dumps(content))
    said = digest(progress, Setting(None, 2**34, 2, tmp_path))
    assert 10_000 < len(said) <= stages.DIGEST_CHARS
    assert said.startswith("(cut here")
    assert "w" * 200 in said
    assert said.splitlines()[-1].startswith("second: 1 with figures")


# A rehearsal.


def begun(notes: Path) -> dict[str, int]:
    """How often each row was begun."""
    return {path.name: len(path.read_text().splitlines()) for path in notes.iterdir()}


def all_rows(archive: Path) -> dict[str, dict[str, Any]]:
    files = contents(archive) if archive.exists() else {}
    parts = [json.loads(content) for name, content in files.items() if name.endswith(".json")]
    return {key: row for part in parts for key, row in part["rows"].items()}


def found(archive: Path) -> dict[str, dict[str, Any]]:
    """The rows of an archive that have figures."""
    return {key: row for key, row in all_rows(archive).items() if "figures" in row}


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", [0, 1])
def test_commands_that_are_killed_lose_no_row(tmp_path: Path, seed: int) -> None:
    """At random moments: no row that was seen is lost or measured again, and no process outlives its command."""
    archive, notes, draw = tmp_path / "results.tgz", tmp_path / "notes", random.Random(seed)
    notes.mkdir()
    command = [sys.executable, "-m", "tests.helpers.gpu_half_hour", str(archive), str(notes)]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    seen: dict[str, dict[str, Any]] = {}
    for _ in range(6):
        before = begun(notes)
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, start_new_session=True)
        time.sleep(draw.uniform(0.1, 1.2))  # the moment of the kill is what is drawn: no event stands for it
        process.send_signal(signal.SIGKILL)
        process.wait()
        now = found(archive)
        assert seen.items() <= now.items()
        assert all(begun(notes)[key] == before[key] for key in seen)
        seen = now
    assert_end(*(int(process) for path in notes.iterdir() for process in path.read_text().splitlines()))
    statuses = []
    for _ in range(4):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode in (0, 3), done.stderr
        assert len(done.stdout) < 12_000
        statuses.append(done.returncode)
        if done.returncode == 0:
            break
    assert statuses[-1] == 0
    assert seen.items() <= found(archive).items()
    assert all(num <= 2 for num in begun(notes).values())
    # A row that two commands were killed over is left to --retry.
    assert all_rows(archive).keys() == set(KEYS)
    assert {row["reason"] for key, row in all_rows(archive).items() if key not in found(archive)} <= {"cut"}


# What a card is taken for.


@pytest.mark.parametrize(
    ("name", "gib", "capability", "taken_for"),
    [
        ("NVIDIA H100 80GB HBM3", 79, "9.0", "h100"),
        ("NVIDIA H200", 140, "9.0", "h200"),
        ("NVIDIA A100-SXM4-80GB", 79, "8.0", "a100"),
        ("Tesla V100-SXM2-32GB", 32, "7.0", "v100"),
        ("NVIDIA GeForce RTX 4090", 24, "8.9", "rtx4090"),
        ("NVIDIA GeForce RTX 5090", 31, "12.0", "rtx5090"),
        ("NVIDIA GH200 480GB", 95, "9.0", "gh200"),
        ("NVIDIA GB200", 184, "10.0", "gb200"),
        ("NVIDIA L40S", 44, "8.9", "l40s"),
        ("NVIDIA B200", 180, "10.0", "h200"),
    ],
)
def test_a_card_is_taken_for_what_comes_closest(name: str, gib: int, capability: str, taken_for: str) -> None:
    card = Card(name, gib * GIB, gib * GIB, capability, 132, 2**25, "1")
    assert card.hardware == Setting(card, 2**37, 16, Path()).hardware == taken_for


def test_the_host_cap_is_what_was_said() -> None:
    assert Setting(None, 100 * GIB, 16, Path()).host_nbytes == 80 * GIB
    assert Setting(None, 100 * GIB, 16, Path(), 115 * GIB).host_nbytes == 115 * GIB
