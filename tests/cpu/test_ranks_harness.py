"""The harness for ranks, on itself: a rank that fails, hangs or dies fails the test, soon, and leaves nothing."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from chunkmem.data.errors import StateError
from tests.helpers import ranks
from tests.helpers.ranks import RankFailure, Team

HANG_S = 1.0
FOREVER_S = 600.0
SOON_S = 120.0
"""For what takes a second or two on an idle machine, and `FOREVER_S` if it goes wrong."""


def add(rank: int, a: int, b: int) -> tuple[int, int]:
    return rank, a + b


def fail(rank: int, who: int) -> None:
    if rank == who:
        raise ValueError(f"rank {rank} has had enough")
    threading.Event().wait()


def hang(rank: int, who: int) -> None:
    if rank == who:
        threading.Event().wait()


def stop(rank: int, who: int) -> None:
    if rank == who:
        os.kill(os.getpid(), signal.SIGSTOP)


def die(rank: int, who: int, number: int) -> None:
    if rank == who:
        os.kill(os.getpid(), number)


def leave(rank: int, who: int, status: int) -> None:
    if rank == who:
        os._exit(status)


def my_pid(rank: int) -> int:
    return os.getpid()


def answer_with_a_lambda(rank: int) -> object:
    return lambda: rank


def never_start(*_: object) -> None:
    threading.Event().wait()


@pytest.fixture
def team() -> Iterator[Team]:
    """Two processes, which all have to be gone in the end."""
    with Team(2, gloo=False) as team:
        team.run(my_pid)
        yield team
    assert children() == []


def children() -> list[psutil.Process]:
    """The ranks, zombies included: children of the process that they are forked from, or of this one."""
    found = []
    for child in psutil.Process().children():
        command = " ".join(child.cmdline())
        if "multiprocessing.forkserver" in command:
            found += child.children()
        elif "multiprocessing.resource_tracker" not in command:
            found.append(child)
    return found


def failure(team: Team, *task: object, timeout_s: float = FOREVER_S, **options: object) -> str:
    """Run what fails: soon, and with no process left."""
    started_s = time.monotonic()
    assert sorted(child.pid for child in children()) == sorted(team.pids)
    assert len(team.pids) == 2
    with pytest.raises(RankFailure) as caught:
        team.run(*task, timeout_s=timeout_s, **options)  # type: ignore[arg-type]
    assert time.monotonic() - started_s < SOON_S
    assert team.pids == []
    assert children() == []
    return str(caught.value)


def test_results_come_by_rank_from_processes_that_are_kept(team: Team) -> None:
    pids = team.run(my_pid)
    assert len({*pids, os.getpid()}) == 3
    assert team.run(add, 2, 3) == [(0, 5), (1, 5)]
    assert team.run(my_pid) == pids == team.pids


def test_a_failing_rank_fails_the_test_while_another_still_waits_for_it(team: Team) -> None:
    message = failure(team, fail, 1)
    assert message.startswith("fail on 2 ranks:\nrank 0 did not answer; it is in\n")
    assert "rank 1 raised\n    Traceback" in message
    assert "ValueError: rank 1 has had enough" in message


def test_a_hanging_rank_fails_the_test_and_says_where_it_is(team: Team) -> None:
    message = failure(team, hang, 1, timeout_s=HANG_S)
    assert message.startswith("hang on 2 ranks:\nrank 1 did not answer; it is in\n")
    assert "in hang\n" in message


@pytest.mark.full
def test_a_stopped_rank_fails_the_test(team: Team) -> None:
    assert "rank 0 did not answer" in failure(team, stop, 0, timeout_s=HANG_S)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSEGV, marks=pytest.mark.full)])
def test_a_rank_that_a_signal_kills_fails_the_test_and_there_are_new_ones(team: Team, number: int) -> None:
    before = team.pids
    assert failure(team, die, 1, number) == f"die on 2 ranks:\nrank 1 died of {signal.Signals(number).name}"
    assert len({*before, *team.run(my_pid)}) == 4


@pytest.mark.parametrize("status", [0, pytest.param(3, marks=pytest.mark.full)])
def test_a_rank_that_leaves_fails_the_test(team: Team, status: int) -> None:
    assert failure(team, leave, 1, status) == f"leave on 2 ranks:\nrank 1 left with status {status}"


def refuse(rank: int, late: int, only: tuple[int, ...]) -> None:
    if rank == late:
        time.sleep(ranks.GRACE_S + 0.2)
    if rank in only:
        raise StateError(f"rank {rank} refuses\nfor good reasons")


def test_errors_of_all_ranks_need_not_come_soon_after_each_other(team: Team) -> None:
    assert team.errors(refuse, 1, (0, 1)) == [
        f"chunkmem.data.errors.StateError: rank {rank} refuses" for rank in (0, 1)
    ]
    assert children() == []


def test_a_rank_without_an_error_fails_the_test(team: Team) -> None:
    with pytest.raises(RankFailure, match="refuse on 2 ranks, one error each:\nrank 0 done\nrank 1 raised"):
        team.errors(refuse, -1, (1,))
    assert children() == []


@pytest.mark.full
def test_an_answer_that_cannot_be_sent_fails_the_test(team: Team) -> None:
    assert "Can't pickle local object" in failure(team, answer_with_a_lambda)


def test_a_rank_may_be_meant_to_be_lost(team: Team) -> None:
    assert team.run(die, 1, signal.SIGKILL, lost=[1]) == [None, None]
    assert children() == []
    assert "rank 0 died of SIGKILL" in failure(started(team), die, 0, signal.SIGKILL, lost=[1])
    assert failure(started(team), add, 2, 3, lost=[1]) == "add on 2 ranks:\nrank 1 answered"


def started(team: Team) -> Team:
    """Have new processes where there are none."""
    team.run(my_pid)
    return team


def test_ranks_that_do_not_start_fail_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "START_S", HANG_S)
    monkeypatch.setattr(ranks, "_serve", never_start)
    with Team(2, gloo=False) as team, pytest.raises(RankFailure, match=r"starting 2 ranks:\nrank 0 did not answer"):
        team.run(my_pid)
    assert children() == []
