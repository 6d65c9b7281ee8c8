"""Models to ask `chunkmem estimate` about, as a user would name them: ``tests.helpers.estimated:mlp``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 64
WORDS = 4000


def mlp(batch: int = 8) -> tuple[nn.Module, Any]:
    """Blocks that can be recomputed, and a function that returns the loss."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)))
    return model, lambda m: m(torch.randn(batch, WIDTH)).square().mean()


def tower(batch: int = 8, layers: int = 6) -> tuple[nn.Module, Any]:
    """As many blocks as are asked for."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers)))
    return model, lambda m: m(torch.randn(batch, WIDTH)).square().mean()


class Worded(nn.Module):
    """A wide embedding before blocks that can be recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)))

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.blocks(self.words(ids)).square().mean()
        return result


def worded(batch: int = 8) -> tuple[nn.Module, Any]:
    """Far more words than a batch looks up."""
    ids = torch.arange(batch * 4).view(batch, 4) % WORDS
    return Worded(), lambda m: m(ids)


class Head(nn.Module):
    """Returns its loss, in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": F.mse_loss(x @ self.weight, y)}


def without_blocks(batch: int = 8) -> tuple[nn.Module, Any]:
    """A model with nothing to recompute, and its arguments by name."""
    return Head(), {"x": torch.randn(batch, WIDTH), "y": torch.randn(batch, WIDTH)}


def positional(batch: int, seq: int) -> tuple[nn.Module, Any]:
    """Arguments by position."""
    return Head(), (torch.randn(batch * seq, WIDTH), torch.randn(batch * seq, WIDTH))


class Branching(nn.Module):
    """Asks for a value."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.router(x)
        return x.mean() if x.sum() > 0 else x.square().mean()


def branching(batch: int = 8) -> tuple[nn.Module, Any]:
    """Control flow that depends on data."""
    return Branching(), torch.randn(batch, WIDTH)


def without_step() -> nn.Module:
    """Forgets what to do with the model."""
    return Head()


def without_loss(batch: int = 8) -> tuple[nn.Module, Any]:
    """Its step returns more than one element."""
    return nn.Linear(WIDTH, WIDTH), torch.randn(batch, WIDTH)


def empty() -> tuple[nn.Module, Any]:
    """Nothing to train."""
    return nn.Identity(), torch.zeros(())


def failing() -> tuple[nn.Module, Any]:
    """Raises something of its own."""
    raise KeyError("no such layer")


def misfit(batch: int = 8) -> tuple[nn.Module, Any]:
    """Its shapes do not fit: an operator fails, on which torch has a lot to say."""
    return nn.Linear(WIDTH, WIDTH), lambda m: m(torch.randn(batch, WIDTH)).expand(3, 3).sum()


NOT_A_FUNCTION = 3


def wide(batch: int = 2) -> tuple[nn.Module, Any]:
    """Feed-forward blocks whose weights are all of it, and a narrow head."""
    layers = [nn.Sequential(nn.Linear(WIDTH, 16 * WIDTH), nn.Tanh(), nn.Linear(16 * WIDTH, WIDTH)) for _ in range(2)]
    return nn.Sequential(*layers), lambda m: m(torch.randn(batch, WIDTH)).square().mean()
