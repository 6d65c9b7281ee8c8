"""Gradients divided by gaps: the formula by hand; what trains so is in test_asynchronous.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import chunkmem
from chunkmem.contrib.async_pipeline.gap_aware import expected_step, note_step_, reduced, require_momentum

SGD: dict[str, Any] = {"momentum": 0.9, "weight_decay": 0.0}
ADAM: dict[str, Any] = {"betas": (0.8, 0.95), "eps": 1e-8, "weight_decay": 0.0, "decoupled_weight_decay": False}


def test_a_gap_of_one_expected_step_halves_a_gradient() -> None:
    average = torch.zeros(3)
    for num in (1, 2, 3):
        note_step_(average, {"momentum_buffer": torch.tensor([2.0, -2.0, 2.0])}, SGD, 0.05)
        expected = expected_step(average, SGD, num=num, max_rate=0.1)
        assert torch.allclose(expected, torch.full((3,), 0.2)), "the largest learning rate, times the momentum"
    weight, seen = torch.ones(3), torch.tensor([1.0, 1.2, 1.6])
    found = reduced(torch.full((3,), 6.0), weight, seen, expected, options=SGD, scale=1.0)
    assert torch.allclose(found, torch.tensor([6.0, 3.0, 1.5]))


def test_steps_of_adam_have_their_learning_rates() -> None:
    """Of a single update, the expected step is its step."""
    param = torch.nn.Parameter(torch.randn(40))
    optimizer = torch.optim.Adam([param], lr=0.01, betas=(0.8, 0.95))
    param.grad = torch.randn(40)
    before = param.detach().clone()
    optimizer.step()
    average = torch.zeros(40)
    note_step_(average, optimizer.state[param], ADAM, 0.01)
    assert torch.allclose(expected_step(average, ADAM, num=1, max_rate=9.0), (param - before).abs(), atol=1e-6)


def test_l2_weight_decay_is_divided_too_and_the_loss_scale_counts() -> None:
    """decay * weight, which the optimizer adds to it, makes (gradient + decay * weight) / penalty of a gradient."""
    weight, expected, scale = torch.tensor([2.0]), torch.tensor([0.5]), 256.0
    for decoupled, decay in ((False, 0.1), (True, 0.0)):
        options = {**ADAM, "weight_decay": 0.1, "decoupled_weight_decay": decoupled}
        found = reduced(torch.tensor([scale]), weight, weight + 1.5, expected, options=options, scale=scale)
        assert math.isclose(float(found) / scale + decay * 2.0, (1 + decay * 2.0) / 4, rel_tol=1e-6)


def test_sgd_without_momentum_is_refused() -> None:
    with chunkmem.ChunkManager(chunkmem.Config.from_dict({"memory": {"device": "1MiB", "host": "8MiB"}})) as manager:
        with manager.init():
            model = torch.nn.Linear(4, 4)
        require_momentum(chunkmem.AdamW(model.parameters(), manager=manager, lr=0.1))
        with pytest.raises(chunkmem.ConfigError, match="that of parameter group 0 is 0; give momentum"):
            require_momentum(chunkmem.SGD(model.parameters(), manager=manager, lr=0.1))
