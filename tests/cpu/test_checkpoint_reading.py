"""How a checkpoint's files are read: straight to slots where they can be; and what goes wrong meanwhile."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.utils._python_dispatch import TorchDispatchMode

import chunkmem
from chunkmem.checkpoints.reading import CheckpointFiles, StoredPart
from chunkmem.checkpoints.stored_values import StoredValues
from tests.helpers.ranks import Team
from tests.helpers.saved_training import Saved, assert_same


class Image(nn.Module):
    """Convolutions in another memory order, and a buffer in yet another."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 16, 3)
        self.norm = nn.BatchNorm2d(16)
        self.register_buffer("turned", torch.arange(15.0).view(3, 5).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(self.conv(x))
        return result


@pytest.fixture
def read_by_torch(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tensors that torch has read."""
    names: list[str] = []
    real = CheckpointFiles._load

    def load(self: CheckpointFiles, part: StoredPart) -> torch.Tensor:
        names.append(part.name)
        return real(self, part)

    monkeypatch.setattr(CheckpointFiles, "_load", load)
    return names


KINDS = {
    "fp32": (Saved(), Saved()),
    "to tiles": (Saved(), Saved(tiled=True)),
    "from tiles": (Saved(tiled=True), Saved()),
    "to bf16": (Saved(), Saved("bf16")),
    "built in bf16": (Saved("bf16", built_low=True), Saved("bf16", built_low=True)),
    "SGD": (Saved(optimizer="SGD"), Saved(optimizer="SGD")),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", KINDS)
def test_torch_reads_nothing_of_what_chunkmem_has_saved(kind: str, tmp_path: Path, read_by_torch: list[str]) -> None:
    first, second = (how.open() for how in KINDS[kind])
    first.run(2)
    first.manager.save(tmp_path / "saved", first.optimizer)
    second.manager.load(tmp_path / "saved", second.optimizer)
    assert_same(first.state(), second.state())
    assert read_by_torch == []


def test_what_is_in_another_order_is_read_by_torch(tmp_path: Path, read_by_torch: list[str]) -> None:
    state = {}
    for seed in (0, 1):
        torch.manual_seed(seed)
        manager = chunkmem.ChunkManager()
        with manager.init():
            model = Image().to(memory_format=torch.channels_last)
        if seed == 0:
            manager.save(tmp_path / "saved")
        else:
            model.get_buffer("turned").zero_()
            manager.load(tmp_path / "saved")
        state[seed] = manager.state_dict()
    assert_same(state[0], state[1])
    assert set(read_by_torch) == {"model.conv.weight", "model.turned"}


@pytest.mark.parametrize("has_crc", [True, False])
def test_a_checkpoint_of_torch_alone_is_read_straight_where_its_archives_say_the_order(
    has_crc: bool, tmp_path: Path, read_by_torch: list[str]
) -> None:
    """Its archives have checksums of their own, unless torch was told to leave them out."""
    torch.serialization.set_crc32_options(has_crc)
    try:
        plain = Image().to(memory_format=torch.channels_last)
        dcp.save({"model": plain.state_dict()}, checkpoint_id=tmp_path / "saved", no_dist=True)
    finally:
        torch.serialization.set_crc32_options(True)
    manager = chunkmem.ChunkManager()
    model = manager.wrap(Image())
    model.get_buffer("turned").zero_()
    manager.load(tmp_path / "saved")
    assert_same(manager.state_dict(), plain.state_dict())
    assert set(read_by_torch) == {"model.conv.weight", "model.turned"}


def test_under_a_dispatch_mode(tmp_path: Path) -> None:
    """Operators of the runtime ask no mode, and no class of a tensor either: lazy values have no memory to copy."""

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    first, second = Saved().open(), Saved().open()
    first.run(1)
    first.manager.save(tmp_path / "saved", first.optimizer)
    with Mode():
        second.manager.load(tmp_path / "saved", second.optimizer)
    assert_same(first.state(), second.state())


def after_verifying(monkeypatch: pytest.MonkeyPatch, do: Callable[[], object]) -> None:
    """Have something happen between the two times that files are read: when the first tensor is loaded."""
    real = StoredValues.read_into
    is_done = False

    def read_into(self: StoredValues, *args: Any) -> None:
        nonlocal is_done
        if not is_done:
            is_done = True
            do()
        real(self, *args)

    monkeypatch.setattr(StoredValues, "read_into", read_into)


def test_files_that_go_or_fail_after_they_were_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Saved().open()
    training.run(1)
    folder = tmp_path / "saved"

    def preadv(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def each(do: Callable[[Path], object]) -> None:
        for path in folder.glob("*.distcp"):
            do(path)

    ends: dict[str, Callable[[], object]] = {
        "FileNotFoundError: .*No such file": lambda: each(Path.unlink),
        "EOFError: the file has 100 bytes": lambda: each(lambda path: os.truncate(path, 100)),
        "OSError: .*Input/output error": lambda: patched.setattr(os, "preadv", preadv),
    }
    for said, do in ends.items():
        training.manager.save(folder, training.optimizer)
        with monkeypatch.context() as patched:
            after_verifying(patched, do)
            with pytest.raises(
                chunkmem.CheckpointError, match=rf"\.distcp cannot be read where .* is: {said}"
            ) as caught:
                training.manager.load(folder, training.optimizer)
        assert "\n" not in str(caught.value)
    training.manager.save(folder, training.optimizer)
    training.manager.load(folder, training.optimizer)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_several_threads_find_the_damage(num_threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first file in the order of the checkpoint is named, whichever thread comes first."""
    training = Saved().open()
    training.run(1)
    training.manager.save(tmp_path / "saved", training.optimizer)
    before = training.state()
    files = sorted((tmp_path / "saved").glob("*.distcp"))
    for path in files:
        os.truncate(path, path.stat().st_size // 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    with pytest.raises(chunkmem.CheckpointError, match=rf"{files[0].name} cannot be read where .*nothing was loaded"):
        training.manager.load(tmp_path / "saved", training.optimizer)
    assert_same(training.state(), before)


def test_what_nobody_has_verified_is_when_it_is_read(tmp_path: Path) -> None:
    """As of copies on the disks of ranks, each of which verifies a part of them."""
    for order in (torch.contiguous_format, torch.channels_last):  # the latter is read by torch
        manager = chunkmem.ChunkManager()
        with manager.init():
            model = Image().to(memory_format=order)
        manager.save(tmp_path / "saved")
        stride = manager.state_dict()["conv.weight"].stride()
        value = torch.as_strided(manager.state_dict()["conv.weight"], (16,), (1,)).numpy().tobytes()
        assert (stride[1] == 1) == (order is torch.channels_last), model
        for path in (tmp_path / "saved").glob("*.distcp"):
            path.write_bytes(path.read_bytes().replace(value, bytes(64)))
        lazy = CheckpointFiles(tmp_path / "saved").nested("model")
        assert torch.equal(lazy["conv.bias"].read(), manager.state_dict()["conv.bias"])
        with pytest.raises(chunkmem.CheckpointError, match=r"\.distcp has changed.*conv.weight has not its checksum"):
            lazy["conv.weight"].read()


def load_on_one(rank: int, folder: Path) -> list[str]:
    """Count what each rank verifies: its own share, and what it loads and another has verified."""
    training = Saved(sizes=(2,)).open()
    training.run(1)
    training.manager.save(folder, training.optimizer)
    summed: list[str] = []
    real = StoredValues.checksum

    def checksum(self: StoredValues) -> int:
        summed.append(f"{self.path.name} {self.offset}")
        return real(self)

    StoredValues.checksum = checksum  # type: ignore[method-assign]
    before = training.state()
    try:
        training.manager.load(folder, training.optimizer)
    finally:
        StoredValues.checksum = real  # type: ignore[method-assign]
    assert_same(training.state(), before)
    return summed


def test_over_ranks_no_rank_reads_all(tmp_path: Path) -> None:
    with Team(2) as team:
        one, other = team.run(load_on_one, tmp_path / "saved")
    for own in (one, other):
        assert len(own) == len(set(own))
    both = {*one, *other}
    assert len(one) < len(both)
    assert len(other) < len(both)
