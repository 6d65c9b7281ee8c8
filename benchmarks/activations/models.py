"""Two models whose activations are many times their weights: a GPT with dropout, and a CNN with batch norm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

NUM_BATCHES = 4


@dataclass(frozen=True)
class Workload:
    """A model and the size of a step's batch."""

    name: str
    title: str
    depth: int
    """Blocks of the GPT; blocks of each of the 3 stages of the CNN."""
    width: int
    """Channels; of the CNN, in the first stage."""
    batch: int
    size: int
    """Tokens of a sequence, or pixels of a side."""

    def build(self, *, checkpointed: bool) -> nn.Module:
        """Return the model, the same weights each time; `checkpointed`: torch's checkpoint around every block."""
        torch.manual_seed(0)
        kind: Callable[..., nn.Module] = GPT if self.name == "gpt" else CNN
        return kind(self, checkpointed=checkpointed)

    def batches(self) -> list[Tensor]:
        """Return what the steps are trained on, in turns."""
        draw = torch.Generator().manual_seed(1)
        if self.name == "gpt":
            return list(torch.randint(_VOCABULARY, (NUM_BATCHES, self.batch, self.size + 1), generator=draw))
        return list(torch.randn(NUM_BATCHES, self.batch, 3, self.size, self.size, generator=draw))


_VOCABULARY = 256
FULL = (
    Workload("gpt", "GPT with dropout", depth=8, width=128, batch=6, size=96),
    Workload("cnn", "CNN with batch norm", depth=3, width=24, batch=12, size=32),
)
QUICK = (
    Workload("gpt", "GPT with dropout", depth=3, width=32, batch=2, size=16),
    Workload("cnn", "CNN with batch norm", depth=1, width=8, batch=2, size=8),
)


class Block(nn.Module):
    """A pre-norm transformer block with causal attention and dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_up = nn.Linear(width, 4 * width)
        self.mlp_down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:  # (sequences, tokens, width), the same back
        """Mix tokens, then channels, each added to what came in."""
        q, k, v = (
            part.unflatten(-1, (4, -1)).transpose(1, 2)  # (sequences, heads, tokens, width / heads)
            for part in self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.attention_out(attended))
        return x + self.dropout(self.mlp_down(F.gelu(self.mlp_up(self.mlp_norm(x)))))


class GPT(nn.Module):
    """A byte-level GPT with an untied head."""

    def __init__(self, work: Workload, *, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.token = nn.Embedding(_VOCABULARY, work.width)
        self.position = nn.Embedding(work.size, work.width)
        self.blocks = nn.ModuleList(Block(work.width) for _ in range(work.depth))
        self.head = nn.Linear(work.width, _VOCABULARY, bias=False)

    def forward(self, batch: Tensor) -> Tensor:  # (sequences, tokens + 1)
        """Return the mean loss of predicting each token from those before it."""
        tokens, targets = batch[:, :-1], batch[:, 1:]
        x = run_blocks(
            self.blocks, self.token(tokens) + self.position.weight[: tokens.shape[1]], checkpointed=self.checkpointed
        )
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Residual(nn.Module):
    """Two convolutions with batch norm, added to what came in."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        stride = 1 if width == out else 2
        self.first = nn.Conv2d(width, out, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(out)
        self.second = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(out)
        self.skip = nn.Identity() if stride == 1 else nn.Conv2d(width, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (images, channels, height, width)
        """Return as many channels, or twice as many at half the resolution."""
        y = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.skip(x) + self.second_norm(self.second(y)))


class CNN(nn.Module):
    """A small residual network of 3 stages, each of half the resolution and twice the channels."""

    def __init__(self, work: Workload, *, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        widths = [work.width * 2 ** (at // work.depth) for at in range(3 * work.depth)]
        self.stem = nn.Conv2d(3, work.width, 3, padding=1, bias=False)
        self.blocks = nn.ModuleList(
            Residual(width, out) for width, out in zip([work.width, *widths], widths, strict=False)
        )
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, batch: Tensor) -> Tensor:  # (images, 3, height, width)
        """Return the mean loss of telling the class 0 from 9 others."""
        x = run_blocks(self.blocks, self.stem(batch), checkpointed=self.checkpointed).mean(dim=(2, 3))
        return F.cross_entropy(self.head(x), torch.zeros(len(x), dtype=torch.long))


def run_blocks(blocks: nn.ModuleList, x: Tensor, *, checkpointed: bool) -> Tensor:
    """Call the blocks one after the other, each under torch's checkpoint if asked to."""
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
    return x
