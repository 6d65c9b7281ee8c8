"""Gradients that no optimizer consumes, or that come from before a step: such steps are planned, and plans followed."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import chunkmem
from tests.helpers.audit import audit
from tests.helpers.twins import cpu_only

WIDTH, LAYERS, STEPS = 16, 8, 7
CHUNK_NUMEL = WIDTH * WIDTH + WIDTH
"""A chunk for each layer."""

Step = Callable[[nn.Module, torch.optim.Optimizer, Tensor], Tensor]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def never(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """What the optimizer does not know accumulates for ever."""
    optimizer.zero_grad()
    loss = loss_of(model, x)
    loss.backward()
    optimizer.step()
    return loss


def to_none(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = loss_of(model, x)
    loss.backward()
    optimizer.step()
    model.zero_grad()
    return loss


def to_zeros(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = loss_of(model, x)
    loss.backward()
    optimizer.step()
    model.zero_grad(set_to_none=False)
    return loss


def after_forward(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = loss_of(model, x)
    model.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def evaluated(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """An evaluation lies between the step and what gives its gradients up."""
    loss = to_none(model, optimizer, x) if x.sum() > 0 else never(model, optimizer, x)
    with torch.no_grad():
        model(x)
    model.zero_grad()
    return loss


def train(
    manager: chunkmem.ChunkManager | None, step: Step, *, others: bool, plan_misses: list[int]
) -> tuple[list[Tensor], list[Tensor]]:
    """Train half of the layers; return losses, and weights with what gradients are left of the others."""
    torch.manual_seed(0)
    make = lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))  # noqa: E731
    if manager is None:
        model = make()
        optimizer = torch.optim.AdamW(list(model.parameters())[:LAYERS], fused=True, lr=1e-2)
    else:
        with manager.init():
            model = make()
        optimizer = chunkmem.AdamW(list(model.parameters())[:LAYERS], manager=manager, lr=1e-2)
        if others:
            chunkmem.AdamW(list(model.parameters())[LAYERS:], manager=manager)
    losses = []
    for seed in range(STEPS):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
        losses.append(step(model, optimizer, x).detach())
        if manager is not None:
            audit(manager)
            timeline = manager.timeline()
            plan_misses.append(-1 if timeline is None or manager.plan is None else timeline.plan_misses)
    left = [param.grad for param in list(model.parameters())[LAYERS:]]
    gradients = [torch.zeros(()) if grad is None else grad + 0 for grad in left]
    return losses, [param.detach().clone() for param in model.parameters()] + gradients


@pytest.mark.few(6)
@cpu_only
@pytest.mark.parametrize("others", [False, True], ids=["left out", "two optimizers"])
@pytest.mark.parametrize("step", [never, to_none, to_zeros, after_forward])
@pytest.mark.parametrize("slabs", [3, pytest.param(6, marks=pytest.mark.full), 40])
def test_a_step_with_gradients_that_no_optimizer_consumes_is_planned(slabs: int, step: Step, others: bool) -> None:
    """Once every access was served on demand: 'Free grad chunk 1 ...: it is the only replica of the newest version'."""
    expected = train(None, step, others=others, plan_misses=[])
    values = {"memory": {"device": 4 * slabs * CHUNK_NUMEL, "host": 1 << 22}, "default_chunk_size": CHUNK_NUMEL}
    plan_misses: list[int] = []
    with warnings.catch_warnings(), chunkmem.ChunkManager(chunkmem.Config.from_dict(values)) as manager:
        warnings.simplefilter("error")
        found = train(manager, step, others=others, plan_misses=plan_misses)
    assert plan_misses == [-1] + [0] * (STEPS - 1)
    for ours, plain in zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True):
        assert torch.equal(ours, plain)


@cpu_only
@pytest.mark.parametrize("slabs", [3, 40])
def test_an_evaluation_between_does_not_hear_of_gradients_given_up(slabs: int) -> None:
    expected = train(None, evaluated, others=False, plan_misses=[])
    values = {"memory": {"device": 4 * slabs * CHUNK_NUMEL, "host": 1 << 22}, "default_chunk_size": CHUNK_NUMEL}
    with warnings.catch_warnings(), chunkmem.ChunkManager(chunkmem.Config.from_dict(values)) as manager:
        warnings.simplefilter("error")
        found = train(manager, evaluated, others=False, plan_misses=[])
        assert manager.plan is not None
    for ours, plain in zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True):
        assert torch.equal(ours, plain)


def clipped_before(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """Before its first step the gradients are zeros that a user has set, and clipping has put into their chunks."""
    if all(param.grad is None for param in model.parameters()):
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        optimizer.clip_grad_norm_(1.0) if hasattr(optimizer, "clip_grad_norm_") else None
    loss = loss_of(model, x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return loss


@cpu_only
@pytest.mark.parametrize("slabs", [4, 10])
def test_a_step_that_uses_up_gradients_from_before_it_is_planned(slabs: int) -> None:
    """Once a KeyError of the planner: the next step begins what this one had added to."""
    expected = train(None, clipped_before, others=False, plan_misses=[])
    values = {"memory": {"device": 4 * slabs * CHUNK_NUMEL, "host": 1 << 22}, "default_chunk_size": CHUNK_NUMEL}
    plan_misses: list[int] = []
    with warnings.catch_warnings(), chunkmem.ChunkManager(chunkmem.Config.from_dict(values)) as manager:
        warnings.simplefilter("error")
        found = train(manager, clipped_before, others=False, plan_misses=plan_misses)
    assert plan_misses == [-1] + [0] * (STEPS - 1)
    for ours, plain in zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True):
        assert torch.equal(ours, plain)
