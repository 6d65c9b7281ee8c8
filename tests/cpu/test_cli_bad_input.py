"""What a user can get wrong on the command line: one line on stderr, exit status 2, and nothing is overwritten."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from chunkmem.cli.main import main
from chunkmem.data.trace import Mode, Moment, Trace
from chunkmem.plan.machine import Machine, host_links
from chunkmem.plan.planner import make_plan
from tests.helpers.traces import training_trace

MIB = 1 << 20
MACHINE = Machine(device_nbytes=6 * MIB, host_nbytes=1 << 30, links=host_links(h2d_Bps=1e9, d2h_Bps=1e9))
EARLIER = "what was there before"

Refused = Callable[..., str]


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str]) -> Refused:
    """Run a command that has to be refused, and return the line that says why."""

    def refused(*arguments: object) -> str:
        try:
            status: object = main([str(argument) for argument in arguments])
        except SystemExit as exited:
            status = exited.code
        out, err = capfd.readouterr()
        assert (status, out) == (2, "")
        assert err.count("\n") == 1
        assert err.endswith("\n")
        assert err.startswith("chunkmem")
        return err

    return refused


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The working directory: good files, and everything that can be wrong with one."""
    trace = training_trace(4, MIB)
    trace.save(tmp_path / "trace.json")
    MACHINE.save(tmp_path / "machine.json")
    plan = make_plan(trace, MACHINE)
    plan.save(tmp_path / "plan.json")
    text = (tmp_path / "trace.json").read_text()
    (tmp_path / "truncated.json").write_text(text[: len(text) // 2])
    (tmp_path / "broken.json").write_text("{not json}")
    (tmp_path / "empty.json").write_text("")
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "binary.json").write_bytes(b"\x80\x81\xff")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    values = trace.to_dict()
    values["moments"][0][3] = float("nan")
    (tmp_path / "nan.json").write_text(json.dumps(values))
    (tmp_path / "newer.json").write_text(json.dumps({**trace.to_dict(), "version": 99}))
    Trace(Mode.TRAIN, "", {}, ()).save(tmp_path / "no_moments.json")
    (tmp_path / "damaged_plan.json").write_text(json.dumps({**plan.to_dict(), "name": 1}))
    speeds = MACHINE.to_dict()["links"]
    slow = {**MACHINE.to_dict(), "links": [["host", "device", 0.0, 0.0], *speeds[:1]]}
    unknown = {**MACHINE.to_dict(), "links": [["host", "device", 1e9, float("nan")], *speeds[:1]]}
    (tmp_path / "slow_machine.json").write_text(json.dumps(slow))
    (tmp_path / "nan_machine.json").write_text(json.dumps(unknown))
    (tmp_path / "directory").mkdir()
    return tmp_path


@pytest.fixture(autouse=True)
def in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


# The frame.


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "required: COMMAND"),
        (("plam",), "invalid choice: 'plam'"),
        (("--plan",), "required: COMMAND"),
        (("plan",), "required: TRACE, --device"),
        (("plan", "trace.json"), "required: --device"),
        (("plan", "--device", "6MiB"), "required: TRACE"),
        (("plan", "trace.json", "plan.json", "--device", "6MiB"), "unrecognized arguments: plan.json"),
        (("plan", "trace.json", "--device"), "--device: expected one argument"),
        (("plan", "trace.json", "--device", "6MiB", "--gpu", "1"), "unrecognized arguments: --gpu 1"),
        (("info", "cpu"), "unrecognized arguments: cpu"),
        (("build", "--fast"), "unrecognized arguments: --fast"),
        (("chunk-size",), "required: MODEL"),
        (("chunk-size", "gpt:125m", "8GiB"), "unrecognized arguments: 8GiB"),
    ],
)
def test_wrong_words(refused: Refused, words: tuple[str, ...], says: str) -> None:
    assert says in refused(*words)


# plan: the trace


