"""Optimizers of other libraries over managed parameters: refused at their step, which would train nothing."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from chunkmem.data.errors import StateError
from chunkmem.modules.binding import ManagedParameter
from chunkmem.modules.gradients import GradientBook
from chunkmem.modules.registry import ModelRegistry
from chunkmem.optim.optimizer import RuleOptimizer


class ForeignStepCheck:
    """Raises at the step of every `torch.optim.Optimizer` of the process that is given managed parameters.

    chunkmem's own optimizers pass, and so does what holds one of them as an attribute: a wrapper has it do the step.
    Parameters inside `manager.gather(grads=True)` pass, too: their weights and gradients are there, and writes count.
    """

    def __init__(self, registry: ModelRegistry, gradients: GradientBook) -> None:
        """Check from now on, until `remove` or until nothing else refers to `registry`."""
        self._handle = register_optimizer_step_pre_hook(_StepHook(registry, gradients))
        for key in [key for key, hook in self._hooks().items() if not hook.is_alive()]:
            # Not by a finalizer of the registry: it could run while torch goes through its hooks.
            (self._handle.hooks_dict_ref() or {}).pop(key)

    def is_alone(self) -> bool:
        """Tell whether no other manager of this process is open, or waits to be collected."""
        return len(self._hooks()) <= 1

    def remove(self) -> None:
        """Check no longer. Idempotent."""
        self._handle.remove()

    def _hooks(self) -> dict[int, _StepHook]:
        """Return the hooks of all managers in torch's table of them."""
        found = self._handle.hooks_dict_ref() or {}
        return {key: hook for key, hook in found.items() if isinstance(hook, _StepHook)}


class _StepHook:
    """What torch refers to: it keeps no manager alive."""

    def __init__(self, registry: ModelRegistry, gradients: GradientBook) -> None:
        self._registry = weakref.ref(registry)
        self._gradients = weakref.ref(gradients)

    def is_alive(self) -> bool:
        """Tell whether its manager is still there."""
        return self._registry() is not None

    def __call__(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        registry, gradients = self._registry(), self._gradients()
        if registry is None or gradients is None or _steps_by_chunkmem(optimizer):
            return
        for group in optimizer.param_groups:
            for param in group["params"]:
                managed = registry.find(param)
                if managed is not None and managed not in gradients.exposed:
                    raise _refused(optimizer, managed)


def _steps_by_chunkmem(optimizer: torch.optim.Optimizer) -> bool:
    return any(isinstance(found, RuleOptimizer) for found in (optimizer, *vars(optimizer).values()))


def _refused(optimizer: torch.optim.Optimizer, managed: ManagedParameter) -> StateError:
    kind = type(optimizer).__name__
    return StateError(
        f"{kind}.step(): parameter {managed.name} is managed; its gradient is in a chunk, where {kind} does not look, "
        f"and nothing would be trained; make the optimizer with chunkmem.Optimizer({kind}, params, manager=manager) "
        "or chunkmem.AdamW(params, manager=manager), or build in manager.exclude() what another optimizer has to update"
    )
