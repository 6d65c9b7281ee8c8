"""bf16 with fp32 master weights, written out in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class MasterAdamW(torch.optim.AdamW):
    """Lower a model to bf16 and update fp32 copies of its weights by the fused AdamW; round the model's from them.

    The copies' gradients are allocated once: fresh ones in every step would be page faults that a tuned loop has not.
    """

    def __init__(self, model: nn.Module, **options: Any) -> None:
        """Take the copies before the weights are rounded; `options` are AdamW's."""
        self.masters = {name: nn.Parameter(param.detach().clone()) for name, param in model.named_parameters()}
        for master in self.masters.values():
            master.grad = torch.zeros_like(master)
        self._pairs = list(zip(model.bfloat16().parameters(), self.masters.values(), strict=True))
        super().__init__(self.masters.values(), fused=True, **options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update once; every parameter has a gradient."""
        for param, master in self._pairs:
            assert param.grad is not None
            assert master.grad is not None
            master.grad.copy_(param.grad)
        super().step(closure)
        for param, master in self._pairs:
            param.copy_(master)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the model's gradients; those of the copies are overwritten in the next step."""
        for param, _ in self._pairs:
            param.grad = None

    def weights(self) -> dict[str, Tensor]:
        """Return the fp32 weights by the model's names."""
        return {name: master.detach() for name, master in self.masters.items()}
