"""The preset models: GPTs of published sizes."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 50257


@dataclass(frozen=True)
class Shape:
    """Size of a GPT."""

    layers: int
    width: int
    heads: int
    vocab: int = VOCAB


SHAPES = MappingProxyType(
    {
        "1m": Shape(4, 128, 4, vocab=256),
        "125m": Shape(12, 768, 12),
        "350m": Shape(24, 1024, 16),
        "760m": Shape(24, 1536, 16),
        "1.3b": Shape(24, 2048, 16),
        "2.7b": Shape(32, 2560, 32),
        "6.7b": Shape(32, 4096, 32),
        "7b": Shape(32, 4096, 32),
        "13b": Shape(40, 5120, 40),
        "18b": Shape(40, 6144, 48),
        "30b": Shape(48, 7168, 56),
        "66b": Shape(64, 9216, 72),
        "175b": Shape(96, 12288, 96),
        "530b": Shape(105, 20480, 128),
        "1t": Shape(128, 25600, 160),
    }
)
"""Layers, widths and heads as published: the GPT-3 paper's table 2.1, OPT's, Megatron's for the largest.
"1m" is a toy over bytes."""


class _Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm1 = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.norm2 = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, width) -> the same
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        residual: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + residual


class GPT(nn.Module):
    """A pre-norm GPT with a tied head."""

    def __init__(self, shape: Shape, *, seq: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.width)
        self.position = nn.Embedding(seq, shape.width)
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of predicting `tokens` (batch, time), each from those before it."""
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
