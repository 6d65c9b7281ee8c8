"""Faulty and throttled disks: they do what they say, and the same for the same seed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chunkmem.data.errors import StateError
from chunkmem.runtime.disk_file import SYSTEM_CALLS, SystemCalls
from tests.helpers.disk import BLOCK, ROLE, numbers, opened
from tests.helpers.faulty_disk import Fault, FaultKind, FaultyDisk, ThrottledDisk


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Fault(FaultKind.TORN, "preadv", at=1), "torn does not happen to 'preadv'"),
        (lambda: Fault(FaultKind.FLIP, "pwritev", at=1), "flip does not happen"),
        (lambda: Fault(FaultKind.ERROR, "read", at=1), "does not happen to 'read'; calls: open, preadv"),
        (lambda: Fault(FaultKind.ERROR, "preadv"), "give either `at` or `probability`"),
        (lambda: Fault(FaultKind.ERROR, "preadv", at=1, probability=0.5), "give either"),
        (lambda: ThrottledDisk(0, 1), "nothing would end on a disk of 0"),
        (lambda: ThrottledDisk(1, 1, latency_s=-1), "nothing would end"),
    ],
)
def test_faults_that_cannot_be(make: Callable[[], object], message: str) -> None:
    with pytest.raises(StateError, match=message):
        make()


def test_the_same_seed_fails_the_same_calls(tmp_path: Path) -> None:
    def struck(seed: int) -> list[Any]:
        disk = FaultyDisk(Fault(FaultKind.DELAY, "pwritev", probability=0.3, delay_s=0), seed=seed)
        with opened(tmp_path, calls=disk) as pool:
            pool.alloc(ROLE, 20 * BLOCK).write(numbers(20 * BLOCK))
        return sorted(disk.struck, key=lambda each: each[1])

    assert struck(1) == struck(1) != struck(2)
    assert 1 <= len(struck(1)) <= 15


def test_a_throttled_disk_has_a_rate_for_each_direction(tmp_path: Path) -> None:
    with opened(tmp_path, depth=4, calls=ThrottledDisk(64 * BLOCK, 128 * BLOCK)) as pool:
        slab = pool.alloc(ROLE, 16 * BLOCK)
        memory = numbers(16 * BLOCK)
        for move, expected_s in ((slab.write, 0.125), (slab.read, 0.25)):
            begin_s = time.perf_counter()
            move(memory)
            assert expected_s <= time.perf_counter() - begin_s < expected_s + 2


def test_the_system_says_what_it_cannot_reserve(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        SYSTEM_CALLS.fallocate(-1, 0, 10)
    calls = SystemCalls()
    calls._fallocate = None
    with pytest.raises(OSError, match="not supported"):
        calls.fallocate(0, 0, 10)
