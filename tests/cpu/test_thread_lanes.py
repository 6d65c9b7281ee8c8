"""Lanes that are threads: when they run, how errors come out of them, what becomes of them in a fork."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator

import pytest
import torch

from chunkmem.data.errors import StateError, TierIOError
from chunkmem.plan.model import Lane
from chunkmem.runtime.events import Event
from chunkmem.runtime.queues import Lanes
from tests.helpers.lanes import lane_threads


@pytest.fixture
def threads() -> Iterator[Lanes]:
    opened = Lanes()
    yield opened
    opened.close()


def test_threads_start_with_the_first_copy_of_their_lane(threads: Lanes) -> None:
    assert lane_threads() == set()
    threads.copy(Lane.D2H, [(torch.zeros(8), torch.ones(8))], after=[], label="x")
    assert lane_threads() == {"chunkmem d2h"}
    threads.copy(Lane.H2D, [(torch.zeros(8), torch.ones(8))], after=[], label="x")
    assert lane_threads() == {"chunkmem d2h", "chunkmem h2d"}
    threads.close()
    assert lane_threads() == set()


def test_threads_end_with_lanes_that_nobody_closed() -> None:
    lanes = Lanes()
    lanes.compute_waits(lanes.copy(Lane.D2H, [(torch.zeros(8), torch.ones(8))], after=[], label="x"))
    thread = next(thread for thread in threading.enumerate() if thread.name == "chunkmem d2h")
    del lanes
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_an_idle_thread_forgets_its_last_copy(threads: Lanes) -> None:
    event = threads.copy(Lane.D2H, [(torch.zeros(8), torch.ones(8))], after=[], label="x")
    threads.drain()
    deadline_s = time.perf_counter() + 10
    while sys.getrefcount(event) > 2:  # this frame's and the call's; the thread lets go a little after the copy is done
        assert time.perf_counter() < deadline_s
        time.sleep(0.001)


def test_a_program_ends_without_closing_its_lanes() -> None:
    program = (
        "import torch; from chunkmem.plan.model import Lane; from chunkmem.runtime.queues import Lanes\n"
        "lanes = Lanes(); lanes.copy(Lane.D2H, [(torch.zeros(8), torch.ones(8))], after=[], label='x').wait()"
    )
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)


def test_a_program_ends_while_an_update_is_under_way() -> None:
    """A thread that torch's code runs in cannot just be ended with the interpreter: the process would be aborted."""
    program = (
        "import threading, torch; from chunkmem.runtime.queues import Lanes\n"
        "lanes, one, begun, said = Lanes(), torch.ones(200, 200), threading.Event(), threading.Event()\n"
        "def update():\n"
        "    begun.set(); said.wait()\n"
        "    for _ in range(600): one @ one\n"
        "    print('updated')\n"
        "lanes.work(update, after=(), label='update')\n"
        "begun.wait(); print('the end'); said.set()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "the end\nupdated\n", "")


def test_lanes_run_beside_each_other_and_beside_the_caller(threads: Lanes) -> None:
    # Each lane's copy ends only once the other's has begun and the caller has done something else.
    meet = threading.Barrier(3, timeout=60)
    threads._move = lambda target, source, nbytes: meet.wait()
    events = [
        threads.copy(lane, [(torch.zeros(8), torch.ones(8))], after=[], label="x") for lane in (Lane.H2D, Lane.D2H)
    ]
    assert not any(event.done() for event in events)
    meet.wait()
    threads.drain()


def broken(threads: Lanes) -> None:
    """Make every copy to 64 bytes fail."""

    def move(target: int, source: int, nbytes: int) -> None:
        if nbytes == 64:
            raise OSError("the link is down")
        ctypes.memmove(target, source, nbytes)

    threads._move = move


def fail(threads: Lanes, lane: Lane) -> Event:
    return threads.copy(lane, [(torch.zeros(16), torch.ones(16))], after=[], label="bad")


def test_an_error_is_raised_by_who_waits_and_once_by_drain(threads: Lanes) -> None:
    broken(threads)
    bad = fail(threads, Lane.H2D)
    for _ in range(2):
        with pytest.raises(OSError, match="the link is down"):
            bad.wait()
        with pytest.raises(OSError, match="the link is down"):
            threads.compute_waits(bad)
    assert bad.done()
    with pytest.raises(OSError, match="the link is down"):
        threads.drain()
    threads.drain()


class Held:
    """Something in a frame."""


@pytest.mark.parametrize("how", ["wait", "compute_waits", "drain"])
def test_an_event_keeps_nothing_of_who_was_told_of_its_failure(threads: Lanes, how: str) -> None:
    """A model's call that ended so kept its graph, which pinned weights: the step could not be repeated."""
    broken(threads)
    bad = fail(threads, Lane.H2D)
    seen: list[weakref.ref[Held]] = []

    def wait() -> None:
        held = Held()
        seen.append(weakref.ref(held))
        {"wait": bad.wait, "compute_waits": lambda: threads.compute_waits(bad), "drain": threads.drain}[how]()

    with pytest.raises(TierIOError, match="the link is down") as raised:
        wait()
    assert str(raised.value.__cause__) == "the link is down"
    del raised
    assert seen[0]() is None
    assert bad.failure is not None


def test_what_relies_on_a_failed_copy_fails_too(threads: Lanes) -> None:
    broken(threads)
    bad = fail(threads, Lane.H2D)
    target = torch.zeros(8)
    behind = threads.copy(Lane.H2D, [(target, torch.ones(8))], after=[], label="behind")
    after = threads.copy(Lane.D2H, [(target, torch.ones(8))], after=[bad], label="after")
    for event in (behind, after):
        with pytest.raises(OSError, match="the link is down"):
            event.wait()
    assert torch.equal(target, torch.zeros(8))
    with pytest.raises(OSError, match="the link is down"):
        threads.drain()
    threads.compute_waits(threads.copy(Lane.H2D, [(target, torch.ones(8))], after=[], label="again"))
    assert torch.equal(target, torch.ones(8))


def test_lanes_with_an_error_that_nobody_saw_close_quietly(threads: Lanes) -> None:
    broken(threads)
    fail(threads, Lane.D2H)
    threads.close()
    assert lane_threads() == set()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_threads_it_has_not_got(threads: Lanes) -> None:
    hold = threading.Event()
    threads._move = lambda target, source, nbytes: hold.wait()
    pending = threads.copy(Lane.D2H, [(torch.zeros(8), torch.ones(8))], after=[], label="block 3")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with pytest.raises(StateError, match="block 3: it was left to process"):
                pending.wait()
            with pytest.raises(StateError, match="block 4: the lanes belong to process"):
                threads.copy(Lane.D2H, [(torch.zeros(8), torch.ones(8))], after=[], label="block 4")
            threads.drain()
            threads.close()
            threads.close()
            status = 0
        finally:
            os._exit(status)
    deadline_s = time.perf_counter() + 20
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.perf_counter() > deadline_s:
            os.kill(child, 9)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        time.sleep(0.01)
    hold.set()
    assert os.waitstatus_to_exitcode(ended[1]) == 0
