"""The file of DISK: it has no name, nothing is left of it, and what a directory or its file system lacks is said."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from chunkmem.data.errors import ConfigError, StateError, TierIOError
from chunkmem.runtime.disk_file import DiskFile
from chunkmem.runtime.disk_pool import DiskPool
from tests.helpers.disk import BLOCK, ROLE, disk_threads, new_pool, numbers, open_files, opened, wait_until
from tests.helpers.faulty_disk import FaultyDisk, ThrottledDisk
from tests.helpers.processes import wait_for
from tests.helpers.rights import ordinary_rights

PAGE = 4096
SHM = Path("/dev/shm")


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[DiskPool]:
    with opened(tmp_path) as pool:
        yield pool


# What is left.


def test_the_file_has_no_name_and_goes_with_the_pool(tmp_path: Path) -> None:
    pool = new_pool(tmp_path)
    slab = pool.alloc(ROLE, BLOCK)
    slab.write(numbers(BLOCK))
    assert list(tmp_path.iterdir()) == []
    assert len(open_files(tmp_path)) == 1
    assert len(disk_threads()) == 2
    folder = os.open("/", os.O_RDONLY)
    with pytest.raises(FileNotFoundError):  # nor can it be given one
        os.link(f"/proc/self/fd/{pool._file._descriptor}", tmp_path / "name", src_dir_fd=folder)
    os.close(folder)
    pool.close()
    pool.close()
    assert open_files(tmp_path) == []
    assert disk_threads() == []


def test_what_is_under_way_ends_before_the_file_is_closed(tmp_path: Path) -> None:
    """Another file may get its descriptor."""
    calls = FaultyDisk(calls=ThrottledDisk(1e12, BLOCK / 0.01))
    pool = new_pool(tmp_path, calls=calls)
    slab = pool.alloc(ROLE, 20 * BLOCK)
    failures: list[BaseException] = []

    def write() -> None:
        try:
            slab.write(numbers(20 * BLOCK))
        except BaseException as error:
            failures.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    wait_until(lambda: calls.num_calls["pwritev"] >= 2)
    pool.close()
    writer.join()
    assert failures == []
    assert disk_threads() == []


def test_what_is_closed_says_so(tmp_path: Path) -> None:
    pool = new_pool(tmp_path)
    used, idle = pool.alloc(ROLE, BLOCK), pool.alloc(ROLE, BLOCK)
    used.write(numbers(BLOCK))
    pool.close()
    for use in (lambda: pool.alloc(ROLE, BLOCK), lambda: used.read(numbers(BLOCK)), lambda: idle.write(numbers(BLOCK))):
        with pytest.raises(StateError, match="DISK is closed"):
            use()


@pytest.mark.parametrize("used", [False, True])
def test_a_pool_that_is_forgotten_goes_with_its_file_and_threads(tmp_path: Path, used: bool) -> None:
    pool = new_pool(tmp_path)
    slab = pool.alloc(ROLE, BLOCK)
    if used:
        slab.write(numbers(BLOCK))
    threads = disk_threads()
    assert len(threads) == 2 * used
    del pool
    gc.collect()
    for thread in threads:
        thread.join(timeout=10)
    assert disk_threads() == []
    assert open_files(tmp_path) == []
    with pytest.raises(StateError, match="closed"):
        slab.read(numbers(BLOCK))


def test_without_unnamed_files_the_name_is_removed_at_once(tmp_path: Path) -> None:
    for direct in (True, False):
        with opened(tmp_path, calls=FaultyDisk(unnamed=False, direct=direct)) as pool:
            assert list(tmp_path.iterdir()) == []
            (target,) = open_files(tmp_path)
            assert ".chunkmem-" in target
            slab = pool.alloc(ROLE, BLOCK)
            slab.write(numbers(BLOCK))
            read = numbers(BLOCK, seed=1)
            slab.read(read)
            assert torch.equal(read, numbers(BLOCK))


def test_two_pools_in_one_directory_do_not_meet(tmp_path: Path) -> None:
    with opened(tmp_path) as one, opened(tmp_path) as other:
        slabs = one.alloc(ROLE, BLOCK), other.alloc(ROLE, BLOCK)
        for seed, slab in enumerate(slabs):
            slab.write(numbers(BLOCK, seed=seed))
        for seed, slab in enumerate(slabs):
            read = numbers(BLOCK, seed=9)
            slab.read(read)
            assert torch.equal(read, numbers(BLOCK, seed=seed))


KILLED = """
import sys, time
from pathlib import Path
from tests.helpers.disk import *
folder = Path(sys.argv[1])
pool = new_pool(folder / "disk")
slab = pool.alloc(ROLE, BLOCK)
slab.write(numbers(BLOCK))
(folder / "ready").write_text("yes")
time.sleep(60)
"""


def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], env=environment, cwd=root)
    try:
        wait_for(tmp_path / "ready", process)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert list((tmp_path / "disk").iterdir()) == []


def deleted_files(process: int, folder: Path) -> list[os.stat_result]:
    """Return what another process has open, was in `folder` and has no name any more; it may close files meanwhile."""
    found = []
    for each in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(each)
            if target.startswith(f"{folder}/") and "(deleted)" in target:
                found.append(os.stat(each))
    return found


def test_a_forked_child_keeps_no_room_of_a_file_that_is_given_back(pool: DiskPool, tmp_path: Path) -> None:
    slab = pool.alloc(ROLE, BLOCK)
    slab.write(numbers(BLOCK))
    before, end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        os.read(before, 1)
        os._exit(0)
    try:
        assert sum(file.st_size for file in deleted_files(child, tmp_path)) >= BLOCK
        pool.close()
        files = deleted_files(child, tmp_path)
        assert [(file.st_size, file.st_blocks) for file in files] == [(0, 0)]
    finally:
        os.close(end)
        os.close(before)
        os.waitpid(child, 0)


def test_a_forked_child_is_refused_and_leaves_its_parents_file_alone(pool: DiskPool, tmp_path: Path) -> None:
    slab, idle = pool.alloc(ROLE, BLOCK), pool.alloc(ROLE, PAGE)
    pool.free(ROLE, idle)
    slab.write(numbers(BLOCK))
    child = os.fork()
    if child == 0:
        # Straight out, whatever happens: nothing of the test session may run twice.
        try:
            num_refused = 0
            for use in (
                lambda: slab.read(numbers(BLOCK)),
                lambda: slab.write(numbers(BLOCK, seed=1)),
                lambda: pool.alloc(ROLE, PAGE),
                lambda: pool.alloc(ROLE, BLOCK),
            ):
                try:
                    use()
                except StateError as error:
                    num_refused += "process" in str(error)
            pool.close()
            os._exit(num_refused)
        finally:
            os._exit(99)
    _, status = os.waitpid(child, 0)
    assert os.WIFEXITED(status)
    assert os.WEXITSTATUS(status) == 4
    read = numbers(BLOCK, seed=2)
    slab.read(read)
    assert torch.equal(read, numbers(BLOCK))


# The directory.


def test_a_directory_is_made(tmp_path: Path) -> None:
    with opened(tmp_path / "a" / "b") as pool:
        pool.alloc(ROLE, BLOCK).write(numbers(BLOCK))
    assert (tmp_path / "a" / "b").is_dir()


def test_a_file_in_place_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=rf"memory.disk.path: {path} cannot be used: Not a directory \(ENOTDIR\)"):
            new_pool(path)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_directory_that_takes_no_files() -> None:
    with pytest.raises(ConfigError, match=r"memory.disk.path: /proc/self cannot be used.*name a directory"):
        new_pool(Path("/proc/self"), cap_nbytes=0)


def test_a_directory_without_permission(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    with ordinary_rights(), pytest.raises(ConfigError, match=rf"{closed} cannot be used: Permission denied \(EACCES\)"):
        new_pool(closed)
    with ordinary_rights(), pytest.raises(ConfigError, match="below cannot be used: Permission denied"):
        new_pool(closed / "below")


def test_a_file_system_with_less_room_than_the_cap(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"memory.disk.capacity: 1.00 EiB are asked for.* left; make room"):
        new_pool(tmp_path, cap_nbytes=1 << 60)
    assert open_files(tmp_path) == []


@pytest.mark.parametrize("options", [{"block_nbytes": 0}, {"depth": 0}, {"block_nbytes": -1}])
def test_options_that_move_nothing(tmp_path: Path, options: dict[str, int]) -> None:
    with pytest.raises(StateError, match="move nothing"):
        new_pool(tmp_path, **options)
    gc.collect()
    assert open_files(tmp_path) == []


# Kinds of file systems.


@pytest.mark.skipif(not SHM.is_dir(), reason="there is no tmpfs")
def test_a_file_system_in_ram(tmp_path: Path) -> None:
    with opened(SHM / f"chunkmem-test-{os.getpid()}") as pool:
        try:
            slab = pool.alloc(ROLE, 3 * BLOCK + 1)
            slab.write(numbers(3 * BLOCK + 1, shift=3))
            read = numbers(3 * BLOCK + 1, seed=1)
            slab.read(read)
            assert torch.equal(read, numbers(3 * BLOCK + 1, shift=3))
        finally:
            (SHM / f"chunkmem-test-{os.getpid()}").rmdir()


def flags_of(file: DiskFile) -> int:
    """The flags that the system has of the open file."""
    lines = Path(f"/proc/self/fdinfo/{file._descriptor}").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("flags:")).split()[1], 8)


def test_the_page_cache_is_passed_or_waited_for(tmp_path: Path) -> None:
    """A write that the system puts off could fail later, and nobody would hear of it."""
    for direct, expected in ((True, os.O_DIRECT), (False, os.O_DSYNC)):
        with opened(tmp_path, calls=FaultyDisk(direct=direct)) as pool:
            if direct and not pool.is_direct:
                continue  # this file system does not take it
            assert pool.is_direct is direct
            assert flags_of(pool._file) & (os.O_DIRECT | os.O_DSYNC) == expected


def demand_alignment(monkeypatch: pytest.MonkeyPatch, alignment: int) -> None:
    """Have the system refuse what is not aligned; nothing is aligned to 0."""
    for name in ("preadv", "pwritev"):
        call = getattr(os, name)

        def checked(descriptor: int, buffers: list[memoryview], offset: int, call: Any = call) -> int:
            for buffer in buffers:
                address = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
                if not alignment or any(number % alignment for number in (address, len(buffer), offset)):
                    raise OSError(errno.EINVAL, "Invalid argument")
            return int(call(descriptor, buffers, offset))

        monkeypatch.setattr(os, name, checked)


@pytest.mark.parametrize("alignment", [512, PAGE, 16 << 10, 64 << 10])
@pytest.mark.parametrize("shift", [0, 9])
def test_file_systems_ask_for_an_alignment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alignment: int, shift: int
) -> None:
    demand_alignment(monkeypatch, alignment)
    with opened(tmp_path, checks=True) as pool:
        if not pool.is_direct:
            pytest.skip("this file system does not take O_DIRECT")
        for nbytes in (3 * BLOCK + 5, 1, 200_000):
            slab = pool.alloc(ROLE, nbytes)
            assert slab.start % alignment == 0
            written, read = numbers(nbytes, shift=shift), numbers(nbytes, seed=1)
            slab.write(written)
            slab.read(read)
            slab.read(read[:1], at=nbytes // 2)
            assert read[0] == written[nbytes // 2]
            assert torch.equal(read[1:], written[1:])


def test_a_file_system_that_takes_o_direct_and_refuses_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        demand_alignment(patch, 0)
        pool = new_pool(tmp_path)
    assert not pool.is_direct
    assert len(open_files(tmp_path)) == 1
    slab = pool.alloc(ROLE, 100)
    slab.write(numbers(100))
    pool.close()


def test_room_is_reserved_when_it_is_first_taken(tmp_path: Path) -> None:
    with opened(tmp_path, calls=(calls := FaultyDisk())) as pool:
        assert calls.num_calls["fallocate"] == 0
        first = pool.alloc(ROLE, 64 * BLOCK)
        assert calls.num_calls["fallocate"] == 1
        found = os.fstat(pool._file._descriptor or 0)
        assert found.st_size == 64 * BLOCK
        assert found.st_blocks * 512 >= 64 * BLOCK
        pool.free(ROLE, first)
        pool.alloc(ROLE, 64 * BLOCK)
        assert calls.num_calls["fallocate"] == 1


def test_what_is_full_says_so_and_nothing_is_lost(tmp_path: Path) -> None:
    """A tmpfs of its own, of one MiB."""
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(tmp_path)], capture_output=True, text=True, check=False
    )
    if mount.returncode:
        pytest.skip(f"nothing can be mounted: {mount.stderr}")
    try:
        with opened(tmp_path, cap_nbytes=1 << 20) as pool:
            slab = pool.alloc(ROLE, 40 * PAGE)
            slab.write(numbers(40 * PAGE))
            (tmp_path / "another").write_bytes(bytes(160 * PAGE))
            with pytest.raises(
                TierIOError, match=rf"reserving 400.00 KiB at offset \d+ .*{tmp_path}.*ENOSPC.*224.00 KiB left"
            ):
                pool.alloc(ROLE, 100 * PAGE)
            assert pool.ledger.total_nbytes == 40 * PAGE
            read = numbers(40 * PAGE, seed=1)
            slab.read(read)
            assert torch.equal(read, numbers(40 * PAGE))
            pool.free(ROLE, slab)
            assert pool.alloc(ROLE, 30 * PAGE).nbytes == 30 * PAGE
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
