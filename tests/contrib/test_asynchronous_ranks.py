"""`manager.save(asynchronous=True)` over ranks and stages: what was saved is one moment of all of them."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import chunkmem
from chunkmem.checkpoints import files
from tests.helpers.ranks import Team
from tests.helpers.saved_training import Saved, Training, assert_same
from tests.helpers.spread import spread

State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def teams() -> Iterator[dict[int, Team]]:
    found = {size: Team(size) for size in (2, 4)}
    yield found
    for team in found.values():
        team.close()


class Slow:
    """Makes writing slow while it is entered, for some ranks more than for others."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._write = files._write_item

    def __enter__(self) -> None:
        files._write_item = self._slow

    def __exit__(self, *_: object) -> None:
        files._write_item = self._write

    def _slow(self, *args: Any) -> Any:
        time.sleep(self._delay_s)
        return self._write(*args)


def save_on(rank: int, how: Saved, path: Path) -> tuple[State, State]:
    """What was there, and what is there after more steps."""
    training = how.open()
    training.run(3)
    state = training.state()
    with Slow(0.002 * (1 + rank)):
        saving = training.manager.save(path, training.optimizer, extra={"rank": rank}, asynchronous=True)
        training.run(2, seed=4)
        saving.wait()
    assert saving.done()
    assert (path / ".metadata").exists()  # on all ranks, when it is over on one
    return state, training.state()


def train_on(rank: int, how: Saved) -> State:
    training = how.open()
    training.run(3)
    training.state()
    training.run(2, seed=4)
    return training.state()


def load_on(rank: int, how: Saved, path: Path) -> tuple[State, Any]:
    training = how.open()
    extra = training.manager.load(path, training.optimizer)
    return training.state(), extra


def size_of(how: Saved) -> int:
    size = 1
    for extent in how.sizes:
        size *= extent
    return size


WIDTHS = {"2": (2,), "2 stages": (2, 1), "2 x 2": (2, 2), "4": (4,)}


@pytest.mark.few(1)
@spread(width=WIDTHS, precision=("fp32", "bf16"))
def test_one_moment_of_all_ranks(width: str, precision: str, teams: dict[int, Team], tmp_path: Path) -> None:
    how = Saved(precision, sizes=WIDTHS[width])
    team = teams[size_of(how)]
    saved = team.run(save_on, how, tmp_path / "saved")
    trained = team.run(train_on, how)
    for (_, after), alone in zip(saved, trained, strict=True):
        assert_same(after, alone)
    state, extra = load_on(0, Saved(precision), tmp_path / "saved")
    assert_same(saved[0][0], state)
    assert extra == {"rank": 0}
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert not list((tmp_path / "saved").glob(".part*"))


def full_disk(*args: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "some/file")


def fail_on(rank: int, how: Saved, path: Path, failing: int, told_by: str) -> tuple[str, State]:
    training = how.open()
    training.run(1)
    real = files._write_item
    if rank == failing:
        files._write_item = full_disk
    try:
        saving = training.manager.save(path, training.optimizer, asynchronous=True)
        training.run(1)
        with pytest.raises(chunkmem.CheckpointError) as caught:
            if told_by == "wait":
                saving.wait()
            elif told_by == "save":
                training.manager.save(path, training.optimizer)
            else:
                training.manager.close()
    finally:
        files._write_item = real
    if told_by == "close":
        return str(caught.value), {}
    training.run(1)
    state = training.state()
    training.manager.save(path, training.optimizer, asynchronous=True).wait()
    return str(caught.value), state


@pytest.mark.few(1)
@spread(failing=(1, 0), told_by=("wait", "save", "close"))
def test_a_rank_that_cannot_write_is_heard_by_all(
    failing: int, told_by: str, teams: dict[int, Team], tmp_path: Path
) -> None:
    (one, state), (other, _) = teams[2].run(fail_on, Saved(sizes=(2,)), tmp_path / "saved", failing, told_by)
    assert one == other
    assert f"rank {failing}: some/file: No space left" in one
    if told_by == "close":
        assert list(tmp_path.iterdir()) == []
        return
    expected = Saved(sizes=(2,))
    assert_same(teams[2].run(three_steps, expected)[0], state)
    assert_same(load_on(0, Saved(), tmp_path / "saved")[0], state)


def three_steps(rank: int, how: Saved) -> State:
    training = how.open()
    for _ in range(3):
        training.run(1)
    return training.state()


