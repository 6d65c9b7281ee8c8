"""The command line: what each command answers, as text and as one JSON object whose keys do not change by accident."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import chunkmem
from chunkmem.cli.main import main
from chunkmem.data.layout import TensorSpec
from chunkmem.data.layout_pack import choose_slab_nbytes
from chunkmem.data.trace import Trace
from chunkmem.data.types import Tier
from chunkmem.plan.machine import Machine, host_links
from chunkmem.plan.model import Lane, Plan
from chunkmem.plan.simulate import simulate
from chunkmem.runtime.build import Recipe
from tests.helpers.traces import training_trace

ROOT = Path(__file__).parents[2]
COMMANDS = ("run", "estimate", "check", "plan", "report", "chunk-size", "config", "info", "build")
MIB = 1 << 20
MACHINE = Machine(
    device_nbytes=1,
    host_nbytes=1,
    links=host_links(h2d_Bps=1e9, d2h_Bps=2e9, latency_s=1e-5),
    device_update_Bps=5e10,
    host_update_Bps=5e9,
)

QUESTION_KEYS = {"fits", "trace", "mode", "num_moments", "num_chunks", "machine"}
PLAN_KEYS = QUESTION_KEYS | {
    *("plan", "step_s", "compute_s", "stall_s", "host_update_s", "h2d_nbytes", "d2h_nbytes", "moved_nbytes"),
    *("bound_nbytes", "bound_ratio", "certain_nbytes", "fetched", "prefetched", "peak_nbytes", "cap_nbytes"),
    *("disk_bound_read_nbytes", "disk_bound_write_nbytes"),
    *("exchanged_nbytes", "num_updates", "num_updates_on_device", "out"),
}
NO_PLAN_KEYS = QUESTION_KEYS | {"needed_nbytes", "reason"}
CHUNK_SIZE_KEYS = {"model", "device_cap_nbytes", "num_tensors", "numel", "nbytes", "best", "candidates"}
CANDIDATE_KEYS = {"chunk_numel", "chunk_nbytes", "padding_share", "num_groups", "tensors_per_group"}
INFO_KEYS = {
    "disk",
    *("chunkmem", "python", "system", "packages", "cores", "threads", "cuda", "driver", "accelerator", "ram", "tiers"),
    *("storage", "updates", "speeds", "missing"),
}
LIBRARY_KEYS = {"name", "path", "was_there", "build_s"}

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Run a command; return its status and what it printed. Nothing may be on stderr."""

    def run(*arguments: object) -> tuple[int, str]:
        status = main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        assert err == ""
        return status, out

    return run


