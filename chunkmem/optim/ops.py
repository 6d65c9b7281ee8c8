"""The norm of gradients, wherever they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype


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
    norms = [known[param] if param in known else torch.linalg.vector_norm(gradient(param)) for param in order]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(_on_host(norms)))
    return total


def _on_host(norms: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return 0-dim tensors on the CPU in their order: one copy for each device, as each waits for it."""
    placed: dict[torch.device, list[int]] = {}
    for index, norm in enumerate(norms):
        placed.setdefault(norm.device, []).append(index)
    copied: dict[int, torch.Tensor] = {}
    for indices in placed.values():
        copied.update(zip(indices, torch.stack([norms[index] for index in indices]).cpu().unbind(), strict=True))
    return [copied[index] for index in range(len(norms))]
