"""How much RAM a process may use, where a job scheduler or a container says so."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from chunkmem.runtime import device as device_module
from chunkmem.runtime.device import ram_nbytes

GIB = 1 << 30
LIMITS = {
    "none": ("0::/\n", {}, None),
    "a container sees its own group as the root": ("0::/\n", {"memory.max": GIB}, GIB),
    "a job's group": ("0::/job/step\n", {"job/step/memory.max": GIB, "job/memory.max": "max"}, GIB),
    "a group above": ("0::/job/step\n", {"job/step/memory.max": "max", "job/memory.max": 2 * GIB}, 2 * GIB),
    "throttled before it is ended": ("0::/job\n", {"job/memory.max": 2 * GIB, "job/memory.high": GIB}, GIB),
    "version 1": ("7:cpu:/job\n4:blkio,memory:/job\n", {"memory/job/memory.limit_in_bytes": GIB}, GIB),
    "version 1, a container": (
        "4:memory:/docker/0\n",
        {"memory/memory.limit_in_bytes": GIB},
        GIB,
    ),
    "version 1, a limit beyond RAM": ("4:memory:/\n", {"memory/memory.limit_in_bytes": 2**63 - 4096}, None),
    "another group's limit is none of ours": ("0::/job\n", {"other/memory.max": GIB}, None),
}


@pytest.mark.parametrize("name", LIMITS)
def test_ram_is_what_every_group_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    groups, files, expected = LIMITS[name]
    for path, limit in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"{limit}\n")
    (tmp_path / "own").write_text(groups)
    monkeypatch.setattr(device_module, "_CGROUPS", tmp_path)
    monkeypatch.setattr(device_module, "_OWN_CGROUPS", tmp_path / "own")
    total_nbytes = 4 * GIB
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"total": total_nbytes}))
    assert ram_nbytes() == (total_nbytes if expected is None else expected)


def test_a_system_without_control_groups_has_its_ram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "_CGROUPS", tmp_path / "missing")
    monkeypatch.setattr(device_module, "_OWN_CGROUPS", tmp_path / "missing")
    assert ram_nbytes() == psutil.virtual_memory().total