@pytest.mark.parametrize(
    ("trace", "says"),
    [
        ("missing.json", "missing.json: cannot be read: No such file or directory"),
        ("directory", "directory/trace.json: cannot be read: No such file or directory"),
        ("trace.json/inside", "trace.json/inside: cannot be read: Not a directory"),
        ("truncated.json", "truncated.json: the file looks truncated"),
        ("broken.json", "broken.json: not JSON: line 1"),
        ("empty.json", "empty.json: the file is empty"),
        ("list.json", "list.json: the content is [1, 2], but must be an object"),
        ("binary.json", "binary.json: byte 0 is not UTF-8"),
        ("deep.json", "deep.json: the content is nested too deeply"),
        ("nan.json", "nan.json: moments[0][3] is nan, but must be a finite number of seconds"),
        ("newer.json", "newer.json: version of this chunkmem trace is 99"),
        ("plan.json", "plan.json: this has the format 'chunkmem plan', but a \"chunkmem trace\" is needed"),
        ("no_moments.json", "no_moments.json: the trace has no moments"),
        ("", "'' is not the path of a file"),
        ("a\nb", "a\\nb: cannot be read"),
        ("\udcff.json", "cannot be read"),
        ("nul\0.json", "is not the path of a file"),
        ("x" * 5000, "File name too long"),
    ],
)
def test_traces_that_cannot_be_read(refused: Refused, trace: str, says: str) -> None:
    assert says in refused("plan", trace, "--device", "6MiB", "--machine", "machine.json")


# Sizes, speeds, shares


@pytest.mark.few(24)
@pytest.mark.parametrize(
    "size", ["", "-1", "-1GiB", "nan", "inf", "0", "0GiB", "8 apples", "1e9", "8gib", "9EiB", "1" * 400]
)
@pytest.mark.parametrize("option", ["--device", "--host", "--h2d", "--d2h"])
def test_sizes_that_are_none(refused: Refused, option: str, size: str) -> None:
    if (option, size) in (("--host", "0"), ("--host", "0GiB")):
        size = "-0"  # 0 is a size there: everything stays on DEVICE
    options = {"--device": "6MiB", option: size}
    given = [f"{name}={value}" for name, value in options.items()]
    assert f" {option}" in refused("plan", "trace.json", "--machine", "machine.json", *given)


@pytest.mark.parametrize("share", ["nan", "-0.1", "1.1", "inf", "half", ""])
def test_shares_that_are_none(refused: Refused, share: str) -> None:
    said = refused("plan", "trace.json", "--device=6MiB", "--machine=machine.json", f"--margin-use-ratio={share}")
    assert "--margin-use-ratio is" in said
    assert "must be a number from 0 to 1" in said


# plan: the machine


@pytest.mark.parametrize(
    ("machine", "says"),
    [
        ("missing.json", "missing.json: cannot be read: No such file or directory"),
        ("directory", "directory: cannot be read: Is a directory"),
        ("machine.json/inside", "cannot be read: Not a directory"),
        ("broken.json", "broken.json: not JSON"),
        ("empty.json", "empty.json: the file is empty"),
        ("trace.json", "this has the format 'chunkmem trace', but a \"chunkmem machine\" is needed"),
        ("damaged_plan.json", "damaged_plan.json: name is 1, but must be a string"),
        ("nan_machine.json", "nan_machine.json: links[0][3] is nan, but must be"),
        ("slow_machine.json", "slow_machine.json: machine: the link from HOST to DEVICE is 0.0 bytes/s"),
    ],
)
def test_machines_that_are_none(refused: Refused, machine: str, says: str) -> None:
    assert says in refused("plan", "trace.json", "--device", "6MiB", "--machine", machine)


# plan: --out


