"""The GPU suite where there is no GPU: its dry mode, its tables, and the page that is made of committed rows."""

from __future__ import annotations

import fnmatch
import gzip
import itertools
import json
import os
import random
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from benchmarks.gpu import (
    correct,
    glance,
    monotone,
    page,
    probe,
    probe_device,
    profile,
    scale,
    soak,
    speed,
)  # fmt: skip
from benchmarks.gpu.__main__ import BUDGET_S, PARTS, STAGES, main
from benchmarks.gpu.archive import Archive
from benchmarks.gpu.machine import speeds
from benchmarks.gpu.model import LADDER, Size, build, ladder, preset
from benchmarks.gpu.peers import PEERS
from benchmarks.gpu.rows import Reason, Row, Store, StoreError
from benchmarks.gpu.setting import GIB, WHOLE, Card, Setting
from benchmarks.gpu.train import run
from benchmarks.gpu.warm_up import warm_up
from benchmarks.gpu.work import Training, Work, toy_cap_nbytes
from tests.helpers.programs import run_python

ROOT = Path(__file__).parents[2]
CARD = Card("NVIDIA H200", 141 * GIB, 140 * GIB, "9.0", 132, 60 << 20, "580")
MACHINE = {"gpu": "none", "num_cpus": 2, "torch": "2"}


def setting(folder: Path, card: Card | None = CARD) -> Setting:
    return Setting(card, 128 * GIB, 16, folder)


def empty(folder: Path, name: str = "speed") -> Store:
    return Store(folder / f"{name}.json", machine=MACHINE, told={})


