"""Files made to harm, or damaged in ways that no checksum of chunkmem's tells: nothing is run, and nothing hangs."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

import chunkmem
from chunkmem.checkpoints.converting import Format, convert
from chunkmem.checkpoints.files import results_of_json
from chunkmem.checkpoints.safetensors_files import open_safetensors
from chunkmem.cli.main import main
from tests.helpers.ranks import Team

WEIGHT, BIAS = "model.weight", "model.bias"


class Runs:
    """What leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def open_model(*, seed: int = 0) -> chunkmem.ChunkManager:
    torch.manual_seed(seed)
    manager = chunkmem.ChunkManager()
    manager.wrap(nn.Linear(4, 6))
    return manager


@pytest.fixture
def manager() -> Iterator[chunkmem.ChunkManager]:
    with open_model() as manager:
        yield manager


@pytest.fixture
def foreign(tmp_path: Path, manager: chunkmem.ChunkManager) -> Path:
    """A checkpoint that torch alone has written."""
    state = {"model": manager.state_dict(), "extra": {"step": 3}}
    dcp.save(state, checkpoint_id=tmp_path / "foreign", no_dist=True)
    return tmp_path / "foreign"


def refused(do: Callable[[], object], match: str | None = None) -> str:
    with pytest.raises(chunkmem.CheckpointError, match=match) as caught:
        do()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# What runs while it is read.


def test_an_object_is_not_run_unless_it_is_trusted(tmp_path: Path, manager: chunkmem.ChunkManager) -> None:
    saved, mark = tmp_path / "saved", tmp_path / "mark"
    manager.save(saved, extra={"step": 1, "odd": Runs(mark)})
    refused(lambda: manager.load(saved), r"extra in .*distcp needs posix.mkdir, .*pass trust=True.*nothing was loaded")
    for form, target in ((Format.TORCH, "all.pt"), (Format.DCP, "again")):
        refused(lambda form=form, target=target: convert(saved, tmp_path / target, form, max_shard_nbytes=1 << 20))  # type: ignore[misc]
    convert(saved, tmp_path / "hf", Format.SAFETENSORS, max_shard_nbytes=1 << 20)
    assert not mark.exists()
    convert(saved, tmp_path / "all.pt", Format.TORCH, max_shard_nbytes=1 << 20, trust=True)
    assert mark.exists()
    mark.rmdir()
    assert manager.load(saved, trust=True)["step"] == 1
    assert mark.exists()


def test_metadata_are_not_run_unless_they_are_trusted(
    foreign: Path, tmp_path: Path, manager: chunkmem.ChunkManager, capsys: pytest.CaptureFixture[str]
) -> None:
    mark, path = tmp_path / "mark", foreign / ".metadata"
    found: Metadata = pickle.loads(path.read_bytes())
    path.write_bytes(pickle.dumps(dataclasses.replace(found, storage_meta=Runs(mark))))  # type: ignore[arg-type]
    refused(lambda: manager.load(foreign), r"names posix.mkdir, which is none of torch's metadata.*trust=True")
    words = ["convert", str(foreign), str(tmp_path / "hf"), "--to", "safetensors"]
    assert main(words) == 2
    assert "--trust" in capsys.readouterr().err
    assert not mark.exists()
    assert main([*words, "--trust"]) == 0
    assert mark.exists()


def test_a_file_of_torch_save_is_not_run_unless_it_is_trusted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = tmp_path / "mark"
    for name, is_archive in (("new.pt", True), ("old.pt", False)):
        torch.save({"model": {"a": torch.ones(2)}, "extra": Runs(mark)}, tmp_path / name,
                   _use_new_zipfile_serialization=is_archive)  # fmt: skip
        words = ["convert", str(tmp_path / name), str(tmp_path / f"{name}.dir"), "--to", "dcp"]
        assert main(words) == 2
        assert "--trust" in capsys.readouterr().err
        assert not mark.exists()
        assert main([*words, "--trust"]) == 0
        mark.rmdir()


