"""Gradients that are made smaller where their weights are not those that they were computed for.

An element of a gradient is divided by 1 + gap / expected step: its gap is how far the weight is from where the forward
of the batch had it, its expected step the root of a running average of squared steps. With L2 weight decay, the decay
that the optimizer adds to the gradient is divided, too; decoupled decay is not part of the gradient, and stays.

Source: Barkai, Hakimi, Schuster, "Gap Aware Mitigation of Gradient Staleness", https://arxiv.org/abs/1909.10802, as in
FTPipe, https://github.com/saareliad/FTPipe, pipe/pipeline/gap_aware; here, averages of Adam are corrected for their
start, as those of SGD are there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from chunkmem.data.errors import ConfigError
from chunkmem.optim.optimizer import RuleOptimizer

_SGD_DECAY, _SGD_EPS = 0.999, 1e-8


def require_momentum(optimizer: RuleOptimizer) -> None:
    """Raise a `ConfigError` if an optimizer has no state that tells how far it steps."""
    for number, group in enumerate(optimizer.param_groups):
        if group.get("momentum", 1.0) == 0:
            raise ConfigError(
                f'versions="predict+gap" takes expected steps from momentum, and that of parameter group {number} is '
                '0; give momentum to chunkmem.SGD, or take versions="stash"'
            )


def note_step_(
    average: torch.Tensor, state: Mapping[str, torch.Tensor], options: Mapping[str, Any], rate: float
) -> None:
    """Have the last update be part of an average of squared steps; of SGD, without its learning rate.

    Args:
        average: float32, in the shape of the weight; 0 before the first update.
        state: of the optimizer, after the update, of any dtype.
        options: of the parameter group.
        rate: the learning rate of the update.
    """
    if "exp_avg" in state:
        beta1, beta2 = map(float, options["betas"])
        step = float(state["step"])
        denominator = (state["exp_avg_sq"].float().sqrt() / math.sqrt(1 - beta2**step)).add_(float(options["eps"]))
        direction = (state["exp_avg"].float() / denominator).mul_(rate / (1 - beta1**step))
    else:
        beta2, direction = _SGD_DECAY, state["momentum_buffer"].float()
    average.mul_(beta2).addcmul_(direction, direction, value=1 - beta2)


def expected_step(average: torch.Tensor, options: Mapping[str, Any], *, num: int, max_rate: float) -> torch.Tensor:
    """Return how far an update is expected to move each element.

    Args:
        average: of `note_step_`.
        options: of the parameter group.
        num: updates that are part of it, at least 1.
        max_rate: the largest learning rate so far.
    """
    if "betas" in options:
        return (average / (1 - float(options["betas"][1]) ** num)).sqrt_().add_(float(options["eps"]))
    return (average / (1 - _SGD_DECAY**num)).sqrt_().add_(_SGD_EPS).mul_(max_rate)


def reduced(
    grad: torch.Tensor,
    weight: torch.Tensor,
    seen: torch.Tensor,
    expected: torch.Tensor,
    *,
    options: Mapping[str, Any],
    scale: float,
) -> torch.Tensor:
    """Return a gradient divided by 1 + gap / expected step, in float32.

    Args:
        grad: multiplied by the loss scale.
        weight: as the update finds it, in the shape of the gradient, as all tensors here.
        seen: what forward took for it.
        expected: of `expected_step`.
        options: of the parameter group.
        scale: of the loss; 1 if there is none.
    """
    penalty = (weight.float() - seen.float()).abs_().div_(expected).add_(1)
    found = grad.float() / penalty
    decay = float(options["weight_decay"])
    if decay and not options.get("decoupled_weight_decay", False):  # the optimizer adds decay * weight
        found.addcmul_(weight.float(), (1 - penalty).div_(penalty), value=scale * decay)
    return found
