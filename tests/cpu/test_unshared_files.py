"""Ranks that do not see each other's files: nothing is written that could not be loaded, and nothing is mixed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import chunkmem
from chunkmem.checkpoints import replacing
from tests.helpers.ranks import Team
from tests.helpers.saved_training import Saved, assert_same

HOW = Saved(sizes=(2,))


def save_apart(rank: int, folder: Path, asynchronous: bool) -> str:
    """Each rank has a folder of its own; there is a checkpoint already."""
    training = HOW.open()
    training.run(1)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(chunkmem.CheckpointError) as raised:
        patch.setattr(replacing, "_LATE_S", 0.2)
        training.manager.save(folder / str(rank) / "ckpt", training.optimizer, asynchronous=asynchronous).wait()
    training.run(1)
    training.manager.save(folder / "shared", training.optimizer)
    training.manager.close()
    return str(raised.value)


@pytest.mark.few(1)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_saving_is_refused_on_all_ranks(asynchronous: bool, pair: Team, tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    for message in pair.run(save_apart, tmp_path, asynchronous):
        assert message == (
            f"the checkpoint could not be written ({tmp_path}/1/ckpt: rank 1 does not see what the first rank writes "
            "there); what was there before is there. Name a directory on a file system that all ranks share"
        )
    assert (tmp_path / "shared" / ".metadata").is_file()
    assert not list((tmp_path / "0").iterdir())
    assert not list((tmp_path / "1").iterdir())


def save_steps(rank: int, folder: Path) -> Any:
    training = HOW.open()
    states = []
    for name in ("first", "second"):
        training.run(1)
        training.manager.save(folder / name, training.optimizer, extra={"name": name})
        states.append(training.state())
    training.manager.close()
    return states


def load_apart(rank: int, folder: Path) -> Any:
    training = HOW.open()
    before = training.state()
    try:
        extra = training.manager.load(folder / str(rank) / "ckpt", training.optimizer)
    except chunkmem.CheckpointError as error:
        return str(error), before, training.state()
    return extra, before, training.state()


def test_copies_on_local_disks_are_loaded(pair: Team, tmp_path: Path) -> None:
    expected = pair.run(save_steps, tmp_path)
    for rank in range(2):
        shutil.copytree(tmp_path / "second", tmp_path / str(rank) / "ckpt")
    for (extra, _, state), (_, second) in zip(pair.run(load_apart, tmp_path), expected, strict=True):
        assert extra["name"] == "second"
        assert_same(state, second)


def test_another_checkpoint_on_a_rank_is_refused(pair: Team, tmp_path: Path) -> None:
    """Else each rank would load its own chunks from another step."""
    pair.run(save_steps, tmp_path)
    for rank, name in enumerate(("first", "second")):
        shutil.copytree(tmp_path / name, tmp_path / str(rank) / "ckpt")
    for message, before, after in pair.run(load_apart, tmp_path):
        assert message.startswith(f"{tmp_path}/1/ckpt of rank 1 is another checkpoint than {tmp_path}/0/ckpt of rank 0")
        assert "nothing was loaded" in message
        assert_same(after, before)


def test_a_checkpoint_that_one_rank_lacks_is_refused(pair: Team, tmp_path: Path) -> None:
    pair.run(save_steps, tmp_path)
    shutil.copytree(tmp_path / "first", tmp_path / "0" / "ckpt")
    for message, before, after in pair.run(load_apart, tmp_path):
        assert message.startswith(f"{tmp_path}/1/ckpt is not there")
        assert_same(after, before)
