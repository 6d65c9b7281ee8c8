"""The norm of gradients, wherever they are, and few waits for an accelerator on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype, _has_foreach_support


def global_norm(
    params: Sequence[torch.Tensor],
    gradient: Callable[[torch.Tensor], torch.Tensor],
    *,
    known: Mapping[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Return the 2-norm over the gradients of parameters, wherever each gradient is; 0-dim, on the CPU.

    It is computed as `torch.nn.utils.clip_grad_norm_` does of the parameters in their order.

    Args:
        params: in that order.
        gradient: returns that of a parameter; one after the other is asked for.
        known: norms of some of them, as `torch.linalg.vector_norm` has given them.
    """
    groups = _group_tensors_by_device_and_dtype([[*params]], with_indices=True)
    order = [params[index] for _, indices in groups.values() for index in indices]
    norms = [known[param] if param in known else _norm(gradient(param)) for param in order]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(on_host(norms)))
    return total


def _norm(gradient: torch.Tensor) -> torch.Tensor:
    """Return a 2-norm, 0-dim, by the kernel that `clip_grad_norm_` takes on that device: they add in another order."""
    is_foreach = _has_foreach_support([gradient], gradient.device)
    norm: torch.Tensor = torch._foreach_norm([gradient])[0] if is_foreach else torch.linalg.vector_norm(gradient)
    return norm


def on_host(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors of one shape on the CPU in their order: one copy for each device, as each waits for it."""
    placed: dict[torch.device, list[int]] = {}
    for index, value in enumerate(values):
        placed.setdefault(value.device, []).append(index)
    copied: dict[int, torch.Tensor] = {}
    for indices in placed.values():
        copied.update(zip(indices, torch.stack([values[index] for index in indices]).cpu().unbind(), strict=True))
    return [copied[index] for index in range(len(values))]


def number_on(device: torch.device, number: torch.Tensor) -> torch.Tensor:
    """Return a 0-dim tensor of the CPU on a device: filled there, as a copy would wait for the device."""
    if device.type == "cpu":
        return number
    return torch.full((), number.item(), dtype=number.dtype, device=device)
