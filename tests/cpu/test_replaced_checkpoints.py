"""A checkpoint that takes the place of another: killed, failing, two at once, and in a folder that others use, too."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp

import chunkmem
from chunkmem.checkpoints import replacing, unfinished
from chunkmem.checkpoints.converting import Format, convert
from chunkmem.checkpoints.reading import CheckpointFiles
from chunkmem.checkpoints.saving import save_now
from chunkmem.ranks.ranks import open_ranks
from tests.helpers.killed import at_once, failing_at, is_killed_at
from tests.helpers.saved_files import contents
from tests.helpers.saved_training import Saved

MIB = 1 << 20


def save(path: Path, number: int, *, num_large: int = 0) -> None:
    """Write a checkpoint whose every value is a number, with so many large tensors, which have files of their own."""
    values = {f"part {part}": torch.full((33 * MIB // 4,), float(number)) for part in range(num_large)}
    state = {"model": {**values, "small": torch.tensor(float(number))}, "extra": {"number": number}}
    save_now(state, path, open_ranks(timeout_s=1))


def number_in(path: Path) -> int:
    """Return the number of a checkpoint, which all of its files have."""
    found = contents(path)
    numbers = {int(value.unique()) for value in found["model"].values()} | {found["extra"]["number"]}
    assert len(numbers) == 1
    return numbers.pop()


def new(path: Path) -> None:
    """There is nothing."""


def ours(path: Path) -> None:
    save(path, 1)


def theirs(path: Path) -> None:
    """What torch.distributed.checkpoint writes, which has no checksums."""
    with warnings.catch_warnings(action="ignore"):
        dcp.save({"model": {"small": torch.tensor(1.0)}, "extra": {"number": 1}}, checkpoint_id=path, no_dist=True)
    metadata = dcp.FileSystemReader(path).read_metadata()
    assert metadata.state_dict_metadata.keys() == {"model.small", "extra.number"}


def ours_among_others(path: Path) -> None:
    save(path, 1)
    add_others(path)


def add_others(path: Path) -> None:
    (path / "tokenizer.json").write_text("{}")
    (path / "logs").mkdir()
    (path / "logs" / "events").write_text("1\n")
    (path / "link").symlink_to("tokenizer.json")
    save(path / "step-7", 7)


def check_others(path: Path) -> None:
    assert (path / "tokenizer.json").read_text() == "{}"
    assert (path / "logs" / "events").read_text() == "1\n"
    assert (path / "link").is_symlink()
    assert number_in(path / "step-7") == 7


def standing_number(path: Path) -> int:
    """Return the number of the checkpoint that is there, 0 if there is none."""
    return number_in(path) if path.exists() else 0


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("before", [ours_among_others, new, pytest.param(ours, marks=pytest.mark.full)])
def test_killed_at_each_change_it_is_the_old_one_or_the_new(
    before: Callable[[Path], None], every: int, tmp_path: Path
) -> None:
    found = []
    for number in range(0, 1000, every):
        path = tmp_path / str(number) / "saved"
        path.parent.mkdir()
        before(path)
        kept = partial(check_others, path) if before is ours_among_others else lambda: None
        was_killed = is_killed_at(number, save, path, 2)
        found.append(standing_number(path))
        kept()
        save(path, 3)
        assert number_in(path) == 3
        kept()
        assert [each.name for each in path.parent.iterdir()] == ["saved"]  # nothing is left
        assert len([name for name in os.listdir(path) if name.startswith(".")]) == 1  # its .metadata
        assert len(list(path.glob("*.distcp"))) == 1
        if not was_killed:
            break
    old = 0 if before is new else 1
    assert found == sorted(found)
    assert set(found) == {old, 2}
    assert len(found) > 10 / every


def test_killed_before_the_manifest_of_another_program_is_replaced(tmp_path: Path) -> None:
    """It has no checksums, and is none the less found."""
    found, was_killed = [], True
    for number in range(0, 1000, 5):
        path = tmp_path / str(number)
        theirs(path)
        was_killed = is_killed_at(number, save, path, 2)
        found.append(int(CheckpointFiles(path).nested("model")["small"]))
        if not was_killed:
            break
    assert found == sorted(found)
    assert set(found) == {1, 2}
    assert not list(path.glob("__*"))


@pytest.mark.few(1)
@pytest.mark.parametrize("before", [ours, new])
def test_a_call_that_fails(before: Callable[[Path], None], tmp_path: Path) -> None:
    """What is said is true: an error says that the old one is there, and then it is."""
    outcomes = []
    for number in range(1000):
        path = tmp_path / str(number) / "saved"
        path.parent.mkdir()
        before(path)
        with failing_at(number) as made:
            try:
                save(path, 2)
            except chunkmem.CheckpointError as error:
                said = str(error)
                assert "None" not in said
                assert str(path.parent) in said.partition("could not be written: ")[2]  # the file is named
                assert said.endswith("; what was there before is there still")
                outcomes.append((made[0], "told"))
                assert standing_number(path) == (0 if before is new else 1)
            else:
                assert number_in(path) == 2
                outcomes.append((made[0] if made else "", "done"))
        save(path, 3)
        assert [each.name for each in path.parent.iterdir()] == ["saved"]
        assert len(list(path.glob("*.distcp"))) == 1
        if not made:
            break
    assert ("unlink", "done") in outcomes  # what is left of the old one is not missed
    assert {name for name, how in outcomes if how == "told"} >= {"rename", "fsync", "mkdir"}


def test_what_may_be_put_back_is_on_the_disk_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest without its content, put back by a rename, would be no checkpoint after a crash of the machine."""
    path = tmp_path / "saved"
    save(path, 1)
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(descriptor: int) -> None:
        done.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        fsync(descriptor)

    def noted_replace(one: Path, other: Path) -> None:
        done.append(f"replace {other}")
        replace(one, other)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", noted_fsync)
        patched.setattr(os, "replace", noted_replace)
        save(path, 2)
    assert "sync .metadata.before" in done[: done.index(f"replace {path / '.metadata'}")]


