"""The example under torchrun: two processes, one of which may die."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.helpers.saved_files import last_contents

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TEXT = b"for word in ('chunk', 'slab', 'tier', 'role'):\n    print(word)\n" * 20
SEQ = 16
PRETRAIN = ("pretrain_gpt.py", "--model", "1m", "--batch", "2", "--seq", str(SEQ), "--sample", "4")
PIPELINE = ("pipeline_gpt.py", "--model", "1m", "--batch", "4", "--seq", str(SEQ), "--micro-batches", "2")
STAGES = (*PIPELINE, "--stages", "2", "--schedule", "1f1b")
REPORT = {"trace.json", "plan.json", "timeline.json", "timeline.html", "memory.png"}
WRITTEN = {"checkpoints", "sample.txt", *REPORT}
PATIENCE_S = 300


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "words.py"
    path.write_bytes(TEXT)
    return path


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXAMPLES)
    import pretrain_gpt

    return pretrain_gpt


@contextmanager
def torchrun(
    *arguments: object, log: Path, restarts: int = 0, ranks: int = 2, example: tuple[str, ...] = PRETRAIN
) -> Iterator[subprocess.Popen[bytes]]:
    """Start ranks of an example; whatever happens, nothing of them is left."""
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, "--max-restarts", restarts)
    script, *options = example
    command = [sys.executable, *map(str, (*start, EXAMPLES / script, *options, *arguments))]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    with (
        log.open("wb") as file,
        subprocess.Popen(command, env=env, stdout=file, stderr=file, cwd=log.parent) as process,
    ):
        try:
            yield process
        finally:
            if process.poll() is None:
                for each in (*psutil.Process(process.pid).children(recursive=True), process):
                    each.kill()


def finish(process: subprocess.Popen[bytes], log: Path) -> str:
    """Wait for the end, which has to be a good one; return what was said."""
    code = process.wait(PATIENCE_S)
    said = log.read_text()
    assert code == 0, said
    return said


def train(*arguments: object, log: Path, ranks: int = 2, example: tuple[str, ...] = PRETRAIN) -> str:
    with torchrun(*arguments, log=log, ranks=ranks, example=example) as process:
        return finish(process, log)


def assert_equal(left: Any, right: Any, name: str = "") -> None:
    assert type(left) is type(right), name
    if isinstance(left, dict):
        assert left.keys() == right.keys(), name
        for key, value in left.items():
            assert_equal(value, right[key], f"{name}/{key}")
    elif isinstance(left, list):
        assert_equal(dict(enumerate(left)), dict(enumerate(right)), name)
    else:
        assert torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right, name


def loss_of(model: torch.nn.Module) -> float:
    rows = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8).long().unfold(0, SEQ + 1, SEQ)
    with torch.no_grad():
        return float(model(rows[:, :-1], rows[:, 1:]))


def test_two_ranks_train_what_plain_pytorch_loads(tmp_path: Path, text: Path, example: Any) -> None:
    said = train("--steps", 6, "--save-every", 4, "--data", text, "--out", "run", log=tmp_path / "log")
    assert said.count("0/6 [") == 1  # one bar, which begins once
    assert len(re.findall("validation loss", said)) == 1
    assert re.search(r"[\d,]+ tokens/s on 2 ranks, peak [\d.]+ MiB of [\d.]+ MiB on rank 0", said)
    assert {path.name for path in (tmp_path / "run").iterdir()} == WRITTEN
    torch.manual_seed(0)
    model = example.GPT(example.PRESETS["1m"], SEQ)
    loss_before = loss_of(model)
    state = last_contents(tmp_path / "run")
    assert state["extra"]["step"] == 6
    model.load_state_dict(state["model"])
    assert loss_of(model) < loss_before - 0.5


def worker(process: subprocess.Popen[bytes], rank: int) -> psutil.Process:
    """Return the process that is a rank now."""
    (found,) = (child for child in psutil.Process(process.pid).children() if child.environ().get("RANK") == str(rank))
    return found


@pytest.mark.full
@pytest.mark.parametrize("example", [PRETRAIN, STAGES], ids=["shards", "stages"])
def test_a_killed_rank_is_started_again_and_nothing_is_lost(
    tmp_path: Path, text: Path, example: tuple[str, ...]
) -> None:
    arguments = ("--steps", 12, "--save-every", 4, "--data", text)
    train(*arguments, "--out", "whole", log=tmp_path / "whole.log", example=example)
    log, saved = tmp_path / "parts.log", tmp_path / "parts" / "checkpoints"
    saved.mkdir(parents=True)
    (saved / "step-2").write_bytes(b"of an earlier training")
    with torchrun(*arguments, "--out", "parts", log=log, restarts=1, example=example) as process:
        # `wait` comes back early if the training ends, which it must not yet.
        while not (saved / "step-4").exists():
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.05)
        workers = [worker(process, rank) for rank in range(2)]
        workers[1].send_signal(signal.SIGKILL)
        said = finish(process, log)
    (step,) = re.findall(r"started again by torchrun: goes on after step (\d+) of 12", said)
    assert int(step) in (4, 8)
    assert said.count(f"{step}/12 [00:00<?") == 1
    assert not any(each.is_running() for each in workers)
    assert not [each for each in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(each.info["cmdline"])]
    written = WRITTEN if example is PRETRAIN else {"checkpoints"}
    assert {path.name for path in saved.parent.iterdir()} == {*written, "earlier-checkpoints"}
    assert (saved.parent / "earlier-checkpoints" / "step-2").read_bytes() == b"of an earlier training"
    assert_equal(last_contents(tmp_path / "parts"), last_contents(tmp_path / "whole"))


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, pytest.param(4, marks=pytest.mark.full)])
def test_stages_go_on_as_other_ranks(tmp_path: Path, text: Path, ranks: int) -> None:
    """What two stages have saved, one process or two stages of two shards train on, with the same means."""
    out = ("--save-every", 3, "--data", text, "--out", "run")
    train("--steps", 3, *out, log=tmp_path / "stages.log", example=STAGES)
    first = last_contents(tmp_path / "run")
    example = PIPELINE if ranks == 1 else STAGES
    said = train("--steps", 5, "--resume", *out, log=tmp_path / "other.log", ranks=ranks, example=example)
    assert "3/5 [00:00<?" in said
    then = last_contents(tmp_path / "run")
    assert (first["extra"]["step"], then["extra"]["step"]) == (3, 5)
    assert then["model"].keys() == first["model"].keys()
    assert all(float(state["step"]) == 5 for state in then["optimizer"]["state"].values())


@pytest.mark.full
def test_what_ranks_refuse_is_said_with_their_number(tmp_path: Path, text: Path) -> None:
    log = tmp_path / "log"
    with torchrun("--res_check", "--data", text, log=log) as process:
        assert process.wait(PATIENCE_S) == 1
    said = log.read_text()
    assert re.search(r"pretrain_gpt\.py: rank \d: --res_check compares one process with plain PyTorch", said)


def test_a_restart_goes_on_from_its_own_training_only(tmp_path: Path, example: Any) -> None:
    saved = example.Checkpoints(tmp_path)
    first, again = (example.Ranks(num_restarts=count, may_restart=True) for count in (0, 1))
    assert saved.start(again, resume=False) == 0  # died before anything was saved
    for step in (2, 10, 4):
        saved.of(step).mkdir(parents=True)
    assert saved.start(again, resume=False) == 10
    saved.prune(keep=2)
    assert saved.steps() == [4, 10]
    assert saved.start(example.Ranks(), resume=False) == 0
    assert saved.of(10).exists()
    assert saved.start(first, resume=False) == 0
    assert saved.start(again, resume=False) == 0
    assert {each.name for each in tmp_path.iterdir()} == {"earlier-checkpoints"}


def test_a_file_is_the_old_one_or_the_new_one(tmp_path: Path, example: Any) -> None:
    path = tmp_path / "sample.txt"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), example.replacing(path) as file:
        file.write(b"ne")
        raise KeyboardInterrupt
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"old"]
    with example.replacing(path) as file:
        file.write(b"new")
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"new"]
