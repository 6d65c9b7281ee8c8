"""An optimizer over chunks with the parameter groups, options and states of one of torch's."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch

from chunkmem.errors import ConfigError, StateError
from chunkmem.optim.adam import Adam, AdamW
from chunkmem.optim.host import HasRuntime
from chunkmem.optim.sgd import SGD

_COUNTERPARTS = MappingProxyType({torch.optim.AdamW: AdamW, torch.optim.Adam: Adam, torch.optim.SGD: SGD})
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
"""Options of how torch computes."""


def converted(
    optimizer: torch.optim.Optimizer, *, manager: HasRuntime, max_grad_norm: float | None
) -> Adam | AdamW | SGD:
    """Return the counterpart of one of torch's optimizers; see `ChunkManager.optimizer`.

    Raises:
        ConfigError: it has no counterpart, or an option that there is none of.
        StateError: it is an optimizer over chunks already, or what `chunkmem.AdamW` raises.
    """
    if isinstance(optimizer, Adam | SGD):
        raise StateError(f"manager.optimizer() was given a chunkmem.{type(optimizer).__name__}: use it as it is")
    kind: Any = _COUNTERPARTS.get(type(optimizer))
    if kind is None:
        names = ", ".join(f"torch.optim.{name.__name__}" for name in _COUNTERPARTS)
        raise ConfigError(
            f"manager.optimizer() takes one of {names}, not a {type(optimizer).__name__}; make that with "
            f"chunkmem.Optimizer({type(optimizer).__name__}, params, manager=manager, ...)"
        )
    groups = [{k: v for k, v in group.items() if k not in _IMPLEMENTATION} for group in optimizer.param_groups]
    made: Adam | AdamW | SGD = kind(groups, manager=manager, max_grad_norm=max_grad_norm)
    if optimizer.state:
        made.load_state_dict(optimizer.state_dict())
    return made