@pytest.mark.parametrize(
    "rows", [5, [5], [[1, 2, 3, 4, 5]], [["a", "b", 3, {}, None]], [["a", None, 3, {"odd": 1}, None]]]
)
def test_what_ranks_leave_for_each_other_is_not_run(rows: Any, tmp_path: Path) -> None:
    path = tmp_path / ".part-1"
    refused(lambda: results_of_json(json.dumps({"results": rows}).encode(), path), "is no list of what a rank has")
    refused(lambda: results_of_json(pickle.dumps(Runs(tmp_path / "mark")), path), "is no list of what a rank has")
    assert not (tmp_path / "mark").exists()


def global_of(name: str) -> bytes:
    return f"cchunkmem_odd\n{name}\n".replace("chunkmem_odd", "torch.distributed.checkpoint.metadata").encode()


PROGRAMS = {
    "changes a class by its slots": global_of("Metadata") + b"(N}S'__init__'\nNstb.",
    "changes a class by its state": global_of("Metadata") + b"}S'state'\nNsb.",
    "an attribute of a class": b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x0fMetadata.__eq__\x93.",
    "another module's name": b"cbuiltins\neval\n(S'1'\ntR.",
    "a name of torch's": b"ctorch\nload\n(S'x'\ntR.",
    "a size of words": b"ctorch\nSize\n((S'a'\nttR.",
    "an extension": b"\x82\x01.",
    "a persistent id": b"Psomething\n.",
    "much memory": b"\x80\x04\x8b\xff\xff\xff\x7f.",
    "a memo far away": b"\x80\x04Nr\xff\xff\xff\x0f.",
    "no end": b"((((((((",
    "deep": b"(" * 100_000 + b"t" * 100_000 + b".",
    "nothing": b"",
    "a number": b"I1\n.",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_pickles_that_are_no_metadata(program: str, foreign: Path, manager: chunkmem.ChunkManager) -> None:
    before = {name: dict(vars(kind)) for name, kind in vars(torch.distributed.checkpoint.metadata).items()
              if isinstance(kind, type)}  # fmt: skip
    (foreign / ".metadata").write_bytes(PROGRAMS[program])
    refused(lambda: manager.load(foreign), r"\.metadata (cannot be read|names)")
    for name, kind in before.items():
        assert dict(vars(getattr(torch.distributed.checkpoint.metadata, name))) == kind


# Metadata that make no sense.


def parts(found: Metadata, *rows: tuple[tuple[int, int], tuple[int, int]]) -> None:
    """Have the weight consist of other parts, each in the place of the whole."""
    form, data = found.state_dict_metadata[WEIGHT], found.storage_data
    (place,) = [value for key, value in data.items() if key.fqn == WEIGHT]
    form.chunks = [  # type: ignore[union-attr]
        ChunkStorageMetadata(torch.Size(at), torch.Size(size)) for at, size in rows
    ]
    data |= {MetadataIndex(WEIGHT, torch.Size(at)): place for at, _ in rows}


def place(found: Metadata, **changes: Any) -> None:
    (key,) = [key for key in found.storage_data if key.fqn == WEIGHT]
    vars(found.storage_data[key]).update(changes)


def nested(found: Metadata, *keys: Any) -> None:
    found.planner_data[WEIGHT] = keys


def shared(depth: int) -> Any:
    """A tuple of few bytes that is written out for ever."""
    value: Any = ("ha",)
    for _ in range(depth):
        value = (value, value)
    return value


ODD_METADATA: dict[str, tuple[str, Callable[[Metadata], object]]] = {
    "half of it": ("cover 12 of the 24 elements", lambda found: parts(found, ((0, 0), (3, 4)))),
    "no part": ("cover 0 of the 24 elements", lambda found: parts(found)),
    "overlap": ("two parts that overlap", lambda found: parts(found, ((0, 0), (3, 4)), ((2, 0), (3, 4)))),
    "twice": ("two parts that overlap", lambda found: parts(found, ((0, 0), (3, 4)), ((0, 0), (3, 4)))),
    "outside": ("which is outside of it", lambda found: parts(found, ((1, 0), (6, 4)))),
    "before": ("-1 in the place of a size", lambda found: parts(found, ((-1, 0), (6, 4)))),
    "another dimension": ("a part of 1 dimensions", lambda found: parts(found, ((0,), (6,)))),  # type: ignore[arg-type]
    "huge": ("in the place of a size", lambda found: place(found, length=1 << 70)),
    "negative": ("in the place of a size or an offset", lambda found: place(found, offset=-8)),
    "no number": ("in the place of a size or an offset", lambda found: place(found, offset="8")),
    "another folder": ("outside of it", lambda found: place(found, relative_path="../foreign/__0_0.distcp")),
    "anywhere": ("outside of it", lambda found: place(found, relative_path="/etc/passwd")),
    "no file name": ("is no name", lambda found: place(found, relative_path="")),
    "not there": ("No such file", lambda found: place(found, relative_path="other.distcp")),
    "behind the end": ("cannot be read where", lambda found: place(found, offset=1 << 40)),
    "transformed": ("cannot be read where", lambda found: place(found, transform_descriptors=["no such"])),
    "transformed oddly": ("is transformed by", lambda found: place(found, transform_descriptors={1: 2})),
    "no place": ("has no place in a file", lambda found: found.storage_data.clear()),
    "no dtype": ("has no dtype", lambda found: setattr(found.state_dict_metadata[WEIGHT].properties, "dtype", 3)),  # type: ignore[union-attr]
    "another dtype": (
        "has torch.float32 of shape (6, 4) where model.weight is, and .metadata says torch.int32 of shape (6, 4)",
        lambda found: setattr(found.state_dict_metadata[WEIGHT].properties, "dtype", torch.int32),  # type: ignore[union-attr]
    ),
    "under itself": ("cannot be nested", lambda found: nested(found, "model", "bias", "weight")),
    "another's": ("cannot be nested", lambda found: nested(found, "model", "bias")),
    "names and numbers": ("cannot be nested", lambda found: nested(found, "model", 0)),
    "a far position": ("neither a name nor a position", lambda found: nested(found, "model", 1 << 40)),
    "before the first": ("neither a name nor a position", lambda found: nested(found, "model", -1)),
    "deeply nested": ("is nested under", lambda found: nested(found, *["model"] * 5000)),
    "nowhere": ("is nested under", lambda found: nested(found)),
    "no keys": ("is not what torch.distributed.checkpoint writes", lambda found: setattr(found, "planner_data", 5)),
    "no rows": ("is not what torch.distributed.checkpoint", lambda found: setattr(found, "state_dict_metadata", [])),
    "an odd name": ("in the place of a name", lambda found: found.state_dict_metadata.update({7: None})),  # type: ignore[dict-item]
    "laughs": ("in the place of a size or an offset", lambda found: place(found, offset=shared(60))),
    "neither": ("neither a tensor nor an object", lambda found: found.state_dict_metadata.update({"model.x": 7})),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("odd", ODD_METADATA)
def test_metadata_that_make_no_sense(odd: str, foreign: Path, manager: chunkmem.ChunkManager) -> None:
    said, change = ODD_METADATA[odd]
    path = foreign / ".metadata"
    found = pickle.loads(path.read_bytes())
    change(found)
    path.write_bytes(pickle.dumps(found))
    before = manager.state_dict()
    message = refused(lambda: manager.load(foreign), "nothing was loaded")
    assert said in message, message
    assert all(torch.equal(value, before[name]) for name, value in manager.state_dict().items())


@pytest.mark.parametrize("layout", [
    [((0, 0), (3, 4)), ((3, 0), (3, 4))],
    [((0, 0), (2, 3)), ((2, 0), (4, 3)), ((0, 3), (4, 1)), ((4, 3), (2, 1))],  # bricks
    [((0, 0), (6, 4)), ((6, 0), (0, 4))],  # a rank without a part
])  # fmt: skip
def test_parts_that_cover_a_tensor_are_loaded(layout: Any, tmp_path: Path, manager: chunkmem.ChunkManager) -> None:
    """Their archives are in one file, as of ranks that torch has saved from."""
    weight = torch.arange(24.0).view(6, 4)
    found = {}
    for number, (at, size) in enumerate(layout):
        found[f"part{number}"] = weight[at[0] : at[0] + size[0], at[1] : at[1] + size[1]].clone()
    dcp.save({"model": {**found, "bias": torch.ones(6)}}, checkpoint_id=tmp_path / "saved", no_dist=True)
    path = tmp_path / "saved" / ".metadata"
    metadata: Metadata = pickle.loads(path.read_bytes())
    rows, data = metadata.state_dict_metadata, metadata.storage_data
    whole: Any = rows["model.part0"]
    for name in [name for name in rows if "part" in name]:
        del rows[name], metadata.planner_data[name]
    places = {key.fqn: data.pop(key) for key in list(data) if "part" in key.fqn}
    whole.size = torch.Size((6, 4))
    whole.chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(size)) for at, size in layout]
    rows[WEIGHT], metadata.planner_data[WEIGHT] = whole, ("model", "weight")
    for number, (at, _) in enumerate(layout):
        data.setdefault(MetadataIndex(WEIGHT, torch.Size(at)), places[f"model.part{number}"])
    path.write_bytes(pickle.dumps(metadata))
    manager.load(tmp_path / "saved")
    assert torch.equal(manager.state_dict()["weight"], weight)


