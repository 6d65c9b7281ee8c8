"""`manager.save_pretrained`: safetensors files, read here without the library."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import chunkmem
from tests.helpers.ranks import Team
from tests.helpers.saved_training import Saved, assert_same

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64}


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    with Team(4) as team:
        yield team


def read(path: Path) -> dict[str, torch.Tensor]:
    """What the format says: the length of a header in JSON, the header, and the values."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    assert header.pop("__metadata__") == {"format": "pt"}
    assert start % 8 == 0
    found = {}
    for name, about in header.items():
        first, last = about["data_offsets"]
        values = torch.frombuffer(bytearray(content[start + first : start + last]), dtype=DTYPES[about["dtype"]])
        found[name] = values.reshape(about["shape"])
    assert start + max(about["data_offsets"][1] for about in header.values()) == len(content)
    return found


def expected(training_state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tied weights have one of their names."""
    weights = {key.removeprefix("model."): v for key, v in training_state.items() if key.startswith("model.")}
    del weights["last.weight"]
    return weights


@pytest.mark.parametrize(
    "how", [Saved(), Saved(tiled=True), Saved("bf16", built_low=True)], ids=["plain", "tiled", "low"]
)
def test_the_files_have_all_weights(how: Saved, tmp_path: Path) -> None:
    training = how.open()
    training.run(2)
    (tmp_path / "tokenizer.json").write_text("{}")
    training.manager.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"model.safetensors", "tokenizer.json"}
    assert_same(expected(training.state()), read(tmp_path / "model.safetensors"))


def test_shards_have_an_index_and_replace_those_of_before(tmp_path: Path) -> None:
    training = Saved().open()
    training.manager.save_pretrained(tmp_path, max_shard_size="20KiB")
    before = {path.name for path in tmp_path.iterdir()}
    training.run(1)
    training.manager.save_pretrained(tmp_path, max_shard_size="50KiB")
    assert before - {path.name for path in tmp_path.iterdir()}
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    found: dict[str, torch.Tensor] = {}
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert [path.name for path in shards] == sorted(set(index["weight_map"].values()))
    for path in shards:
        own = read(path)
        assert all(index["weight_map"][name] == path.name for name in own)
        assert len(own) == 1 or sum(value.nbytes for value in own.values()) <= 50 << 10
        found |= own
    assert_same(expected(training.state()), found)
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in found.values())


def save_on(rank: int, how: Saved, folder: Path) -> dict[str, torch.Tensor]:
    training = how.open()
    training.run(2)
    training.manager.save_pretrained(folder)
    return training.state()


@pytest.mark.few(1)
@pytest.mark.parametrize("sizes", [(4,), (2, 2)], ids=["4 ranks", "2 stages of 2"])
def test_over_ranks_and_stages(sizes: tuple[int, ...], team: Team, tmp_path: Path) -> None:
    states = team.run(save_on, Saved(sizes=sizes), tmp_path)
    assert_same(expected(states[0]), read(tmp_path / "model.safetensors"))


def test_a_full_disk(tmp_path: Path) -> None:
    training = Saved().open()
    training.manager.save_pretrained(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    training.run(1)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY))
    try:
        with pytest.raises(chunkmem.CheckpointError, match=os.strerror(errno.EFBIG)):
            training.manager.save_pretrained(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, handler)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == before
    with pytest.raises(chunkmem.ConfigError, match=r"'5 gigs' is not a size"):
        training.manager.save_pretrained(tmp_path, max_shard_size="5 gigs")


class Refusing:
    """A configuration that its library does not write."""

    def save_pretrained(self, folder: Path) -> None:
        raise ValueError("temperature without sampling")


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    training = Saved().open()
    training.manager.save_pretrained(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    training.run(1)
    model: Any = training.model
    model.config, model.dtype = Refusing(), torch.float32
    with pytest.raises(chunkmem.CheckpointError, match=r"ValueError: temperature without sampling"):
        training.manager.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == before
    del model.config
    model.register_buffer("odd", torch.ones(2, dtype=torch.complex64))
    with pytest.raises(chunkmem.CheckpointError, match=r"have no odd \(torch.complex64\); use manager.save"):
        training.manager.save_pretrained(tmp_path)