def json_of(run: Run, *arguments: object, status: int = 0) -> dict[str, Any]:
    """The one JSON object that a command prints."""
    found, out = run(*arguments, "--json")
    assert found == status
    assert out.count("\n") == 1
    data = json.loads(out)
    assert isinstance(data, dict)
    return data


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with a trace of 12 groups of 1 MiB a chunk, `machine.json`, and a run directory with the same trace."""
    trace = training_trace(12, MIB)
    trace.save(tmp_path / "trace.json")
    (tmp_path / "run").mkdir()
    trace.save(tmp_path / "run" / "trace.json")
    MACHINE.save(tmp_path / "machine.json")
    return tmp_path


# The frame.


def test_help_as_a_process_names_every_command() -> None:
    done = subprocess.run([sys.executable, "-m", "chunkmem", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr == ""
    assert all(re.search(rf"^ +{name}\s", done.stdout, re.MULTILINE) for name in COMMANDS)
    assert "exit status: 0" in done.stdout


def test_help_imports_nothing_that_takes_long() -> None:
    program = (
        "import sys; from chunkmem.cli.main import make_parser; make_parser().format_help();"
        "print(sorted({'torch', 'numpy', 'matplotlib', 'psutil', 'tqdm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"chunkmem {chunkmem.__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_each_command_has_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert f"\n  chunkmem {name}" in out
    assert ("--json" in out) == (name != "run")


# plan


def test_plan_says_what_the_simulator_says(files: Path, run: Run) -> None:
    arguments = ("plan", files / "trace.json", "--device", "6MiB", "--machine", files / "machine.json")
    data = json_of(run, *arguments, "--out", files / "plan.json")
    trace, plan = Trace.load(files / "trace.json"), Plan.load(files / "plan.json")
    timeline = simulate(plan, trace)
    assert data.keys() == PLAN_KEYS
    assert (data["fits"], data["out"]) == (True, str(files / "plan.json"))
    assert (data["mode"], data["num_moments"], data["num_chunks"]) == ("train", 84, 48)
    assert Machine.from_dict(data["machine"]) == plan.machine
    assert (data["step_s"], data["stall_s"]) == (timeline.step_s, timeline.stall_s)
    assert data["compute_s"] == pytest.approx(trace.compute_s - 12e-3)  # its updates are HOST's
    assert data["compute_s"] + data["stall_s"] + data["host_update_s"] == pytest.approx(data["step_s"])
    moved = timeline.moved_nbytes
    assert (data["h2d_nbytes"], data["d2h_nbytes"]) == (moved[Lane.H2D], moved[Lane.D2H]) == (19 * MIB, 12 * MIB)
    # Each gradient goes to HOST and each weight comes from there, 24; 7 chunks of forward are missed in backward.
    assert (data["moved_nbytes"], data["bound_nbytes"], data["certain_nbytes"]) == (31 * MIB, 31 * MIB, 24 * MIB)
    assert data["bound_ratio"] == 1.0
    assert (data["fetched"], data["prefetched"]) == (timeline.fetched, timeline.prefetched)
    assert data["peak_nbytes"] == {tier.value: timeline.peak_nbytes[tier] for tier in (Tier.DEVICE, Tier.HOST)}
    assert data["cap_nbytes"] == {"device": 6 * MIB, "host": 48 * MIB}
    assert (data["num_updates"], data["num_updates_on_device"]) == (12, 0)

    status, text = run(*arguments)
    assert status == 0
    rows = ("to DEVICE .* 19.00 MiB", "to HOST .* 12.00 MiB", "lower bound .* 31.00 MiB", r"lower bound +1\.000")
    for row in (*rows, "step, as predicted", "DEVICE +6.00 MiB +6.00 MiB", f"plan: {plan.name}", "updates: 0 of 12"):
        assert re.search(row, text), row


def test_plan_takes_a_run_directory(files: Path, run: Run) -> None:
    common = ("--device", "6MiB", "--machine", files / "machine.json")
    one, other = (json_of(run, "plan", files / name, *common) for name in ("run", "trace.json"))
    assert one.pop("trace") == str(files / "run" / "trace.json")
    assert other.pop("trace") == str(files / "trace.json")
    assert one == other


def test_the_machine_is_a_saved_one_or_a_saved_plan_s_with_other_caps_and_speeds(files: Path, run: Run) -> None:
    trace = files / "trace.json"
    json_of(run, "plan", trace, "--device", "6MiB", "--machine", files / "machine.json", "--out", files / "plan.json")
    data = json_of(run, "plan", trace, "--device", "8MiB", "--machine", files / "plan.json", "--h2d", "25GB/s")
    machine = Machine.from_dict(data["machine"])
    assert (machine.device_nbytes, machine.host_nbytes) == (8 * MIB, 48 * MIB)
    assert machine.links == host_links(h2d_Bps=25e9, d2h_Bps=2e9, latency_s=1e-5)
    assert (machine.device_update_Bps, machine.host_update_Bps) == (5e10, 5e9)
    options = ("--device", "8MiB", "--host", "100MiB", "--machine", files / "machine.json", "--d2h", "1000000")
    machine = Machine.from_dict(json_of(run, "plan", trace, *options)["machine"])
    assert machine.host_nbytes == 100 * MIB
    assert machine.links == host_links(h2d_Bps=1e9, d2h_Bps=1e6, latency_s=1e-5)


def test_without_a_machine_this_one_is_measured_once(
    files: Path, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    first = json_of(run, "plan", files / "trace.json", "--device", "6MiB")["machine"]
    assert len(list((tmp_path / ".cache" / "chunkmem").iterdir())) == 1
    assert json_of(run, "plan", files / "trace.json", "--device", "6MiB")["machine"] == first
    speeds = json_of(run, "info")["speeds"]
    latency_s, updates = speeds["latency_s"], ("device_update_Bps", "host_update_Bps")
    assert sorted(first["links"]) == [
        ["device", "host", speeds["d2h_Bps"], latency_s],
        ["host", "device", speeds["h2d_Bps"], latency_s],
    ]
    assert [first[name] for name in updates] == [speeds[name] for name in updates]


def test_states_go_where_the_ratio_lets_them(files: Path, run: Run) -> None:
    common = ("plan", files / "trace.json", "--device", "36MiB", "--machine", files / "machine.json")
    some = json_of(run, *common)
    none = json_of(run, *common, "--margin-use-ratio", "0")
    assert 0 < some["num_updates_on_device"] < 12
    assert none["num_updates_on_device"] == 0
    everything = json_of(run, "plan", files / "trace.json", "--device", "1GiB", "--machine", files / "machine.json")
    assert (everything["num_updates_on_device"], everything["moved_nbytes"], everything["bound_ratio"]) == (12, 0, 1.0)


def test_what_does_not_fit_names_the_bytes_that_do(files: Path, run: Run) -> None:
    common = ("plan", files / "trace.json", "--machine", files / "machine.json")
    data = json_of(run, *common, "--device", "1MiB", status=1)
    assert data.keys() == NO_PLAN_KEYS
    assert (data["fits"], data["needed_nbytes"]) == (False, 2 * MIB)
    assert data["reason"].endswith(
        "raise memory.device to at least 2.00 MiB (2097152 bytes), or lower default_chunk_size"
    )
    assert json_of(run, *common, "--device", data["needed_nbytes"])["fits"]
    assert run(*common, "--device", "1MiB") == (1, f"does not fit: {data['reason']}\n")


def test_what_does_not_fit_host_says_so(files: Path, run: Run) -> None:
    common = ("plan", files / "trace.json", "--machine", files / "machine.json", "--device", "6MiB")
    data = json_of(run, *common, "--host", "1MiB", status=1)
    assert "on HOST, which may hold 1.00 MiB; raise memory.host to at least" in data["reason"]
    assert "DEVICE" in json_of(run, *common, "--host", "0", status=1)["reason"]  # nowhere else to go


# chunk-size


def test_chunk_size_marks_the_size_that_auto_takes(run: Run) -> None:
    data = json_of(run, "chunk-size", "gpt:125m", "--device", "8GiB")
    assert data.keys() == CHUNK_SIZE_KEYS
    assert all(candidate.keys() == CANDIDATE_KEYS for candidate in data["candidates"])
    assert (data["model"], data["device_cap_nbytes"]) == ("gpt:125m", 8 << 30)
    assert data["nbytes"] == 4 * data["numel"]
    assert data["best"] in data["candidates"]
    sizes = [candidate["chunk_nbytes"] for candidate in data["candidates"]]
    assert sizes == sorted(set(sizes))
    status, text = run("chunk-size", "gpt:125m", "--device", "8GiB")
    assert status == 0
    assert f'"default_chunk_size": {data["best"]["chunk_numel"]}' in text.splitlines()
    marked = [line for line in text.splitlines() if line.endswith("<- best")]
    assert [line.split()[0] for line in marked] == [str(data["best"]["chunk_numel"])]


def test_chunk_size_of_a_function_s_model_takes_no_memory(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (
        "from torch import nn\n"
        "def make():\n"
        "    return nn.Sequential(*(nn.Linear(1 << 18, 1 << 18, bias=False) for _ in range(4))), None\n"  # 1 TiB
    )
    (tmp_path / "model_of_a_tebibyte.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    data = json_of(run, "chunk-size", "model_of_a_tebibyte:make", "--device", "80GiB")
    assert (data["num_tensors"], data["nbytes"]) == (4, 1 << 40)
    assert data["best"]["padding_share"] == 0.0
    tensors = [TensorSpec(f"{index}.weight", (1 << 18, 1 << 18), "float32", 4) for index in range(4)]
    chosen = choose_slab_nbytes(tensors, chunk_numel=data["best"]["chunk_numel"], device_cap_nbytes=80 << 30)
    assert chosen == data["best"]["chunk_nbytes"] == choose_slab_nbytes(
        tensors, chunk_numel=None, device_cap_nbytes=80 << 30
    )  # fmt: skip


def test_chunk_size_without_a_cap_takes_this_machine_s(run: Run) -> None:
    cap_nbytes = json_of(run, "info")["tiers"]["device_nbytes"]
    assert json_of(run, "chunk-size", "gpt:125m")["device_cap_nbytes"] == cap_nbytes


# info


def test_info_says_what_is_there(run: Run) -> None:
    data = json_of(run, "info")
    assert data.keys() == INFO_KEYS
    assert data["chunkmem"] in (chunkmem.__version__, None)  # None: run from a checkout
    assert data["python"] == ".".join(map(str, sys.version_info[:3]))
    assert data["packages"]["torch"]
    assert 0 < data["ram"]["nbytes"] <= data["ram"]["machine_nbytes"]
    assert data["speeds"]["h2d_Bps"] > 0
    assert data["storage"]["name"] in ("swap", "native", "resize")
    lacking = (data["chunkmem"], data["accelerator"], data["cuda"], data["driver"], *data["packages"].values())
    assert len(data["missing"]) == lacking.count(None)
    status, text = run("info")
    assert status == 0
    assert all(word in text for word in ("HOST to DEVICE", "GB/s", "RAM", *data["missing"]))


def test_info_answers_where_nothing_works(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("driver and library\nversion mismatch")

    monkeypatch.setattr("chunkmem.runtime.device.ComputeDevice.default", broken)
    monkeypatch.setattr("chunkmem.runtime.storage.default_backend", broken)
    monkeypatch.setattr("importlib.metadata.version", broken)
    data = json_of(run, "info")
    assert all(data[key] is None for key in ("accelerator", "tiers", "speeds", "storage"))
    assert "speeds: RuntimeError: driver and library version mismatch" in data["missing"]
    assert run("info")[0] == 0


def test_info_answers_without_torch() -> None:
    program = "import sys; sys.modules['torch'] = None; from chunkmem.cli.main import main; sys.exit(main(['info']))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "speeds: ModuleNotFoundError: import of torch halted" in done.stdout


# build


@pytest.mark.full
def test_build_builds_once(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "torch"))
    data = json_of(run, "build")
    assert data.keys() == {"libraries", "torch", "notes"}
    for library in data["libraries"]:
        assert library.keys() == LIBRARY_KEYS
        path = Path(library["path"])
        assert path.is_file()
        assert path.is_relative_to(tmp_path)
        assert (library["was_there"], library["build_s"] > 0) == (False, True)
        os.utime(path, (0, 0))  # as if it had been built long ago
    assert all(library["was_there"] for library in json_of(run, "build")["libraries"])
    status, text = run("build")
    assert status == 0
    assert text.splitlines()[:2] == [data["libraries"][0]["path"], "was there already"]


@pytest.mark.parametrize("has_nvcc", [True, False])
def test_build_builds_kernels_for_gpus(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_nvcc: bool
) -> None:
    monkeypatch.setattr("torch.version.cuda", "13.0")
    made: list[str] = []

    def ensure(recipe: Recipe, cache_dir: Path) -> Path:
        made.append(recipe.name)
        return Path(__file__)

    monkeypatch.setattr("chunkmem.runtime.build.ensure_library", ensure)
    compiler = ("nvcc",) if has_nvcc else ()
    monkeypatch.setattr(
        "chunkmem.runtime.build.cuda_recipe", lambda nvcc=None: Recipe("kernels-cuda", compiler, (), ())
    )
    status, text = run("build")
    assert status == 0
    assert (made[:2] == ["kernels", "kernels-cuda"]) == has_nvcc
    assert ("there is no nvcc on the PATH" in text) != has_nvcc
