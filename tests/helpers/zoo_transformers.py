"""The transformers of the zoo, each with one habit that has broken a chunk manager: tying, routing, loose weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

VOCAB = 48
WIDTH = 32
LENGTH = 12


class Stack(nn.Module):
    """A model made of blocks, each of which can run under torch's non-reentrant checkpoint."""

    checkpointing = False

    def run(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.checkpointing:
            return checkpoint(block, *args, use_reentrant=False, **kwargs)
        return block(*args, **kwargs)


class Attention(nn.Module):
    """Multi-head attention over `(batch, length, width)`, to itself or to `memory`."""

    def __init__(self, width: int, *, heads: int = 4, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.q, self.kv, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        k, v = self.kv(x if memory is None else memory).chunk(2, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (self.q(x), k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2))


def mlp(width: int, *, ratio: int = 4, inplace: bool = False) -> nn.Sequential:
    activation = nn.ReLU(inplace=True) if inplace else nn.GELU()
    return nn.Sequential(nn.Linear(width, ratio * width), activation, nn.Linear(ratio * width, width))


class Block(nn.Module):
    """Pre-norm transformer block; attends to `memory` as well where it is given."""

    def __init__(self, width: int = WIDTH, *, causal: bool = False, cross: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, causal=causal)
        self.norm2, self.mlp, self.dropout = nn.LayerNorm(width), mlp(width), nn.Dropout(dropout)
        if cross:
            self.norm3, self.cross = nn.LayerNorm(width), Attention(width)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        if memory is not None:
            x = x + self.cross(self.norm3(x), memory)
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(Stack):
    """The head is the embedding's weight, read outside the module that owns it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(causal=True, dropout=0.1) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = self.run(block, x)
        return self.norm(x) @ self.tokens.weight.t()


class BertBlock(nn.Module):
    """`nn.MultiheadAttention` reads `out_proj.weight` itself and never calls `out_proj`."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True)
        self.norm1, self.mlp, self.norm2 = nn.LayerNorm(WIDTH), mlp(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0])
        return self.norm2(x + self.mlp(x))


class Bert(Stack):
    """One Parameter under two names, in two modules that are both called."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.blocks = nn.Embedding(VOCAB, WIDTH), nn.ModuleList(BertBlock() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, padding: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = self.run(block, x, padding)
        return self.head(x)


class ViT(Stack):
    """Class token and positions are parameters of the root, which has children as well."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.class_token = nn.Parameter(torch.randn(1, 1, WIDTH) * 0.1)
        self.positions = nn.Parameter(torch.randn(1, 1 + 16, WIDTH) * 0.1)
        layers = (nn.TransformerEncoderLayer(WIDTH, 4, 64, 0.1, batch_first=True, norm_first=True) for _ in range(3))
        self.blocks, self.head = nn.ModuleList(layers), nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1) + self.positions
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x[:, 0])


class T5(Stack):
    """Encoder, decoder and head share one embedding; the encoder's output feeds every decoder block."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCAB, WIDTH)
        self.encoder = nn.ModuleList(Block(dropout=0.1) for _ in range(2))
        self.decoder = nn.ModuleList(Block(causal=True, cross=True) for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, x = self.shared(source), self.shared(target)
        for block in self.encoder:
            memory = self.run(block, memory)
        for block in self.decoder:
            x = self.run(block, x, memory)
        return F.linear(self.norm(x) * WIDTH**-0.5, self.shared.weight)


class MoEBlock(nn.Module):
    """Top-1 routing; an expert that got no token is not called at all and has no gradient."""

    def __init__(self, experts: int = 6) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(mlp(WIDTH, ratio=2) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        gate, choice = self.router(tokens).softmax(-1).max(-1)
        out = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            rows = (choice == index).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(tokens[rows]) * gate[rows, None])
        return x + out.view_as(x)


class MoE(Stack):
    """Which parameters a step reads depends on its data."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.blocks = nn.Embedding(VOCAB, WIDTH), nn.ModuleList(MoEBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x)
