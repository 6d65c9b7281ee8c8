"""`manager.save` and `manager.load`: the same training afterwards, little memory, and never half of anything."""

from __future__ import annotations

import copy
import errno
import json
import os
import random
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import chunkmem
from chunkmem.modules.lazy_tensor import LazyTensor
from tests.helpers.ranks import Team
from tests.helpers.saved_training import Net, Saved, assert_same
from tests.helpers.spread import spread

MIB = 1 << 20


@pytest.fixture(scope="module")
def teams() -> Iterator[dict[int, Team]]:
    found = {size: Team(size) for size in (2, 4)}
    yield found
    for team in found.values():
        team.close()


SHAPES = {
    "plain": Saved(),
    "tiled": Saved(tiled=True),
    "roomy": Saved(device_nbytes=4 * MIB),
    "bf16": Saved("bf16"),
    "built in bf16": Saved("bf16", built_low=True),
    "tiled in bf16": Saved("bf16", tiled=True),
    "fp16": Saved("fp16"),
    "SGD": Saved(optimizer="SGD"),
}
PAIRS = [
    ("plain", "plain"),
    ("plain", "tiled"),
    ("tiled", "roomy"),
    ("bf16", "tiled in bf16"),
    ("built in bf16", "built in bf16"),
    ("fp16", "fp16"),
    ("SGD", "SGD"),
]


@pytest.mark.few(3)
@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_what_is_loaded_is_what_was_saved(before: str, after: str, tmp_path: Path) -> None:
    first = SHAPES[before].open()
    first.run(2)
    first.manager.save(tmp_path / "saved", first.optimizer, extra={"step": 2, "draws": {"cpu": torch.arange(3)}})
    second = SHAPES[after].open()
    extra = second.manager.load(tmp_path / "saved", second.optimizer)
    assert extra["step"] == 2
    assert torch.equal(extra["draws"]["cpu"], torch.arange(3))
    assert_same(first.state(), second.state())
    assert first.manager.loss_scale == second.manager.loss_scale
    if SHAPES[before].tiled == SHAPES[after].tiled:  # else sums are rounded otherwise
        for training in (first, second):
            training.run(2, seed=5)
        assert_same(first.state(), second.state())


def test_a_checkpoint_of_float32_is_loaded_in_bf16(tmp_path: Path) -> None:
    first, second = SHAPES["plain"].open(), SHAPES["bf16"].open()
    first.run(2)
    first.manager.save(tmp_path / "saved", first.optimizer)
    second.manager.load(tmp_path / "saved", second.optimizer)
    assert_same(first.state(), second.state())


def test_plain_pytorch_loads_it_and_the_other_way_round(tmp_path: Path) -> None:
    training = Saved(tiled=True).open()
    training.run(2)
    training.manager.save(tmp_path / "chunks", training.optimizer, extra={"step": 2})
    plain = Net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    weights, states = get_state_dict(plain, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": states, "extra": None}
    dcp.load(state, checkpoint_id=tmp_path / "chunks", no_dist=True)
    set_state_dict(plain, optimizer, model_state_dict=weights, optim_state_dict=states)
    assert state["extra"]["step"] == 2
    found = {f"model.{name}": value.detach() for name, value in plain.state_dict().items()}
    rows = optimizer.state_dict()["state"]
    found |= {f"states.{index}.{key}": value for index, row in rows.items() for key, value in row.items()}
    own = training.state()
    assert_same(own, {name: found[name] for name in own})

    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=tmp_path / "plain", no_dist=True)
    again = Saved().open()
    again.manager.load(tmp_path / "plain", again.optimizer)
    assert_same(own, {name: again.state()[name] for name in own})


