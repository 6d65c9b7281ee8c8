"""Frozen weights beside trained ones, and weights that are made from others."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.hostile.harness import User, script
from tests.hostile.models import WIDTH, stack


class Supermask(nn.Module):
    """Frozen weights, trained scores: the mask is straight-through."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4, requires_grad=False)
        self.scores = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        mask = (self.scores > 0).float() + self.scores.sigmoid() - self.scores.sigmoid().detach()
        return F.linear(x, self.weight * mask)


@script(model=lambda: stack(Supermask(), nn.Tanh(), Supermask()))
def supermask(user: User) -> None:
    user.train(0, 1, 2)


@script(model=lambda: nn.Sequential(Supermask(), nn.Tanh(), Supermask(), nn.Linear(WIDTH, 4)))
def supermask_on_inputs_that_require_grad(user: User) -> None:
    """As saliency does: the input is a leaf that requires grad."""
    for seed in range(3):
        x = user.batch(seed).requires_grad_()
        user.backward(user.model(x).square().mean())
        user.update()
        user.record(x.grad)


class Scaled(nn.Module):
    """IA3: frozen weights, a trained vector that scales what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) * self.scale


@script(model=lambda: stack(Scaled(), nn.Tanh(), Scaled()))
def scaled_activations(user: User) -> None:
    user.train(0, 1, 2)


class LowRank(nn.Module):
    """LoRA; with a magnitude, DoRA."""

    def __init__(self, *, magnitude: bool = False) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, WIDTH) / 4)
        self.b = nn.Parameter(torch.zeros(WIDTH, 2))
        self.magnitude = nn.Parameter(self.base.weight.norm(dim=1).detach().clone()) if magnitude else None

    def forward(self, x: Tensor) -> Tensor:
        if self.magnitude is None:
            return self.base(x) + x @ self.a.t() @ self.b.t()
        w = self.base.weight + self.b @ self.a
        return F.linear(x, w * (self.magnitude / w.norm(dim=1).detach()).unsqueeze(1), self.base.bias)


@script(model=lambda: stack(LowRank(), nn.Tanh(), LowRank()))
def lora(user: User) -> None:
    user.train(0, 1, 2)


@script(model=lambda: nn.Sequential(*(LowRank(magnitude=True) for _ in range(3)), nn.Linear(WIDTH, 4)))
def dora_on_inputs_that_require_grad(user: User) -> None:
    for seed in range(3):
        x = user.batch(seed).requires_grad_()
        user.backward(user.model(x).square().mean())
        user.update()
        user.record(x.grad)


@script(model=lambda: stack(LowRank(), nn.Tanh(), LowRank()))
def lora_merged_and_unmerged(user: User) -> None:
    """For evaluation the product is added to the frozen weight, and taken off again."""
    user.train(0, 1)
    layers = [m for m in user.model if isinstance(m, LowRank)]
    with torch.no_grad():
        for m in layers:
            m.base.weight.add_(m.b @ m.a)
        user.record(user.loss(9).item())
        for m in layers:
            m.base.weight.sub_(m.b @ m.a)
    user.train(2)


class Lists(nn.Module):
    """Parameters in a ParameterList and a ParameterDict, read by their parent."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 4 for _ in range(4))
        self.scales = nn.ParameterDict({name: torch.ones(WIDTH) for name in ("in", "out")})

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scales["in"]
        for w in self.weights:
            x = torch.tanh(x @ w)
        return x * self.scales["out"]


@script(model=Lists)
def lists_and_dicts_of_parameters(user: User) -> None:
    user.train(0, 1, 2)
    user.record([w.norm() for w in user.model.weights], {k: v.sum() for k, v in user.model.scales.items()})


class Hyper(nn.Module):
    """One network makes the weights of another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.randn(3, 8))
        self.make = nn.Linear(8, WIDTH * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for code in self.code:
            x = torch.tanh(F.linear(x, self.make(code).view(WIDTH, WIDTH) / 4))
        return x


@script(model=Hyper)
def hypernetwork(user: User) -> None:
    user.train(0, 1, 2)
