"""Slabs of DISK: what is written is read, whatever its address and size; which slab is given out; several threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkmem.data.errors import StateError
from chunkmem.runtime.disk_file import SystemCalls
from chunkmem.runtime.disk_pool import DiskPool, DiskSlab
from chunkmem.runtime.transfer_threads import TransferThreads
from tests.helpers.disk import BLOCK, ROLE, disk_threads, numbers, opened, wait_until
from tests.helpers.faulty_disk import FaultyDisk
from tests.helpers.spread import spread

PAGE = 4096
SHM = Path("/dev/shm")


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[DiskPool]:
    with opened(tmp_path) as pool:
        yield pool


def starts(pool: DiskPool, *nbytes: int) -> list[int]:
    return [pool.alloc(ROLE, each).start for each in nbytes]


# Reading and writing.


@spread(
    nbytes=[2 * BLOCK, 1, PAGE - 1, PAGE, PAGE + 1, BLOCK, 3 * BLOCK + 5, 5 * BLOCK + PAGE + 1],
    shift=[0, 1, 64, 512, PAGE - 1],
    direct=[True, False],
    checks=[False, True],
)
def test_what_was_written_is_read(tmp_path: Path, nbytes: int, shift: int, direct: bool, checks: bool) -> None:
    with opened(tmp_path, calls=FaultyDisk(direct=direct), checks=checks) as pool:
        first, slab, last = (pool.alloc(ROLE, nbytes) for _ in range(3))
        neighbours = numbers(nbytes, seed=1)
        first.write(neighbours)
        last.write(neighbours)
        written, read = numbers(nbytes, seed=2, shift=shift), numbers(nbytes + 2, seed=3, shift=shift)
        around = read[nbytes:].clone()
        slab.write(written)
        slab.read(read[:nbytes])
        assert torch.equal(read[:nbytes], written)
        assert torch.equal(read[nbytes:], around), "more was read than asked for"
        for other in (first, last):
            other.read(read[:nbytes])
            assert torch.equal(read[:nbytes], neighbours), "another slab was written over"


@spread(
    at=[0, 1, PAGE, BLOCK - 1, BLOCK, BLOCK + 7, 2 * BLOCK + 100],
    nbytes=[1, PAGE, BLOCK, 100, 2 * BLOCK + 3],
    shift=[0, 1, 512],
    direct=[True, False],
    checks=[False, True],
)
def test_a_part_of_a_slab(tmp_path: Path, at: int, nbytes: int, shift: int, direct: bool, checks: bool) -> None:
    size = 5 * BLOCK + 9
    with opened(tmp_path, calls=FaultyDisk(direct=direct), checks=checks) as pool:
        slab = pool.alloc(ROLE, size)
        expected = numbers(size)
        slab.write(expected)
        part = numbers(nbytes, seed=1, shift=shift)
        slab.read(part, at=at)
        assert torch.equal(part, expected[at : at + nbytes])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_any_dtype(pool: DiskPool, dtype: torch.dtype) -> None:
    written = (torch.arange(5000) % 3).to(dtype)
    slab = pool.alloc(ROLE, written.nbytes)
    slab.write(written)
    read = torch.zeros_like(written)
    slab.read(read)
    assert torch.equal(read, written)


def test_a_parameter_that_needs_gradients_in_any_mode(pool: DiskPool) -> None:
    written = torch.nn.Parameter(torch.arange(2048.0))
    slab = pool.alloc(ROLE, written.nbytes)
    read = torch.zeros(2048)
    with torch.inference_mode(), torch.device("meta"):
        slab.write(written)
        slab.read(read)
    assert torch.equal(read, written.detach())


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(BLOCK + 1, dtype=torch.uint8), f"bytes 0 to {BLOCK + 1} are not in a slab of {BLOCK}"),
        (torch.zeros(4, 4), r"1-D contiguous.*shape \[4, 4\]"),
        (torch.zeros(8)[::2], "1-D contiguous"),
        (torch.zeros(8, device="meta"), "in RAM.*on meta"),
    ],
)
def test_what_cannot_be_moved_is_refused(pool: DiskPool, tensor: torch.Tensor, message: str) -> None:
    slab = pool.alloc(ROLE, BLOCK)
    for move in (slab.read, slab.write):
        with pytest.raises(StateError, match=message):
            move(tensor)
    with pytest.raises(StateError, match=f"bytes 0 to 2 are not in a slab of {BLOCK} bytes, or not all"):
        slab.write(torch.zeros(2, dtype=torch.uint8))
    with pytest.raises(StateError, match="bytes -1 to 1 are not in"):
        slab.read(torch.zeros(2, dtype=torch.uint8), at=-1)


@given(
    actions=st.lists(
        st.tuples(st.sampled_from([1, 4096, 5000, 40000, 70001]), st.booleans(), st.integers(0, 99)), max_size=25
    ),
    cap_blocks=st.integers(4, 40),
)
@settings(max_examples=30)
def test_slabs_never_overlap_and_the_file_stays_within_the_cap(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[int, bool, int]], cap_blocks: int
) -> None:
    with opened(tmp_path_factory.getbasetemp(), cap_nbytes=cap_blocks * BLOCK, checks=True) as pool:
        live: list[tuple[int, DiskSlab]] = []
        most_nbytes = 0
        for mark, (nbytes, takes, which) in enumerate(actions):
            if takes and pool.ledger.free_nbytes >= nbytes:
                slab = pool.alloc(ROLE, nbytes)
                assert slab.nbytes == nbytes
                slab.write(torch.full((nbytes,), mark, dtype=torch.uint8))
                live.append((mark, slab))
            elif live:
                pool.free(ROLE, live.pop(which % len(live))[1])
            padded_nbytes = sum(-(-slab.nbytes // PAGE) * PAGE for _, slab in live)
            most_nbytes = max(most_nbytes, padded_nbytes)
            assert pool.ledger.total_nbytes == sum(slab.nbytes for _, slab in live)
            assert pool.reserved_nbytes <= max(pool.ledger.cap_nbytes, most_nbytes)
        for mark, slab in live:
            read = torch.empty(slab.nbytes, dtype=torch.uint8)
            slab.read(read)
            assert (read == mark).all(), "another slab was written over this one"


# Which slab is given out.


def test_the_slab_of_its_size_that_was_freed_last_is_given_out_first(pool: DiskPool) -> None:
    slabs = [pool.alloc(ROLE, nbytes) for nbytes in (PAGE, PAGE, 2 * PAGE, PAGE)]
    assert [slab.start // PAGE for slab in slabs] == [0, 1, 2, 4]
    for index in (0, 3, 2):
        pool.free(ROLE, slabs[index])
    assert pool.alloc(ROLE, PAGE) is slabs[3]
    assert pool.alloc(ROLE, PAGE) is slabs[0]
    assert pool.alloc(ROLE, PAGE).start == 5 * PAGE, "a slab of another size is not cut before the cap is reached"
    assert pool.ledger.total_nbytes == 4 * PAGE


def test_at_the_cap_freed_slabs_of_other_sizes_make_room(tmp_path: Path) -> None:
    # |a|b|c|d|e|f|   b, c and e are freed; then 2 in one place, then 1 where it was, and with f freed 2 in two places
    with opened(tmp_path, cap_nbytes=6 * PAGE) as pool:
        slabs = [pool.alloc(ROLE, PAGE) for _ in range(6)]
        for index in (1, 2, 4):
            pool.free(ROLE, slabs[index])
        assert starts(pool, 2 * PAGE) == [PAGE]
        pool.free(ROLE, slabs[0])
        split = pool.alloc(ROLE, 2 * PAGE)
        assert sorted(split.extents) == [(0, PAGE), (4 * PAGE, PAGE)]
        written, read = numbers(2 * PAGE), numbers(2 * PAGE, seed=1)
        split.write(written)
        split.read(read)
        assert torch.equal(read, written)
        assert pool.reserved_nbytes == 6 * PAGE


class Busy:
    """A copy that is at work."""

    started_s = ended_s = 0.0
    failure = None

    def __init__(self) -> None:
        self.waited = False

    def done(self) -> bool:
        return self.waited

    def wait(self) -> None:
        self.waited = True


def test_a_slab_that_a_copy_still_uses_is_not_cut_before_that_is_over(tmp_path: Path) -> None:
    with opened(tmp_path, cap_nbytes=2 * PAGE) as pool:
        slabs = [pool.alloc(ROLE, PAGE) for _ in range(2)]
        copies = []
        for slab in slabs:
            copies.append(Busy())
            slab.events = (copies[-1],)
            pool.free(ROLE, slab)
        assert pool.alloc(ROLE, PAGE) is slabs[1]
        assert not any(copy.waited for copy in copies), "who uses it next waits, not the pool"
        pool.free(ROLE, slabs[1])
        assert starts(pool, 2 * PAGE) == [0]
        assert all(copy.waited for copy in copies)


def test_the_ledger_counts_bytes_without_padding(tmp_path: Path) -> None:
    with opened(tmp_path, cap_nbytes=300) as pool:
        slabs = [pool.alloc(ROLE, 100) for _ in range(3)]
        assert pool.ledger.total_nbytes == pool.ledger.now[ROLE] == 300
        pool.free(ROLE, slabs[0])
        assert pool.ledger.total_nbytes == 200


def test_a_slab_of_nothing(pool: DiskPool) -> None:
    slab = pool.alloc(ROLE, 0)
    slab.write(torch.empty(0))
    slab.read(torch.empty(0))
    assert pool.reserved_nbytes == 0
    assert disk_threads() == []


def test_poisoned_slabs_are_nan(pool: DiskPool) -> None:
    pool.poison = True
    slab, other = (pool.alloc(ROLE, 4 * 5000) for _ in range(2))
    for each in (slab, other):
        each.write(torch.zeros(5000))
    other.events = (Busy(),)
    pool.free(ROLE, slab)
    pool.free(ROLE, other)
    read = torch.zeros(5000)
    slab.read(read)
    assert read.isnan().all()
    other.read(read)
    assert (read == 0).all(), "a copy may still read it"


# Several threads.


def test_slabs_are_read_and_written_by_several_threads(pool: DiskPool) -> None:
    """Each thread its own slabs; blocks take turns, so they mix."""
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for turn in range(10):
                nbytes = 3 * BLOCK + 1000 * seed
                written = numbers(nbytes, seed=100 * seed + turn, shift=seed)
                slabs[seed].write(written[: slabs[seed].nbytes])
                read = torch.empty(slabs[seed].nbytes, dtype=torch.uint8)
                slabs[seed].read(read)
                assert torch.equal(read, written[: slabs[seed].nbytes])
        except BaseException as error:
            failures.append(error)

    slabs = [pool.alloc(ROLE, 3 * BLOCK + 1000 * seed) for seed in range(4)]
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(disk_threads()) == 2


def test_a_short_read_is_not_held_up_by_a_long_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # write |W W W W W W W W W W W W W W W W ...   128 blocks; the first ones wait until the read is asked for
    # read       |R|                               one block, in its turn: the last ones wait until it is there
    is_asked, has_read = threading.Event(), threading.Event()

    class Patient(SystemCalls):
        def pwritev(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
            if calls.num_calls["pwritev"] >= 3:
                assert is_asked.wait(60)
            if calls.num_calls["pwritev"] >= 50:
                assert has_read.wait(60), "the read waits for the write"
            return super().pwritev(descriptor, buffers, offset)

        def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
            has_read.set()
            return super().preadv(descriptor, buffers, offset)

    queue = TransferThreads._queue

    def asked(self: TransferThreads[Any], transfer: Any) -> None:
        queue(self, transfer)
        if threading.current_thread() is threading.main_thread() and writer.is_alive():
            is_asked.set()

    monkeypatch.setattr(TransferThreads, "_queue", asked)
    calls = FaultyDisk(calls=Patient())
    with opened(tmp_path, calls=calls) as pool:
        long, short = pool.alloc(ROLE, 128 * BLOCK), pool.alloc(ROLE, BLOCK)
        writer = threading.Thread(target=lambda: long.write(numbers(128 * BLOCK)))
        short.write(numbers(BLOCK))
        writer.start()
        wait_until(lambda: calls.num_calls["pwritev"] >= 3)
        short.read(numbers(BLOCK))
        writer.join()
        assert calls.num_calls["pwritev"] == 1 + 128


class Together(SystemCalls):
    """Writes that end once so many are under way."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.is_on = False
        self._meet = threading.Barrier(num, timeout=60)

    def pwritev(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.is_on:
            self._meet.wait()
        return super().pwritev(descriptor, buffers, offset)


def test_blocks_are_moved_at_the_same_time(tmp_path: Path) -> None:
    calls = Together(8)
    with opened(tmp_path, depth=8, calls=calls) as pool:
        slab = pool.alloc(ROLE, 8 * BLOCK)
        calls.is_on = True
        slab.write(numbers(8 * BLOCK))
