"""Speeds of a disk: measured in time, by the best blocks, and kept in a file that is checked when it is read."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import chunkmem
from chunkmem.data.errors import ConfigError, TierIOError
from chunkmem.runtime import disk_speed
from chunkmem.runtime.disk_file import DiskFile
from chunkmem.runtime.disk_speed import DiskSpeed, cached_disk_speed, measure_disk
from tests.helpers.disk import disk_threads, open_files
from tests.helpers.faulty_disk import Fault, FaultKind, FaultyDisk, ThrottledDisk

SPEED = DiskSpeed(read_Bps=3e9, write_Bps=2e9, latency_s=1e-4, block_nbytes=4 << 20, depth=8)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Measuring finds `SPEED`; the list says where it was done."""
    calls: list[Path] = []

    def find(directory: Path, *, capacity_nbytes: int) -> DiskSpeed:
        calls.append(directory)
        return SPEED

    monkeypatch.setattr(disk_speed, "measure_disk", find)
    return calls


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert disk_threads() == []
    assert open_files(tmp_path) == []


# Measuring.


def test_the_speed_is_that_of_the_disk(tmp_path: Path) -> None:
    begin_s = time.perf_counter()
    found = measure_disk(tmp_path, calls=ThrottledDisk(400e6, 200e6, latency_s=0.004), budget_s=1.0)
    assert time.perf_counter() - begin_s < 30
    # No faster than the disk; slower by what is under way at the ends, and as far as others use this machine.
    assert 400e6 / 20 < found.read_Bps <= 400e6
    assert 200e6 / 20 < found.write_Bps <= 200e6
    assert 0.004 <= found.latency_s < 1
    assert (found.block_nbytes, found.depth) in disk_speed._CANDIDATES
    assert list(tmp_path.iterdir()) == []