def suite(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the command without any CUDA device, wherever these tests run."""
    where = [] if "--archive" in options else ["--out", str(folder)]
    env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return run_python("-m", "benchmarks.gpu", *options, *where, env=env)


def rows_of(folder: Path, name: str) -> dict[str, Any]:
    return dict(json.loads((folder / f"{name}.json").read_text())["rows"])


# A row.


def test_steps_are_timed_once_no_plan_is_made_any_more() -> None:
    size = preset("toy", dry=True)
    training, figures = run(Work("chunkmem", size, batch=1, micro_batch=1, cap_nbytes=None, num_warm_up=3, num_timed=3))
    training.close()
    assert len(figures["step_s"]) == 3
    assert figures["num_warm_up"] >= 3
    assert figures["has_settled"] in (True, False)
    assert figures["plan_misses"] == 0


# The command.


@pytest.mark.full
def test_the_dry_probe_is_whole_honest_and_kept(tmp_path: Path) -> None:
    done = suite(tmp_path, "probe")
    assert done.returncode == 0, done.stderr
    assert "no GPU" in done.stderr
    assert "**no GPU**: a dry run" in done.stdout
    rows = rows_of(tmp_path, "probe")
    assert list(rows) == [task.key for task in probe.tasks(setting(tmp_path, None), empty(tmp_path))]
    with_figures = {"back end", "host memory", "Adam on the host", "small costs", "disk, O_DIRECT"}
    for key, row in rows.items():
        if key not in with_figures:
            assert row["why_not"] == "no GPU", key
    assert rows["host memory"]["figures"]["triad_Bps"]["1"] > 0
    assert rows["small costs"]["figures"]["attach_and_detach_s"] > 0
    # What a file system without O_DIRECT says is a reason, too.
    assert "figures" in rows["disk, O_DIRECT"] or "takes no O_DIRECT" in rows["disk, O_DIRECT"]["why_not"]
    assert not (tmp_path / "probe.bin").exists()
    again = suite(tmp_path, "probe")
    assert again.returncode == 0
    assert rows_of(tmp_path, "probe") == rows
    shown = suite(tmp_path, "probe", "--show")
    assert shown.stdout == again.stdout


@pytest.mark.full
def test_a_dry_speed_trains_a_toy_beside_plain_pytorch(tmp_path: Path) -> None:
    done = suite(tmp_path, "speed")
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path, "speed")
    why_not = {key.split(" / ")[0]: row.get("why_not") for key, row in rows.items()}
    ours = dict.fromkeys(("plain", "chunkmem", "chunkmem, clipping", *speed.VARIANTS))
    assert why_not == {**ours, "fsdp2": "no GPU", "deepspeed": "no GPU", "torchao": "no GPU"}
    clipped = rows["chunkmem, clipping / toy / 64 / toy cap"]["figures"]
    ours, plain = (rows[f"{name} / toy / 64 / toy cap"]["figures"] for name in ("chunkmem", "plain"))
    assert ours["tokens"] == plain["tokens"] == 64
    assert ours["plan_misses"] == 0
    assert ours["h2d_nbytes"] > 0
    assert ours["lower_bounds"]["floor_s"] > 0
    assert (plain["max_norm"], ours["max_norm"], clipped["max_norm"]) == (1e3, 1e3, 1.0)
    # What was expected, in addition to what was measured.
    assert ours["estimate"]["fits"]
    assert ours["estimate"]["step_s"] > 0
    assert ours["planned_step_s"] > 0
    assert ours["rolled_back"] == 0
    assert ours["losses"] == pytest.approx(plain["losses"], rel=0.02)
    assert (
        "Assumed, as no probe found them: duplex_Bps, flop_per_s, host_memory_Bps, link_Bps, memory_Bps." in done.stdout
    )


@pytest.mark.full
def test_all_parts_in_dry_mode(tmp_path: Path) -> None:
    done = suite(tmp_path, "all")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in tmp_path.glob("*.json")} == {f"{name}.json" for name in PARTS}
    for name in PARTS:
        for key, row in rows_of(tmp_path, name).items():
            assert row.get("why_not", "no GPU") == "no GPU" or "O_DIRECT" in row["why_not"], (name, key, row)
    soaked = rows_of(tmp_path, "soak")["chunkmem / toy / toy cap"]["figures"]
    assert soaked["changed"] == []
    assert (tmp_path / "profile" / "timeline.html").stat().st_size > 0
    assert (tmp_path / "profile" / "trace.json.gz").stat().st_size > 0
    profiled = rows_of(tmp_path, "profile")["profile / toy / toy cap"]["figures"]
    assert profiled["trace"] is None  # no device
    assert {name for name, took_s in profiled["seconds"].items() if took_s} == {"kernels_s", "python_s"}
    assert 0 < profiled["cores"]["cores_busy"] <= os.cpu_count() + 1  # type: ignore[operator]
    predicted = rows_of(tmp_path, "scale")["predicted / toy cap"]["figures"]
    assert predicted["largest"] == "toy-3"


@pytest.mark.full
def test_the_half_hour_is_rehearsed_with_commands_and_rows_that_are_killed(tmp_path: Path) -> None:
    """The whole sequence in dry mode. Its machinery alone, in seconds: tests/unit/test_gpu_half_hour.py."""
    archive, draw = tmp_path / "results.tgz", random.Random(0)
    command = [sys.executable, "-m", "benchmarks.gpu", "half-hour", "--archive", str(archive)]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    seen: dict[str, Any] = {}
    for index in range(6):
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(draw.uniform(4, 14))  # the moment of the kill is what is drawn: no event stands for it
        begun = psutil.Process(process.pid).children(recursive=True)
        if index % 2:  # A row alone: the command continues with the next, and has its time cut a little later.
            for child in begun:
                child.kill()
            time.sleep(draw.uniform(2, 6))
            begun = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        _, alive = psutil.wait_procs(begun, timeout=20)
        assert not alive
        now = figures_of(archive, tmp_path / f"look {index}")
        assert {key: now.get(key) for key in seen} == seen
        seen = now
    statuses = []
    while 0 not in statuses and len(statuses) < 3:
        done = suite(tmp_path, "half-hour", "--archive", str(archive), "--retry")
        assert len(done.stdout) + len(done.stderr) < 12_000
        assert "## stages" in done.stdout
        statuses.append(done.returncode)
    assert statuses[-1] == 0, done.stdout + done.stderr
    assert archive.stat().st_size < 16 << 20
    now = figures_of(archive, tmp_path / "end")
    assert {key: now.get(key) for key in seen} == seen
    for stage in STAGES:
        rows = rows_of(tmp_path / "end", stage.part.NAME)
        reasons = {row.get("why_not", "no GPU") for row in rows.values()}
        assert all(why == "no GPU" or "O_DIRECT" in why for why in reasons)
        asked = [task.key for task in stage.part.tasks(setting(tmp_path, None), empty(tmp_path, stage.part.NAME))]
        assert {key for key in asked if any(fnmatch.fnmatch(key, pattern) for pattern in stage.only)} <= rows.keys()


def figures_of(archive: Path, folder: Path) -> dict[str, Any]:
    """Unpack an archive; return its rows that have figures and are not measured in each call, by part and key."""
    folder.mkdir()
    Archive(archive, folder).open()
    parts = {path.stem: rows_of(folder, path.stem) for path in folder.glob("*.json")}
    found = {f"{part}: {key}": row for part, rows in parts.items() for key, row in rows.items() if "figures" in row}
    found.pop(f"probe: {probe.BACK_END}", None)
    return found


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["nothing"], "invalid choice: 'nothing'"),
        (["probe", "--budget", "0"], "--budget must be above 0"),
        (["probe", "--host", "-1"], "--host must be above 0"),
        (["half-hour", "--archive", "r.tgz", "--out", "r"], "not allowed with argument"),
        (["probe", "--show"], "there is none of probe.json"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    try:
        status = main([*options, *([] if "--archive" in options else ["--out", str(tmp_path)])])
    except SystemExit as exited:
        status = exited.code
    assert status == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_rows_of_another_machine_are_refused(tmp_path: Path) -> None:
    Store(tmp_path / "probe.json", machine={"gpu": "NVIDIA H200"}, told={}).save()
    done = suite(tmp_path, "probe")
    assert done.returncode == 2
    assert "has rows of gpu NVIDIA H200" in done.stderr


# What would be run on a card.


def test_caps_are_those_that_the_card_is_larger_than(tmp_path: Path) -> None:
    assert [cap.label for cap in setting(tmp_path).caps(8, 24, 80)] == ["8 GiB", "24 GiB", "80 GiB", WHOLE]
    small = replace(CARD, nbytes=24 * GIB, free_nbytes=23 * GIB)
    assert [(cap.label, cap.nbytes) for cap in setting(tmp_path, small).caps(8, 24, 80)] == [
        ("8 GiB", 8 * GIB),
        (WHOLE, 22 * GIB),
    ]


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("card", [CARD, None], ids=["card", "dry"])
def test_tasks_are_plain_data_under_distinct_keys(tmp_path: Path, part: Any, card: Card | None) -> None:
    tasks = list(part.tasks(setting(tmp_path, card), empty(tmp_path, part.NAME)))
    assert len({task.key for task in tasks}) == len(tasks) > 0
    for task in tasks:
        json.dumps([dict(task.arguments), [dict(change) for change in task.alternatives]])
        assert task.limit_s < BUDGET_S


def test_speed_has_every_combination_once(tmp_path: Path) -> None:
    keys = [task.key for task in speed.tasks(setting(tmp_path), empty(tmp_path))]
    combinations = 4 * 3 * 3 + 1  # and the small one
    # chunkmem and three peers; clipping; rows of one feature each; no offload once for each model and size.
    assert len(keys) == len(set(keys)) == combinations * 4 + 1 + len(speed.VARIANTS) + 4 * 3
    ours = [key for key in keys if key.startswith(("plain", "chunkmem"))]
    assert ours[: 5 + len(speed.VARIANTS)] == [
        "plain / 6.7b / 16384 / whole card",
        "chunkmem / 6.7b / 16384 / 24 GiB",
        "chunkmem, clipping / 6.7b / 16384 / 24 GiB",
        "plain / 1.3b / 4096 / whole card",
        "chunkmem / 1.3b / 4096 / 8 GiB",
        *(f"{name} / 1.3b / 4096 / 8 GiB" for name in speed.VARIANTS),
    ]


def test_a_smaller_card_begins_with_a_model_that_needs_no_offload_there(tmp_path: Path) -> None:
    small = replace(CARD, name="NVIDIA H100 80GB HBM3", nbytes=79 * GIB, free_nbytes=78 * GIB)
    tasks = list(speed.tasks(setting(tmp_path, small), empty(tmp_path)))
    assert [task.key for task in tasks if task.key.startswith("plain")][:3] == [
        "plain / 2.7b / 16384 / whole card",
        "plain / 1.3b / 4096 / whole card",
        "plain / 1.3b / 16384 / whole card",
    ]
    assert {task.arguments["speeds"]["hardware"] for task in tasks} == {"h100"}
    host_nbytes = {task.arguments["work"]["on_disk"]: task.arguments["work"]["host_nbytes"] for task in tasks}
    assert host_nbytes == {False: int(0.8 * 128 * GIB), True: 8 * preset("1.3b", dry=False).num_params}
    # What everybody clips to is not reached, but in the row that is about it.
    norms = {task.key: task.arguments["work"]["max_norm"] for task in tasks}
    assert {key for key, norm in norms.items() if 0 < norm < 1e3} == {"chunkmem, clipping / 2.7b / 16384 / 24 GiB"}
    assert {key for key, norm in norms.items() if norm == 0} == {"chunkmem, in backward / 1.3b / 4096 / 8 GiB"}


def test_the_half_hour_is_half_an_hour_and_no_row_can_take_its_stage(tmp_path: Path) -> None:
    assert sum(stage.seconds for stage in STAGES) <= 25 * 60
    first_keys = {"scale": "predicted / 24 GiB"}
    for stage in STAGES:
        tasks = list(stage.part.tasks(setting(tmp_path), empty(tmp_path, stage.part.NAME)))
        asked = [task for task in tasks if any(fnmatch.fnmatch(task.key, pattern) for pattern in stage.only)]
        assert asked[0].key == first_keys.get(stage.part.NAME, asked[0].key)
        assert all(task.least_s < stage.seconds for task in asked)
        assert not any(task.key.startswith(PEERS) for task in asked)


def test_micro_batches_leave_half_of_the_cap() -> None:
    size = preset("13b", dry=False)
    assert speed.first_micro_batch(size, 64, 140 * GIB) == 64
    assert speed.first_micro_batch(size, 64, 24 * GIB) == 8
    assert speed.first_micro_batch(size, 4, 24 * GIB) == 4
    assert speed.first_micro_batch(size, 64, GIB // 4) == 1


def test_sizes_count_their_parameters() -> None:
    for size in (*ladder(dry=True), preset("1.3b", dry=True)):
        assert sum(param.numel() for param in build(size).parameters()) == size.num_params
    billions = {size.name: size.num_params / 1e9 for size in ladder(dry=False)}
    assert list(billions) == list(LADDER)
    # The names round: the 8B one has 8.4 billion, the 60B one 60.8.
    assert all(0.9 < billions[name] / float(name.removesuffix("B")) < 1.2 for name in billions)
    assert list(billions.values()) == sorted(billions.values())


def test_weights_differ_and_are_small() -> None:
    for param in build(ladder(dry=True)[0]).parameters():
        if param.dim() > 1:
            assert 0.01 < param.std() < 0.03
            assert not param[0].equal(param[1])


def climb(folder: Path, outcomes: dict[str, bool], predicted: str | None) -> list[str]:
    """Return the models that `scale` tries under the whole card, given which complete."""
    store = empty(folder, "scale")
    tried = []
    for task in scale.tasks(setting(folder), store):
        trainer, _, cap = task.key.partition(" / ")
        if task.key == f"predicted / {WHOLE}":
            store.put(Row(task.key, {"largest": predicted, "rungs": {}}))
        elif trainer == "chunkmem" and cap.startswith(WHOLE):
            model = task.key.split(" / ")[2]
            tried.append(model)
            fits = outcomes[model]
            store.put(Row(task.key, {"num_params": 1}) if fits else Row(task.key, why_not="x", reason=Reason.NO_ROOM))
    return tried


@pytest.mark.parametrize(
    ("largest", "predicted", "tried"),
    [
        ("12B", "12B", ["12B", "15B"]),
        ("18B", "12B", ["12B", "15B", "18B", "20B"]),
        ("8B", "12B", ["12B", "10B", "8B"]),
        ("60B", "60B", ["60B"]),
        ("2B", None, ["1B", "2B", "4B"]),
    ],
)
def test_scale_tries_until_it_knows(tmp_path: Path, largest: str, predicted: str | None, tried: list[str]) -> None:
    names = list(LADDER)
    outcomes = {name: names.index(name) <= names.index(largest) for name in names}
    assert climb(tmp_path, outcomes, predicted) == tried


def test_work_survives_json() -> None:
    work = Work("chunkmem", preset("7b", dry=False), batch=6, micro_batch=4, cap_nbytes=24 * GIB)
    assert Work.of(json.loads(json.dumps(asdict(work)))) == work
    assert work.num_micro_batches == 2
    assert work.tokens == 2 * 4 * 1024
    assert work.device_nbytes < 24 * GIB
    toy = ladder(dry=True)[0]
    assert replace(work, size=toy, cap_nbytes=None).device_nbytes == toy_cap_nbytes(toy)


def test_rates_are_the_probes_where_it_has_them() -> None:
    assert speeds(None, hardware="h100")["assumed"] == [
        "duplex_Bps", "flop_per_s", "host_memory_Bps", "link_Bps", "memory_Bps",
    ]  # fmt: skip
    assert speeds(None, hardware="h100")["memory_Bps"] < speeds(None, hardware="h200")["memory_Bps"]
    rows = {
        "copies, pinned": {
            "figures": {"h2d_Bps": {"1": 1e9, "64": 50e9}, "d2h_Bps": {"64": 45e9}, "both_Bps": {"64": 80e9}}
        },
        "host memory": {"figures": {"triad_Bps": {"1": 10e9, "16": 150e9}}},
        "matmul, bf16": {"why_not": "no GPU", "reason": "missing"},
    }
    found = speeds(rows, hardware="h200")
    assert (found["link_Bps"], found["duplex_Bps"], found["host_memory_Bps"]) == (45e9, 80e9, 150e9)
    assert found["assumed"] == ["flop_per_s", "memory_Bps"]


# Tables.


def training(**figures: Any) -> dict[str, Any]:
    lower_bounds = {"floor_s": 0.5, "binding": "link", "assumed": []}
    base = {"tokens_per_s": 1000.0, "model_flop_per_s": 2e14, "step_s": [0.9, 1.1], "stall_s": 0.25,
            "median_step_s": 1.0, "planned_step_s": 0.8, "estimate": {"fits": True, "step_s": 0.5},
            "num_alloc_retries": 3, "plan_misses": 0, "rolled_back": 2,
            "device_reserved_nbytes": 8 * GIB, "num_micro_batches": 2, "num_warm_up": 7,
            "lower_bounds": lower_bounds}  # fmt: skip
    return {"figures": {**base, **figures}, "wall_s": 1.0, "at": "2030-01-02 03:04"}


def test_speed_is_compared_with_no_offload_and_the_lower_bound() -> None:
    plain = training(tokens_per_s=4000.0)
    rows = {"plain / 7b / 4096 / whole card": plain, "chunkmem / 7b / 4096 / 24 GiB": training()}
    assert speed.cells("chunkmem / 7b / 4096 / 24 GiB", rows["chunkmem / 7b / 4096 / 24 GiB"]["figures"], rows) == [
        "1,000", "200", "25%", "1.000", "0.900 – 1.100", "0.500 s, +100%", "0.800 s, +25%", "0.250", "–", "0.500",
        "2.00", "link", "8.0", "3", "0", "2", "2", "7",
    ]  # fmt: skip
    assert speed.error_of({"estimate": {"fits": False, "limit": "host"}}, "estimate") == "does not fit: host"
    # Nothing to divide by: no offload had another number of tokens, or no room.
    assert speed.cells("chunkmem / 7b / 16384 / 24 GiB", training()["figures"], rows)[2] == "–"


def test_the_verdict_names_caps_that_are_slower_than_smaller_ones() -> None:
    rising = {str(cap): training(tokens_per_s=rate) for cap, rate in ((8, 100.0), (16, 98.0), (24, 150.0))}
    assert monotone.verdict(rising) == "No cap is slower than a smaller one by more than 3%."
    assert monotone.verdict({**rising, "32": training(tokens_per_s=120.0)}) == "32 reaches 80.0% of 24."
    assert monotone.verdict({"8": training()}) == "Fewer than two caps have figures, so there is no order to check."


def test_a_report_of_tests_is_counted(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase name="a" time="1.5"/><testcase name="b" time="0.5"><failure/></testcase>'
        '<testcase name="c"><skipped/></testcase><testcase name="d"><error/></testcase></testsuite></testsuites>'
    )
    assert correct.read_report(report) == {
        "passed": 1, "failed": 2, "skipped": 1, "tests_s": 2.0, "failures": ["b", "d"],
    }  # fmt: skip


def test_a_soak_names_what_has_changed() -> None:
    look = {"reserved_nbytes": 1, "streams": 4, "threads": 3, "files": 9, "rss_nbytes": 5, "num_alloc_retries": 0}
    assert soak.changed([look, {**look, "rss_nbytes": 6}]) == []
    assert soak.changed([look, {**look, "threads": 4}, look]) == ["threads"]
    assert soak.changed([look, {**look, "reserved_nbytes": 2, "num_alloc_retries": 1}]) == [
        "reserved_nbytes",
        "num_alloc_retries",
    ]


def test_a_back_end_that_is_a_substitute_is_named() -> None:
    native = {"storage": "swap", "lanes": "StreamLanes", "kernels": ["cpu", "cuda"]}
    assert probe_device.not_native(native) == probe_device.not_native({**native, "storage": "native"}) == []
    assert probe_device.not_native({"storage": "resize", "lanes": "BlockingLanes", "kernels": ["cpu"]}) == [
        "chunks change memory by resize, without a C++ compiler on the PATH",
        "copies are on BlockingLanes, so nothing overlaps",
        "there are no kernels of our own for cuda",
    ]


def test_a_soak_returns_what_it_has_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = preset("1.3b", dry=True)
    work = asdict(Work("chunkmem", toy, batch=2, micro_batch=2, cap_nbytes=None))
    monkeypatch.setattr(soak, "time", SimpleNamespace(monotonic=itertools.count().__next__))  # a step is a second
    figures = soak.soak(work=work, num_steps=10**6, every=2, limit_s=20)
    assert figures["num_steps"] == 21
    assert [look["step"] for look in figures["looks"]] == [12, 14, 16, 18, 20]
    with pytest.raises(TimeoutError, match="3 steps took 2 s, too few to compare anything"):
        soak.soak(work=work, num_steps=10**6, every=2, limit_s=2)


# Steps before those that are timed.


@pytest.mark.parametrize(
    ("step_s", "settled_after", "num", "has_settled"),
    [
        ([8.0, 2.0, 1.0, 1.0, 1.0], 0, 4, True),
        ([8.0, 6.0, 1.6, 1.7, 1.5, 0.72, 0.69, 0.8], 5, 7, True),  # that planning takes as long twice is not enough
        ([8.0, 6.0, 2.0, 1.5, 1.2, 1.0, 0.8, 0.6, 0.6], 0, 8, False),
        ([8.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], 99, 8, False),
        ([40.0, 30.0, 8.0, 6.0, 4.0], 0, 5, False),  # the 15 s begin behind the second
    ],
)
def test_steps_are_timed_once_they_are_alike(
    monkeypatch: pytest.MonkeyPatch, step_s: list[float], settled_after: int, num: int, has_settled: bool
) -> None:
    now_s, done = 0.0, 0

    def step(batch: torch.Tensor) -> torch.Tensor:
        nonlocal now_s, done
        now_s, done = now_s + step_s[done], done + 1
        return batch

    monkeypatch.setattr("benchmarks.gpu.warm_up.time", SimpleNamespace(perf_counter=lambda: now_s))
    training = Training(step, lambda loss, last: None, lambda: None, has_settled=lambda: done >= settled_after)
    seen: list[int] = []
    warm = warm_up(training, [[torch.tensor(2.0)], [torch.tensor(3.0)]], least=4, most=8,
                   passed=lambda so_far: seen.append(len(so_far.step_s)))  # fmt: skip
    assert warm.step_s == pytest.approx(step_s[:num])
    assert seen == list(range(1, num + 1))
    assert warm.losses == [2.0, 3.0, 2.0, 3.0, 2.0, 3.0, 2.0, 3.0][:num]
    assert warm.has_settled is has_settled


# One step at a glance.


def kernel(ts: float, dur: float, correlation: int, stream: int = 7) -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "name": "k", "ts": ts, "dur": dur,
            "args": {"stream": stream, "correlation": correlation}}  # fmt: skip


def host_call(
    ts: float, dur: float, correlation: int | None = None, name: str = "cudaLaunchKernel", tid: int = 1
) -> dict[str, Any]:
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": "cuda_runtime", "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


def test_why_a_device_idles_is_told_apart() -> None:
    #       0    100   200   300   400   500   600 µs
    # host  1 2 3            sync....  4
    # device  1111111 2222      3333          444
    # copy                 ccccc  cccc
    events = [
        host_call(0, 10, 1), host_call(10, 10, 2), host_call(20, 10, 3),
        host_call(300, 100, name="cudaEventSynchronize"), host_call(490, 10, 4),
        kernel(50, 100, 1), kernel(150, 50, 2), kernel(300, 100, 3), kernel(520, 80, 4), kernel(0, 10, 9, stream=13),
        {"ph": "X", "cat": "gpu_memcpy", "name": "HtoD", "ts": 220, "dur": 130, "args": {"stream": 13}},
        # Another thread waits for a copy, and at the end the profile for the device.
        host_call(0, 400, name="cudaEventSynchronize", tid=2), host_call(510, 90, name="cudaDeviceSynchronize"),
        {"ph": "M", "name": "process_name"},
    ]  # fmt: skip
    found = glance.of_trace(events)
    assert found is not None
    assert found.pop("host_waits") == {"cudaEventSynchronize": [1, pytest.approx(100e-6)]}
    assert found == pytest.approx(
        {
            "num_kernels": 4,
            "span_s": 550e-6,
            "median_lead_s": 85e-6,  # of 40, 130, 270 and 20 µs after a launch had returned
            "late_launch_s": 100e-6,  # 4 was not launched yet until 500
            "waited_s": 120e-6,  # 3 was launched long ago; and from 500, 4
            "copies_s": 130e-6,
            "copies_hidden_s": 50e-6,
        }
    )
    assert glance.seconds_of(events) == pytest.approx(
        {
            "kernels_s": 330e-6,
            "copies_s": 130e-6,
            "late_launch_s": 100e-6,
            "waited_s": 120e-6,
            "host_waits_s": 100e-6,
            "host_calls_s": 40e-6,
            "python_s": 360e-6,  # of 500, from the first launch to the end of the last
        }
    )
    operators = [{**kernel(ts, 20, 0), "cat": "cpu_op", "tid": 1} for ts in (0, 10, 50)]
    assert {name: took for name, took in glance.seconds_of(operators).items() if took} == pytest.approx(
        {"kernels_s": 50e-6, "python_s": 20e-6}
    )
    assert glance.of_trace([host_call(0, 10, 1)]) is None
    assert glance.busiest(events) == [["k", pytest.approx(340e-6)]]


def test_threads_that_launch_are_told_apart_by_what_they_had() -> None:
    cpu = glance.Cpu
    begin = glance.Look(10.0, {1: cpu("MainThread", 1.0, 0.1), 2: cpu("pt_autograd_0", 5.0, 0.0)}, None)
    middle = glance.Look(10.4, {1: cpu("MainThread", 1.3, 0.1), 2: cpu("pt_autograd_0", 5.0, 0.0)}, None)
    end = glance.Look(
        11.0, {1: cpu("MainThread", 1.31, 0.13), 2: cpu("pt_autograd_0", 5.5, 0.01), 3: cpu("x", 1.0, 0.2)}, None
    )
    launching = {1, 2, 99}  # what has ended is not told of
    backward = glance.part_of(middle, end, launching)
    assert backward.pop("threads") == {
        "MainThread": pytest.approx([0.01, 0.03, 0.56]),
        "pt_autograd_0": pytest.approx([0.5, 0.01, 0.09]),
    }
    assert backward == {"host_s": pytest.approx(0.6), "device_s": None}
    found = glance.of_cores(begin, end, launching, used_s=4.5)
    assert found == pytest.approx({"cores_busy": 4.5, "launching_ready_s": 0.04, "worst_ready_s": 0.2})
    assert glance.told(None, found, num_cpus=16) == (
        "4.5 of 16 cores busy; no core for the threads that launch 40.0 ms, for any thread at most 200.0 ms"
    )
    told = glance.told_of_parts({"backward": {"host_s": 0.6, "device_s": 0.5, "threads": {"a": [0.1, 0.0, 0.5]}}})
    assert told == {
        "backward: by the host": "0.6000",
        "backward: on COMPUTE": "0.5000",
        "backward: a on a core, ready without one, neither": "0.1000, 0.0000, 0.5000",
    }


def test_cores_are_counted_of_threads_that_have_ended() -> None:
    look, used_s = glance.Look.now(torch.device("cpu")), -glance.cores_s()
    until_s = time.thread_time() + 0.05

    def work() -> None:
        while time.thread_time() < 0.1:
            pass

    ended = threading.Thread(target=work)
    ended.start()
    ended.join()
    while time.thread_time() < until_s:
        pass
    used_s += glance.cores_s()
    assert used_s >= 0.14
    own = glance.Look.now(torch.device("cpu")).threads.get(threading.get_native_id())
    if own is not None:  # the system tells
        assert own.name == threading.current_thread().name
        assert own.core_s > look.threads[threading.get_native_id()].core_s


def test_a_large_trace_keeps_what_touches_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json.gz"
    events = [kernel(0, 1, 1), host_call(0, 1, 1), {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 1}]
    with gzip.open(path, "wt") as file:
        json.dump({"schemaVersion": 1, "traceEvents": events}, file)
    assert profile.cut(path) == profile.cut(path) == events
    monkeypatch.setattr(profile, "MOST_TRACE_NBYTES", 10)
    assert profile.cut(path) == events
    with gzip.open(path, "rt") as file:
        assert json.load(file) == {"schemaVersion": 1, "traceEvents": events[:2]}


# The page.


def test_the_page_is_what_the_committed_rows_give() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.filled(text, page.RESULTS) == text


def results(folder: Path, card: Card | None) -> Path:
    hardware = {
        "cpu": "a cpu",
        "num_cpus": 16,
        "usable_ram_nbytes": GIB,
        "card": None if card is None else asdict(card),
    }
    told = {"part": "speed", "command": "python -m benchmarks.gpu speed", "hardware": hardware,
            "versions": {"torch": "2.11", "python": "3.12", "cuda": "13.0"}, "left": ["a row"]}  # fmt: skip
    store = Store(folder / "speed.json", machine=MACHINE, told=told)
    store.put(Row.from_dict("chunkmem / 7b / 4096 / 24 GiB", training()))
    return folder


def test_the_page_changes_with_the_rows(tmp_path: Path) -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    filled = page.filled(text, results(tmp_path, CARD))
    assert filled != text
    assert "| chunkmem / 7b / 4096 / 24 GiB | 1,000 | 200 |" in filled
    assert (
        "NVIDIA H200, 141 GiB (driver 580, CUDA 13.0). a cpu, 16 cores, 1 GiB; torch 2.11, Python 3.12. 2030-01-02."
        in filled
    )
    assert "Not measured yet: a row." in filled
    assert "Not measured yet: `probe`, `correct`, `scale`, `monotone`, `soak`, `profile`." in filled
    assert page.filled(filled, tmp_path) == filled


def test_rows_of_a_dry_run_do_not_get_onto_the_page(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="of a dry run, whose figures say nothing"):
        page.filled(page.PAGE.read_text(encoding="utf-8"), results(tmp_path, None))


def test_a_size_is_plain_data() -> None:
    assert Size(**asdict(preset("13b", dry=False))) == preset("13b", dry=False)
