"""`manager.save_pretrained`: safetensors files, read here without the library."""

from __future__ import annotations

import errno
import itertools
import json
import os
import resource
import signal
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import chunkmem
from chunkmem.checkpoints.pretrained import shards_of, write_weights
from tests.helpers.killed import at_once, failing_at, is_killed_at
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


# Who is killed, and who comes at the same time. Weights are a number each.

NAMES = "abcde"
KINDS = {"one": 1 << 20, "shards": 8, "other shards": 4}
"""Bytes of a file."""


class Configured:
    """Has a configuration, which is of these weights."""

    dtype = torch.float32

    def __init__(self, number: int) -> None:
        self.config = self
        self.number = number

    def save_pretrained(self, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps({"number": self.number}))

    def can_generate(self) -> bool:
        return False


def put(folder: Path, number: int, kind: str) -> None:
    forms = {name: torch.empty(1, device="meta") for name in NAMES}
    values = (torch.tensor([float(number)]) for _ in NAMES)
    write_weights(folder, shards_of(forms, max_nbytes=KINDS[kind]), values, Configured(number))  # type: ignore[arg-type]


def numbers_in(paths: Iterator[Path] | Mapping[Path, None]) -> set[int]:
    found: dict[str, torch.Tensor] = {}
    for path in paths:
        found |= read(path)
    assert list(found) in ([], list(NAMES))
    return {int(value) for value in found.values()}


def shards_in(folder: Path) -> Mapping[Path, None]:
    """What the index names."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return dict.fromkeys(folder / name for name in index["weight_map"].values())


def as_transformers(folder: Path) -> set[int]:
    """One file comes before the index."""
    one = folder / "model.safetensors"
    return numbers_in(dict.fromkeys([one]) if one.exists() else shards_in(folder))


def as_others(folder: Path) -> set[int]:
    """The index comes before what files there are."""
    has_index = (folder / "model.safetensors.index.json").exists()
    return numbers_in(shards_in(folder) if has_index else dict.fromkeys(sorted(folder.glob("*.safetensors"))))


def num_files(kind: str) -> int:
    """Weights, an index if there are several, the configuration, and a tokenizer."""
    return {"one": 1, "shards": 3 + 1, "other shards": 5 + 1}[kind] + 2


@pytest.mark.few(1)
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize(("before", "after"), [*itertools.product(KINDS, repeat=2)])
def test_killed_at_each_change_the_weights_are_the_old_ones_or_the_new(
    before: str, after: str, every: int, tmp_path: Path
) -> None:
    found = []
    for at in range(0, 1000, every):
        folder = tmp_path / str(at)
        folder.mkdir()
        (folder / "tokenizer.json").write_text("{}")
        put(folder, 1, before)
        was_killed = is_killed_at(at, put, folder, 2, after)
        for reader in (as_transformers, as_others):
            found.append((reader, reader(folder)))
            assert found[-1][1] in ({1}, {2})
        assert json.loads((folder / "config.json").read_text())["number"] in (1, 2)
        put(folder, 3, before)
        assert as_transformers(folder) == as_others(folder) == {3}
        assert len(os.listdir(folder)) == num_files(before)
        if not was_killed:
            break
    for reader in (as_transformers, as_others):
        own = [number for each, (number,) in found if each is reader]
        assert own == sorted(own)
        assert set(own) == {1, 2}


@pytest.mark.few(1)
@pytest.mark.parametrize(("before", "after"), [("one", "shards"), ("shards", "shards"), ("shards", "one")])
def test_a_call_that_fails(before: str, after: str, tmp_path: Path) -> None:
    told, names = set(), list[str]()
    for at in range(1000):
        folder = tmp_path / str(at)
        put(folder, 1, before)
        with failing_at(at) as made:
            try:
                put(folder, 2, after)
            except OSError as error:
                told.add(made[0])
                names.append(error.filename)
                expected: tuple[set[int], ...] = ({1}, {2})
            else:
                expected = ({2},)
            assert as_transformers(folder) in expected
            assert as_others(folder) in expected
        put(folder, 3, before)
        assert len(os.listdir(folder)) == num_files(before) - 1
        if not made:
            break
    assert told >= {"replace", "fsync", "mkdir"}
    assert all(name.startswith(str(tmp_path)) for name in names)


def test_what_cannot_be_removed_is_told_and_the_index_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was passed over in silence. Without an index, programs would take the files that are left for weights."""
    real = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.name.startswith("model-"):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))
        real(path, missing_ok)

    put(tmp_path, 1, "shards")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", unlink)
        with pytest.warns(UserWarning, match=r"3 files of those before .* \(.*model-.*: Operation not permitted\)"):
            put(tmp_path, 2, "one")
    assert as_transformers(tmp_path) == as_others(tmp_path) == {2}
    put(tmp_path, 3, "one")
    assert as_transformers(tmp_path) == as_others(tmp_path) == {3}
    assert len(os.listdir(tmp_path)) == num_files("one") - 1


def test_what_somebody_else_has_removed_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index stayed, as if the files were there still."""
    real = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.name.startswith("model-"):
            real(path)
        real(path, missing_ok)

    put(tmp_path, 1, "shards")
    monkeypatch.setattr(Path, "unlink", unlink)
    put(tmp_path, 2, "one")
    assert as_transformers(tmp_path) == as_others(tmp_path) == {2}
    assert len(os.listdir(tmp_path)) == num_files("one") - 1


def put_often(folder: Path, first: int, kind: str) -> None:
    for number in range(first, first + 10):
        put(folder, number, kind)


def test_two_at_once(tmp_path: Path) -> None:
    at_once(*(partial(put_often, tmp_path, 100 * at, kind) for at, kind in enumerate(KINDS, start=1)))
    assert as_transformers(tmp_path) == as_others(tmp_path)
    (number,) = as_others(tmp_path)
    assert number in (109, 209, 309)
    assert len(os.listdir(tmp_path)) == num_files([*KINDS][number // 100 - 1]) - 1
