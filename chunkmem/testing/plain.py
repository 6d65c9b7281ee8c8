"""Training in plain PyTorch: the other side of every comparison, with fp32 master weights in bf16 and fp16."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from chunkmem.assembly.parts import DTYPES
from chunkmem.config import Config
from chunkmem.estimate.optimizers import BUILT_IN, Trained
from chunkmem.modules.dtype_casts import DtypeCasts
from chunkmem.optim.scaler import LossScaler
from chunkmem.packing.precision import precision_of
from chunkmem.testing.training import Side, Stepped


class Plain(Side):
    """Classes of torch.optim, Adam's with `fused=True`; in bf16 and fp16 over fp32 copies, rounded to weights."""

    def __init__(self, device: torch.device, config: Config) -> None:
        """Compute on `device`, in the precision and with the loss scale of `config`."""
        self._device = device
        self._dtype = DTYPES[config.precision]
        self._scaler = LossScaler(config.fp16) if self._dtype is torch.float16 else None
        self._has_masters = config.master_weights
        self._masters: dict[nn.Parameter, nn.Parameter] = {}
        self._built: dict[nn.Parameter, torch.dtype] = {}
        self._optimizer: _Optimizers | None = None

    @property
    def num_updates(self) -> int:
        """How often a parameter was updated, over all parameters and steps."""
        return 0 if self._optimizer is None else self._optimizer.num_updates

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
        DtypeCasts().fit(model, precision.modules, self._dtype)

    def optimizer(self, name: str, trained: list[Trained]) -> Stepped:
        kernel: dict[str, Any] = {"fused": True} if name in BUILT_IN else {}
        made = [
            kind([self._masters.get(param, param) for param in params], **options, **kernel)
            for kind, params, options in trained
        ]
        params = [param for _, params, _ in trained for param in params]
        masters = None if self._dtype is torch.float32 else [self._masters.get(param, param) for param in params]
        self._optimizer = _Optimizers(made, params, masters, self._scaler)
        return self._optimizer

    def backward(self, loss: torch.Tensor) -> None:
        (loss if self._scaler is None else loss.float() * self._scaler.loss_scale).backward()

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        values = model.state_dict(keep_vars=True)
        return {
            name: self._masters.get(value, value).to(self._built.get(value, value.dtype))
            for name, value in values.items()
        }


class _Optimizers:
    """Optimizers of torch over the parameters of one model, or over an fp32 master of each, stepped together."""

    def __init__(
        self,
        made: list[torch.optim.Optimizer],
        params: list[nn.Parameter],
        masters: list[nn.Parameter] | None,
        scaler: LossScaler | None,
    ) -> None:
        """`masters` are what is updated, which may be a parameter itself; None: that is all parameters."""
        self._made = made
        self._params = params
        self._masters = masters
        self._scaler = scaler
        self.num_updates = 0

    @torch.no_grad()
    def step(self) -> None:
        masters = self._params if self._masters is None else self._masters
        pairs = [pair for pair in zip(self._params, masters, strict=True) if pair[0].grad is not None]
        if self._masters is not None and not self._take_gradients(pairs):
            return
        for one in self._made:
            one.step()
        self.num_updates += len(pairs)
        for param, master in pairs:
            if param is not master:
                param.copy_(master)

    def _take_gradients(self, pairs: list[tuple[nn.Parameter, nn.Parameter]]) -> bool:
        """Give masters the gradients, without the scale of the loss; tell whether these are finite."""
        scale = 1.0 if self._scaler is None else self._scaler.loss_scale
        for param, master in pairs:
            assert param.grad is not None
            master.grad = param.grad.float().mul(1 / scale).to(master.dtype)
        if self._scaler is None:
            return True
        is_finite = all(bool(master.grad.isfinite().all()) for _, master in pairs)  # type: ignore[union-attr]
        self._scaler.step(overflow=not is_finite)
        return is_finite

    def zero_grad(self) -> None:
        for param in (*self._params, *(self._masters or ())):
            param.grad = None

    def state_dict(self) -> dict[str, Any]:
        state: dict[int, Any] = {}
        first = 0
        for one in self._made:
            state |= {first + number: entry for number, entry in one.state_dict()["state"].items()}
            first += sum(len(group["params"]) for group in one.param_groups)
        return {"state": state}
