"""Threads that move blocks: none is at work when who asked is told, and what was asked for is done before they end."""

from __future__ import annotations

import threading
import time

import pytest

from chunkmem.data.errors import StateError
from chunkmem.runtime.transfer_threads import TransferThreads
from tests.helpers.disk import disk_threads, wait_until


def test_blocks_that_were_begun_end_before_an_error_is_raised() -> None:
    threads: TransferThreads[None] = TransferThreads(4, lambda: None)
    running: set[int] = set()
    begun: list[int] = []

    def is_cancelled() -> bool:
        with threads._changed:
            return not threads._waiting

    def move(block: int, scratch: None) -> None:
        begun.append(block)
        running.add(block)
        try:
            if block == 1:
                raise ValueError(block)
            wait_until(is_cancelled)  # however late a busy machine goes on with the other thread
            time.sleep(0.1)
        finally:
            running.discard(block)

    with pytest.raises(ValueError, match="1"):
        threads.carry_out(100, move)
    assert not running
    assert len(begun) <= 8
    threads.close()


def test_what_was_asked_for_is_done_before_threads_end() -> None:
    threads: TransferThreads[None] = TransferThreads(2, lambda: None)
    done: list[int] = []
    told: list[str] = []
    begun = threading.Event()

    def move(block: int, scratch: None) -> None:
        begun.set()
        time.sleep(0.02)
        done.append(block)

    waiter = threading.Thread(target=lambda: threads.carry_out(10, move))
    waiter.start()
    begun.wait()
    threads.stop(lambda: told.append("ended"))
    waiter.join()
    wait_until(lambda: bool(told))
    assert sorted(done) == list(range(10))
    assert told == ["ended"]
    with pytest.raises(StateError, match="have ended"):
        threads.carry_out(1, move)
    threads.close()
    assert told == ["ended"]
    assert disk_threads() == []
