"""`manager.save(asynchronous=True)` where something goes wrong: training continues, and the old checkpoint is there."""

from __future__ import annotations

import errno
import gc
import os
import random
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor

import chunkmem
from chunkmem.checkpoints import files
from chunkmem.runtime import snapshot
from tests.helpers.saved_training import Saved, assert_same


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[OSError]]:
    """What the next writes raise."""
    errors: list[OSError] = []
    real = files._write_item

    def write(*args: object) -> object:
        if errors:
            raise errors.pop(0)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(files, "_write_item", write)
    yield errors
    assert not errors


def full_disk() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "some/file")


def test_who_waits_is_told(failing: list[OSError], tmp_path: Path) -> None:
    one, other = Saved().open(), Saved().open()
    for training in (one, other):
        training.run(3)
    one.manager.save(tmp_path / "saved", one.optimizer, extra={"step": 3})
    state = one.state()
    one.run(1)
    other.run(1)
    failing.append(full_disk())
    saving = one.manager.save(tmp_path / "saved", one.optimizer, asynchronous=True)
    for training in (one, other):
        training.run(2)
    for _ in range(2):
        with pytest.raises(chunkmem.CheckpointError, match=r"rank 0: some/file: No space.*; what was there before is"):
            saving.wait()
    assert saving.done()
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    one.run(1)
    other.run(1)
    assert_same(one.state(), other.state())
    timeline = one.manager.timeline()
    assert timeline is not None
    assert timeline.plan_misses == 0
    again = Saved().open()
    assert again.manager.load(tmp_path / "saved", again.optimizer) == {"step": 3}
    assert_same(again.state(), state)
    one.manager.save(tmp_path / "saved", one.optimizer, asynchronous=True).wait()  # it was told before


@pytest.mark.parametrize("asynchronous", [False, True])
def test_else_the_next_save_is(asynchronous: bool, failing: list[OSError], tmp_path: Path) -> None:
    training = Saved().open()
    failing.append(full_disk())
    training.manager.save(tmp_path / "saved", training.optimizer, asynchronous=True)
    with pytest.raises(chunkmem.CheckpointError, match=r"No space left.*the save before this one"):
        training.manager.save(tmp_path / "other", training.optimizer, asynchronous=asynchronous)
    assert list(tmp_path.iterdir()) == []
    training.manager.save(tmp_path / "other", training.optimizer, asynchronous=asynchronous).wait()
    training.manager.load(tmp_path / "other", training.optimizer)


def test_else_close_is(failing: list[OSError], tmp_path: Path) -> None:
    training = Saved().open()
    failing.append(full_disk())
    training.manager.save(tmp_path / "saved", training.optimizer, asynchronous=True)
    with pytest.raises(chunkmem.CheckpointError, match=r"No space left"):
        training.manager.close()
    training.manager.close()
    other = Saved().open()
    failing.append(full_disk())
    with pytest.raises(ZeroDivisionError) as caught, other.manager:
        other.manager.save(tmp_path / "saved", other.optimizer, asynchronous=True)
        _ = 1 / 0
    assert "No space left" in caught.value.__notes__[0]


def test_a_forgotten_one_warns(failing: list[OSError], tmp_path: Path) -> None:
    training = Saved().open()
    failing.append(full_disk())
    kept: list[object] = [training]
    training.manager.save(tmp_path / "saved", training.optimizer, asynchronous=True).join()
    del training
    with pytest.warns(UserWarning, match=r"could not be written.*No space left"):
        forget(kept)


def forget(kept: list[object]) -> None:
    kept.clear()
    gc.collect()


