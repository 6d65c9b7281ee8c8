"""A byte-level GPT in plain PyTorch. Nothing in this file knows of chunks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCAB = 256
"""One token a byte."""
STD = 0.02
"""Of the first weights, as in GPT-2."""


@dataclass(frozen=True)
class Shape:
    layers: int
    width: int
    heads: int

    @property
    def last_std(self) -> float:
        """Of the weights that end a branch: so that the residual stream does not grow with depth."""
        return STD / math.sqrt(2 * self.layers)


# Layers, widths and heads as published. The names count the parameters with the original vocabularies; over bytes the
# embedding is smaller, so gpt2-small has 86 M here and not 124 M.
PRESETS = {
    "1m": Shape(4, 128, 4),
    "2m": Shape(4, 192, 6),
    "5m": Shape(6, 256, 8),
    "10m": Shape(6, 384, 6),
    "gpt2-small": Shape(12, 768, 12),
    "gpt2-medium": Shape(24, 1024, 16),
    "gpt2-large": Shape(36, 1280, 20),
    "gpt2-xl": Shape(48, 1600, 25),
    "2.7b": Shape(32, 2560, 32),
    "6.7b": Shape(32, 4096, 32),
    "13b": Shape(40, 5120, 40),
    "30b": Shape(48, 7168, 56),
    "66b": Shape(64, 9216, 72),
    "175b": Shape(96, 12288, 96),
}


# A layer is initialised before it becomes part of another module: of several ranks that build a model, one keeps its
# weights from then on.


def linear(num_in: int, num_out: int, *, std: float = STD) -> nn.Linear:
    layer = nn.Linear(num_in, num_out)
    nn.init.normal_(layer.weight, std=std)
    nn.init.zeros_(layer.bias)
    return layer


def embedding(num: int, width: int) -> nn.Embedding:
    layer = nn.Embedding(num, width)
    nn.init.normal_(layer.weight, std=STD)
    return layer


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = linear(shape.width, 3 * shape.width)
        self.out = linear(shape.width, shape.width, std=shape.last_std)

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, width) -> the same
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each (batch, heads, time, -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.norm2 = nn.LayerNorm(shape.width)
        self.up = linear(shape.width, 4 * shape.width)
        self.down = linear(4 * shape.width, shape.width, std=shape.last_std)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Pre-LN GPT over bytes, its head tied to the embedding, initialised as GPT-2."""

    def __init__(self, shape: Shape, seq: int, *, checkpointing: bool = False) -> None:
        super().__init__()
        self.seq = seq
        self.checkpointing = checkpointing
        self.embedding = embedding(VOCAB, shape.width)
        self.position = embedding(seq, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits (batch, time, 256) of `tokens` (batch, time); with `targets`, the mean loss in nats a byte."""
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def continue_text(model: GPT, prompt: bytes, length: int, *, device: torch.device, temperature: float = 0.7) -> bytes:
    """Return `prompt` followed by `length` sampled bytes, always the same ones for the same weights."""
    rng = torch.Generator().manual_seed(0)
    text = list(prompt) or [ord("\n")]
    for _ in range(length):
        context = torch.tensor([text[-model.seq :]], device=device)
        likely = (model(context)[0, -1].cpu() / temperature).softmax(-1)
        text.append(int(torch.multinomial(likely, 1, generator=rng)))
    return bytes(text)