def test_extra_is_what_it_was(tmp_path: Path) -> None:
    training = Saved().open()
    layer = nn.Linear(2, 2)
    foreign = torch.optim.Adam(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    foreign.step()
    extra = {"foreign": foreign.state_dict(), "a.b": {1: [(2, None)]}, "empty": {}, "path": tmp_path}
    training.manager.save(tmp_path / "saved", extra=extra)
    with pytest.raises(
        chunkmem.CheckpointError, match=r"extra in .*distcp needs pathlib\S*PosixPath, .*pass trust=True"
    ):
        training.manager.load(tmp_path / "saved")
    found = training.manager.load(tmp_path / "saved", trust=True)
    same = ("a.b", "empty", "path")
    assert [found[key] for key in same] == [extra[key] for key in same]
    foreign.load_state_dict(found["foreign"])
    with pytest.raises(chunkmem.CheckpointError, match=r"takes extra= as a dict, not a int"):
        training.manager.save(tmp_path / "saved", extra=5)  # type: ignore[arg-type]
    with pytest.raises(chunkmem.CheckpointError, match=r"could not be written: rank 0: Can't pickle") as caught:
        training.manager.save(tmp_path / "saved", extra={"made": lambda: 1})
    assert "\n" not in str(caught.value)
    for call in (training.manager.save, training.manager.load):
        with pytest.raises(chunkmem.CheckpointError, match=r"of chunkmem's, or None, not a Adam; put the"):
            call(tmp_path / "saved", foreign)  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_a_link_to_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Saved().open()
    training.manager.save(tmp_path / "step-1", extra={"step": 1})
    (tmp_path / "last").symlink_to("step-1")
    training.manager.save(tmp_path / "last", extra={"step": 2})
    assert (tmp_path / "last").is_symlink()
    assert training.manager.load(tmp_path / "step-1") == {"step": 2}
    monkeypatch.chdir(tmp_path / "last")
    training.manager.save(".", extra={"step": 3})
    assert training.manager.load(".") == {"step": 3}
    assert {path.name for path in tmp_path.iterdir()} == {"step-1", "last"}


def test_without_an_optimizer(tmp_path: Path) -> None:
    first, second = Saved().open(), Saved().open()
    first.run(1)
    first.manager.save(tmp_path / "saved")
    second.run(2, seed=9)
    assert second.manager.load(tmp_path / "saved") == {}
    assert_same(first.manager.state_dict(), second.manager.state_dict())
    with pytest.raises(chunkmem.CheckpointError, match=r"saved has no optimizer state; load it without an optimizer"):
        second.manager.load(tmp_path / "saved", second.optimizer)


def test_gradients_that_wait_and_the_plan_are_left_alone(tmp_path: Path) -> None:
    one, other = Saved().open(), Saved().open()
    for training in (one, other):
        training.run(4)
        training.manager.backward(training.model(torch.ones(4, 48)).sum())
        if training is other:
            other.manager.save(tmp_path / "saved", other.optimizer)
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.run(2)
    assert_same(one.state(), other.state())
    timeline = other.manager.timeline()
    assert timeline is not None
    assert timeline.plan_misses == 0


# Ranks.


def save_on(rank: int, how: Saved, path: Path) -> dict[str, torch.Tensor]:
    training = how.open()
    training.run(2)
    training.manager.save(path, training.optimizer, extra={"rank": rank})
    return training.state()


def load_on(rank: int, how: Saved, path: Path) -> tuple[dict[str, torch.Tensor], Any]:
    training = how.open()
    extra = training.manager.load(path, training.optimizer)
    return training.state(), extra


def run_on(teams: dict[int, Team], function: Any, how: Saved, path: Path) -> list[Any]:
    size = 1
    for extent in how.sizes:
        size *= extent
    return [function(0, how, path)] if size == 1 else teams[size].run(function, how, path)


WIDTHS = {"1": (), "2": (2,), "4": (4,), "2 stages": (2, 1), "2 x 2": (2, 2)}


@pytest.mark.few(1)
@spread(before=WIDTHS, after=[*list(WIDTHS)[2:], *list(WIDTHS)[:2]], precision=("fp32", "bf16"))
def test_any_number_of_ranks_and_stages(
    before: str, after: str, precision: str, teams: dict[int, Team], tmp_path: Path
) -> None:
    saved = run_on(teams, save_on, Saved(precision, sizes=WIDTHS[before]), tmp_path / "saved")
    loaded = run_on(teams, load_on, Saved(precision, sizes=WIDTHS[after]), tmp_path / "saved")
    for rank, (state, extra) in enumerate(loaded):
        assert_same(saved[0], state)
        assert extra == {"rank": rank if len(loaded) == len(saved) else 0}


def train_on(rank: int, how: Saved, path: Path) -> dict[str, torch.Tensor]:
    training = how.open()
    for _ in range(2):
        training.run(1)
    return training.state()


def fail_on_one(rank: int, how: Saved, path: Path) -> tuple[str, dict[str, torch.Tensor]]:
    training = how.open()
    training.run(1)
    if rank == 1:  # its files reach a limit, as on a full disk
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    try:
        with pytest.raises(chunkmem.CheckpointError) as caught:
            training.manager.save(path, training.optimizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    training.run(1)
    return str(caught.value), training.state()


def test_a_rank_that_cannot_write_is_heard_by_all(teams: dict[int, Team], tmp_path: Path) -> None:
    (one, state), (other, _) = teams[2].run(fail_on_one, Saved(sizes=(2,)), tmp_path / "saved")
    assert one == other
    assert os.strerror(errno.EFBIG) in one
    assert list(tmp_path.iterdir()) == []
    assert_same(run_on(teams, train_on, Saved(sizes=(2,)), tmp_path)[0], state)


# What goes wrong.


def damaged(folder: Path) -> Iterator[tuple[str, Path, bytes]]:
    """Ways to damage each of a checkpoint's files: what, where, and what is in it then."""
    draw = random.Random(0)
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        yield "truncated", path, content[: len(content) // 2]
        yield "empty", path, b""
        at = draw.randrange(len(content))
        yield f"another byte at {at}", path, content[:at] + bytes([content[at] ^ 0x41]) + content[at + 1 :]
    for _ in range(4):  # in the pickles of what is no tensor, and of what is where
        path = folder / ".metadata"
        content = path.read_bytes()
        at = draw.randrange(len(content))
        yield f"another byte at {at}", path, content[:at] + bytes([content[at] ^ 0x01]) + content[at + 1 :]


def test_damaged_files_are_named_and_nothing_is_loaded(tmp_path: Path) -> None:
    first, second = Saved().open(), Saved().open()
    first.run(2)
    first.manager.save(tmp_path / "saved", first.optimizer, extra={"step": 1})
    before = first.state()
    second.run(1, seed=3)
    own = second.state()
    for what, path, content in damaged(tmp_path / "saved"):
        whole = path.read_bytes()
        path.write_bytes(content)
        said = ""
        try:
            second.manager.load(tmp_path / "saved", second.optimizer)
        except chunkmem.CheckpointError as error:
            said = str(error)
        if said:
            assert path.name in said, (what, path)
            assert "\n" not in said
            assert_same(second.state(), own)
        else:  # a byte that nobody reads
            assert what.startswith("another"), (what, path)
            assert_same(second.state(), before)
            second = Saved().open()
            second.run(1, seed=3)
        path.write_bytes(whole)
    missing = next((tmp_path / "saved").glob("*.distcp"))
    missing.unlink()
    with pytest.raises(chunkmem.CheckpointError, match=missing.name):
        second.manager.load(tmp_path / "saved", second.optimizer)


def test_values_that_have_changed_fail_their_checksum(tmp_path: Path) -> None:
    training = Saved().open()
    training.run(1)
    training.manager.save(tmp_path / "saved", training.optimizer)
    value = training.state()["model.blocks.0.0.weight"].numpy().tobytes()[:64]
    (path,) = [path for path in (tmp_path / "saved").iterdir() if value in path.read_bytes()]
    path.write_bytes(path.read_bytes().replace(value, bytes(64)))
    with pytest.raises(chunkmem.CheckpointError, match=rf"{path.name} has changed.*model.blocks.0.0.weight") as caught:
        training.manager.load(tmp_path / "saved", training.optimizer)
    training.manager.save(tmp_path / "saved", training.optimizer, extra={"text": "the marvellous number is 41"})
    (path,) = [path for path in (tmp_path / "saved").iterdir() if b"number is 41" in path.read_bytes()]
    path.write_bytes(path.read_bytes().replace(b"number is 41", b"number is 42"))
    with pytest.raises(chunkmem.CheckpointError, match=rf"{path.name} has changed.*extra has not its checksum"):
        training.manager.load(tmp_path / "saved", training.optimizer)
    assert "nothing was loaded" in str(caught.value)


def test_checksums_that_have_changed_blame_no_other_file(tmp_path: Path) -> None:
    training = Saved().open()
    training.manager.save(tmp_path / "saved", training.optimizer)
    path = tmp_path / "saved" / "checksums.json"
    saved = json.loads(path.read_text())
    saved["values"]["model.norm.bias [0]"] ^= 1
    path.write_text(json.dumps(saved))
    with pytest.raises(chunkmem.CheckpointError, match=r"checksums.json has changed since it was written"):
        training.manager.load(tmp_path / "saved", training.optimizer)


def test_another_model_or_optimizer(tmp_path: Path) -> None:
    training = Saved().open()
    training.run(1)
    training.manager.save(tmp_path / "saved", training.optimizer)
    other = chunkmem.ChunkManager()
    model = other.wrap(nn.Linear(48, 48))
    optimizer = chunkmem.AdamW(model.parameters(), manager=other)
    with pytest.raises(chunkmem.CheckpointError, match=r"missing weight, bias; unexpected first.weight.*nothing was"):
        other.load(tmp_path / "saved", optimizer)
    split = Saved().open()
    params = list(split.model.parameters())
    groups = chunkmem.AdamW([{"params": params[:3]}, {"params": params[3:]}], manager=split.manager)
    with pytest.raises(chunkmem.CheckpointError, match=r"no parameter group of the 3 parameters from first.weight"):
        split.manager.load(tmp_path / "saved", groups)
    sgd = chunkmem.SGD(split.model.parameters(), manager=split.manager, lr=0.1)
    with pytest.raises(chunkmem.CheckpointError, match=r"of another optimizer than SGD"):
        split.manager.load(tmp_path / "saved", sgd)


def test_wrong_places(tmp_path: Path) -> None:
    training = Saved().open()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("\\begin{document}")
    (tmp_path / "file").write_text("")
    with pytest.raises(chunkmem.CheckpointError, match=r"mine is there, and is no checkpoint"):
        training.manager.save(tmp_path / "mine")
    with pytest.raises(chunkmem.CheckpointError, match=r"file is there, and is no checkpoint"):
        training.manager.save(tmp_path / "file")
    with pytest.raises(chunkmem.CheckpointError, match=r"file: File exists"):
        training.manager.save(tmp_path / "file" / "below")
    with pytest.raises(chunkmem.CheckpointError, match=r"nowhere is not there; name the directory"):
        training.manager.load(tmp_path / "nowhere")
    with pytest.raises(chunkmem.CheckpointError, match=r"mine has no .metadata, so it is no checkpoint"):
        training.manager.load(tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.tex").exists()


@pytest.mark.few(2)
@pytest.mark.parametrize("number", range(6))
def test_a_disk_that_fails(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One `fsync` of six raises: what was saved before is there, and nothing else."""
    training = Saved().open()
    training.run(1)
    training.manager.save(tmp_path / "saved", training.optimizer, extra={"step": 1})
    state = training.state()
    training.run(1)
    real, count = os.fsync, iter(range(1000))

    def fsync(descriptor: int) -> None:
        if next(count) == number:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fsync)
        with pytest.raises(chunkmem.CheckpointError, match=r"Input/output error.*what was there before"):
            training.manager.save(tmp_path / "saved", training.optimizer, extra={"step": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    training.run(1)
    again = Saved().open()
    assert again.manager.load(tmp_path / "saved", again.optimizer) == {"step": 1}
    assert_same(again.state(), state)


SAVING = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from tests.helpers.saved_training import Saved
    training = Saved().open()
    for step in range(1000):
        training.run(1, seed=step)
        training.manager.save(Path(sys.argv[1]) / "saved", training.optimizer, extra={"step": step})
        print(step, flush=True)
    """
)


@pytest.mark.full
@pytest.mark.parametrize("num_kills", [5, pytest.param(50, marks=pytest.mark.full)])
def test_killed_at_any_point_it_is_the_old_one_or_the_new(num_kills: int, tmp_path: Path) -> None:
    draw = random.Random(num_kills)
    expected = Saved().open()
    states: list[dict[str, torch.Tensor]] = []
    for _ in range(num_kills):
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SAVING, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        reached = int(process.stdout.readline())
        time.sleep(draw.uniform(0, 0.2))  # a random point of the saves that follow
        process.kill()
        rest = process.stdout.read().split()
        process.wait()
        reached = int(rest[-1]) if rest else reached
        again = Saved().open()
        step = again.manager.load(tmp_path / "saved", again.optimizer)["step"]
        assert step in (reached, reached + 1)
        while len(states) <= step:
            expected.run(1, seed=len(states))
            states.append(expected.state())
        assert_same(again.state(), states[step])


# Memory.

PEAK = textwrap.dedent(
    """
    import sys, torch, chunkmem
    from torch import nn

    def peak_mib():
        with open("/proc/self/status") as file:
            return int(file.read().split("VmHWM:")[1].split()[0]) / 1024

    def reset():
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")

    def open_training():
        config = {"memory": {"device": "64MiB", "host": "2GiB"}, "default_chunk_size": 1 << 20}
        manager = chunkmem.ChunkManager(chunkmem.Config.from_dict(config))
        with manager.init():
            model = nn.Sequential(*(nn.Linear(1023, 1024) if i % 2 else nn.Linear(1024, 1023) for i in range(40)))
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager)
        manager.backward(model(torch.ones(1, 1024)).sum())
        optimizer.step()
        return manager, optimizer

    manager, optimizer = open_training()
    manager.save(sys.argv[1] + "/small", extra={"what": "is imported is imported"})
    reset()
    before = peak_mib()
    manager.save(sys.argv[1] + "/saved", optimizer)
    print(peak_mib() - before)
    manager.load(sys.argv[1] + "/saved", optimizer)
    reset()
    before = peak_mib()
    manager.load(sys.argv[1] + "/saved", optimizer)
    print(peak_mib() - before)
    reset()
    before = peak_mib()
    state = {"model": manager.state_dict(lazy=True), "optimizer": optimizer.state_dict(lazy=True)}
    torch.save(state, sys.argv[1] + "/lazy.pt")
    print(peak_mib() - before)
    """
)


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's count of the largest memory")
def test_two_chunks_of_memory_are_enough(tmp_path: Path) -> None:
    """160 MiB of weights and 320 of states; a chunk has 4."""
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PEAK, str(tmp_path)], capture_output=True, text=True, check=True
    )
    increases = [float(mib) for mib in found.stdout.split()]
    assert len(increases) == 3
    assert max(increases) <= 2 * 4 + 64


@pytest.mark.parametrize("kind", ["tiled", "built in bf16", "SGD"])
def test_torch_saves_lazy_values(kind: str, tmp_path: Path) -> None:
    training = SHAPES[kind].open()
    training.run(2)
    lazy = {"model": training.manager.state_dict(lazy=True), "optimizer": training.optimizer.state_dict(lazy=True)}
    torch.save(lazy, tmp_path / "lazy.pt")
    found = torch.load(tmp_path / "lazy.pt", weights_only=True)
    assert type(found["model"]["first.weight"]) is torch.Tensor
    assert found["model"]["last.weight"] is found["model"]["first.weight"]
    again = SHAPES[kind].open()
    again.manager.load_state_dict(found["model"])
    again.optimizer.load_state_dict(found["optimizer"])
    assert_same(training.state(), again.state())
    with pytest.raises(RuntimeError, match=r"don't know how to determine data location"):
        torch.save(lazy, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    copied = copy.deepcopy(lazy)
    training.run(1)
    assert torch.equal(copied["model"]["first.weight"], again.manager.state_dict()["first.weight"])
    assert not torch.equal(lazy["model"]["first.weight"], copied["model"]["first.weight"])


def lazy_on(rank: int) -> None:
    training = Saved(sizes=(2,)).open()
    for call in (training.manager.state_dict, training.optimizer.state_dict):
        with pytest.raises(chunkmem.StateError, match=r"lazy=True\) over several ranks.*use manager.save"):
            call(lazy=True)


def test_lazy_values_are_for_one_process(teams: dict[int, Team]) -> None:
    teams[2].run(lazy_on)


def test_lazy_values_are_read_when_they_are_used() -> None:
    training = Saved(tiled=True).open()
    training.run(1)
    lazy = training.manager.state_dict(lazy=True)
    whole = training.manager.state_dict()
    joined = lazy["blocks.0.0.weight"]
    assert isinstance(joined, LazyTensor)
    assert len(joined.pieces) > 1
    assert torch.equal(joined[40:130, 7:], whole["blocks.0.0.weight"][40:130, 7:])
    assert isinstance(joined[40:130, 7:], LazyTensor)
    assert torch.equal(joined + 1, whole["blocks.0.0.weight"] + 1)
    training.run(1)
    assert not torch.equal(joined, whole["blocks.0.0.weight"])
    with pytest.raises(chunkmem.StateError, match=r"mul_ of a lazy value"):
        joined.mul_(2)
    for ask in (joined.data_ptr, joined.untyped_storage):
        with pytest.raises(chunkmem.StateError, match=r"has no memory"):
            ask()
