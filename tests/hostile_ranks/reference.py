"""What plain PyTorch does over ranks: each has the whole model, and updates with the mean of all ranks' gradients."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.helpers.shared_training import mean_of


class MeanAdamW(torch.optim.AdamW):
    """AdamW of plain PyTorch over the mean of all ranks' gradients."""

    def step(self, closure: Any = None) -> Any:
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        average_gradients([param for group in self.param_groups for param in group["params"]])
        super().step()
        return result


def average_gradients(params: Sequence[Tensor]) -> None:
    """Give every parameter the mean of what all ranks have in its `.grad`. All ranks call it."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, pickle.dumps([param.grad for param in params]))
    for param, *grads in zip(params, *map(pickle.loads, every), strict=True):
        param.grad = mean_of(param, grads)
