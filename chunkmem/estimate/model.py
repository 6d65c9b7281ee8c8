"""What is estimated: how to build a model, and how to run one step of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
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
    blocks = _blocks(module)
    for block in blocks:
        # Nothing is drawn and nothing computed, so there is no random state to keep and nothing to compare.
        block.forward = partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, determinism_check="none"
        )
    return bool(blocks)


def _blocks(module: nn.Module) -> list[nn.Module]:
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        return list(module.children())
    return [block for child in module.children() for block in _blocks(child)]


def in_precision(module: nn.Module, dtype: torch.dtype) -> None:
    """Have a model compute in `dtype`, with casts where floats enter and leave it.

    Modules that own floating buffers (batch statistics) stay as they are, with casts around them.
    """
    for child in module.modules():
        stays = any(buffer.is_floating_point() for buffer in child.buffers(recurse=False))
        if not stays:
            for param in child.parameters(recurse=False):
                if param.dtype is torch.float32:
                    param.data = param.data.to(dtype)
        elif child is not module:
            _cast_around(child, torch.float32, dtype)
    _cast_around(module, dtype, torch.float32)


def _cast_around(module: nn.Module, inside: torch.dtype, outside: torch.dtype) -> None:
    def enter(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _cast(args, inside), _cast(kwargs, inside)

    def leave(_module: nn.Module, _args: Any, result: Any) -> Any:
        return _cast(result, outside)

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave)


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tree)
