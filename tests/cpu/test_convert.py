"""`chunkmem convert`: the same values in another format, in little memory."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.utils._pytree import tree_map_only

import chunkmem
from chunkmem.checkpoints.converting import Format, convert
from chunkmem.checkpoints.safetensors_files import open_safetensors
from chunkmem.cli.main import main
from chunkmem.modules.lazy_tensor import LazyTensor
from tests.helpers.saved_files import contents
from tests.helpers.saved_training import Saved, assert_same

SHARD = 64 << 10


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    training = Saved("bf16", built_low=True, tiled=True).open()
    training.run(2)
    training.manager.save(tmp_path / "saved", training.optimizer, extra={"step": 2})
    return tmp_path / "saved"


def read(path: Path, form: Format) -> Any:
    if form is Format.DCP:
        return contents(path)
    if form is Format.TORCH:
        return torch.load(path, weights_only=True)
    return {"model": tree_map_only(LazyTensor, LazyTensor.read, open_safetensors(path))}


@pytest.mark.few(1)
@pytest.mark.parametrize(("first", "second"), list(itertools.product(Format, Format)))
def test_there_and_back(first: Format, second: Format, saved: Path, tmp_path: Path) -> None:
    one = convert(saved, tmp_path / "one", first, max_shard_nbytes=SHARD)
    two = convert(tmp_path / "one", tmp_path / "two", second, max_shard_nbytes=SHARD)
    before, after = contents(saved), read(tmp_path / "two", second)
    assert_same(before["model"], after["model"])
    if Format.SAFETENSORS in (first, second):
        assert (one.left_out or two.left_out) == ("extra", "optimizer")
    else:
        assert after["extra"] == {"step": 2}
        assert_same(before["optimizer"]["state"]["norm.weight"], after["optimizer"]["state"]["norm.weight"])
        assert_same(before["optimizer"]["master_weights"], after["optimizer"]["master_weights"])
        assert after["optimizer"]["param_groups"] == before["optimizer"]["param_groups"]
    assert not list(tmp_path.glob(".*"))


def test_a_converted_checkpoint_is_loaded(tmp_path: Path, saved: Path) -> None:
    convert(saved, tmp_path / "all.pt", Format.TORCH, max_shard_nbytes=SHARD)
    convert(tmp_path / "all.pt", tmp_path / "again", Format.DCP, max_shard_nbytes=SHARD)
    states = []
    for path in (saved, tmp_path / "again"):
        training = Saved("bf16", built_low=True).open()
        training.manager.load(path, training.optimizer)
        states.append(training.state())
    assert_same(*states)


def test_weights_alone_come_under_model(tmp_path: Path) -> None:
    weights = {"a": torch.randn(3, 4), "b": torch.arange(5), "empty": torch.empty(0, 2), "one": torch.tensor(2.0)}
    torch.save(weights, tmp_path / "weights.pth")
    convert(tmp_path / "weights.pth", tmp_path / "dcp", Format.DCP, max_shard_nbytes=SHARD)
    found = {"model": {name: torch.zeros_like(value) for name, value in weights.items()}}
    dcp.load(found, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert_same(weights, found["model"])
    convert(tmp_path / "dcp", tmp_path / "st", Format.SAFETENSORS, max_shard_nbytes=SHARD)
    assert_same(weights, read(tmp_path / "st", Format.SAFETENSORS)["model"])


def test_the_command(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(saved), str(tmp_path / "hf"), "--to", "safetensors"]) == 0
    assert "saved (dcp) -> " in capsys.readouterr().out
    assert main(["convert", str(tmp_path / "hf" / "model.safetensors"), str(tmp_path / "w.pt"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["source"], said["target"], said["left_out"]) == ("safetensors", "torch", [])
    assert said["num_tensors"] == len(torch.load(tmp_path / "w.pt", weights_only=True)["model"])


def test_what_cannot_be_converted(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").write_text("hello")
    (tmp_path / "odd.safetensors").write_bytes(b"12345678{}")
    torch.save([torch.ones(2)], tmp_path / "list.pt")
    torch.save({"model": {}, "optimizer": {"state": {0: {"step": 1}}}}, tmp_path / "indexed.pt")
    whole = tmp_path / "hf"
    convert(saved, whole, Format.SAFETENSORS, max_shard_nbytes=1 << 30)
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes((whole / "model.safetensors").read_bytes()[:-1])
    cases = {
        "nowhere is not there; name a directory": ("nowhere", "x.pt"),
        "empty has neither .metadata nor *.safetensors": ("empty", "x.pt"),
        "text.txt is no file of torch.save() that can be read safely": ("text.txt", "x.pt"),
        "odd.safetensors is no safetensors file: its header would have": ("odd.safetensors", "x.pt"),
        "or cut off": ("cut.safetensors", "x.pt"),
        "list.pt has a list, not a dict": ("list.pt", "x", "--to", "dcp"),
        "x: say in which format, --to dcp or --to safetensors": ("saved", "x"),
        "text.txt is there, and is no checkpoint": ("saved", "text.txt", "--to", "dcp"),
        "optimizer.state has the key 0, and torch.distributed.checkpoint has names only": (
            "indexed.pt",
            "x",
            "--to",
            "dcp",
        ),
        "'many' is not a size": ("saved", "x", "--to", "safetensors", "--max-shard-size", "many"),
    }
    for said, (source, target, *options) in cases.items():
        assert main(["convert", str(tmp_path / source), str(tmp_path / target), *options]) == 2, said
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
    assert not (tmp_path / "x.pt").exists()
    with pytest.raises(chunkmem.CheckpointError, match=r"no such file|No such file"):
        convert(saved, tmp_path / "no" / "where.pt", Format.TORCH, max_shard_nbytes=SHARD)
