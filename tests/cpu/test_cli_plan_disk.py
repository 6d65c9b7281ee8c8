"""`chunkmem plan --disk` and `chunkmem info --disk`: a machine with a third tier."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chunkmem.cli.main import main
from chunkmem.plan.machine import Machine, host_links
from tests.helpers.traces import training_trace

NBYTES = 1 << 10
DISK = ("--disk", "1GiB", "--disk-read", "6GB/s", "--disk-write", "4GB/s")


def words(folder: Path, *more: str) -> list[str]:
    training_trace(6, NBYTES).save(folder / "trace.json")
    Machine(1, 1, host_links(h2d_Bps=1e9, d2h_Bps=1e9)).save(folder / "machine.json")
    files = [str(folder / "trace.json"), "--machine", str(folder / "machine.json")]
    return ["plan", *files, "--device", str(6 * NBYTES), "--host", str(6 * NBYTES), *more]


def test_what_host_has_no_room_for_is_on_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(tmp_path, "--json")) == 1
    assert not json.loads(capsys.readouterr().out)["fits"]
    assert main(words(tmp_path, *DISK, "--json")) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["fits"]
    assert said["peak_nbytes"]["host"] <= 6 * NBYTES
    assert said["peak_nbytes"]["disk"] > 0
    for way in ("read", "write"):  # weights and two states, less what both tiers hold
        assert said[f"disk_bound_{way}_nbytes"] == (18 - 12) * NBYTES <= said[f"disk_{way}_nbytes"]
    assert main(words(tmp_path, *DISK)) == 0
    shown = capsys.readouterr().out
    assert "to and from DEVICE" in shown
    assert f"{said['disk_read_nbytes'] / said['disk_bound_read_nbytes']:.3f}" in shown


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--disk", "1GiB", "--disk-read", "1GB"), "--disk needs --disk-write: the machine has no speed of a disk"),
        (("--disk-read", "1GB"), "--disk-read is about DISK; give --disk"),
    ],
)
def test_wrong_words(more: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(tmp_path, *more)) == 2
    assert message in capsys.readouterr().err


def test_how_fast_a_disk_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--disk", str(tmp_path), "--json"]) == 0
    disk = json.loads(capsys.readouterr().out)["disk"]
    assert disk["path"] == str(tmp_path)
    assert disk["read_Bps"] > 0 < disk["write_Bps"]
    assert main(["info", "--disk", str(tmp_path)]) == 0
    assert f"{disk['write_Bps'] / 1e9:.2f} GB/s" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_cannot_be_used_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["info", "--disk", str(tmp_path / "file"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["disk"] is None
    assert any(line.startswith("disk: ") for line in said["missing"])
