"""Adam and AdamW: the torch optimizers over their rules."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch.optim.optimizer import ParamsT

from chunkmem.optim.block_adam import adam_rule
from chunkmem.optim.host import HasOptimizerHost
from chunkmem.optim.optimizer import RuleOptimizer


class Adam(RuleOptimizer):
    """`torch.optim.Adam` (L2 weight decay) over managed and excluded parameters, with torch's fused kernel.

    Parameter groups, LR schedulers and `state_dict()` are torch's. Gradients are consumed by `step()`.

    Args:
        params: parameters or parameter groups, as in torch.optim.
        manager: the manager that holds the parameters.
        lr, betas, eps, weight_decay: given ones win over `optimizer.params` of the configuration.
        states: "fp32", or "8bit": exp_avg and exp_avg_sq as codes of 8 bits with a scale for each 256 elements; wins,
            too. `state_dict()` has fp32 values either way.
        max_grad_norm: clip the global norm to this in `step()`; default: the configuration's `gradient_clipping`.
        in_backward: update each chunk group inside backward, as soon as its gradients are complete, so that these never
            exist all at once; default: the configuration's `optimizer.params.in_backward`. For loops with one backward
            a step that neither clip nor look at gradients: what does not go is refused.

    Raises:
        ConfigError: an option is out of range.
        StateError: a parameter is neither managed nor excluded.
        CapacityError: weights, gradients and states do not fit DEVICE and HOST together.
    """

    _decoupled = False

    def __init__(
        self,
        params: ParamsT,
        *,
        manager: HasOptimizerHost,
        lr: float | torch.Tensor | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        states: Literal["fp32", "8bit"] | None = None,
        max_grad_norm: float | None = None,
        in_backward: bool | None = None,
    ) -> None:
        host = manager.runtime
        host.require_open()
        configured = host.config.optimizer.params_for("AdamW" if self._decoupled else "Adam")
        defaults = {
            "lr": configured.lr if lr is None else lr,
            "betas": configured.betas if betas is None else betas,
            "eps": configured.eps if eps is None else eps,
            "weight_decay": configured.weight_decay if weight_decay is None else weight_decay,
            # The rest says to torch.optim what this optimizer does, so that a state_dict goes both ways.
            "amsgrad": False,
            "maximize": False,
            "foreach": None,
            "capturable": False,
            "differentiable": False,
            "fused": True,
            "decoupled_weight_decay": self._decoupled,
        }
        if states is not None:
            configured = replace(configured, states=states)
        rule = adam_rule(configured, host.updater.native, decoupled=self._decoupled)
        super().__init__(params, defaults, rule=rule, host=host, max_grad_norm=max_grad_norm, in_backward=in_backward)


class AdamW(Adam):
    """`torch.optim.AdamW` (decoupled weight decay) over managed and excluded parameters, with torch's fused kernel.

    Gradients are consumed by `step()`. Arguments, their defaults in the configuration, and errors are those of `Adam`.
    """

    _decoupled = True
