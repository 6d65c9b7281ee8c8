"""What is estimated: how to build a model, and how to run one step of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Model:
    """A model and a batch for it. Both are made under fake tensors, so neither takes memory."""

    name: str
    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module], torch.Tensor]
    """Makes a batch, calls the model on it, and returns a scalar."""
    tokens: int = 0
    """Positions in a batch, for speeds; 0 if it has none."""


def checkpointed(module: nn.Module) -> bool:
    """Have every block recomputed in backward; False if there are none.

    Blocks are the children of the outermost ModuleList or Sequential modules.
    """
    blocks = blocks_in(module)
    for block in blocks:
        # Nothing is drawn and nothing computed, so there is no random state to keep and nothing to compare.
        block.forward = partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, determinism_check="none"
        )
    return bool(blocks)


def blocks_in(module: nn.Module) -> list[nn.Module]:
    """Return the children of the outermost ModuleList or Sequential modules."""
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        return list(module.children())
    return [block for child in module.children() for block in blocks_in(child)]
