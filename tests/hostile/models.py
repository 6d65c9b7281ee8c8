"""Small models for the scripts: each a dozen chunks, of which a step reads one or two at a time."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 16
VOCAB = 20


class Net(nn.Module):
    """Features to 4 numbers: what most scripts train."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class LanguageModel(nn.Module):
    """Tokens to logits; the embedding is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Parameter(torch.randn(8, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ConvNet(nn.Module):
    """Images of 3 channels to 4 numbers; running statistics beside the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.conv = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.head = nn.Linear(8, 4)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(images)))
        return self.head(F.relu(x + self.conv(x)).mean(dim=(2, 3)))


class Tower(nn.Module):
    """A shallow network: generators, critics, encoders."""

    def __init__(self, inputs: int = WIDTH, outputs: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(inputs, 2 * WIDTH),
            nn.Tanh(),
            nn.Linear(2 * WIDTH, 2 * WIDTH),
            nn.Tanh(),
            nn.Linear(2 * WIDTH, outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def stack(*modules: nn.Module) -> nn.Module:
    """Modules between a layer of features and a head, with enough beside them for chunks to move."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *modules, nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, 4))
