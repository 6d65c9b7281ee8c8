"""Update parameters that no chunk holds."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

import torch

from chunkmem.optim.checks import STATE_KEYS
from chunkmem.optim.ops import AdamTensors, fused_adam_


def first_state(param: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the state of a parameter that was not updated yet."""
    step = torch.zeros((), dtype=torch.float32, device=param.device)
    return {"step": step, **{key: torch.zeros_like(param, memory_format=torch.preserve_format) for key in STATE_KEYS}}


def update_excluded(
    params: Sequence[torch.Tensor],
    states: MutableMapping[torch.Tensor, Any],
    options: dict[str, Any],
    *,
    multiplier: float | None,
) -> None:
    """Update parameters as torch's fused Adam does, with their own `.grad`.

    Args:
        params: of one parameter group; each has a gradient.
        states: by parameter, as torch.optim keeps them; made where there is none.
        options: of the parameter group.
        multiplier: of the gradients; None: they are taken as they are.
    """
    for param in params:
        if not states[param]:
            states[param] = first_state(param)
        states[param]["step"] += 1
    for dtype in dict.fromkeys(param.dtype for param in params):
        alike = [param for param in params if param.dtype == dtype]
        columns = [[states[param][key] for param in alike] for key in (*STATE_KEYS, "step")]
        grads = [grad if multiplier is None else grad.mul(multiplier) for p in alike if (grad := p.grad) is not None]
        fused_adam_(AdamTensors(alike, grads, *columns), options)