def test_what_cannot_be_saved_is_said_at_once(tmp_path: Path) -> None:
    training = Saved().open()
    with pytest.raises(chunkmem.CheckpointError, match=r"could not be written: rank 0: Can't pickle"):
        training.manager.save(tmp_path / "saved", extra={"made": lambda: 1}, asynchronous=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(chunkmem.CheckpointError, match=r"file is there, and is no checkpoint"):
        training.manager.save(tmp_path / "file", asynchronous=True)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    training.run(2)
    training.manager.save(tmp_path / "saved", asynchronous=True).wait()


@pytest.mark.few(2)
@pytest.mark.parametrize("number", range(5))
def test_a_disk_that_fails(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One `fsync` of five raises."""
    one, other = Saved().open(), Saved().open()
    for training in (one, other):
        training.run(1)
    one.manager.save(tmp_path / "saved", one.optimizer, extra={"step": 1})
    state = one.state()
    real, count = os.fsync, iter(range(1000))

    def fsync(descriptor: int) -> None:
        if next(count) == number:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    saving = one.manager.save(tmp_path / "saved", one.optimizer, extra={"step": 2}, asynchronous=True)
    for training in (one, other):
        training.run(2)
    with pytest.raises(chunkmem.CheckpointError, match=r"Input/output error.*what was there before"):
        saving.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert_same(one.state(), other.state())
    again = Saved().open()
    assert again.manager.load(tmp_path / "saved", again.optimizer) == {"step": 1}
    assert_same(again.state(), state)


def test_files_that_reach_a_limit(tmp_path: Path) -> None:
    training = Saved().open()
    training.run(1)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    try:
        saving = training.manager.save(tmp_path / "saved", training.optimizer, asynchronous=True)
        training.run(1)
        with pytest.raises(chunkmem.CheckpointError, match=os.strerror(errno.EFBIG)):
            saving.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, before)
    assert list(tmp_path.iterdir()) == []


def test_a_copy_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that of whoever hands a chunk over: it is no error of training."""
    training, twin = Saved().open(), Saved().open()
    for each in (training, twin):
        each.run(2)

    def copied(*args: object) -> object:
        raise MemoryError("no more")

    with monkeypatch.context() as patched:
        patched.setattr(snapshot.Snapshot, "_copied", copied)
        saving = training.manager.save(tmp_path / "saved", training.optimizer, asynchronous=True)
        for each in (training, twin):
            each.run(2)
        with pytest.raises(chunkmem.CheckpointError, match=r"no more"):
            saving.wait()
    assert_same(training.state(), twin.state())


def test_no_thread_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Saved().open()
    training.run(2)

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start"):
            training.manager.save(tmp_path / "saved", training.optimizer, asynchronous=True)
    training.run(2)
    training.manager.save(tmp_path / "saved", training.optimizer, asynchronous=True).wait()


# The end of the process.

SAVING = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from tests.helpers.saved_training import Saved
    training = Saved().open()
    path = Path(sys.argv[1]) / "saved"
    training.run(1, seed=0)
    training.manager.save(path, training.optimizer, extra={"step": 0})
    for step in range(1, 1000):
        training.run(1, seed=step)
        training.manager.save(path, training.optimizer, extra={"step": step}, asynchronous=True)
        print(step, flush=True)
    """
)


@pytest.mark.full
@pytest.mark.parametrize("num_kills", [5, pytest.param(50, marks=pytest.mark.full)])
def test_killed_at_any_point_it_is_the_old_one_or_the_new(num_kills: int, tmp_path: Path) -> None:
    draw = random.Random(num_kills)
    expected = Saved().open()
    states: list[dict[str, Tensor]] = []
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
        assert step in (reached - 1, reached, reached + 1)
        while len(states) <= step:
            expected.run(1, seed=len(states))
            states.append(expected.state())
        assert_same(again.state(), states[step])


LAST = textwrap.dedent(
    """
    import os, sys, time
    from pathlib import Path
    from chunkmem.checkpoints import files
    from tests.helpers.saved_training import Saved
    training = Saved().open()
    training.run(2)
    real = files._write_item
    def write(*args):
        time.sleep(0.01)
        if sys.argv[2] == "fails":
            raise OSError(28, os.strerror(28), "some/file")
        return real(*args)
    files._write_item = write
    training.manager.save(Path(sys.argv[1]) / "saved", training.optimizer, asynchronous=True)
    if sys.argv[2] == "raises":
        raise SystemExit("over")
    """
)


@pytest.mark.full
@pytest.mark.parametrize("how", ["ends", "raises", "fails"])
def test_python_waits_for_it(how: str, tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-W", "default", "-c", LAST, str(tmp_path), how], capture_output=True, text=True, check=False
    )
    assert found.returncode == (how == "raises")
    assert ("No space left" in found.stderr) == (how == "fails")
    expected, again = Saved().open(), Saved().open()
    expected.run(2)
    if how == "fails":
        assert list(tmp_path.iterdir()) == []
    else:
        again.manager.load(tmp_path / "saved", again.optimizer)
        assert_same(again.state(), expected.state())


# Memory.

PEAK = textwrap.dedent(
    """
    import sys, time, torch, chunkmem
    from torch import nn
    from chunkmem.checkpoints import files

    def peak_mib():
        with open("/proc/self/status") as file:
            return int(file.read().split("VmHWM:")[1].split()[0]) / 1024

    def reset():
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")

    config = {"memory": {"device": "64MiB", "host": "2GiB"}, "default_chunk_size": 1 << 20}
    manager = chunkmem.ChunkManager(chunkmem.Config.from_dict(config))
    with manager.init():
        model = nn.Sequential(*(nn.Linear(1023, 1024) if i % 2 else nn.Linear(1024, 1023) for i in range(40)))
    optimizer = chunkmem.AdamW(model.parameters(), manager=manager)

    def train():
        for _ in range(2):
            manager.backward(model(torch.ones(1, 1024)).sum())
            optimizer.step()
            optimizer.zero_grad()

    manager.save(sys.argv[1] + "/small", extra={"what": "is imported is imported"}, asynchronous=True).wait()
    for _ in range(3):
        train()
    reset()
    train()
    before = peak_mib()
    write = files._write_item
    def slow(*args):
        time.sleep(0.01)
        return write(*args)
    files._write_item = slow
    reset()
    saving = manager.save(sys.argv[1] + "/saved", optimizer, asynchronous=True)
    print(peak_mib() - before)
    train()
    saving.wait()
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
    assert len(increases) == 2
    assert max(increases) <= 2 * 4 + 64
