"""Doing something in a second process."""

from __future__ import annotations

import multiprocessing
import os

import pytest

from chunkmem.estimate.forked import in_fork


def test_it_is_done_in_another_process_and_its_result_comes_back() -> None:
    result = in_fork(lambda: (os.getpid(), ["anything"]))
    pid, value = result()
    assert pid != os.getpid()
    assert value == ["anything"]


def test_an_error_is_raised_here() -> None:
    def fail() -> None:
        raise KeyError(os.getpid())

    result = in_fork(fail)
    with pytest.raises(KeyError, match=str(os.getpid())):
        result()


def test_a_process_that_dies_is_made_up_for() -> None:
    here = os.getpid()

    def work() -> int:
        if os.getpid() != here:
            os._exit(3)
        return 7

    assert in_fork(work)() == 7


def test_where_processes_cannot_be_forked_it_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    assert in_fork(os.getpid)() == os.getpid()