def test_a_name_that_can_neither_be_synced_nor_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "saved"
    save(path, 1)
    real, count = os.replace, iter(range(100))

    def replace(one: Path, other: Path) -> None:
        if Path(other).name == ".metadata" and next(count) > 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(one, other)

    def sync(folder: Path) -> None:
        if folder == path and not (path / ".metadata").read_bytes() == manifest:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(folder))

    manifest = (path / ".metadata").read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", replace)
        patched.setattr(replacing, "sync", sync)
        with pytest.raises(
            chunkmem.CheckpointError, match=r"saved: Input/output error; the new one is in place.*$"
        ) as e:
            save(path, 2)
    assert "what was there before" not in str(e.value)
    assert number_in(path) == 2


def save_often(path: Path, first: int) -> None:
    for number in range(first, first + 10):
        save(path, number)


@pytest.mark.few(1)
@pytest.mark.parametrize("before", [ours_among_others, new])
def test_two_at_once(before: Callable[[Path], None], tmp_path: Path) -> None:
    """Both are told that theirs was written, and one of them was after the other."""
    path = tmp_path / "saved"
    before(path)
    at_once(partial(save_often, path, 100), partial(save_often, path, 200), partial(save_often, path, 300))
    assert number_in(path) in (109, 209, 309)
    assert [each.name for each in tmp_path.iterdir()] == ["saved"]
    assert len(list(path.glob("*.distcp"))) == 1
    if before is ours_among_others:
        check_others(path)


def test_a_folder_that_a_living_process_writes_stays(tmp_path: Path) -> None:
    other = unfinished.Unfinished.make(tmp_path, "saved")
    save(tmp_path / "saved", 1)
    assert other.folder.is_dir()
    other.discard()
    assert [each.name for each in tmp_path.iterdir()] == ["saved"]


def test_somebody_who_does_not_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "saved"
    save(path, 1)
    monkeypatch.setattr(unfinished, "_BUSY_S", 0.1)
    with (
        unfinished.alone_in(path),
        pytest.raises(chunkmem.CheckpointError, match=r"has had .*\.saving.lock locked for 0 s.*end that process"),
    ):
        save(path, 2)
    assert number_in(path) == 1
    save(path, 2)
    assert number_in(path) == 2


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    path = tmp_path / "saved"
    save(path, 1)
    with pytest.raises(chunkmem.CheckpointError, match=r"has no locks.*name a directory that is not there yet"):
        save(path, 2)
    assert number_in(path) == 1
    assert sorted(os.listdir(tmp_path)) == ["saved"]
    assert len(os.listdir(path)) == 3


def test_what_is_not_a_checkpoints_own_stays(tmp_path: Path) -> None:
    training = Saved().open()
    path = tmp_path / "saved"
    path.mkdir()
    path.chmod(0o2750)
    training.manager.save(path, training.optimizer)
    training.manager.save_pretrained(path)
    add_others(path)
    training.manager.save(path, training.optimizer, extra={"step": 2})
    check_others(path)
    assert (path / "model.safetensors").exists()
    assert stat.S_IMODE(path.stat().st_mode) == 0o2750
    assert training.manager.load(path, training.optimizer) == {"step": 2}


def test_what_an_older_version_has_left_between_two_renames(tmp_path: Path) -> None:
    save(tmp_path / "saved", 1)
    (tmp_path / "saved").rename(tmp_path / ".saved.before")
    assert number_in(tmp_path / "saved") == 1
    assert convert(tmp_path / "saved", tmp_path / "all.pt", Format.TORCH, max_shard_nbytes=MIB).num_tensors == 1
    save(tmp_path / "saved", 2)
    assert number_in(tmp_path / "saved") == 2
    assert {path.name for path in tmp_path.iterdir()} == {"saved", "all.pt"}


@pytest.mark.full
def test_many_files(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    for number in (1, 2):
        save(path, number, num_large=3)
        assert number_in(path) == number
        assert len(list(path.glob("*.distcp"))) == 4
