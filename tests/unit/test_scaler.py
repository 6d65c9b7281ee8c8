"""The loss scale of fp16, step by step."""

from __future__ import annotations

import pytest

from chunkmem.config import Fp16Config
from chunkmem.data.errors import CheckpointError
from chunkmem.optim.scaler import LossScaler


def scales(scaler: LossScaler, steps: str) -> list[float]:
    """The scale after each step; `x` overflows."""
    found = []
    for step in steps:
        scaler.step(overflow=step == "x")
        found.append(scaler.loss_scale)
    return found


def test_it_grows_after_a_window_without_overflow() -> None:
    scaler = LossScaler(Fp16Config(initial_scale_power=3, loss_scale_window=3))
    assert scales(scaler, "ooooooo") == [8, 8, 16, 16, 16, 32, 32]


def test_one_bad_batch_is_forgiven_and_a_streak_is_not() -> None:
    scaler = LossScaler(Fp16Config(initial_scale_power=5, hysteresis=2, loss_scale_window=4))
    assert scales(scaler, "oxoxxo") == [32, 32, 32, 16, 8, 8]
    assert scaler.num_skipped == 3


def test_growing_renews_the_patience() -> None:
    scaler = LossScaler(Fp16Config(initial_scale_power=5, hysteresis=2, loss_scale_window=2))
    assert scales(scaler, "xxooxx") == [32, 16, 16, 32, 32, 16]


def test_an_overflow_begins_the_window_anew() -> None:
    scaler = LossScaler(Fp16Config(initial_scale_power=5, hysteresis=9, loss_scale_window=3))
    assert scales(scaler, "ooxooo") == [32, 32, 32, 32, 32, 64]


def test_it_does_not_fall_below_the_least() -> None:
    scaler = LossScaler(Fp16Config(initial_scale_power=2, hysteresis=1, min_loss_scale=2))
    assert scales(scaler, "xxx") == [2, 2, 2]


def test_a_fixed_scale_stays() -> None:
    scaler = LossScaler(Fp16Config(loss_scale=7))
    assert scales(scaler, "xxooo") == [7] * 5
    assert scaler.num_skipped == 2


def test_it_goes_on_from_a_saved_state() -> None:
    config = Fp16Config(initial_scale_power=5, hysteresis=2, loss_scale_window=3)
    first, second = LossScaler(config), LossScaler(config)
    scales(first, "oox")
    second.load_state_dict(first.state_dict())
    assert scales(second, "xooo") == scales(first, "xooo")


@pytest.mark.parametrize(
    "state", [{}, {"scale": "x"}, None, {"scale": 0, "patience": 1, "num_good": 0, "num_skipped": 0}]
)
def test_a_state_that_is_none(state: object) -> None:
    scaler = LossScaler(Fp16Config())
    with pytest.raises(CheckpointError, match="loss_scaler"):
        scaler.load_state_dict(state)  # type: ignore[arg-type]
    assert scaler.loss_scale == 2**16