# Files that are something else.


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


@pytest.mark.parametrize("name", [".metadata", "checksums.json", "*.distcp"])
@pytest.mark.parametrize("make", [pipe, folder, loop])
def test_what_is_no_file_is_named(name: str, make: Any, tmp_path: Path, manager: chunkmem.ChunkManager) -> None:
    manager.save(tmp_path / "saved", extra={"step": 1})
    (path,) = (tmp_path / "saved").glob(name)
    make(path)
    assert path.name in refused(lambda: manager.load(tmp_path / "saved"))


DEEP = b'{"a":' * 100_000
ODD_JSON = {
    "deep": DEEP,
    "a list": b"[1, 2]",
    "a number": b"3",
    "a list of values": b'{"values": [], "checksum": 1}',
    "words": b'{"values": {"a": "b"}, "checksum": 1}',
    "twice": b'{"values": {}, "values": {}, "checksum": 1}',
    "no text": b"\xff\xfe\xfa",
    "digits": b'{"values": {"a": ' + b"9" * 10_000 + b"}}",
    "empty": b"",
}


@pytest.mark.parametrize("odd", ODD_JSON)
def test_odd_checksums(odd: str, tmp_path: Path, manager: chunkmem.ChunkManager) -> None:
    manager.save(tmp_path / "saved")
    (tmp_path / "saved" / "checksums.json").write_bytes(ODD_JSON[odd])
    refused(lambda: manager.load(tmp_path / "saved"), r"checksums.json (is no list of checksums|has changed)")


