"""`chunkmem plan --stages` and `chunkmem estimate --stages`: what they answer, and what they refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest

from chunkmem.cli.main import main
from tests.helpers.traces import training_trace

MIB = 1 << 20
PLAN_KEYS = {"fits", "source", "num_stages", "num_blocks", "stages", "tied"}
ESTIMATE_KEYS = {
    *("fits", "model", "num_devices", "num_micro_batches", "schedule", "step_s", "bubble", "bubbles", "num_in_flight"),
    *("reason", "schedules", "stages", "tied", "picture"),
}
STAGE_KEYS = {"blocks", "weight_nbytes", "nbytes", "forward_s", "backward_s", "share", "output_nbytes"}
NO_KEYS = {"fits", "needed_nbytes", "cap_nbytes", "reason"}
TOWER = "tests.helpers.estimated:tower"

Ask = Callable[..., Any]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """Run a command; return its JSON object."""

    def ask(*words: object, status: int = 0) -> Any:
        assert main([*map(str, words), "--json"]) == status
        out, err = capsys.readouterr()
        assert err == ""
        return json.loads(out)

    return ask


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that cannot be answered; return the line that it says why in."""

    def refused(*words: object) -> str:
        try:
            status = main([*map(str, words)])
        except SystemExit as error:
            status = int(str(error.code))
        out, err = capsys.readouterr()
        assert (status, out, err.count("\n")) == (2, "", 1)
        return err

    return refused


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A run directory with a trace of 6 blocks of 4 chunks of 1 MiB each."""
    training_trace(6, MIB).save(tmp_path / "trace.json")
    return tmp_path


def test_stages_of_a_recorded_step(trace: Path, ask: Ask, capsys: pytest.CaptureFixture[str]) -> None:
    said = ask("plan", trace, "--stages", 3)
    assert said.keys() == PLAN_KEYS
    assert (said["fits"], said["source"], said["num_blocks"], said["tied"]) == (True, str(trace), 6, {})
    assert [stage["blocks"] for stage in said["stages"]] == [
        ["blocks.0", "blocks.1"],
        ["blocks.2", "blocks.3"],
        ["blocks.4", "blocks.5"],
    ]
    for stage in said["stages"]:
        assert stage.keys() == STAGE_KEYS
        assert (stage["weight_nbytes"], stage["nbytes"]) == (2 * MIB, 8 * MIB)
        assert stage["forward_s"] == pytest.approx(2e-3)
        assert stage["backward_s"] == pytest.approx(4e-3)
        assert stage["share"] == pytest.approx(1 / 3)
    assert ask("plan", trace / "trace.json", "--stages", 3)["stages"] == said["stages"]
    assert main(["plan", str(trace), "--stages", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{trace}: 6 blocks in 3 stages"
    assert lines[2].split() == ["stage", "blocks", "weights", "model", "data", "computes", "share"]
    assert " ".join(lines[3].split()) == "0: blocks.0 to blocks.1 2 2.00 MiB 8.00 MiB 6.0 ms 33.3 %"
    assert lines[-1] == "the slowest stage takes 1.00 x the mean; no other cut is faster"


@pytest.mark.few(1)
@pytest.mark.parametrize("num_stages", [2, 4])
def test_stages_of_a_model_are_the_best_ones(ask: Ask, num_stages: int) -> None:
    whole = ask("plan", "gpt:1m", "--stages", 8)["stages"]
    seconds = [stage["forward_s"] + stage["backward_s"] for stage in whole]
    best_s = min(
        max(sum(seconds[start:stop]) for start, stop in pairwise([0, *cuts, len(seconds)]))
        for cuts in combinations(range(1, len(seconds)), num_stages - 1)
    )
    said = ask("plan", "gpt:1m", "--stages", num_stages)
    found_s = max(stage["forward_s"] + stage["backward_s"] for stage in said["stages"])
    assert found_s <= 1.05 * best_s
    assert said["tied"] == {"embedding.weight": [0, num_stages - 1]}
    # Between blocks go samples x positions x width x 4 bytes.
    assert [stage["output_nbytes"] for stage in said["stages"]] == [2048 * 128 * 4] * (num_stages - 1) + [0]


def test_a_cap_bounds_the_bytes_of_a_stage(trace: Path, ask: Ask) -> None:
    assert ask("plan", trace, "--stages", 3, "--device", "2MiB", "--host", "6MiB")["fits"]
    said = ask("plan", trace, "--stages", 3, "--device", "2MiB", "--host", "5MiB", status=1)
    assert said.keys() == NO_KEYS | {"source", "num_stages", "num_blocks"}
    assert (said["needed_nbytes"], said["cap_nbytes"]) == (8 * MIB, 7 * MIB)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--stages", 7), "7 stages, and the model has 6 blocks"),
        (("--stages", 0), "argument --stages: '0' is not a whole number"),
        (("--stages", 2, "--h2d", "1GB", "--out", "x"), "--stages cannot be given with --h2d or --out"),
        (("--stages", 2, "--host", "1GB"), "--host bounds the bytes of a stage together with --device"),
        (
            ("--mesh", "tp=2"),
            "--mesh 'tp=2': TRACE is of one rank, and has its chunks and local parts alone: ask `chunk",
        ),
        (("--device", "8MiB", "--keep-ties"), "--keep-ties is about stages; give --stages, too"),
    ],
)
def test_what_plan_refuses(trace: Path, refused: Callable[..., str], words: tuple[object, ...], says: str) -> None:
    assert says in refused("plan", trace, *words)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("nowhere", "nowhere: cannot be read: No such file or directory"),
        (".", "trace.json: cannot be read: No such file or directory"),
        ("gpt:8k", "MODEL 'gpt:8k' is not a size of GPT"),
        ("config.json", "config.json"),
    ],
)
def test_without_blocks_there_are_no_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str], source: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert says in refused("plan", source, "--stages", 2)


def test_ties_may_be_kept(refused: Callable[..., str]) -> None:
    message = "2 stages, and the model has 8 blocks, which ties keep together in 1 groups"
    assert message in refused("plan", "gpt:1m", "--stages", 2, "--keep-ties")


def test_a_pipeline_is_estimated(ask: Ask, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("estimate", TOWER, "--stages", 3, "--micro-batches", 4, "--batch", 8)
    said = ask(*words)
    assert said.keys() == ESTIMATE_KEYS
    assert (said["num_devices"], said["num_micro_batches"]) == (3, 4)
    assert {each["schedule"] for each in said["schedules"]} == {"gpipe", "1f1b", "interleaved", "looped-bfs"}
    assert said["schedules"][0]["step_s"] == said["step_s"]
    assert said["step_s"] <= 1.01 * min(each["step_s"] for each in said["schedules"])
    computed_s = sum(stage["forward_s"] + stage["backward_s"] for stage in said["stages"])
    assert 3 * (1 - said["bubble"]) * said["step_s"] == pytest.approx(computed_s)
    assert main([str(word) for word in words]) == 0
    out = capsys.readouterr().out
    assert "a pipeline over 3 devices, 4 micro-batches of 2 samples" in out
    assert f"schedule: {said['reason']}" in out


def test_one_device_has_nothing_tied(ask: Ask) -> None:
    said = ask("estimate", "gpt:1m", "--stages", 1, "--seq", 64)
    assert (said["schedule"], said["bubble"], said["tied"]) == ("by-layer", 0.0, {})
    assert ask("estimate", "gpt:1m", "--stages", 2, "--seq", 64)["tied"].keys() == {"embedding.weight"}


def test_schedules_are_drawn(ask: Ask, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "schedules.png"
    assert ask("estimate", TOWER, "--stages", 2, "--picture", path)["picture"] == str(path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_micro_batches_are_as_many_as_the_batch_has(ask: Ask) -> None:
    for asked, num in ((None, 4), (3, 2), (9, 4)):
        words = () if asked is None else ("--micro-batches", asked)
        assert ask("estimate", TOWER, "--stages", 2, "--batch", 4, *words)["num_micro_batches"] == num


def test_a_stage_has_to_fit(ask: Ask) -> None:
    said = ask(
        "estimate", TOWER, "--stages", 2, "--device", "100KiB", "--host", "50KiB", "--chunk-size", 4160, status=1
    )
    # Three of six blocks, 16 bytes a parameter.
    assert said["needed_nbytes"] >= 16 * 3 * (64 * 64 + 64)
    assert said["cap_nbytes"] == 150 << 10


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--micro-batches", 4), "--micro-batches is about a pipeline; give --stages, too"),
        (("--picture", "x.png"), "--picture is about a pipeline; give --stages, too"),
        (("--stages", 2, "--picture", "nowhere/x.png"), "name another directory with --picture"),
        (("--stages", 2, "--world", 2), "--stages cannot be given with --world"),
        (("--stages", 3, "--nnodes", 2), "3 ranks (--world or --stages) on 2 machines"),
        (("--stages", 9), "9 stages, and the model has 6 blocks"),
    ],
)
def test_what_estimate_refuses(refused: Callable[..., str], words: tuple[object, ...], says: str) -> None:
    assert says in refused("estimate", TOWER, *words)
