"""Small models in which ranks may take different ways, and ones whose constructors do things to their weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.hostile.models import WIDTH, Block, Net


class Routed(nn.Module):
    """Experts as an attribute of the model, so that each is a unit; `choice` says which one is used."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)
        self.choice = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.experts[self.choice](self.stem(x)))


class Layer(nn.Module):
    """A layer that routes by values; as one unit its experts may differ between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        index = int(x.detach().sum().abs() * 1000) % 3
        return x + self.experts[index](x)


class RoutedInside(nn.Module):
    """Layers in a list: each is a unit, with its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class PastExperts(Layer):
    """A layer whose batches go past all experts on some ranks: these read nothing in the unit, and return its input."""

    def __init__(self) -> None:
        super().__init__()
        self.is_used = True

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.is_used else x


class UsedBySome(RoutedInside):
    def __init__(self, *, has_stem: bool = True) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH) if has_stem else nn.Identity()
        self.layers = nn.ModuleList(PastExperts() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.stem(x))


class Skipping(Net):
    """Blocks that are named in `skipped` are left out; after `exit_after` blocks come none."""

    def __init__(self) -> None:
        super().__init__()
        self.skipped: set[int] = set()
        self.exit_after = 99

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            if index not in self.skipped and index < self.exit_after:
                x = block(x)
        return self.head(x)


class InitializedAtTheEnd(Net):
    """Weights are written in place after their modules were attached, as most models on the internet do."""

    def __init__(self) -> None:
        super().__init__()
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.05)
                nn.init.zeros_(module.bias)


class AppliedAtTheEnd(Net):
    """`self.apply(...)` as the last line of the constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.apply(init_weights)


def init_weights(module: nn.Module) -> None:
    """What transformers do, over a generator that all ranks share."""
    if isinstance(module, nn.Linear):
        torch.nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            module.bias.data.zero_()
    elif isinstance(module, nn.LayerNorm):
        module.weight.data.fill_(1.0)