@pytest.mark.parametrize("state", [5, {"param_groups": 5}, {"param_groups": [5]}, {"param_groups": [{"params": 5}]},
                                   {"param_groups": [{"params": ["weight", "bias"]}], "state": 5}])  # fmt: skip
def test_odd_states(state: Any, tmp_path: Path, manager: chunkmem.ChunkManager) -> None:
    model = manager.runtime.root(None)
    optimizer = chunkmem.AdamW(model.parameters(), manager=manager)
    dcp.save({"model": manager.state_dict(), "optimizer": state}, checkpoint_id=tmp_path / "saved", no_dist=True)
    refused(lambda: manager.load(tmp_path / "saved", optimizer), "nothing was loaded")


def test_odd_paths(tmp_path: Path, manager: chunkmem.ChunkManager) -> None:
    manager.save(tmp_path / "saved")
    (tmp_path / "loop").symlink_to("loop")
    odd: list[Any] = [
        tmp_path / "loop",
        tmp_path / "loop" / "saved",
        7,
        None,
        "nul\0",
        "/",
        "/dev/null",
        "/dev/zero",
        "",
    ]
    for path in odd:
        refused(lambda path=path: manager.load(path), "nothing was loaded")  # type: ignore[misc]
        if path not in ("", "/"):  # where this program runs, and the root: weights may be written to both
            for save in (manager.save, manager.save_pretrained):
                refused(lambda save=save, path=path: save(path))  # type: ignore[misc]
    for save in (manager.save, manager.save_pretrained):
        save(os.fsencode(tmp_path / "saved"))  # type: ignore[arg-type]
    manager.load(os.fsencode(tmp_path / "saved"))  # type: ignore[arg-type]
    refused(lambda: manager.save("/"), "/ is there, and is no checkpoint")


IN_A_MOUNT = """
import chunkmem, os, sys
from torch import nn
manager = chunkmem.ChunkManager()
manager.wrap(nn.Linear(4, 4))
for step in range(3):
    manager.save(sys.argv[1], extra={"step": step})
assert os.path.ismount(sys.argv[1]) and manager.load(sys.argv[1]) == {"step": 2}
print("saved")
"""


