"""What makes `test_hostile` able to fail: every kind of wrong outcome is seen, and named."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch

import chunkmem
from tests.helpers.twins import cpu_only
from tests.hostile import worker
from tests.hostile.harness import EQUAL, EQUAL_IF_ROOM, ORDINARY, Expected, Raises, Refused, Script, User
from tests.hostile.judge import verdict
from tests.hostile.models import Net

pytestmark = cpu_only


def verdicts(run: Callable[[User], object], expect: Expected = EQUAL) -> list[str | None]:
    """What is wrong with a script, by mode."""
    script = Script("under_test", "test", run, Net, expect, ())
    reports = worker.in_children(script)
    return [verdict(expect, reports["plain"], reports[mode], mode) for mode in ORDINARY]


def all_said(found: list[str | None], phrase: str) -> bool:
    return all(wrong is not None and phrase in wrong for wrong in found)


def test_a_script_that_trains_is_equal() -> None:
    assert verdicts(lambda user: user.train(0, 1)) == [None, None, None]


def test_other_numbers_are_seen() -> None:
    assert all_said(verdicts(lambda user: user.record(1.0 if user.manager else 2.0)), "1.0 is not 2.0")


def test_another_bit_of_a_tensor_is_seen() -> None:
    def run(user: User) -> None:
        user.record(torch.ones(3) + (2e-7 if user.manager else 0))

    assert all_said(verdicts(run), "off by up to")


def test_nan_is_seen() -> None:
    def run(user: User) -> None:
        user.record(torch.full((2,), float("nan") if user.manager else 0.0))

    assert all_said(verdicts(run), "2 of 2 are NaN")


def test_nan_in_plain_pytorch_is_a_fault_of_the_script() -> None:
    assert all_said(verdicts(lambda user: user.record(torch.tensor(float("nan")))), "NaN in the reference")
    assert all_said(verdicts(lambda user: user.record(float("nan"))), "nan in the reference")


def test_none_is_seen() -> None:
    assert all_said(verdicts(lambda user: user.record(None if user.manager else 0.5)), "NoneType None")


def test_other_weights_at_the_end_are_seen() -> None:
    assert all_said(verdicts(lambda user: user.train(0, *([1] if user.manager else []))), ".seen: 2 values")

    def run(user: User) -> None:
        user.opt.param_groups[0]["weight_decay"] = 0.5 if user.manager else 0.0
        user.train(0)

    assert all_said(verdicts(run), ".weights[0].stem.weight")


def test_an_error_of_another_kind_is_seen() -> None:
    def run(user: User) -> None:
        assert user.manager is None

    assert all_said(verdicts(run), "AssertionError")
    assert all_said(verdicts(run, Refused("StateError", "")), "AssertionError")


def refuse(user: User) -> None:
    if user.manager is not None:
        raise chunkmem.StateError("parameter head.weight, 3 bytes of 4: do that")


def test_a_script_that_becomes_refused_is_seen_and_one_that_no_longer_is() -> None:
    assert verdicts(refuse, Refused("StateError", r"head\.weight")) == [None, None, None]
    assert all_said(verdicts(refuse), "StateError: parameter head.weight")
    assert all_said(verdicts(refuse, Refused("StateError", "tail")), "'tail' is declared")
    assert all_said(verdicts(lambda user: user.train(0), Refused("StateError", "head")), "nothing raised, where")


def test_a_call_that_is_served_and_should_not_be_is_seen() -> None:
    assert all_said(verdicts(lambda user: user.refused("StateError", "x", lambda: None)), "NotRefusedError")


def test_too_small_counts_at_the_smallest_cap_only() -> None:
    def run(user: User) -> None:
        if user.manager is not None:
            raise chunkmem.CapacityError("too small", needed_nbytes=2, cap_nbytes=1)

    ample, *small = verdicts(run, EQUAL_IF_ROOM)
    assert ample is not None
    assert small == [None, None]
    assert all_said(verdicts(run), "CapacityError")


def test_what_plain_pytorch_refuses_has_to_be_refused() -> None:
    def run(user: User) -> None:
        raise ValueError("in both") if user.manager is None or user.bare else TypeError("another type will do")

    def served(user: User) -> None:
        if user.manager is None:
            raise ValueError

    assert verdicts(run, Raises("ValueError")) == [None, None, None]
    assert all_said(verdicts(served, Raises("ValueError")), "nothing raised")
    assert all_said(verdicts(run), "the reference itself")


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL])
def test_a_crash_names_its_mode_and_the_others_are_still_run(number: signal.Signals) -> None:
    def run(user: User) -> None:
        if user.manager is not None and not user.bare:
            os.kill(os.getpid(), number)

    assert verdicts(run) == [f"ended the process by {number.name}"] * 2 + [None]


def test_a_hang_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "TIMEOUT_S", 1)

    def run(user: User) -> None:
        if user.bare:
            time.sleep(60)

    assert verdicts(run) == [None, None, "ended the process by SIGALRM"]


def test_an_interrupt_that_escapes_is_seen() -> None:
    def run(user: User) -> None:
        if user.manager is not None:
            raise KeyboardInterrupt

    assert all_said(verdicts(run), "ended the process by exit status 1")