@pytest.mark.parametrize(
    ("out", "says"),
    [
        ("directory", "directory cannot be written: it is not a regular file"),
        ("missing/plan.json", "missing/plan.json cannot be written: No such file or directory; create the directory"),
        ("trace.json/plan.json", "trace.json/plan.json cannot be written: Not a directory"),
        ("", "'' is not the path of a file"),
    ],
)
def test_plans_that_cannot_be_written(refused: Refused, folder: Path, out: str, says: str) -> None:
    before = contents(folder)
    assert says in refused("plan", "trace.json", "--device", "6MiB", "--machine", "machine.json", "--out", out)
    assert contents(folder) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ("broken.json", "--device=6MiB", "--machine=machine.json"),
        ("missing.json", "--device=6MiB", "--machine=machine.json"),
        ("trace.json", "--device=nan", "--machine=machine.json"),
        ("trace.json", "--device=6MiB", "--machine=broken.json"),
        ("trace.json", "--device=6MiB", "--machine=machine.json", "--margin-use-ratio=2"),
    ],
)
def test_an_earlier_plan_outlives_a_failure(refused: Refused, folder: Path, arguments: tuple[str, ...]) -> None:
    (folder / "earlier.json").write_text(EARLIER)
    before = contents(folder)
    refused("plan", *arguments, "--out", "earlier.json")
    assert contents(folder) == before


def test_an_earlier_plan_outlives_one_that_does_not_fit(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "earlier.json").write_text(EARLIER)
    before = contents(folder)
    for cap in (("--device=1MiB",), ("--device=6MiB", "--host=1MiB")):
        assert main(["plan", "trace.json", "--machine=machine.json", *cap, "--out=earlier.json"]) == 1
    assert contents(folder) == before
    assert capfd.readouterr().err == ""


def test_labels_that_cannot_be_printed_are_escaped(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trace = training_trace(1, MIB)
    label = "line\nbreak \udcff"
    moments = tuple(Moment(m.kind, m.chunk, label) for m in trace.moments)
    Trace(trace.mode, trace.layout, trace.chunk_nbytes, moments).save(folder / "odd.json")
    assert main(["plan", "odd.json", "--device=1MiB", "--machine=machine.json"]) == 1
    assert "line break \\udcff" in capfd.readouterr().out


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# chunk-size


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("", "MODEL '' is not known"),
        ("gpt:9000z", "is not a size of GPT; there are gpt:1m, gpt:125m"),
        ("missing.json", "missing.json cannot be read: No such file or directory"),
        ("no_such_module:make", "No module named 'no_such_module'"),
        ("models_of_the_tests:nobody", "has no attribute 'nobody'"),
        ("models_of_the_tests:number", "is a int, not a function"),
        ("models_of_the_tests:wrong", "returned a int; return (model, step)"),
        ("models_of_the_tests:fails", "cannot be built: ValueError: two lines"),
        ("models_of_the_tests:bare", "has no parameters"),
    ],
)
def test_models_that_are_none(refused: Refused, folder: Path, model: str, says: str) -> None:
    (folder / "models_of_the_tests.py").write_text(
        "from torch import nn\n"
        "number = 1\n"
        "def wrong(): return 1\n"
        "def fails(): raise ValueError('two\\nlines')\n"
        "def bare(): return nn.ReLU(), None\n"
    )
    assert says in refused("chunk-size", model, "--device", "8GiB")


@pytest.mark.parametrize("size", ["", "-1", "nan", "0", "1e400GiB", "9EiB"])
def test_caps_that_are_none(refused: Refused, size: str) -> None:
    assert " --device" in refused("chunk-size", "gpt:125m", f"--device={size}")


# build


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("CXX", "no-such-compiler", "there is no compiler for kernels on the PATH; install one"),
        ("CXX", "false", "false ended with status 1"),
        ("XDG_CACHE_HOME", "machine.json/inside", "Not a directory"),
    ],
)
def test_build_without_what_it_takes(
    refused: Refused, folder: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, says: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "built"))
    monkeypatch.setenv(variable, value)
    assert says in refused("build")