@pytest.mark.full
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs mounts of its own")
def test_the_root_of_a_mount_is_a_directory_like_others(tmp_path: Path) -> None:
    mounts = f"mount -t tmpfs none {tmp_path}"
    alone = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*alone, mounts], capture_output=True).returncode:
        pytest.skip("may mount nothing")
    command = f'{mounts} && exec {sys.executable} -W ignore -c "$0" {tmp_path}'
    done = subprocess.run([*alone, command, IN_A_MOUNT], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("saved\n", 0), done.stderr


# Changes that no checksum of chunkmem's tells.


@pytest.mark.parametrize("num_flips", [15, pytest.param(1500, marks=pytest.mark.full)])
def test_a_flipped_bit_in_what_torch_has_saved_is_found_or_is_in_no_value(
    num_flips: int, foreign: Path, manager: chunkmem.ChunkManager
) -> None:
    draw = random.Random(num_flips)
    (path,) = foreign.glob("*.distcp")
    whole, before = path.read_bytes(), manager.state_dict()
    for _ in range(num_flips):
        at = draw.randrange(len(whole))
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << draw.randrange(8)]) + whole[at + 1 :])
        said = ""
        try:
            assert manager.load(foreign) == {"step": 3}
        except chunkmem.CheckpointError as error:
            said = str(error)
        assert path.name in said or not said
        assert all(torch.equal(value, before[name]) for name, value in manager.state_dict().items()), at
    value = before["weight"].numpy().tobytes()
    path.write_bytes(whole.replace(value, value[:-1] + bytes([value[-1] ^ 1])))
    refused(
        lambda: manager.load(foreign), r"distcp has changed since it was written: model.weight has not its checksum"
    )
    path.write_bytes(whole)
    assert manager.load(foreign) == {"step": 3}


def test_a_flipped_bit_in_a_file_of_torch_save(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"a": torch.arange(6.0)}, tmp_path / "all.pt")
    whole, value = (tmp_path / "all.pt").read_bytes(), torch.arange(6.0).numpy().tobytes()
    (tmp_path / "all.pt").write_bytes(whole.replace(value, value[:-1] + b"\x41"))
    assert main(["convert", str(tmp_path / "all.pt"), str(tmp_path / "hf"), "--to", "safetensors"]) == 2
    assert "data/0 in it has not its CRC-32" in capsys.readouterr().err


# safetensors.


