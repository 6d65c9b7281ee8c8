"""An optimizer over chunks with the parameter groups, options and states of one of torch's."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch

from chunkmem.errors import StateError
from chunkmem.optim.adam import Adam, AdamW
from chunkmem.optim.any_class import Optimizer
from chunkmem.optim.host import HasRuntime
from chunkmem.optim.saved import StatefulOptimizer
from chunkmem.optim.sgd import SGD

_COUNTERPARTS = MappingProxyType({torch.optim.AdamW: AdamW, torch.optim.Adam: Adam, torch.optim.SGD: SGD})
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
"""Options of how torch computes."""
_ONLY_BY_CLASS = ("amsgrad", "maximize")
"""Options that the counterparts lack, and `chunkmem.Optimizer` has."""


def converted(
    optimizer: torch.optim.Optimizer,
    *,
    manager: HasRuntime,
    max_grad_norm: float | None,
    in_backward: bool | None = None,
) -> StatefulOptimizer:
    """Return the counterpart of an optimizer; see `ChunkManager.optimizer`, which says what is raised, too."""
    if isinstance(optimizer, StatefulOptimizer):
        raise StateError(f"manager.optimizer() was given a chunkmem.{type(optimizer).__name__}: use it as it is")
    kind: Any = _COUNTERPARTS.get(type(optimizer))
    options: dict[str, Any] = {"manager": manager, "max_grad_norm": max_grad_norm, "in_backward": in_backward}
    made: StatefulOptimizer
    if kind is None or any(group.get(option) for group in optimizer.param_groups for option in _ONLY_BY_CLASS):
        made = Optimizer(type(optimizer), optimizer.param_groups, **options)
    else:
        groups = [{k: v for k, v in group.items() if k not in _IMPLEMENTATION} for group in optimizer.param_groups]
        made = kind(groups, **options)
    if optimizer.state:
        made.load_state_dict(optimizer.state_dict())
    return made
