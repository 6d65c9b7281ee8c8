"""Computing in less than float32: which parameters do, and the casts around what does not.

[Note: What stays in float32] A module that owns floating buffers (batch statistics) keeps its parameters in float32,
with casts where tensors enter and leave it. A model takes and returns floats in float32: they are cast at its borders.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only


def keeps_float32(module: nn.Module) -> bool:
    """Tell whether a module computes in float32 whatever the model does; see [Note: What stays in float32]."""
    return any(buffer.is_floating_point() for buffer in module.buffers(recurse=False))


def lowered_parameters(root: nn.Module) -> set[int]:
    """Return the identities of the float32 parameters under `root` that no module needs in float32."""
    lowered: set[int] = set()
    kept: set[int] = set()
    for module in root.modules():
        own = {id(param) for param in module.parameters(recurse=False) if param.dtype is torch.float32}
        (kept if keeps_float32(module) else lowered).update(own)
    return lowered - kept


def cast_at_borders(root: nn.Module, dtype: torch.dtype, *, besides: Iterable[nn.Module] = ()) -> None:
    """Have `root` compute in `dtype` between casts, and below it what stays in float32 between casts back.

    `besides` are modules that compute in float32 for other reasons.
    """
    others = set(besides)
    for module in root.modules():
        if keeps_float32(module) or module in others:
            if module is not root:
                _cast_around(module, torch.float32, dtype)
        elif module is root:
            _cast_around(root, dtype, torch.float32)


def _cast_around(module: nn.Module, inside: torch.dtype, outside: torch.dtype) -> None:
    def enter(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _cast(args, inside), _cast(kwargs, inside)

    def leave(_module: nn.Module, _args: Any, result: Any) -> Any:
        return _cast(result, outside)

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave)


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tree)
