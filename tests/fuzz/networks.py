"""Models of the layers that a case has; each takes and returns features of the same shape."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import chunkmem
from chunkmem import TiledLinear
from tests.fuzz.cases import Layer

WIDTH = 16
WORDS = 24


class StopError(RuntimeError):
    """What a layer raises when it is told to."""


class Shared:
    """What the layers of one model know together."""

    def __init__(self, manager: chunkmem.ChunkManager | None) -> None:
        self.manager = manager
        self.turn = 0
        """Of the next forward; some layers look at it."""
        self.fail = False
        self.linears: list[nn.Linear] = []
        """Which others may be tied to, or call."""


class Leaf(nn.Module):
    """A layer of a kind."""

    def __init__(self, kind: str, shared: Shared) -> None:
        super().__init__()
        self.kind, self._shared = kind, [shared]  # no module: it would be registered, or copied
        self.inner = self._made(kind, shared)
        if kind in ("frozen", "late"):
            self.requires_grad_(False)

    def _made(self, kind: str, shared: Shared) -> nn.Module | None:
        manager, others = shared.manager, shared.linears
        if kind == "excluded":
            with nullcontext() if manager is None else manager.exclude():
                return nn.Linear(WIDTH, WIDTH)
        if kind == "tied":
            made = nn.Linear(WIDTH, WIDTH)
            if others:
                made.weight = others[-1].weight
            return made
        if kind == "shared":
            return others[0] if others else nn.Linear(WIDTH, WIDTH)
        if kind == "parameter":
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
            return None
        made = self._ordinary(kind)
        if kind in ("linear", "in_place"):
            others.append(made)
        if kind.startswith("host") and manager is not None:
            manager.on_host(made)
        return made

    def _ordinary(self, kind: str) -> Any:
        if kind == "mlp":
            return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        if kind == "tiled":
            return TiledLinear(WIDTH, WIDTH, in_splits=2, out_splits=2)
        makers = {
            "norm": lambda: nn.LayerNorm(WIDTH),
            "batch_norm": lambda: nn.BatchNorm1d(WIDTH),
            "conv": lambda: nn.Conv1d(2, 2, 3, padding=1),
            "embedding": lambda: nn.Embedding(WORDS, WIDTH),
            "host_embedding": lambda: nn.Embedding(WORDS, WIDTH),
            "dropout": lambda: nn.Dropout(0.3),
        }
        return makers.get(kind, lambda: nn.Linear(WIDTH, WIDTH))()

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "parameter":
            return torch.tanh(x @ self.weight + x @ self.weight.t())
        if self.kind == "conv":
            return self.inner(x.view(-1, 2, WIDTH // 2)).reshape(x.shape)
        if "embedding" in self.kind:
            return x + self.inner((x.detach().float().sum(-1).abs() * 10).long() % WORDS).to(x.dtype)
        if self.kind == "in_place":
            return self.inner(x).add_(1).relu_()
        return self.inner(x)


class Block(nn.Module):
    """A few layers, called in one way or another."""

    def __init__(self, kind: str, kids: list[nn.Module], shared: Shared) -> None:
        super().__init__()
        self.kind, self._shared = kind, [shared]
        self.layers = nn.Sequential(*kids)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "residual":
            return x + torch.tanh(self.layers(x))
        if self.kind == "checkpoint":
            return checkpoint(self.layers, x, use_reentrant=False)
        if self.kind == "own_checkpoint" and self._shared[0].manager is not None:
            return chunkmem.checkpoint(self.layers, x)  # unlike torch's, it changes buffers once
        if self.kind == "skip" and self._shared[0].turn % 3 == 1:
            return x
        return self.layers(self.layers(x)) if self.kind == "twice" else self.layers(x)


class Network(nn.Module):
    """Layers one after the other, a head that is always trained, and a loss."""

    def __init__(self, layers: tuple[Layer, ...], shared: Shared) -> None:
        super().__init__()
        self._shared = [shared]
        self.layers = nn.ModuleList(made(layer, shared) for layer in layers)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if self._shared[0].fail:
            raise StopError
        return self.head(x)


def made(layer: Layer, shared: Shared) -> nn.Module:
    """The module of a layer."""
    if not layer.kids:
        return Leaf(layer.kind, shared)
    return Block(layer.kind, [made(kid, shared) for kid in layer.kids], shared)
