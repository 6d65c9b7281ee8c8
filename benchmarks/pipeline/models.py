"""The GPT of `benchmarks.overhead` in the parts that a pipeline is given, and its batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.overhead.variants import Block

NUM_BATCHES = 4
_VOCABULARY = 256


@dataclass(frozen=True)
class Workload:
    """The size of the model and of one step's batch."""

    num_layers: int
    width: int
    num_heads: int
    num_sequences: int
    """Of a batch, which are split into micro-batches."""
    num_tokens: int
    """Of a sequence."""

    def build(self) -> GPT:
        """Return the model, the same weights each time."""
        torch.manual_seed(0)
        return GPT(self)

    @property
    def param_nbytes(self) -> int:
        """Bytes of its weights."""
        with torch.device("meta"):
            return sum(parameter.nbytes for parameter in GPT(self).parameters())

    def batches(self) -> list[Tensor]:  # each (sequences, tokens + 1)
        """Return what the steps are trained on, in turns."""
        draw = torch.Generator().manual_seed(1)
        return list(torch.randint(_VOCABULARY, (NUM_BATCHES, self.num_sequences, self.num_tokens + 1), generator=draw))


FULL = Workload(num_layers=6, width=512, num_heads=8, num_sequences=32, num_tokens=64)
COUNTED = Workload(num_layers=8, width=128, num_heads=4, num_sequences=32, num_tokens=4)
"""To count copies, which do not depend on how long anything takes."""
QUICK = Workload(num_layers=3, width=64, num_heads=4, num_sequences=8, num_tokens=16)


class Embeddings(nn.Module):
    """Of tokens and of positions."""

    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.token = nn.Embedding(_VOCABULARY, work.width)
        self.position = nn.Embedding(work.num_tokens, work.width)

    def forward(self, tokens: Tensor) -> Tensor:  # (sequences, tokens) to (sequences, tokens, width)
        """Add both."""
        return self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))


class Head(nn.Module):
    """Logits of the next token."""

    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(work.width)
        self.out = nn.Linear(work.width, _VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (sequences, tokens, width) to (sequences, tokens, vocabulary)
        """Return them."""
        return self.out(self.norm(x))


class GPT(nn.Module):
    """A byte-level GPT with an untied head."""

    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.embeddings = Embeddings(work)
        self.blocks = nn.ModuleList(Block(work.width, work.num_heads) for _ in range(work.num_layers))
        self.head = Head(work)

    def forward(self, tokens: Tensor) -> Tensor:  # (sequences, tokens) to (sequences, tokens, vocabulary)
        """Return the logits of each next token."""
        x = self.embeddings(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def in_turn(self) -> nn.Sequential:
        """Return its parts one after the other."""
        return nn.Sequential(self.embeddings, *self.blocks, self.head)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of a batch, or of a part of it."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def parts_of(batch: Tensor, num: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield tokens and targets of each micro-batch, the last one first: in that order gradients are added by layer."""
    for part in reversed(batch.chunk(num)):
        yield part[:, :-1], part[:, 1:]
