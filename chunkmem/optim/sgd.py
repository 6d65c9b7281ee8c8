"""SGD with momentum: its rule, and the torch optimizer over it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import ParamsT
from torch.optim.sgd import sgd

from chunkmem.data.errors import ConfigError
from chunkmem.data.types import Role
from chunkmem.optim.checks import check_available, check_number, flag, number
from chunkmem.optim.host import HasOptimizerHost
from chunkmem.optim.optimizer import RuleOptimizer
from chunkmem.optim.rule import SlotUpdate, StateSpec, UpdateRule

_MOMENTUM = StateSpec(Role("momentum_buffer"))
_REFUSED = ("maximize", "differentiable")


@dataclass(frozen=True)
class SGDHyper:
    """A parameter group's numbers."""

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool


class SGDRule(UpdateRule[SGDHyper]):
    """`torch.optim.sgd.sgd`, tensor by tensor: on a CPU that is what `torch.optim.SGD` does by default.

    Without momentum there are no states at all.
    """

    name = "SGD"
    options = ("lr", "momentum", "dampening", "weight_decay", "nesterov")
    all_states = (_MOMENTUM,)
    counts_steps = False

    def check(self, group: Mapping[str, Any]) -> None:
        for name in ("lr", "momentum", "weight_decay"):
            check_number(name, group[name])
        hyper = self.hyper(group)
        if hyper.nesterov and (hyper.momentum <= 0 or hyper.dampening != 0):
            raise ConfigError(
                f"nesterov=True needs a momentum above 0 and no dampening, not {hyper.momentum} and {hyper.dampening}"
            )

    def hyper(self, group: Mapping[str, Any]) -> SGDHyper:
        check_available(group, _REFUSED)
        lr, momentum, dampening, weight_decay = (number(name, group[name]) for name in self.options[:4])
        return SGDHyper(lr, momentum, dampening, weight_decay, flag("nesterov", group["nesterov"]))

    def states(self, hyper: SGDHyper) -> tuple[StateSpec, ...]:
        return self.all_states if hyper.momentum else ()

    def update_(self, slots: SlotUpdate) -> None:
        momenta = slots.states[_MOMENTUM.role] if slots.hyper.momentum else []
        # torch makes the buffer where there is none, with the bits of the first gradient.
        buffers = [None if float(step) == 1 else slot for slot, step in zip(momenta, slots.steps, strict=False)]
        grads = slots.scaled_grads()
        sgd(slots.weights, grads, buffers, foreach=False, fused=False, maximize=False, **vars(slots.hyper))
        for slot, buffer in zip(momenta, buffers, strict=True):
            if buffer is not None and buffer is not slot:
                slot.copy_(buffer)


class SGD(RuleOptimizer):
    """`torch.optim.SGD` over managed and excluded parameters, with the bits it has by default on a CPU.

    Parameter groups, LR schedulers and `state_dict()` are torch's. Gradients are consumed by `step()`. Chunks hold
    momentum for the parameter groups that have some; others have no states.

    Args:
        params: parameters or parameter groups, as in torch.optim.
        manager: the manager that holds the parameters.
        lr, momentum, dampening, weight_decay, nesterov: as in torch.optim; the configuration has none for SGD.
        max_grad_norm: clip the global norm to this in `step()`; default: the configuration's `gradient_clipping`.
        in_backward: update each chunk group inside backward, as soon as its gradients are complete, so that these never
            exist all at once; default: the configuration's `optimizer.params.in_backward`. For loops with one backward
            a step that neither clip nor look at gradients: what does not go is refused.

    Raises:
        ConfigError: an option is out of range.
        StateError: a parameter is neither managed nor excluded.
        CapacityError: weights, gradients and states do not fit DEVICE and HOST together.
    """

    is_elementwise = True
    default_states = ()

    def __init__(
        self,
        params: ParamsT,
        *,
        manager: HasOptimizerHost,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        max_grad_norm: float | None = None,
        in_backward: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            # The rest says to torch.optim what this optimizer does, so that a state_dict goes both ways.
            "maximize": False,
            "foreach": None,
            "differentiable": False,
            "fused": None,
        }
        super().__init__(
            params, defaults, rule=SGDRule(), host=manager.runtime, max_grad_norm=max_grad_norm, in_backward=in_backward
        )