def stored(header: bytes | dict[str, Any], values: bytes = bytes(8)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + values


def row(shape: Any = (2,), offsets: Any = (0, 8), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


SAFETENSORS = {
    "whole": stored({"a": row()}),
    "with metadata": stored({"__metadata__": {"format": "pt"}, "a": row()}),
    "two, in any order": stored({"b": row((1,), (4, 8)), "a": row((1,), (0, 4))}),
    "an empty one": stored({"b": row((0,), (8, 8)), "a": row()}),
    "no tensor": stored({}, b""),
    "negative": stored({"a": row(offsets=(-8, 0))}),
    "backwards": stored({"a": row(offsets=(8, 0))}),
    "overlap": stored({"a": row((1,), (0, 4)), "b": row((2,), (0, 8))}),
    "a hole": stored({"a": row((1,), (0, 4)), "b": row((1,), (8, 12))}, bytes(12)),
    "more bytes": stored({"a": row()}, bytes(9)),
    "fewer bytes": stored({"a": row()}, bytes(7)),
    "another size": stored({"a": row(shape=(3,))}),
    "a negative shape": stored({"a": row(shape=(-1, -2))}),
    "a huge shape": stored({"a": row(shape=(1 << 62, 1 << 62, 4))}),
    "a shape of words": stored({"a": row(shape="ab")}),
    "fractions": stored({"a": row(offsets=(0.0, 8.0))}),
    "three offsets": stored({"a": row(offsets=(0, 4, 8))}),
    "no offsets": stored({"a": {"dtype": "F32", "shape": [2]}}),
    "no row": stored({"a": [1]}),
    "an odd dtype": stored({"a": row(dtype=["F32"])}),
    "an unknown dtype": stored({"a": row(dtype="F99")}),
    "a list": stored(b"[]"),
    "deep": stored(DEEP),
    "deep in a row": stored(b'{"a":{"dtype":"F32","shape":' + b"[" * 100_000 + b"}}"),
    "no JSON": stored(b"{nothing}"),
    "no text": stored(b"\xff" * 8),
    "a long header": (1 << 40).to_bytes(8, "little") + b"{}",
    "a short file": b"1234",
    "nothing": b"",
}


@pytest.mark.parametrize("case", SAFETENSORS)
def test_safetensors_are_read_or_refused_as_their_own_library_does(case: str, tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors")
    torch_side = pytest.importorskip("safetensors.torch")
    path = tmp_path / "odd.safetensors"
    path.write_bytes(SAFETENSORS[case])
    try:
        expected = torch_side.load_file(path)
    except library.SafetensorError:
        assert path.name in refused(lambda: open_safetensors(path))
    else:
        found = open_safetensors(path)
        assert set(found) == set(expected)
        assert all(torch.equal(found[name].read(), value) for name, value in expected.items())


INDEX = "model.safetensors.index.json"
ODD_INDICES = {
    "../out.safetensors": b'{"weight_map": {"a": "../out.safetensors"}}',
    "outside of it": b'{"weight_map": {"a": "/etc/passwd"}}',
    "is no name": b'{"weight_map": {"a": 5}}',
    "is not there": b'{"weight_map": {"a": "gone.safetensors"}}',
    "which has no such tensor": b'{"weight_map": {"c": "one.safetensors"}}',
    "it has no weight_map": b'{"weight_map": ["one.safetensors"]}',
    "RecursionError": DEEP,
    "it has a list": b"[]",
    "UnicodeDecodeError": b"\xff\xff",
}


@pytest.mark.parametrize("said", ODD_INDICES)
def test_odd_indices(said: str, tmp_path: Path) -> None:
    path = tmp_path / "hf"
    path.mkdir()
    for name in (path / "one.safetensors", tmp_path / "out.safetensors"):
        name.write_bytes(SAFETENSORS["whole"])
    (path / INDEX).write_bytes(ODD_INDICES[said])
    assert said in refused(lambda: open_safetensors(path))


def test_odd_files_of_safetensors(tmp_path: Path) -> None:
    one, other = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    one.write_bytes(SAFETENSORS["whole"])
    shutil.copy(one, other)
    refused(lambda: open_safetensors(tmp_path), "both have a")
    pipe(other)
    refused(lambda: open_safetensors(tmp_path), r"two.safetensors cannot be read: OSError: .*no regular file")
    other.unlink()
    lazy = open_safetensors(tmp_path)["a"]
    os.truncate(one, 20)
    refused(lazy.read, r"one.safetensors cannot be read where a is: EOFError")
    (tmp_path / INDEX).symlink_to(INDEX)
    refused(lambda: open_safetensors(tmp_path), rf"{INDEX} cannot be read")


# Over ranks.


def load_odd_on(rank: int, base: Path) -> list[str]:
    said = []
    own = base / str(rank)
    manager = open_model()
    for path in (own / "deep", own / "loop", own / "odd", 5 if rank else base / "whole"):
        with pytest.raises(chunkmem.CheckpointError) as caught:
            manager.load(path)  # type: ignore[arg-type]
        said.append(str(caught.value))
    manager.load(base / "whole")
    return said


@pytest.mark.full
def test_one_rank_that_reads_odd_files_is_heard_by_all(tmp_path: Path) -> None:
    manager = open_model(seed=3)
    manager.save(tmp_path / "whole")
    for rank in (0, 1):
        for name in ("deep", "loop", "odd"):
            shutil.copytree(tmp_path / "whole", tmp_path / str(rank) / name)
    (tmp_path / "1" / "deep" / "checksums.json").write_bytes(DEEP)
    shutil.rmtree(tmp_path / "1" / "loop")
    (tmp_path / "1" / "loop").symlink_to("loop")
    (tmp_path / "1" / "odd" / ".metadata").write_bytes(PROGRAMS["another module's name"])
    (tmp_path / "1" / "odd" / "checksums.json").unlink()
    with Team(2) as team:
        one, other = team.run(load_odd_on, tmp_path)
    assert one == other
    assert [str(tmp_path / "1") in each for each in one] == [True, True, True, False]
