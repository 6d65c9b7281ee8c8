"""The norm to clip at is that of torch over `model.parameters()`, bit for bit, however groups spread the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chunkmem
from tests.helpers.training import compute_device
from tests.helpers.twins import AMPLE_NBYTES, WIDTH, config, features

SEEDS = range(20)
"""Sums of norms in another order have other last bits in about one of four."""
MAX_NORM = 0.5


class Mixed(nn.Module):
    """Managed and ordinary modules by turns, a module that is never run, and a weight that two modules share."""

    def __init__(self, ordinary: Callable[[], Any]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        with ordinary():
            self.gate = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.unused = nn.Linear(WIDTH, WIDTH)
        with ordinary():
            self.norm = nn.LayerNorm(WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.gate(self.first(x)))
        for module in self.middle:
            x = torch.tanh(module(x))
        return self.last(self.norm(x))


class Ordinary:
    """`manager.exclude()` of plain PyTorch."""

    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...


def decay_last(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0},
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
    ]


def backwards(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": [p]} for p in reversed(params)]


Build = Callable[[Callable[[], Any]], list[nn.Module]]


def one(ordinary: Callable[[], Any]) -> list[nn.Module]:
    return [Mixed(ordinary)]


def two(ordinary: Callable[[], Any]) -> list[nn.Module]:
    return [Mixed(ordinary), Mixed(ordinary)]


def frozen(ordinary: Callable[[], Any]) -> list[nn.Module]:
    model = Mixed(ordinary)
    model.gate.requires_grad_(False)
    model.middle[1].requires_grad_(False)
    return [model]


def params_of(models: list[nn.Module]) -> list[nn.Parameter]:
    return [param for model in models for param in model.parameters()]


def loss_of(models: list[nn.Module], seed: int) -> Tensor:
    return sum((model(features(seed)).square().mean() for model in models), torch.zeros((), device=compute_device()))


def plain_norms(build: Build, chosen: slice) -> list[Tensor]:
    torch.manual_seed(0)
    models = [model.to(compute_device()) for model in build(Ordinary)]
    norms = []
    for seed in SEEDS:
        for param in params_of(models):
            param.grad = None
        loss_of(models, seed).backward()
        norms.append(nn.utils.clip_grad_norm_(params_of(models)[chosen], MAX_NORM).cpu())
    return norms


def norms_in_groups(build: Build, chosen: slice, groups: Callable[[list[nn.Parameter]], Any]) -> Iterator[Tensor]:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        torch.manual_seed(0)
        with manager.init():
            models = build(manager.exclude)
        optimizer = chunkmem.AdamW(groups(params_of(models)[chosen]), manager=manager)
        for seed in SEEDS:
            optimizer.zero_grad()
            manager.backward(loss_of(models, seed))
            yield optimizer.clip_grad_norm_(MAX_NORM).cpu()


@pytest.mark.few(3)
@pytest.mark.parametrize("groups", [list, decay_last, backwards])
@pytest.mark.parametrize("build", [one, two, frozen])
def test_the_norm_is_that_over_the_model_however_groups_spread_it(build: Build, groups: Callable[..., Any]) -> None:
    expected = plain_norms(build, slice(None))
    assert list(norms_in_groups(build, slice(None), groups)) == expected


def test_an_optimizer_of_some_parameters_adds_them_in_the_order_of_the_model() -> None:
    some = slice(2, -1)
    assert list(norms_in_groups(one, some, decay_last)) == plain_norms(one, some)


def test_an_update_that_clips_is_the_one_of_torch() -> None:
    """The bits of the norm are those of the weights after it."""
    torch.manual_seed(0)
    plain = Mixed(Ordinary).to(compute_device())
    theirs = torch.optim.AdamW(decay_last(list(plain.parameters())), lr=1e-2, fused=True)
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        torch.manual_seed(0)
        with manager.init():
            model = Mixed(manager.exclude)
        ours = chunkmem.AdamW(decay_last(list(model.parameters())), manager=manager, lr=1e-2, max_grad_norm=MAX_NORM)
        for seed in SEEDS:
            loss_of([plain], seed).backward()
            nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM)
            theirs.step()
            theirs.zero_grad()
            manager.backward(loss_of([model], seed))
            ours.step()
            ours.zero_grad()
        weights = manager.state_dict()
    assert all(torch.equal(weights[name], value.cpu()) for name, value in plain.state_dict().items())
