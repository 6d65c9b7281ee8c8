"""A disk that fails, is full, tears, loses and changes what it was given: every result is looked at."""

from __future__ import annotations

import errno
import gc
import math
import os
import signal
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

from chunkmem.data.errors import ConfigError, TierIOError
from chunkmem.runtime.disk_pool import DiskPool
from tests.helpers.disk import BLOCK, ROLE, new_pool, numbers, open_files, opened, wait_until
from tests.helpers.faulty_disk import Fault, FaultKind, FaultyDisk, ThrottledDisk
from tests.helpers.spread import spread

PAGE = 4096
SIZE = 4 * BLOCK
ERROR, SHORT, TORN = FaultKind.ERROR, FaultKind.SHORT, FaultKind.TORN


def written_and_read(pool: DiskPool, *, size: int = SIZE, shift: int = 0) -> bool:
    """Write a new slab and read it; tell whether the bytes are the same."""
    slab = pool.alloc(ROLE, size)
    written, read = numbers(size, shift=shift), numbers(size, seed=1, shift=shift)
    slab.write(written)
    slab.read(read)
    return torch.equal(read, written)


# What is legal has no effect.


@spread(
    at=[1, 2, 4], call=["preadv", "pwritev"], times=[1, 3, math.inf], shift=[0, 5], size=[SIZE, SIZE + 1], direct=[1, 0]
)
def test_short_transfers_are_continued(
    tmp_path: Path, at: int, call: str, times: float, shift: int, size: int, direct: int
) -> None:
    # Half of what is left each time ends at one aligned piece, of which half is nothing: so often it may be stuck.
    times = min(times, 5) if direct else times
    disk = FaultyDisk(Fault(SHORT, call, at=at, times=times), direct=bool(direct))
    with opened(tmp_path, depth=1, calls=disk) as pool:
        assert written_and_read(pool, size=size, shift=shift)
    assert (call, at, SHORT) in disk.struck


@spread(call=["preadv", "pwritev", "fallocate"], at=[1, 2])
def test_interrupted_calls_are_repeated(tmp_path: Path, call: str, at: int) -> None:
    disk = FaultyDisk(Fault(ERROR, call, at=at, times=3, number=errno.EINTR))
    with opened(tmp_path, calls=disk) as pool:
        assert written_and_read(pool)
        assert written_and_read(pool)
    assert len(disk.struck) == 3


def test_late_calls_are_waited_for(tmp_path: Path) -> None:
    disk = FaultyDisk(Fault(FaultKind.DELAY, "preadv", probability=0.5), Fault(FaultKind.DELAY, "pwritev", at=2))
    with opened(tmp_path, calls=disk) as pool:
        assert written_and_read(pool)
    assert {call for call, _, _ in disk.struck} == {"preadv", "pwritev"}


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_that_reserves_nothing(tmp_path: Path, number: int) -> None:
    disk = FaultyDisk(Fault(ERROR, "fallocate", at=1, times=math.inf, number=number))
    with opened(tmp_path, calls=disk, checks=True) as pool:
        assert written_and_read(pool, size=SIZE + 1)
        assert written_and_read(pool, size=BLOCK + 5, shift=3)
        assert disk.num_calls["fallocate"] == 1, "it said no, so it is not asked again"


# What fails is said.


