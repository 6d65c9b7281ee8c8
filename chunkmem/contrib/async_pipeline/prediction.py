"""What weights are going to be some updates from now, as far as their optimizer's state tells.

An optimizer with momentum continues in its direction: the prediction is its own update with gradients of 0, some times
over, with the learning rates that a scheduler is going to set. exp_avg_sq stays what it is.

Source: FTPipe, https://github.com/saareliad/FTPipe, pipe/pipeline/weight_prediction.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from chunkmem.data.errors import ConfigError
from chunkmem.optim.adam import Adam
from chunkmem.optim.optimizer import RuleOptimizer
from chunkmem.optim.sgd import SGD


def require_predictable(optimizer: RuleOptimizer, *, versions: str) -> None:
    """Raise a `ConfigError` unless it is known where an optimizer goes, which these `versions` of weights need."""
    if not isinstance(optimizer, SGD | Adam):
        raise ConfigError(
            f'versions="{versions}" knows where chunkmem.SGD, Adam and AdamW go, not {type(optimizer).__name__}; take '
            'one of them, or versions="stash"'
        )


def learning_rates(optimizer: RuleOptimizer, scheduler: Any, num: int) -> list[list[float]]:
    """Return the learning rates of the next `num` updates, by parameter group.

    Args:
        optimizer: whose groups have that of the next one.
        scheduler: of torch's, stepped after each update; None: they stay as they are. It is not changed.
        num: at least 1.

    Raises:
        ConfigError: what the scheduler does depends on more than the number of updates.
    """
    now = [float(group["lr"]) for group in optimizer.param_groups]
    if scheduler is None:
        return [[lr] * num for lr in now]
    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(
            f"scheduler is a {type(scheduler).__name__}; pipe.step() takes a torch.optim.lr_scheduler.LRScheduler "
            "whose step() needs no metric"
        )
    found = [[lr] for lr in now]
    stand_in = torch.optim.SGD(
        [
            {**{name: value for name, value in group.items() if name != "params"}, "params": [torch.zeros(0)]}
            for group in optimizer.param_groups
        ]
    )
    ahead = copy.deepcopy(scheduler, {id(optimizer): stand_in})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no optimizer has stepped
        for _ in range(num - 1):
            ahead.step()
            for rates, group in zip(found, stand_in.param_groups, strict=True):
                rates.append(float(group["lr"]))
    return found


def predict_(
    weight: torch.Tensor, state: Mapping[str, torch.Tensor], options: Mapping[str, Any], rates: Sequence[float]
) -> None:
    """Move a weight, in float32, to where it is going to be after as many updates as there are learning rates.

    Args:
        weight: of any shape.
        state: of the optimizer, in the same shape and of any dtype; before the first update there is none, and the
            weight stays.
        options: of the parameter group.
        rates: of the next updates.
    """
    if "exp_avg" in state:
        _predict_adam_(weight, state, options, rates)
    elif "momentum_buffer" in state:
        _predict_sgd_(weight, state["momentum_buffer"], options, rates)


def _predict_adam_(
    weight: torch.Tensor, state: Mapping[str, torch.Tensor], options: Mapping[str, Any], rates: Sequence[float]
) -> None:
    beta1, beta2 = map(float, options["betas"])
    decay, eps = float(options["weight_decay"]), float(options["eps"])
    exp_avg, root = state["exp_avg"].float().clone(), state["exp_avg_sq"].float().sqrt()
    step = float(state["step"])
    for number, lr in enumerate(rates, start=1):
        exp_avg.mul_(beta1)
        if decay and options["decoupled_weight_decay"]:
            weight.mul_(1 - lr * decay)
        elif decay:
            exp_avg.add_(weight, alpha=(1 - beta1) * decay)
        denominator = (root / math.sqrt(1 - beta2 ** (step + number))).add_(eps)
        weight.addcdiv_(exp_avg, denominator, value=-lr / (1 - beta1 ** (step + number)))


def _predict_sgd_(
    weight: torch.Tensor, momentum_buffer: torch.Tensor, options: Mapping[str, Any], rates: Sequence[float]
) -> None:
    momentum, decay = float(options["momentum"]), float(options["weight_decay"])
    buffer = momentum_buffer.float().clone()
    for lr in rates:
        buffer.mul_(momentum)
        direction = weight * decay if decay else torch.zeros_like(weight)
        buffer.add_(direction, alpha=1 - float(options["dampening"]))
        weight.add_(direction.add_(buffer, alpha=momentum) if options["nesterov"] else buffer, alpha=-lr)
