"""`chunkmem verify`: a checkpoint is looked over without a model, and what it finds is what `manager.load` would."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

import chunkmem
from chunkmem.checkpoints.converting import Format, convert
from chunkmem.checkpoints.verifying import verify
from chunkmem.cli.main import main
from tests.cpu.test_checkpoint_files import damaged
from tests.cpu.test_odd_files import Runs
from tests.helpers.saved_training import Saved


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    training = Saved("bf16", built_low=True, tiled=True).open()
    training.run(1)
    training.manager.save(tmp_path / "saved", training.optimizer, extra={"step": 1})
    return tmp_path / "saved"


def asked(path: Path, capsys: pytest.CaptureFixture[str], status: int) -> dict[str, Any]:
    assert main(["verify", str(path)]) == status
    text = capsys.readouterr().out
    assert main(["verify", str(path), "--json"]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["whole"] is (status == 0)
    assert text.splitlines()[-1] == ("damaged" if status else "whole")
    assert all(problem in text for problem in found["problems"][:20])
    return found


def test_what_is_whole(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(saved, capsys, 0)
    assert (found["format"], found["compared_with"]) == ("dcp", "checksums.json")
    assert set(found["parts"]) == {"model", "optimizer", "extra"}
    assert found["parts"]["extra"]["num_objects"] == 1
    convert(saved, tmp_path / "all.pt", Format.TORCH, max_shard_nbytes=1 << 20)
    state = torch.load(tmp_path / "all.pt", weights_only=True)
    assert found["parts"]["model"]["num_tensors"] == len(state["model"])
    convert(saved, tmp_path / "hf", Format.SAFETENSORS, max_shard_nbytes=64 << 10)
    dcp.save(state, checkpoint_id=tmp_path / "foreign", no_dist=True)
    for name, form in (("all.pt", "torch"), ("hf", "safetensors"), ("foreign", "dcp")):
        found = asked(tmp_path / name, capsys, 0)
        assert found["format"] == form
        assert sum(part["num_tensors"] for part in found["parts"].values()) >= len(state["model"]) - 1  # one is tied
        assert "checksums.json" not in found["compared_with"]


def test_it_finds_what_loading_does(saved: Path) -> None:
    training = Saved("bf16", built_low=True).open()
    for what, path, content in damaged(saved):
        whole = path.read_bytes()
        path.write_bytes(content)
        found, said = verify(saved), ""
        try:
            training.manager.load(saved, training.optimizer)
        except chunkmem.CheckpointError as error:
            said = str(error)
        assert found.is_whole is not bool(said), (what, path)
        assert found.is_whole or any(problem in said for problem in found.problems), (what, path)
        path.write_bytes(whole)
    assert verify(saved).is_whole


def test_all_that_is_damaged_is_named(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, *_, last = sorted(saved.glob("*.distcp")) * 2
    os.truncate(first, 100)
    found = asked(saved, capsys, 1)
    assert len(found["problems"]) == sum(part["num_damaged"] for part in found["parts"].values()) > 1
    assert all(first.name in problem for problem in found["problems"])
    last.unlink()
    assert any("No such file" in problem for problem in asked(saved, capsys, 1)["problems"])


def test_nothing_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark = tmp_path / "mark"
    Saved().open().manager.save(tmp_path / "saved", extra={"odd": Runs(mark)})
    torch.save({"odd": Runs(mark)}, tmp_path / "odd.pt")
    for name in ("saved", "odd.pt"):
        assert asked(tmp_path / name, capsys, 0)["needs_trust"] == ["posix.mkdir"]
    assert not mark.exists()


def test_safetensors_that_are_cut(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert(saved, tmp_path / "hf", Format.SAFETENSORS, max_shard_nbytes=64 << 10)
    first, second, *_ = sorted((tmp_path / "hf").glob("*.safetensors"))
    os.truncate(first, first.stat().st_size - 1)
    assert "cut off" in asked(tmp_path / "hf", capsys, 1)["problems"][0]
    first.unlink()
    assert f"{first.name} is not there" in asked(tmp_path / "hf", capsys, 1)["problems"][0]
    assert asked(second, capsys, 0)["format"] == "safetensors"


def test_what_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("nowhere", "."):
        assert main(["verify", str(tmp_path / name)]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_names_that_cannot_be_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dcp.save({"a\nb \x1b[31m \ud800": {"c\nd": torch.ones(2)}}, checkpoint_id=tmp_path / "odd", no_dist=True)
    assert asked(tmp_path / "odd", capsys, 0)["parts"]
    (path,) = (tmp_path / "odd").glob("*.distcp")
    os.truncate(path, 10)
    assert main(["verify", str(tmp_path / "odd")]) == 1
    text = capsys.readouterr().out
    assert text.isascii()
    assert len(text.splitlines()) == 7


def test_progress_is_of_bytes(saved: Path) -> None:
    seen, totals = 0, set()

    def on_read(more: int, total: int) -> None:
        nonlocal seen
        seen += more
        totals.add(total)

    verify(saved, on_read=on_read)
    assert totals == {seen}