@spread(
    at=[1, 3, 4],
    number=[errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EINVAL],
    call=["preadv", "pwritev"],
    shift=[0, 7],
    checks=[False, True],
)
def test_a_failed_call_is_an_error_that_names_all(
    tmp_path: Path, at: int, number: int, call: str, shift: int, checks: bool
) -> None:
    disk = FaultyDisk(Fault(ERROR, call, at=at, number=number))
    with opened(tmp_path, calls=disk, depth=1, checks=checks) as pool:
        slab = pool.alloc(ROLE, SIZE)
        doing, move = ("reading", slab.read) if call == "preadv" else ("writing", slab.write)
        if call == "preadv":
            slab.write(numbers(SIZE))
        with pytest.raises(TierIOError) as error:
            move(numbers(SIZE, shift=shift))
        offset = slab.start + (at - 1) * BLOCK
        assert str(error.value).startswith(
            f"DISK: {doing} 16.00 KiB at offset {offset} of the unnamed file in {tmp_path} failed: "
        )
        assert f"({errno.errorcode[number]})" in str(error.value)
        advice = "make room there" if number in (errno.ENOSPC, errno.EDQUOT) else "memory.disk.path"
        assert advice in str(error.value)
        assert error.value.errno == number
        assert disk.num_calls[call] == at, "no more blocks are begun"
        slab.write(numbers(SIZE, shift=shift))
        move(numbers(SIZE, shift=shift))  # the pool still works
        assert written_and_read(pool)


def test_a_file_that_is_cut_off(tmp_path: Path) -> None:
    with opened(tmp_path, calls=(disk := FaultyDisk())) as pool:
        slab = pool.alloc(ROLE, SIZE)
        slab.write(numbers(SIZE))
        disk.faults = (Fault(FaultKind.EMPTY, "preadv", at=2),)
        with pytest.raises(TierIOError, match=rf"ended after 0 of {BLOCK} bytes; the file was cut off"):
            slab.read(numbers(SIZE))
    with opened(tmp_path) as pool:
        slab = pool.alloc(ROLE, SIZE)
        slab.write(numbers(SIZE))
        os.truncate(pool._file._descriptor or -1, BLOCK + 100)
        with pytest.raises(TierIOError, match="the file was cut off"):
            slab.read(numbers(SIZE))


def test_calls_that_move_ever_less_end_in_an_error(tmp_path: Path) -> None:
    """Of one aligned piece half is moved, again and again."""
    disk = FaultyDisk(Fault(SHORT, "pwritev", at=1, times=math.inf))
    with opened(tmp_path, depth=1, calls=disk) as pool:
        slab = pool.alloc(ROLE, PAGE)
        if not pool.is_direct:
            pytest.skip("without alignment, every byte is a step")
        with pytest.raises(TierIOError, match=r"writing 4.00 KiB at offset 0 .* ended after 0 of 4096 bytes"):
            slab.write(numbers(PAGE))


def test_a_full_disk_is_said_before_anything_is_written(tmp_path: Path) -> None:
    disk = FaultyDisk(Fault(ERROR, "fallocate", at=2, times=math.inf, number=errno.ENOSPC))
    with opened(tmp_path, calls=disk) as pool:
        kept = pool.alloc(ROLE, SIZE)
        with pytest.raises(TierIOError, match=rf"reserving 64.00 KiB at offset {SIZE} of .* \(ENOSPC\); .* left: make"):
            pool.alloc(ROLE, SIZE)
        assert pool.ledger.total_nbytes == SIZE
        assert pool.reserved_nbytes == SIZE
        pool.free(ROLE, kept)
        # Still full: smaller ones are cut from what was freed.
        assert [pool.alloc(ROLE, BLOCK).start for _ in range(2)] == [0, BLOCK]
        with pytest.raises(TierIOError, match="ENOSPC"):
            pool.alloc(ROLE, SIZE)
        disk.faults = ()
        assert pool.alloc(ROLE, SIZE).extents == ((SIZE, SIZE),)
        assert pool.ledger.total_nbytes == 2 * BLOCK + SIZE


def test_what_was_gathered_is_given_back_if_the_rest_cannot_be_had(tmp_path: Path) -> None:
    disk = FaultyDisk(Fault(ERROR, "fallocate", at=3, number=errno.ENOSPC))
    with opened(tmp_path, cap_nbytes=2 * BLOCK + PAGE, calls=disk) as pool:
        slabs = [pool.alloc(ROLE, BLOCK) for _ in range(2)]
        pool.free(ROLE, slabs[0])
        with pytest.raises(TierIOError, match=r"reserving 4.00 KiB"):
            pool.alloc(ROLE, BLOCK + PAGE)
        slab = pool.alloc(ROLE, BLOCK + PAGE)
        assert slab.extents == ((0, BLOCK), (2 * BLOCK, PAGE))


