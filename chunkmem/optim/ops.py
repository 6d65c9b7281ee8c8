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
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm.cpu() for norm in norms]))
    return total