def test_the_fastest_blocks_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a latency and no limit on the rate, that is the number of bytes on their way at once."""
    monkeypatch.setattr(disk_speed, "_CANDIDATES", ((1 << 20, 1), (1 << 20, 8), (1 << 20, 2)))
    found = measure_disk(tmp_path, calls=ThrottledDisk(1e12, 1e12, latency_s=0.01), budget_s=6)
    assert (found.block_nbytes, found.depth) == (1 << 20, 8)


def test_on_a_slow_disk_little_is_moved_and_few_blocks_are_tried(tmp_path: Path) -> None:
    disk = FaultyDisk(calls=ThrottledDisk(80e6, 80e6))
    found = measure_disk(tmp_path, calls=disk, budget_s=0.5)
    assert (found.block_nbytes, found.depth) == disk_speed._CANDIDATES[0]
    # One block of 16 MiB: once to find out, and twice to measure.
    assert disk.num_calls["pwritev"] == 1 + 2


def test_a_disk_that_fails(tmp_path: Path) -> None:
    with pytest.raises(TierIOError, match="EIO"):
        measure_disk(tmp_path, calls=FaultyDisk(Fault(FaultKind.ERROR, "pwritev", at=2)))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="Not a directory"):
        measure_disk(tmp_path / "file")


def test_modes_and_defaults_of_the_user_do_not_reach_it(tmp_path: Path) -> None:
    with torch.device("meta"), torch.inference_mode():
        assert measure_disk(tmp_path, budget_s=0).read_Bps > 0


# Keeping.


def test_measured_once(measured: list[Path], tmp_path: Path) -> None:
    path = tmp_path / "a" / "disk.json"
    assert cached_disk_speed(tmp_path, path=path) == SPEED
    assert cached_disk_speed(tmp_path, path=path) == SPEED
    assert measured == [tmp_path]
    assert json.loads(path.read_text())["speeds"] == SPEED.to_dict()
    assert [file.name for file in path.parent.iterdir()] == ["disk.json"], "nothing temporary is left"


def test_a_file_for_each_file_system(measured: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", classmethod(lambda cls: tmp_path))
    cached_disk_speed(tmp_path)
    cached_disk_speed(tmp_path / "below" / "not there yet")
    assert len(measured) == 1
    kept = list((tmp_path / ".cache" / "chunkmem").iterdir())
    assert [file.name.partition("-")[0] for file in kept] == ["disk"]
    if os.stat("/dev/shm").st_dev != os.stat(tmp_path).st_dev:
        cached_disk_speed("/dev/shm")
        assert len(measured) == 2


def test_a_file_system_is_known_by_its_type() -> None:
    device, kind, *_ = disk_speed._identity(Path("/proc"))
    assert kind.split()[0] == "proc"
    assert device != disk_speed._identity(Path("/"))[0]


def damaged(content: dict[str, Any]) -> dict[str, str]:
    """Texts that are not what was written, by what is wrong with them."""

    def with_speeds(**changed: Any) -> str:
        return json.dumps({**content, "speeds": {**content["speeds"], **changed}})

    missing = {name: value for name, value in content["speeds"].items() if name != "depth"}
    return {
        "empty": "",
        "cut off": json.dumps(content)[:40],
        "a list": "[]",
        "nested too deep": "[" * 100_000,
        "speeds are a list": json.dumps({**content, "speeds": [1]}),
        "another file system": json.dumps({**content, "machine": ["device 1:1"]}),
        "one missing": json.dumps({**content, "speeds": missing}),
        "one too many": with_speeds(more=1.0),
        "0": with_speeds(read_Bps=0),
        "negative": with_speeds(write_Bps=-1.0),
        "text": with_speeds(latency_s="1"),
        "null": with_speeds(read_Bps=None),
        "true": with_speeds(depth=True),
        "half a thread": with_speeds(depth=1.5),
        "not a number": with_speeds(read_Bps=float("nan")),
        "infinite": with_speeds(read_Bps=float("inf")),
        "too large for a float": with_speeds(read_Bps=10**400),
    }


CONTENT = {"machine": ["device 8:1"], "speeds": SPEED.to_dict()}


@pytest.mark.parametrize("wrong", damaged(CONTENT))
def test_a_file_that_cannot_be_used_is_replaced(measured: list[Path], tmp_path: Path, wrong: str) -> None:
    path = tmp_path / "disk.json"
    cached_disk_speed(tmp_path, path=path)
    sound = path.read_text()
    path.write_text(damaged(json.loads(sound))[wrong])
    assert cached_disk_speed(tmp_path, path=path) == SPEED
    assert len(measured) == 2
    assert path.read_text() == sound


def test_what_is_kept_is_used(measured: list[Path], tmp_path: Path) -> None:
    path = tmp_path / "disk.json"
    cached_disk_speed(tmp_path, path=path)
    content = json.loads(path.read_text())
    content["speeds"]["read_Bps"] = 5
    path.write_text(json.dumps(content))
    assert cached_disk_speed(tmp_path, path=path).read_Bps == 5
    assert len(measured) == 1


def test_where_nothing_can_be_written_nothing_is_kept(measured: list[Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert cached_disk_speed(tmp_path, path=tmp_path / "file" / "disk.json") == SPEED
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_a_disk_without_room_is_told_by_what_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by what measuring it takes, which the first use of a disk does."""
    monkeypatch.setattr(DiskFile, "free_nbytes", lambda self: 5 << 20)
    path = tmp_path / "disk.json"
    with pytest.raises(ConfigError, match=r"memory.disk.capacity: 1.00 GiB are asked for, .* has 5.00 MiB left"):
        cached_disk_speed(tmp_path, capacity_nbytes=1 << 30, path=path)
    with pytest.raises(ConfigError, match=r"its disk is measured with 16.0+ MiB, .* has 5.00 MiB left"):
        cached_disk_speed(tmp_path, capacity_nbytes=1 << 20, path=path)


def test_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    memory = {"device": "1MiB", "host": "16MiB", "disk": {"path": "~/tier", "capacity": "1MiB"}}
    with chunkmem.ChunkManager(chunkmem.Config.from_dict({"memory": memory})) as manager:
        assert (tmp_path / "home" / "tier").is_dir()
        chunkmem.FrozenCache(manager, host="4KiB", disk="~/cache", disk_capacity="64KiB").close()
    assert {each.name for each in (tmp_path / "home").iterdir()} >= {"tier", "cache"}
    assert not (tmp_path / "~").exists()
