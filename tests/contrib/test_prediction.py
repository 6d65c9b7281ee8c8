"""Predicted weights: formulas, next to optimizers of torch that are given gradients of 0, and learning rates ahead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import chunkmem
from chunkmem.contrib.async_pipeline.gap_aware import note_step_
from chunkmem.contrib.async_pipeline.prediction import learning_rates, predict_

NUM = 3


def trained(name: str, **options: Any) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(40))
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)([param], **options)
    for _ in range(4):
        param.grad = torch.randn(40)
        optimizer.step()
    return param, optimizer


def defaults(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"decoupled_weight_decay": isinstance(optimizer, torch.optim.AdamW), **optimizer.param_groups[0]}


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize(("momentum", "dampening", "nesterov"), [(0.9, 0, False), (0.9, 0.5, False), (0.9, 0, True)])
def test_sgd_continues_without_gradients(decay: float, momentum: float, dampening: float, nesterov: bool) -> None:
    options = {"lr": 0.1, "momentum": momentum, "dampening": dampening, "nesterov": nesterov, "weight_decay": decay}
    param, optimizer = trained("SGD", **options)
    found = param.detach().clone()
    rates = [0.1, 0.05, 0.02]
    predict_(found, optimizer.state[param], defaults(optimizer), rates)
    for lr in rates:
        optimizer.param_groups[0]["lr"] = lr
        param.grad = torch.zeros(40)
        optimizer.step()
    assert torch.allclose(found, param, rtol=0, atol=1e-6)


def test_sgd_in_closed_form() -> None:
    param, optimizer = trained("SGD", lr=0.1, momentum=0.9)
    found, velocity = param.detach().clone(), optimizer.state[param]["momentum_buffer"]
    predict_(found, optimizer.state[param], defaults(optimizer), [0.1] * NUM)
    assert torch.allclose(found, param - 0.1 * (0.9 - 0.9 ** (NUM + 1)) / (1 - 0.9) * velocity, rtol=0, atol=1e-6)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_adam_continues_with_the_squares_it_has(name: str, decay: float) -> None:
    """Term by term, in float64: lr_i beta1^i m / (1 - beta1^(t + i)) / (sqrt(v / (1 - beta2^(t + i))) + eps)."""
    param, optimizer = trained(name, lr=0.01, weight_decay=decay, betas=(0.8, 0.95))
    found, state = param.detach().clone(), optimizer.state[param]
    before = {key: value.clone() for key, value in state.items()}
    rates = [0.01, 0.0, 0.004]
    predict_(found, state, defaults(optimizer), rates)
    assert all(torch.equal(value, before[key]) for key, value in state.items())
    weight, exp_avg = param.detach().double(), state["exp_avg"].double()
    for i, lr in enumerate(rates, start=1):
        if name == "AdamW":
            weight = weight * (1 - lr * decay)
            exp_avg = state["exp_avg"].double() * 0.8**i
        else:
            exp_avg = 0.8 * exp_avg + 0.2 * decay * weight
        root = (state["exp_avg_sq"].double() / (1 - 0.95 ** (4 + i))).sqrt()
        weight = weight - lr * exp_avg / (1 - 0.8 ** (4 + i)) / (root + 1e-8)
    assert torch.allclose(found.double(), weight, rtol=0, atol=1e-6)
    assert (found - param).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_states_in_bf16_are_taken_in_float32(name: str) -> None:
    """Of bf16 without master weights: a weight in float32 is moved by them as if they had been given in it."""
    options = {"lr": 0.1, "momentum": 0.9} if name == "SGD" else {"lr": 0.1}
    param, optimizer = trained(name, **options)
    low = {key: value.bfloat16() for key, value in optimizer.state[param].items() if key != "step"}
    step = {key: value for key, value in optimizer.state[param].items() if key == "step"}
    found, expected = param.detach().clone(), param.detach().clone()
    predict_(found, {**low, **step}, defaults(optimizer), [0.1] * NUM)
    predict_(expected, {key: value.float() for key, value in low.items()} | step, defaults(optimizer), [0.1] * NUM)
    assert torch.equal(found, expected)
    averages = torch.zeros(2, 40)
    note_step_(averages[0], {**low, **step}, defaults(optimizer), 0.1)
    note_step_(averages[1], {key: value.float() for key, value in low.items()} | step, defaults(optimizer), 0.1)
    assert torch.equal(averages[0], averages[1])


def test_without_a_state_a_weight_stays() -> None:
    weight = torch.ones(3)
    predict_(weight, {}, {"lr": 0.1, "weight_decay": 0.5}, [0.1])
    assert torch.equal(weight, torch.ones(3))


SCHEDULERS = {
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.5),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 5),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(
        optimizer, [lambda step: 1 / (1 + step), lambda step: 2.0**-step]
    ),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, [0.1, 0.2], total_steps=9),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[2],
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_learning_rates_ahead_are_those_that_come(name: str) -> None:
    with chunkmem.ChunkManager(chunkmem.Config.from_dict({"memory": {"device": "1MiB", "host": "8MiB"}})) as manager:
        with manager.init():
            model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.05}]
        optimizer = chunkmem.AdamW(groups, manager=manager, lr=0.1)
        scheduler = SCHEDULERS[name](optimizer)
        for _ in range(3):
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            ahead = learning_rates(optimizer, scheduler, NUM)
        for number in range(NUM):
            assert [rates[number] for rates in ahead] == [group["lr"] for group in optimizer.param_groups]
            scheduler.step()


def test_a_scheduler_that_needs_a_metric_is_refused() -> None:
    with chunkmem.ChunkManager(chunkmem.Config.from_dict({"memory": {"device": "1MiB", "host": "8MiB"}})) as manager:
        with manager.init():
            model = torch.nn.Linear(4, 4)
        optimizer = chunkmem.SGD(model.parameters(), manager=manager, lr=0.1)
        with pytest.raises(chunkmem.ConfigError, match="scheduler is a ReduceLROnPlateau"):
            learning_rates(optimizer, lr_scheduler.ReduceLROnPlateau(optimizer), 2)
