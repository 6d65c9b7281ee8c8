"""An optimizer over chunks with the parameter groups, options and states of one of torch's."""

from __future__ import annotations

from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from chunkmem.data.errors import StateError
from chunkmem.optim.adam import Adam, AdamW
from chunkmem.optim.any_class import Optimizer
from chunkmem.optim.host import HasOptimizerHost
from chunkmem.optim.optimizer import RuleOptimizer
from chunkmem.optim.sgd import SGD

_COUNTERPARTS = MappingProxyType({torch.optim.AdamW: AdamW, torch.optim.Adam: Adam, torch.optim.SGD: SGD})
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
"""Options of how torch computes."""
_ONLY_BY_CLASS = ("amsgrad", "maximize")
"""Options that the counterparts lack, and `chunkmem.Optimizer` has."""
_HOOKS = tuple(
    f"_optimizer_{what}_{when}_hooks" for what in ("step", "state_dict", "load_state_dict") for when in ("pre", "post")
)
"""Where torch keeps the hooks of an optimizer."""


def converted(
    optimizer: torch.optim.Optimizer,
    *,
    manager: HasOptimizerHost,
    max_grad_norm: float | None,
    in_backward: bool | None = None,
    by_class: bool = False,
) -> RuleOptimizer:
    """Return the counterpart of an optimizer; see `ChunkManager.optimizer`, and for `by_class` `become`."""
    if isinstance(optimizer, RuleOptimizer):
        raise StateError(f"manager.optimizer() was given a chunkmem.{type(optimizer).__name__}: use it as it is")
    _check_step(optimizer)
    kind, arguments = _counterpart(optimizer, by_class=by_class)
    made: RuleOptimizer = kind(*arguments, manager=manager, max_grad_norm=max_grad_norm, in_backward=in_backward)
    if optimizer.state:
        made.load_state_dict(optimizer.state_dict())
    _share(optimizer, made)
    return made


def become(optimizer: torch.optim.Optimizer, *, manager: HasOptimizerHost, by_class: bool) -> None:
    """Make an optimizer that has just been made its own counterpart: the object is initialised again, of another class.

    Args:
        optimizer: of torch, without states or hooks.
        manager: holds its parameters.
        by_class: update by the class's own code, to the bits of its default, and not as its `fused=True` computes.

    Raises:
        ConfigError, StateError, CapacityError: see `chunkmem.Optimizer`. The optimizer is lost.
    """
    kind, arguments = _counterpart(optimizer, by_class=by_class)
    vars(optimizer).clear()
    optimizer.__class__ = kind
    kind.__init__(optimizer, *arguments, manager=manager)


def _counterpart(optimizer: torch.optim.Optimizer, *, by_class: bool) -> tuple[Any, tuple[Any, ...]]:
    """Return the class of ours for one of torch's, and what it is made of."""
    groups = optimizer.param_groups
    kind = None if by_class else _COUNTERPARTS.get(type(optimizer))
    if kind is None or any(group.get(option) for group in groups for option in _ONLY_BY_CLASS):
        return Optimizer, (type(optimizer), groups)
    return kind, ([{k: v for k, v in group.items() if k not in _IMPLEMENTATION} for group in groups],)


def _check_step(optimizer: torch.optim.Optimizer) -> None:
    """Raise if somebody has put something in the place of an optimizer's `step`, which would not be called any more.

    Raises:
        StateError: see above.
    """
    step: Any = vars(optimizer).get("step")
    # A learning rate schedule notes in the step of the class that it was called.
    if step is not None and not (hasattr(step, "_wrapped_by_lr_sched") and step.__wrapped__ is type(optimizer).step):
        name = getattr(step, "__qualname__", type(step).__name__)
        raise StateError(
            f"manager.optimizer(): the step of this {type(optimizer).__name__} was replaced by {name}, which would not "
            "be called any more; pass the optimizer as it was made, and replace the step of what is returned"
        )


def _share(before: torch.optim.Optimizer, made: RuleOptimizer) -> None:
    """Have both optimizers be of the same groups and hooks: learning rate schedules know the one that was there."""
    for group, own in zip(before.param_groups, made.param_groups, strict=True):
        group.clear()
        group.update(own)
    made.param_groups = before.param_groups
    for name in _HOOKS:
        hooks = getattr(before, name)
        hooks.update(getattr(made, name))
        setattr(made, name, hooks)
    if "step" in vars(before):
        made.register_step_post_hook(partial(_note_called, before))


def _note_called(before: torch.optim.Optimizer, *_: object) -> None:
    """Note what a schedule asks for, to warn of schedules that step before their optimizer."""
    before._opt_called = True  # type: ignore[attr-defined]
