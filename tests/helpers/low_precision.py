"""Training in bf16 or fp16 with float32 master weights, written out in plain PyTorch: what chunkmem has to equal."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from chunkmem.modules.dtype_casts import DtypeCasts
from chunkmem.optim.scaler import LossScaler
from chunkmem.packing.precision import precision_of
from tests.helpers.training import compute_device


class MasterAdamW(torch.optim.AdamW):
    """AdamW over float32 copies of the parameters, which are rounded from them after each step."""

    def __init__(
        self,
        params: Iterable[Any],
        masters: dict[nn.Parameter, nn.Parameter],
        scaler: LossScaler | None,
        **options: Any,
    ) -> None:
        self.scaler = scaler
        groups = [group if isinstance(group, dict) else {"params": [group]} for group in params]
        self.pairs = [(param, masters[param]) for group in groups for param in group["params"]]
        if all(len(group) == 1 for group in groups):  # plain parameters: one group
            super().__init__([master for _, master in self.pairs], fused=True, **options)
        else:
            own = [group | {"params": [masters[param] for param in group["params"]]} for group in groups]
            super().__init__(own, fused=True, **options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        scale = 1.0 if self.scaler is None else self.scaler.loss_scale
        for param, master in self.pairs:
            master.grad = None if param.grad is None else param.grad.float().mul(1 / scale)
        if self.scaler is not None:
            is_finite = all(p.grad.isfinite().all() for p, _ in self.pairs if p.grad is not None)
            self.scaler.step(overflow=not is_finite)
            if not is_finite:
                return
        super().step()
        for param, master in self.pairs:
            if param.grad is not None:
                param.copy_(master)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for param, _ in self.pairs:
            param.grad = None


class LowPlain:
    """Plain PyTorch in `dtype`; modules with floating buffers stay in float32."""

    def __init__(self, dtype: torch.dtype, scaler: LossScaler | None = None) -> None:
        self.dtype = dtype
        self.scaler = scaler
        self.masters: dict[nn.Parameter, nn.Parameter] = {}
        self.built: dict[nn.Parameter, torch.dtype] = {}

    def building(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def ready(self, model: nn.Module) -> nn.Module:
        model = model.to(compute_device())
        own = {module: set(module.parameters(recurse=False)) for module in model.modules()}
        buffered = [
            m for m in own if any(b.is_floating_point() and b.dtype is not self.dtype for b in m.buffers(recurse=False))
        ]
        kept = set().union(*(own[module] for module in buffered))
        while any(0 < len(params & kept) < len(params) for params in own.values()):  # owners share all they own
            kept |= set().union(*(params for params in own.values() if params & kept))
        for param in model.parameters():
            self.built[param] = param.dtype
            if param in kept:
                param.data = param.data.float()
                self.masters[param] = param
            else:
                self.masters[param] = nn.Parameter(param.detach().float().clone())
        DtypeCasts().fit(model, precision_of([model], self.dtype).modules, self.dtype)
        for param in set(model.parameters()) - kept:
            param.data = param.data.to(self.dtype)
        return model

    def optimizer(self, params: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
        return MasterAdamW(params, self.masters, self.scaler, **options)

    def backward(self, loss: Tensor, *, last: bool, by_manager: bool) -> None:
        (loss if self.scaler is None else loss.float() * self.scaler.loss_scale).backward()

    def state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        state = model.state_dict(keep_vars=True)
        return {
            name: self.masters[value].to(self.built[value]) if value in self.masters else value
            for name, value in state.items()
        }

    def after_step(self) -> None:
        pass