def ask_on_one(rank: int, how: Saved, path: Path) -> str:
    """One rank waits for it, the others do not: all of them may continue, and all are told."""
    training = how.open()
    training.run(1)
    real = files._write_item
    if rank == 1:
        files._write_item = full_disk
    saving = training.manager.save(path, training.optimizer, asynchronous=True)
    if rank == 1:
        with pytest.raises(chunkmem.CheckpointError):
            saving.wait()
    training.run(1)
    files._write_item = real
    with pytest.raises(chunkmem.CheckpointError) as caught:
        training.manager.save(path, training.optimizer, asynchronous=True)
    training.manager.save(path, training.optimizer, asynchronous=True).wait()
    return str(caught.value)


def test_one_rank_has_asked(teams: dict[int, Team], tmp_path: Path) -> None:
    one, other = teams[2].run(ask_on_one, Saved(sizes=(2,)), tmp_path / "saved")
    assert one == other
    assert "rank 1: some/file: No space left" in one


def repartition_on(rank: int, how: Saved, path: Path) -> State:
    training = how.open()
    training.run(3)
    state = training.state()
    with Slow(0.01):
        saving = training.manager.save(path, training.optimizer, asynchronous=True)
        training.pipe = training.pipe.repartition(stages=3 - how.sizes[0])
        training.run(1)
        saving.wait()
        training.manager.save(path.with_name("after"), training.optimizer, asynchronous=True)
        training.manager.close()
    return state


@pytest.mark.few(1)
@pytest.mark.parametrize("stages", [2, 1])
def test_ranks_that_are_divided_otherwise_meanwhile(stages: int, teams: dict[int, Team], tmp_path: Path) -> None:
    state, _ = teams[2].run(repartition_on, Saved(sizes=(stages, 2 // stages)), tmp_path / "saved")
    assert_same(load_on(0, Saved(), tmp_path / "saved")[0], state)
    load_on(0, Saved(), tmp_path / "after")


def die_while_saving(rank: int, how: Saved, path: Path) -> str:
    training = how.open(timeout_s=6)
    training.run(1)
    training.manager.save(path, training.optimizer, extra={"step": 1})
    if rank == 1:
        files._write_item = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    begun_s = time.monotonic()
    saving = training.manager.save(path, training.optimizer, extra={"step": 2}, asynchronous=True)
    with pytest.raises(chunkmem.CheckpointError) as caught:
        saving.wait()
    assert time.monotonic() - begun_s < 20
    return str(caught.value)


@pytest.mark.full
def test_a_rank_that_dies_is_missed(teams: dict[int, Team], tmp_path: Path) -> None:
    found = teams[2].run(die_while_saving, Saved(sizes=(2,)), tmp_path / "saved", lost=[1])
    assert "the part of rank 1" in found[0]
    assert load_on(0, Saved(), tmp_path / "saved")[1] == {"step": 1}


SLOW_S, TIMEOUT_S = 8.0, 3.0


def save_slowly(rank: int, how: Saved, path: Path, slow: int) -> Any:
    """One write takes several times as long as ranks wait for one that gives no sign of life."""
    training = how.open(timeout_s=TIMEOUT_S)
    training.run(1)
    real, delays = files._write_item, [SLOW_S] * (rank == slow)

    def write(*args: Any) -> Any:
        time.sleep(delays.pop() if delays else 0)
        return real(*args)

    files._write_item = write
    try:
        begun_s = time.monotonic()
        training.manager.save(path, training.optimizer, extra={"step": 1}, asynchronous=True).wait()
        assert time.monotonic() - begun_s > SLOW_S - 1
    finally:
        files._write_item = real
    return training.manager.load(path, training.optimizer)


@pytest.mark.few(1)
@pytest.mark.parametrize("slow", [1, 0])
def test_a_rank_that_is_slow_is_waited_for(slow: int, teams: dict[int, Team], tmp_path: Path) -> None:
    found = teams[2].run(save_slowly, Saved(sizes=(2,)), tmp_path / "saved", slow)
    assert found == [{"step": 1}] * 2


def threads_of(rank: int, how: Saved, path: Path) -> int:
    training: Training = how.open()
    for _ in range(3):
        training.manager.save(path, training.optimizer, asynchronous=True)
        training.run(1)
    training.manager.close()
    return sum("saves" in thread.name for thread in threading.enumerate())


def test_threads_end(teams: dict[int, Team], tmp_path: Path) -> None:
    assert teams[2].run(threads_of, Saved(sizes=(2,)), tmp_path / "saved") == [0, 0]