def test_an_error_while_closing_is_said(tmp_path: Path) -> None:
    pool = new_pool(tmp_path, calls=FaultyDisk(Fault(ERROR, "close", at=1)))
    with pytest.raises(TierIOError, match=rf"closing the unnamed file in {tmp_path} failed: .*EIO"):
        pool.close()
    pool.close()
    assert open_files(tmp_path) == []


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EMFILE])
def test_a_file_that_cannot_be_made(tmp_path: Path, number: int) -> None:
    disk = FaultyDisk(Fault(ERROR, "open", at=1, times=math.inf, number=number))
    with pytest.raises(ConfigError, match=rf"memory.disk.path: {tmp_path} cannot be used: .*{errno.errorcode[number]}"):
        new_pool(tmp_path, calls=disk)
    assert list(tmp_path.iterdir()) == []


# What the disk changes is found.


@spread(at=[1, 3, 4], kind=["flip", "torn", "lost"], shift=[0, 3], direct=[True, False])
def test_checksums_find_what_is_not_what_was_written(
    tmp_path: Path, at: int, kind: str, shift: int, direct: bool
) -> None:
    disk = FaultyDisk(direct=direct)
    with opened(tmp_path, depth=1, calls=disk, checks=True) as pool:
        slab = pool.alloc(ROLE, SIZE)
        slab.write(numbers(SIZE))
        offset = slab.start + (at - 1) * BLOCK
        number = disk.num_calls["preadv" if kind == "flip" else "pwritev"] + at
        disk.faults = (Fault(FaultKind(kind), "preadv" if kind == "flip" else "pwritev", at=number),)
        written = numbers(SIZE, seed=1, shift=shift)
        if kind == "torn":
            with pytest.raises(TierIOError, match=f"writing .* at offset {offset} "):
                slab.write(written)
            reason = "never written to the end"
        else:
            slab.write(written)
            reason = r"not what was written: their CRC-32 is [0-9a-f]{8}, and was [0-9a-f]{8}"
        with pytest.raises(TierIOError, match=rf"16.00 KiB at offset {offset} of .* in {tmp_path} .*{reason}"):
            slab.read(numbers(SIZE, shift=shift))
        disk.faults = ()
        slab.write(written)
        read = numbers(SIZE)
        slab.read(read)
        assert torch.equal(read, written)


@pytest.mark.parametrize("kind", [FaultKind.FLIP, FaultKind.LOST])
def test_without_checksums_it_is_not_found(tmp_path: Path, kind: FaultKind) -> None:
    """So that it is known what they are for."""
    disk = FaultyDisk(Fault(kind, "preadv" if kind is FaultKind.FLIP else "pwritev", at=2))
    with opened(tmp_path, calls=disk) as pool:
        assert not written_and_read(pool)


def test_a_part_of_a_changed_block(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with opened(tmp_path, calls=disk, checks=True) as pool:
        slab = pool.alloc(ROLE, SIZE)
        part = numbers(10)
        with pytest.raises(TierIOError, match="never written to the end"):
            slab.read(part, at=BLOCK + 7)
        slab.write(numbers(SIZE))
        disk.faults = (Fault(FaultKind.FLIP, "preadv", at=disk.num_calls["preadv"] + 1),)
        with pytest.raises(TierIOError, match=rf"at offset {slab.start + BLOCK} .*not what was written"):
            slab.read(part, at=BLOCK + 7)


def test_a_slab_that_is_freed_can_still_be_read_until_it_is_written(tmp_path: Path) -> None:
    """A copy that reads it may be queued, when the book-keeping has freed it, and given it out again."""
    with opened(tmp_path, checks=True) as pool:
        slab = pool.alloc(ROLE, SIZE)
        slab.write(numbers(SIZE))
        pool.free(ROLE, slab)
        assert pool.alloc(ROLE, SIZE) is slab
        read = numbers(SIZE, seed=1)
        slab.read(read)
        assert torch.equal(read, numbers(SIZE))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(20))
