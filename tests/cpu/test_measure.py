"""Speeds of this machine: measured in time, and kept in a file that is never trusted further than it can be checked."""

from __future__ import annotations

import ctypes
import json
import os
import threading
import time
from dataclasses import replace
from functools import partial
from math import inf, isfinite
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from chunkmem.data.errors import PlanError
from chunkmem.data.types import DEVICE_LINKS, Tier, UpdateForm
from chunkmem.optim.by_form import updates_by_form
from chunkmem.optim.kernels import load_kernels
from chunkmem.plan.machine import Machine, host_links
from chunkmem.runtime import device, measure, speeds
from chunkmem.runtime.device import ComputeDevice, runtime_mode
from chunkmem.runtime.measure import cached_machine, measure_machine
from chunkmem.runtime.tiers import TierCaps
from tests.helpers.simulated import SimulatedAccelerator

CPU = ComputeDevice(torch.device("cpu"))
CAPS = TierCaps(1000, 2000, shared=False)
FETCH = (Tier.HOST, Tier.DEVICE)
MACHINE = Machine(
    1000,
    2000,
    host_links(h2d_Bps=1e9, d2h_Bps=2e9, latency_s=3e-6),
    inf,
    4e9,
    charges_non_model=False,
    one_processor=True,
)
SPEEDS = MACHINE.to_dict()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Measuring finds `MACHINE`; the list says on which caps on DEVICE it was done."""
    calls: list[float] = []

    def find(compute: ComputeDevice, caps: TierCaps, by_form: object) -> Machine:
        calls.append(caps.device_nbytes)
        return MACHINE

    monkeypatch.setattr(measure, "measure_machine", find)
    return calls


# Measuring.


def test_in_time_and_with_the_caps_given() -> None:
    begin_s = time.process_time()
    machine = measure_machine(CPU, CAPS)
    assert time.process_time() - begin_s < 2
    assert machine == Machine(
        device_nbytes=1000,
        host_nbytes=2000,
        links=dict.fromkeys(DEVICE_LINKS, machine.links[FETCH]),
        device_update_Bps=inf,
        host_update_Bps=inf,
        charges_non_model=False,
        one_processor=True,
    )
    assert 0 < machine.links[FETCH].latency_s < 1
    assert isfinite(machine.links[FETCH].Bps)


def test_the_speed_is_that_of_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    # In time on the processor, as others may use it too; within a factor of 4, as they share its caches and RAM.
    clock = SimpleNamespace(perf_counter=time.thread_time)
    monkeypatch.setattr(speeds, "time", clock)
    monkeypatch.setattr(device, "time", clock)
    source, target = (torch.ones(64 * 2**20, dtype=torch.uint8) for _ in range(2))

    def copy_s() -> float:
        begin_s = time.thread_time()
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
        return time.thread_time() - begin_s

    expected = source.nbytes / min(copy_s() for _ in range(5))
    found = max(measure_machine(CPU, CAPS).links[FETCH].Bps for _ in range(3))
    assert expected / 4 <= found <= expected * 4


def test_the_median_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    # First time: memory is touched, code is loaded. Then one of many is disturbed.
    times = iter([100.0, 1.0, 50.0, *[1.0] * 100])
    assert measure.median_s(lambda: next(times), 10) == 1.0


@pytest.mark.parametrize("budget_s", [0, -1])
def test_without_time_there_are_three_of_each(budget_s: float) -> None:
    count = 0

    def step() -> float:
        nonlocal count
        count += 1
        return float(count)

    assert measure.median_s(step, budget_s) == 3  # 2, 3, 4
    assert count == 4


def test_a_coarse_clock_is_not_an_infinite_speed() -> None:
    assert measure.median_s(lambda: 0.0, 0) > 0


def test_a_speed_of_0_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(measure, "_COPY_NBYTES", 0)
    with pytest.raises(PlanError, match="from HOST to DEVICE is 0"):
        measure_machine(CPU, CAPS)
    with pytest.raises(PlanError, match="from HOST to DEVICE is 0"):
        cached_machine(CPU, CAPS, path=tmp_path / "machine.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("interrupted", [False, True])
def test_no_thread_is_left(monkeypatch: pytest.MonkeyPatch, interrupted: bool) -> None:
    def interrupt(measure: Any, budget_s: float) -> float:
        measure()
        raise KeyboardInterrupt

    before = threading.active_count()
    if interrupted:
        monkeypatch.setattr(measure, "median_s", interrupt)
        with pytest.raises(KeyboardInterrupt):
            measure._hand_over_s(0.1)
    else:
        assert 0 < measure._hand_over_s(0.01) < 1
    assert threading.active_count() == before


def test_updates_are_of_16_bytes_an_element(monkeypatch: pytest.MonkeyPatch) -> None:
    # What an accelerator's host is measured by; here on few elements.
    monkeypatch.setattr(measure, "median_s", lambda work, budget_s: (work(), 2.0)[1])
    assert measure._update_Bps(CPU, 1000, 0.1) == 1000 * 16 / 2


@pytest.mark.parametrize(
    ("level_3", "ram_gib", "host_gib", "expected_gib"),
    [
        ([], 512, 400, 1),  # nobody knows the caches: 2**26 elements
        ([("0-15", "32768K"), ("0-15", "32768K")], 512, 400, 1),  # one cache, that all cores share
        ([("0-7", "393216K"), ("8-15", "393216K")], 512, 400, 2),  # 4 x 768 MiB, rounded down to a power of 2
        ([], 8, 400, 0.5),  # small machines: a sixteenth of the RAM
        ([], 512, 0.3, 0.25),  # small caps: no more than the cap
    ],
)
def test_updates_on_host_are_measured_beyond_its_caches(
    level_3: list[tuple[str, str]],
    ram_gib: float,
    host_gib: float,
    expected_gib: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for core, (cores, size) in enumerate(level_3):
        folder = tmp_path / f"cpu{core}" / "cache" / "index3"
        folder.mkdir(parents=True)
        (folder / "shared_cpu_list").write_text(f"{cores}\n")
        (folder / "size").write_text(f"{size}\n")
    monkeypatch.setattr(measure, "_CACHES", tmp_path)
    monkeypatch.setattr(measure, "ram_nbytes", lambda: int(ram_gib * 2**30))
    numel = measure._host_update_numel(TierCaps(1000, int(host_gib * 2**30), shared=False))
    assert numel * 16 == expected_gib * 2**30


def test_both_directions_at_once() -> None:
    # Without an accelerator its copies are copies in RAM: two of them at once, each in a thread.
    assert 0 < measure._duplex_Bps(CPU, 0) < 1e12
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("chunkmem measure")]


def test_updates_alone_are_taken_to_use_all_of_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_link_copies", lambda *_, **__: lambda: 1.0)
    monkeypatch.setattr(measure, "_update_Bps", lambda *_: 100e9)
    monkeypatch.setattr(measure, "_duplex_Bps", lambda *_: 85e9)
    machine = measure_machine(SimulatedAccelerator(), CAPS)
    assert (machine.host_memory_Bps, machine.duplex_Bps) == (1.75 * 100e9, 85e9)


def test_updates_on_host_are_measured_by_form(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = ("_link_copies", "_duplex_Bps")
    monkeypatch.setattr(measure, names[0], lambda *_, **__: lambda: 1.0)
    monkeypatch.setattr(measure, names[1], lambda *_: 85e9)
    by_form = partial(updates_by_form, load_kernels())
    caps = TierCaps(1 << 20, 1 << 20, shared=False)  # bytes: 65 536 elements
    path = tmp_path / "machine.json"
    machine = cached_machine(SimulatedAccelerator(), caps, by_form=by_form, path=path)
    assert [form for form, _ in machine.host_form_Bps] == list(UpdateForm)
    assert all(0 < Bps < 1e12 for _, Bps in machine.host_form_Bps)
    assert (
        machine.host_update_s(10 << 20, UpdateForm.CODES) == (10 << 20) / dict(machine.host_form_Bps)[UpdateForm.CODES]
    )
    monkeypatch.setattr(measure, "_duplex_Bps", None)
    assert cached_machine(SimulatedAccelerator(), caps, by_form=by_form, path=path) == machine
    assert Machine.from_dict(machine.to_dict()) == machine


def test_modes_and_defaults_of_the_user_do_not_reach_it() -> None:
    class Refuses(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(func)

    torch.set_default_dtype(torch.float64)
    try:
        with Refuses(), torch.device("meta"), torch.inference_mode():
            assert measure_machine(CPU, CAPS, budget_s=0).links[FETCH].Bps > 0
            with runtime_mode():
                assert measure._update_Bps(CPU, 1000, 0) > 0
    finally:
        torch.set_default_dtype(torch.float32)


# Keeping.


def test_measured_once(measured: list[float], tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "machine.json"
    assert cached_machine(CPU, CAPS, path=path) == MACHINE
    assert cached_machine(CPU, CAPS, path=path) == MACHINE
    assert len(measured) == 1
    assert json.loads(path.read_text())["speeds"] == SPEEDS
    assert [file.name for file in path.parent.iterdir()] == ["machine.json"], "nothing temporary is left"


def test_caps_come_from_the_caller_and_never_from_the_file(measured: list[float], tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    cached_machine(CPU, CAPS, path=path)
    other = cached_machine(CPU, TierCaps(7, 0, shared=True), path=path)
    assert other == replace(MACHINE, device_nbytes=7, host_nbytes=0)
    assert len(measured) == 1


def test_speeds_given_in_the_file_are_used(measured: list[float], tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    cached_machine(CPU, CAPS, path=path)
    content = json.loads(path.read_text())
    content["speeds"]["host_update_Bps"] = 5
    path.write_text(json.dumps(content))
    assert cached_machine(CPU, CAPS, path=path) == replace(MACHINE, host_update_Bps=5)


def damaged(content: dict[str, Any]) -> dict[str, str | bytes]:
    """Texts that are not what was written, by what is wrong with them."""
    speeds = content["speeds"]

    def with_speeds(**changed: Any) -> str:
        return json.dumps({**content, "speeds": {**speeds, **changed}})

    def with_link(Bps: object, latency_s: object) -> str:
        (source, target, *_), *others = speeds["links"]
        return with_speeds(links=[[source, target, Bps, latency_s], *others])

    missing = {name: value for name, value in speeds.items() if name != "host_update_Bps"}
    whole = json.dumps(content)
    return {
        "empty": "",
        "cut off": whole[: len(whole) // 2],
        "not text": b"\xff\xfe\x00",
        "a list": "[]",
        "a number": "1",
        "null": "null",
        "nested too deep": "[" * 100_000,
        "speeds are a list": json.dumps({**content, "speeds": [1]}),
        "no machine": json.dumps({"speeds": speeds}),
        "another machine": json.dumps({**content, "machine": ["TPU"]}),
        "one missing": json.dumps({**content, "speeds": missing}),
        "one too many": with_speeds(more=1.0),
        "0": with_link(0, 3e-6),
        "negative": with_link(-1.0, 3e-6),
        "text": with_link(1e9, "1"),
        "true": with_link(True, 3e-6),
        "not a number": with_link(float("nan"), 3e-6),
        "infinite link": with_link(inf, 3e-6),
        "infinite latency": with_link(1e9, inf),
        "no update at all": with_speeds(host_update_Bps=0.0),
        "too large for a float": with_link(10**400, 3e-6),
    }


CONTENT = {"machine": measure._identity(CPU, CAPS), "speeds": SPEEDS}


@pytest.mark.parametrize("wrong", damaged(CONTENT))
def test_a_file_that_cannot_be_used_is_replaced(measured: list[float], tmp_path: Path, wrong: str) -> None:
    path = tmp_path / "machine.json"
    cached_machine(CPU, CAPS, path=path)
    sound = path.read_bytes()
    text = damaged(json.loads(sound))[wrong]
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert cached_machine(CPU, CAPS, path=path) == MACHINE
    assert len(measured) == 2
    assert path.read_bytes() == sound


@pytest.mark.parametrize("where", ["below a file", "a folder", "refused"])
def test_where_nothing_can_be_written_nothing_is_kept(
    measured: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    path = tmp_path / "machine.json"
    if where == "below a file":
        path.write_text("")
        path = path / "machine.json"
    elif where == "a folder":
        path.mkdir()
    else:
        monkeypatch.setattr(os, "replace", refuse)
    before = sorted(tmp_path.rglob("*"))
    assert cached_machine(CPU, CAPS, path=path) == MACHINE
    assert sorted(tmp_path.rglob("*")) == before


def refuse(source: object, target: object) -> None:
    raise PermissionError("read-only")


def test_an_interrupted_write_leaves_the_old_file(
    measured: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(source: object, target: object) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "machine.json"
    path.write_text("old")
    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        cached_machine(CPU, CAPS, path=path)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]


def test_the_users_folder(measured: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", classmethod(lambda cls: tmp_path))
    cached_machine(CPU, CAPS)
    cached_machine(CPU, CAPS)
    assert len(measured) == 1
    (found,) = (tmp_path / ".cache" / "chunkmem").iterdir()
    assert found.name.startswith("machine-")
    assert found.suffix == ".json"
    torch.set_num_threads(2)
    cached_machine(CPU, CAPS)
    assert len(measured) == 2, "speeds depend on the number of threads"
    assert len(list(found.parent.iterdir())) == 2


def test_no_home_folder(measured: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home(cls: type[Path]) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", classmethod(no_home))
    assert cached_machine(CPU, CAPS) == MACHINE
