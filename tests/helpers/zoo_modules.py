"""The other modules of the zoo, each with one habit that has broken a chunk manager."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.helpers.zoo_transformers import VOCAB, WIDTH, Block, Stack, mlp


class ConvBlock(nn.Module):
    """Running statistics are buffers beside the parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class CNN(Stack):
    """A ParameterList has no forward: its parameters are read by the parent alone."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, width, 3, padding=1), nn.ModuleList(ConvBlock(width) for _ in range(3))
        self.scales = nn.ParameterList(torch.randn(1, width, 1, 1) * 0.1 + 1 for _ in range(3))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block, scale in zip(self.blocks, self.scales, strict=True):
            x = self.run(block, x) * scale
        return self.head(x.mean(dim=(2, 3)))


class Recurrent(nn.Module):
    """RNNs hand their weights to one operator as a flat list that they keep."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.rnns = nn.ModuleList([kind(WIDTH, WIDTH, num_layers=2, batch_first=True, **options)])
        outputs = WIDTH * (2 if options.get("bidirectional") else 1)
        self.rnns.extend(kind(outputs, outputs, batch_first=True) for _ in range(2))
        self.head = nn.Linear(outputs, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for rnn in self.rnns:
            x = rnn(x)[0]
        return self.head(x)


@dataclass
class BlockOutput:
    hidden: Tensor
    penalty: Tensor


class KeywordBlock(nn.Module):
    """Takes keywords only; returns a dict, or a dataclass that torch's pytree does not know."""

    def __init__(self, *, as_dict: bool) -> None:
        super().__init__()
        self.as_dict, self.norm, self.mlp = as_dict, nn.LayerNorm(WIDTH), mlp(WIDTH)

    def forward(self, *, hidden: Tensor, scale: Tensor) -> dict[str, Any] | BlockOutput:
        hidden = hidden + self.mlp(self.norm(hidden)) * scale
        penalty = hidden.square().mean()
        return {"hidden": hidden, "extra": [penalty, None]} if self.as_dict else BlockOutput(hidden, penalty)


class Keyword(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, WIDTH)
        self.blocks = nn.ModuleList(KeywordBlock(as_dict=index % 2 == 0) for index in range(4))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, *, features: Tensor) -> dict[str, Tensor]:
        x, scale, penalty = self.inner(features), features.new_tensor(0.5), features.new_zeros(())
        for block in self.blocks:
            out = self.run(block, hidden=x, scale=scale)
            x = out["hidden"] if isinstance(out, dict) else out.hidden
            penalty = penalty + (out["extra"][0] if isinstance(out, dict) else out.penalty)
        return {"logits": self.head(x), "penalty": penalty}


class LooseParameters(Stack):
    """`log_sigma` and `prototypes` are read by the loss, outside any module."""

    def __init__(self) -> None:
        super().__init__()
        self.prototypes = nn.Parameter(torch.randn(10, WIDTH))
        self.inner, self.blocks = nn.Linear(16, WIDTH), nn.ModuleList(mlp(WIDTH) for _ in range(3))
        self.log_sigma = nn.Parameter(torch.zeros(2))

    def forward(self, features: Tensor) -> Tensor:
        x = self.inner(features)
        for block in self.blocks:
            x = x + self.run(block, x)
        return x


class Autoencoder(Stack):
    """Only its parts are ever called."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([nn.Linear(16, WIDTH), mlp(WIDTH), mlp(WIDTH)])
        self.decoder = nn.ModuleList([mlp(WIDTH), nn.Linear(WIDTH, 16)])

    def forward(self, features: Tensor) -> Tensor:
        raise AssertionError("the loss calls the encoder and the decoder, never the model")


class Inplace(Stack):
    """The operator after a Linear overwrites the Linear's output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 10)
        self.blocks = nn.ModuleList(mlp(WIDTH, inplace=True) for _ in range(4))

    def forward(self, features: Tensor) -> Tensor:
        x = self.inner(features).relu_()
        for block in self.blocks:
            x = self.run(block, x).add_(x)
        return self.head(x)


class SlicedBlock(nn.Module):
    """Weights that autograd saves as views: slices, an einsum operand, a transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.Parameter(torch.randn(4, WIDTH, WIDTH) * WIDTH**-0.5)
        self.pair = nn.Parameter(torch.randn(2, WIDTH, WIDTH) * WIDTH**-0.5)
        self.gains = nn.Parameter(torch.ones(2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.einsum("bi,hio->bho", x, self.heads).tanh().mean(1)
        return (F.gelu(x * self.gains[0] @ self.pair[0].t()) @ self.pair[1] + x) * self.gains[1]


class Sliced(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 10)
        self.blocks = nn.ModuleList(SlicedBlock() for _ in range(3))

    def forward(self, features: Tensor) -> Tensor:
        x = self.inner(features)
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x)


class Reused(Stack):
    """One block runs at several depths, and one Linear is registered under two names and called under both."""

    def __init__(self) -> None:
        super().__init__()
        shared = Block(dropout=0.1)
        self.first = self.second = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([shared, Block(), shared, Block(), shared])
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, sequence: Tensor) -> Tensor:
        x = self.first(sequence)
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(self.second(x).mean(1))
