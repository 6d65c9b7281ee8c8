"""The GPTs that are trained, by size, and how they are built without waiting for random numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from chunkmem.estimate.gpt import GPT, SHAPES, VOCAB, Shape
from chunkmem.estimate.model import Model

SEQ = 1024
TOY_SEQ = 32
TILE_NUMEL = (1 << 20) + 7
"""Odd, so that rows of a weight differ."""
STD = 0.02

LADDER = {
    "1B": Shape(20, 2048, 16),
    "2B": Shape(40, 2048, 16),
    "4B": Shape(64, 2304, 16),
    "6B": Shape(53, 3072, 16),
    "8B": Shape(72, 3072, 16),
    "10B": Shape(50, 4096, 16),
    "12B": Shape(60, 4096, 16),
    "15B": Shape(78, 4096, 16),
    "18B": Shape(40, 6144, 16),
    "20B": Shape(25, 8192, 16),
    "30B": Shape(37, 8192, 16),
    "40B": Shape(50, 8192, 16),
    "50B": Shape(62, 8192, 16),
    "60B": Shape(75, 8192, 16),
}
"""Widths and depths by which papers on this kind of training compare how large a model may be, from PatrickStar on."""

TOY_LADDER = {
    "toy-1": Shape(2, 16, 2),
    "toy-2": Shape(4, 24, 2),
    "toy-3": Shape(6, 32, 2),
}
TOY = TOY_LADDER["toy-1"]


@dataclass(frozen=True)
class Size:
    """A model by name, as plain data for a row's process."""

    name: str
    layers: int
    width: int
    heads: int
    seq: int

    @property
    def shape(self) -> Shape:
        """What the model is built from."""
        return Shape(self.layers, self.width, self.heads)

    @property
    def num_params(self) -> int:
        """Distinct parameters, counted without the model: the head is the embedding."""
        block = 12 * self.width**2 + 13 * self.width
        return self.layers * block + (VOCAB + self.seq + 2) * self.width


def ladder(*, dry: bool) -> list[Size]:
    """Return the rungs of the scale part, smallest first."""
    shapes, seq = (TOY_LADDER, TOY_SEQ) if dry else (LADDER, SEQ)
    return [_size(name, shape, seq) for name, shape in shapes.items()]


def preset(name: str, *, dry: bool) -> Size:
    """Return one of the sizes of ``chunkmem estimate gpt:NAME``; in a dry run a toy by that name."""
    return _size(name, TOY, TOY_SEQ) if dry else _size(name, SHAPES[name], SEQ)


def _size(name: str, shape: Shape, seq: int) -> Size:
    return Size(name, shape.layers, shape.width, shape.heads, seq)


def build(size: Size) -> GPT:
    """Build a model on the CPU; its weights are random, but drawn from one small tile.

    torch's own initialisation takes minutes for ten billion parameters. Zeros would be as fast, and matrix products on
    zeros are faster than on anything that is trained.
    """
    with quick_initialisation():
        return GPT(size.shape, seq=size.seq)


@contextlib.contextmanager
def quick_initialisation() -> Iterator[None]:
    """Have Linear and Embedding fill their weights from one tile of normal numbers while the block runs."""
    tile = torch.randn(TILE_NUMEL, generator=torch.Generator().manual_seed(0)) * STD

    @torch.no_grad()
    def fill(module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            flat = param.view(-1) if param.dim() > 1 else None
            if flat is None:
                param.zero_()
                continue
            for begin in range(0, flat.numel(), TILE_NUMEL):
                part = flat[begin : begin + TILE_NUMEL]
                part.copy_(tile[: part.numel()])

    before = nn.Linear.reset_parameters, nn.Embedding.reset_parameters
    nn.Linear.reset_parameters = nn.Embedding.reset_parameters = fill  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Linear.reset_parameters, nn.Embedding.reset_parameters = before  # type: ignore[method-assign]


def tokens(size: Size, num_sequences: int, *, device: torch.device, seed: int) -> torch.Tensor:
    """Return random tokens, (sequences, seq), that no other seed gives."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (num_sequences, size.seq), generator=generator).to(device)


def estimated(size: Size, batch: int) -> Model:
    """Return what `chunkmem.estimate` rehearses for this size: the same module on a batch of the same form."""

    def loss(model: nn.Module) -> torch.Tensor:
        result: torch.Tensor = model(torch.randint(VOCAB, (batch, size.seq)))
        return result

    return Model(size.name, lambda: GPT(size.shape, seq=size.seq), loss, tokens=batch * size.seq)
