"""The preset models: GPTs of published sizes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chunkmem.data.errors import ConfigError
from chunkmem.estimate.tensor_parallel import GATHER

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

SIZES = (
    f"{', '.join(f'gpt:{name}' for name in SHAPES)}, a number of parameters (gpt:9.4b), or width x layers (gpt:4096x45)"
)
_HEAD_WIDTH, _WIDTH_STEP = 64, 128
_WIDTH_PER_LAYER = 128
"""About that of published shapes."""
_SCALES = MappingProxyType({"m": 10**6, "b": 10**9, "t": 10**12})
_MOST_WIDTH, _MOST_LAYERS = 2**17, 2**12


def shape_of(size: str) -> Shape:
    """Return the shape of a published size, ``7b``, a number of parameters, ``9.4b``, or width and layers, ``4096x45``.

    Raises:
        ConfigError: it is none of these, or no GPT has it.
    """
    if size in SHAPES:
        return SHAPES[size]
    if found := re.fullmatch(r"(\d+)x(\d+)", size):
        return _shape(size, int(found[1]), int(found[2]))
    if found := re.fullmatch(r"(\d+(?:\.\d+)?)([mbt])", size):
        return _of_params(size, round(float(found[1]) * _SCALES[found[2]]))
    raise ConfigError(f"MODEL 'gpt:{size}' is not a size of GPT; there are {SIZES}")


def usual_width(num_params: int) -> int:
    """Return the width that a GPT of so many parameters usually has: about 128 a layer."""
    width: float = (num_params * _WIDTH_PER_LAYER / 12) ** (1 / 3)
    return max(_WIDTH_STEP, round(width / _WIDTH_STEP) * _WIDTH_STEP)


def _of_params(size: str, num_params: int) -> Shape:
    width = usual_width(num_params)
    layers = round((num_params - VOCAB * width) / (12 * width * width))
    if layers < 1:
        least = VOCAB * _WIDTH_STEP + 12 * _WIDTH_STEP**2
        raise ConfigError(
            f"MODEL 'gpt:{size}' has fewer parameters than a GPT with {VOCAB} words and one layer, {least / 1e6:.1f}m; "
            "gpt:1m is a toy with 256"
        )
    return _shape(size, width, layers)


def _shape(size: str, width: int, layers: int) -> Shape:
    if not 1 <= layers <= _MOST_LAYERS:
        raise ConfigError(f"MODEL 'gpt:{size}' has {layers} layers; give 1 to {_MOST_LAYERS}")
    if width % _HEAD_WIDTH or not _HEAD_WIDTH <= width <= _MOST_WIDTH:
        raise ConfigError(
            f"MODEL 'gpt:{size}' has a width of {width}; give a multiple of {_HEAD_WIDTH} up to {_MOST_WIDTH}"
        )
    return Shape(layers, width, heads=width // (2 * _HEAD_WIDTH if width % (2 * _HEAD_WIDTH) == 0 else _HEAD_WIDTH))


class _Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_width = shape.width // shape.heads
        self.norm1 = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.norm2 = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, width) -> the same
        q, k, v = (
            part.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        residual: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + residual


class GPT(nn.Module):
    """A pre-norm GPT with a tied head."""

    tp_plan = MappingProxyType(
        {"embedding": "embedding_rowwise", "norm": GATHER}
        | {f"blocks.*.{name}": "colwise" for name in ("qkv", "up")}
        | {f"blocks.*.{name}": "rowwise" for name in ("out", "down")}
    )
    """How tensor parallelism divides its weights; see `chunkmem.estimate.tensor_parallel`."""

    def __init__(self, shape: Shape, *, seq: int) -> None:
        super().__init__()
        self.num_attention_heads = shape.heads
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
