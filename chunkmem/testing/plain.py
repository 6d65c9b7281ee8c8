"""Training in plain PyTorch: the other side of every comparison, with fp32 master weights in bf16 and fp16."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from chunkmem.config import Config
from chunkmem.nn.borders import Borders
from chunkmem.nn.precision import precision_of
from chunkmem.optim.scaler import LossScaler

DTYPES = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16})


class Plain:
    """`torch.optim.AdamW(fused=True)`; in bf16 and fp16 over fp32 copies, from which weights are rounded."""

    def __init__(self, device: torch.device, config: Config) -> None:
        """Compute on `device`, in the precision and with the loss scale of `config`."""
        self._device = device
        self._dtype = DTYPES[config.precision]
        self._scaler = LossScaler(config.fp16) if self._dtype is torch.float16 else None
        self._has_masters = config.master_weights
        self._masters: dict[nn.Parameter, nn.Parameter] = {}
        self._built: dict[nn.Parameter, torch.dtype] = {}

    def building(self) -> AbstractContextManager[object]:
        return nullcontext()

    def fit(self, model: nn.Module) -> None:
        model.to(self._device)
        if self._dtype is torch.float32:
            return
        precision = precision_of([model], self._dtype)
        for param in model.parameters():
            self._built[param] = param.dtype
            if id(param) in precision.masters and self._has_masters:
                self._masters[param] = nn.Parameter(param.detach().float().clone(), requires_grad=param.requires_grad)
        for param in self._built:
            param.data = param.data.to(precision.of(param))
        Borders().fit(model, precision.modules, self._dtype)

    def optimizer(self, model: nn.Module, *, lr: float) -> torch.optim.Optimizer:
        params = list(model.parameters())
        if self._dtype is torch.float32:
            return torch.optim.AdamW(params, lr=lr, fused=True)
        return _MasterAdamW([(param, self._masters.get(param, param)) for param in params], self._scaler, lr=lr)

    def watching(self, index: int) -> AbstractContextManager[object]:
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        (loss if self._scaler is None else loss.float() * self._scaler.scale).backward()

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        values = model.state_dict(keep_vars=True)
        return {
            name: self._masters.get(value, value).to(self._built.get(value, value.dtype))
            for name, value in values.items()
        }


class _MasterAdamW(torch.optim.AdamW):
    """AdamW over pairs of a parameter and its fp32 master, which may be the parameter itself."""

    def __init__(self, pairs: list[tuple[nn.Parameter, nn.Parameter]], scaler: LossScaler | None, *, lr: float) -> None:
        super().__init__([master for _, master in pairs], lr=lr, fused=True)
        self._pairs = pairs
        self._scaler = scaler

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with_gradient = [(param, master) for param, master in self._pairs if param.grad is not None]
        scale = 1.0 if self._scaler is None else self._scaler.scale
        for param, master in with_gradient:
            assert param.grad is not None
            master.grad = param.grad.float().mul(1 / scale).to(master.dtype)
        if self._scaler is not None:
            is_finite = all(bool(master.grad.isfinite().all()) for _, master in with_gradient)  # type: ignore[union-attr]
            self._scaler.step(overflow=not is_finite)
            if not is_finite:
                return
        super().step()
        for param, master in with_gradient:
            if param is not master:
                param.copy_(master)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for param, master in self._pairs:
            param.grad = master.grad = None
