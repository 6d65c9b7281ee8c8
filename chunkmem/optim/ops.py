"""torch's fused Adam kernels over lists of slot views.

[Note: Slot views] The kernels work tensor by tensor, so a list of slot views gives the bits that the same parameters
give in plain PyTorch; one call over a whole flat chunk does not (its vector loop ends elsewhere).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class FusedAdam(Protocol):
    """`torch._fused_adam_` (L2 decay) or `torch._fused_adamw_` (decoupled decay)."""

    def __call__(self, *args: Any, **kwargs: Any) -> None: ...


@dataclass
class AdamTensors:
    """Parallel lists, one entry a parameter, all on one device."""

    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    exp_avgs: list[torch.Tensor]
    exp_avg_sqs: list[torch.Tensor]
    steps: list[torch.Tensor]
    """0-dim float32, the number of this update, already counted up; on the device of the others."""


def fused_adam_(kernel: FusedAdam, tensors: AdamTensors, options: dict[str, Any]) -> None:
    """Update `tensors.params` and their states in place, with one parameter group's `options`."""
    beta1, beta2 = options["betas"]
    kernel(
        tensors.params,
        tensors.grads,
        tensors.exp_avgs,
        tensors.exp_avg_sqs,
        [],
        tensors.steps,
        lr=float(options["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        weight_decay=float(options["weight_decay"]),
        eps=float(options["eps"]),
        amsgrad=False,
        maximize=False,
        grad_scale=None,
        found_inf=None,
    )


def global_norm(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm over all of `grads`, computed as `torch.nn.utils.clip_grad_norm_` does; 0-dim, on the CPU."""
    norms = [torch.linalg.vector_norm(grad) for grad in grads]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm.cpu() for norm in norms]))
    return total
