"""Update parameters that no chunk holds."""

from __future__ import annotations

from collections.abc import Hashable, MutableMapping, Sequence
from typing import Any

import torch

from chunkmem.optim.rule import SlotTensors, UpdateRule


def first_state(param: torch.Tensor, rule: UpdateRule[Any]) -> dict[str, torch.Tensor]:
    """Return the state of a parameter that was not updated yet."""
    state = {"step": torch.zeros((), dtype=torch.float32, device=param.device)} if rule.counts_steps else {}
    for spec in rule.all_states:
        dtype = None if spec.codes is not None else spec.dtype  # codes are for chunks
        like = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
        shape = spec.shape_for(param)
        state[spec.role.value] = like if shape == param.shape else like.new_zeros(shape)
    return state


def update_excluded(
    params: Sequence[torch.Tensor],
    states: MutableMapping[torch.Tensor, Any],
    rule: UpdateRule[Any],
    hyper: Hashable,
    *,
    multiplier: float | None,
) -> None:
    """Update parameters as torch's own optimizer does, with their own `.grad`.

    Args:
        params: of one parameter group; each has a gradient.
        states: by parameter, as torch.optim keeps them; made where there is none.
        rule: of the optimizer.
        hyper: what the rule has read of the parameter group.
        multiplier: of the gradients; None: they are taken as they are.
    """
    roles = [spec.role for spec in rule.states(hyper)]
    steps = dict.fromkeys(params, torch.ones((), device="cpu"))
    for param in params if roles else ():
        if not states[param]:
            states[param] = first_state(param, rule)
        elif not rule.counts_steps:
            steps[param] = torch.full((), 2.0, device="cpu")
        if rule.counts_steps:
            states[param]["step"] += 1
            steps[param] = states[param]["step"]
    for dtype in dict.fromkeys(param.dtype for param in params):
        alike = [param for param in params if param.dtype == dtype]
        grads = [grad for param in alike if (grad := param.grad) is not None]
        columns = {role: [states[param][role.value] for param in alike] for role in roles}
        slots = SlotTensors(alike, grads, columns, [])
        rule.apply_(slots, [steps[param] for param in alike], hyper, multiplier=multiplier)
