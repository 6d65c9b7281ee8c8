"""torch's fused Adam kernels over lists of slot views.

[Note: Slot views] The kernels work tensor by tensor, so a list of slot views gives the bits that the same parameters
give in plain PyTorch; one call over a whole flat chunk does not (its vector loop ends elsewhere).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype


@dataclass
class AdamTensors:
    """Parallel lists, one entry a parameter, all on one device."""

    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    exp_avgs: list[torch.Tensor]
    exp_avg_sqs: list[torch.Tensor]
    steps: list[torch.Tensor]
    """0-dim float32, the number of this update, already counted up; on the device of the others."""


def fused_adam_(tensors: AdamTensors, options: dict[str, Any]) -> None:
    """Update `tensors.params` and their states in place, with one parameter group's `options`."""
    kernel = torch._fused_adamw_ if options["decoupled_weight_decay"] else torch._fused_adam_
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


def global_norm(
    grads: Mapping[torch.Tensor, torch.Tensor], *, known: Mapping[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Return the 2-norm over the gradients of parameters, wherever each gradient is; 0-dim, on the CPU.

    It is computed as `torch.nn.utils.clip_grad_norm_` does of the parameters in the order of `grads`.
    `known` are norms of some of them, as `torch.linalg.vector_norm` has given them.
    """
    params = list(grads)
    groups = _group_tensors_by_device_and_dtype([[*params]], with_indices=True)
    order = [params[index] for _, indices in groups.values() for index in indices]
    norms = [known[param] if param in known else torch.linalg.vector_norm(grads[param]) for param in order]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm.cpu() for norm in norms]))
    return total