def test_faults_at_random_never_pass_unnoticed(tmp_path: Path, seed: int) -> None:
    run_at_random(tmp_path, seed)


def test_faults_at_random(tmp_path: Path) -> None:
    assert run_at_random(tmp_path, 0) >= 5


def run_at_random(directory: Path, seed: int) -> int:
    """Write and read slabs on a disk on which all goes wrong: bytes that come back without an error are right."""
    faults = [
        *(Fault(ERROR, call, probability=0.02, number=errno.EIO) for call in ("preadv", "pwritev")),
        *(Fault(SHORT, call, probability=0.1) for call in ("preadv", "pwritev")),
        *(Fault(FaultKind.FLIP, "preadv", probability=0.01), Fault(FaultKind.EMPTY, "preadv", probability=0.01)),
        *(Fault(TORN, "pwritev", probability=0.02), Fault(FaultKind.LOST, "pwritev", probability=0.02)),
        Fault(ERROR, "fallocate", probability=0.05, number=errno.ENOSPC),
    ]
    num_failed = 0
    with opened(directory, calls=FaultyDisk(*faults, seed=seed), checks=True) as pool:
        for turn in range(60):
            size = (BLOCK, SIZE, SIZE + 5, 7 * PAGE)[turn % 4]
            written, read = numbers(size, seed=turn, shift=turn % 3), numbers(size, shift=turn % 2)
            try:
                slab = pool.alloc(ROLE, size)
            except TierIOError:
                num_failed += 1
                continue
            try:
                slab.write(written)
                slab.read(read)
                assert torch.equal(read, written)
            except TierIOError:
                num_failed += 1
            pool.free(ROLE, slab)
        assert pool.ledger.total_nbytes == 0
    return num_failed


# What interrupts who waits.


@pytest.mark.full
def test_an_interrupted_wait_leaves_nobody_at_work_on_the_memory(tmp_path: Path) -> None:
    """The memory belongs to the caller: once the call is over, whatever its end, nothing may write to it."""
    with opened(tmp_path, calls=ThrottledDisk(BLOCK / 0.2, 1e12)) as pool:  # reads for 3 s and more
        slab = pool.alloc(ROLE, 64 * BLOCK)
        slab.write(numbers(64 * BLOCK))
        read = torch.zeros(64 * BLOCK, dtype=torch.uint8)
        main = threading.get_ident()

        def interrupt() -> None:
            while not read.any():
                time.sleep(0.01)
            signal.pthread_kill(main, signal.SIGINT)

        timer = threading.Thread(target=interrupt)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background jobs ignore it
        timer.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                slab.read(read)
            after = read.clone()
            timer.join()
        finally:
            signal.signal(signal.SIGINT, before)
        assert 0 < int((after != 0).sum()) < 50 * BLOCK, "some blocks were read, the others never begun"
        time.sleep(0.3)
        assert torch.equal(read, after)
        assert written_and_read(pool, size=BLOCK)


def test_a_failed_transfer_keeps_nothing_alive(tmp_path: Path) -> None:
    disk = FaultyDisk(Fault(ERROR, "pwritev", at=1))
    with opened(tmp_path, calls=disk) as pool:
        slab = pool.alloc(ROLE, SIZE)
        memory = numbers(SIZE)
        gone = weakref.ref(memory)
        gc.disable()
        try:
            with pytest.raises(TierIOError):
                slab.write(memory)
            del memory
            wait_until(lambda: gone() is None)
        finally:
            gc.enable()
