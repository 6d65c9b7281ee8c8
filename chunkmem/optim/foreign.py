"""Optimizers of other libraries over managed parameters: refused at their step, which would train nothing."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from chunkmem.errors import StateError
from chunkmem.nn.binding import ManagedParameter
from chunkmem.nn.gradients import GradientBook
from chunkmem.nn.registry import ModelRegistry


class ChunkedOptimizer(torch.optim.Optimizer):
    """What chunkmem's own optimizers are: their `step()` finds gradients in chunks."""


def refuse_foreign_steps(registry: ModelRegistry, gradients: GradientBook) -> RemovableHandle:
    """Raise a StateError at the step of every `torch.optim.Optimizer` of the process that is given managed parameters.

    chunkmem's own optimizers pass, and so does what holds one of them as an attribute: a wrapper has it do the step.
    Parameters inside `manager.gather(grads=True)` pass, too: their weights and gradients are there, and writes count.

    Returns:
        A handle that takes the check away. It goes by itself when nothing else refers to `registry`.
    """
    registry_ref, gradients_ref = weakref.ref(registry), weakref.ref(gradients)

    def before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        models, book = registry_ref(), gradients_ref()
        if models is None or book is None or _steps_by_chunkmem(optimizer):
            return
        for group in optimizer.param_groups:
            for param in group["params"]:
                managed = models.find(param)
                if managed is not None and managed not in book.exposed:
                    raise _refused(optimizer, managed)

    handle = register_optimizer_step_pre_hook(before_step)
    weakref.finalize(registry, handle.remove)
    return handle


def _steps_by_chunkmem(optimizer: torch.optim.Optimizer) -> bool:
    return any(isinstance(found, ChunkedOptimizer) for found in (optimizer, *vars(optimizer).values()))


def _refused(optimizer: torch.optim.Optimizer, managed: ManagedParameter) -> StateError:
    kind = type(optimizer).__name__
    return StateError(
        f"{kind}.step(): parameter {managed.name} is managed; its gradient is in a chunk, where {kind} does not look, "
        "and nothing would be trained; make the optimizer with chunkmem.AdamW(params, manager=manager), or build in "
        "manager.exclude() what another optimizer has to update"
    )
