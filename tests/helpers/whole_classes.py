"""Optimizer classes that update a parameter by others, written as their authors' are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

Optimizer = torch.optim.Optimizer


def orthogonalised(stack: Tensor) -> Tensor:
    """Five steps of the quintic Newton-Schulz iteration, of each matrix of a stack."""
    x = stack / (stack.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


class StackedMuon(Optimizer):
    """As nanochat's: parameters of one shape are a group, whose momentum is a stack in the state of its first one."""

    def __init__(self, params: Iterable[Any], lr: float = 0.02, momentum: float = 0.9) -> None:
        groups = list(params)
        if not isinstance(groups[0], dict):
            shapes = dict.fromkeys(param.shape for param in groups)
            groups = [{"params": [param for param in groups if param.shape == shape]} for shape in shapes]
        super().__init__(groups, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for shape in dict.fromkeys(param.shape for param in group["params"]):
                alike = [param for param in group["params"] if param.shape == shape]
                grads = torch.stack([torch.zeros_like(p) if p.grad is None else p.grad for p in alike])
                state = self.state[alike[0]]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(grads)
                state["momentum_buffer"].lerp_(grads, 1 - group["momentum"])
                update = grads.lerp_(state["momentum_buffer"], group["momentum"])
                if len(shape) == 2:
                    update = orthogonalised(update)
                torch._foreach_add_(alike, list(update.unbind(0)), alpha=-group["lr"])


class Prodigy(Optimizer):
    """After Mishchenko and Defazio: a step size is found from all gradients, and is an option of the groups."""

    def __init__(self, params: Any, lr: float = 1.0, weight_decay: float = 0.0, d0: float = 1e-2) -> None:
        options = {"lr": lr, "weight_decay": weight_decay, "beta": 0.9, "d0": d0, "d": d0, "d_numerator": 0.0, "k": 0}
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        d = self.param_groups[0]["d"]
        numerator, denominator = 0.9 * self.param_groups[0]["d_numerator"], 0.0
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if "step" not in state:
                    state["step"] = 0
                    state["s"] = torch.zeros_like(param.data.flatten())
                    state["p0"] = param.flatten().detach().clone()
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
                grad = param.grad
                numerator += d * torch.dot(grad.flatten(), state["p0"] - param.data.flatten()).item()
                state["exp_avg"].mul_(group["beta"]).add_(grad, alpha=d * (1 - group["beta"]))
                state["exp_avg_sq"].mul_(0.99).addcmul_(grad, grad, value=d * d * 0.01)
                state["s"].mul_(0.9).add_(grad.flatten(), alpha=d)
                denominator += state["s"].abs().sum().item()
        if denominator:
            d = max(d, numerator / denominator)
        for group in self.param_groups:
            group["d"], group["d_numerator"] = d, numerator
            group["k"] += 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                state["step"] += 1
                param.data.mul_(1 - group["weight_decay"] * d * group["lr"])
                denominators = state["exp_avg_sq"].sqrt().add_(d * 1e-8)
                param.data.addcdiv_(state["exp_avg"], denominators, value=-d * group["lr"])
        return loss


class ScheduleFree(Optimizer):
    """After Defazio's AdamWScheduleFree: weights are an average in evaluation, and options count steps."""

    def __init__(
        self, params: Any, lr: float = 0.0025, weight_decay: float = 0.0, beta: float = 0.9, warmup_steps: int = 0
    ) -> None:
        options = {"lr": lr, "weight_decay": weight_decay, "beta": beta, "warmup_steps": warmup_steps}
        super().__init__(params, {**options, "k": 0, "train_mode": True, "weight_sum": 0.0, "lr_max": -1.0})

    @torch.no_grad()
    def eval(self) -> None:
        self._turn(False, lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def train(self) -> None:
        self._turn(True, lambda beta: 1 - beta)

    def _turn(self, is_training: bool, weight: Any) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not is_training:
                for param in group["params"]:
                    if "z" in self.state[param]:
                        param.lerp_(end=self.state[param]["z"], weight=weight(group["beta"]))
                group["train_mode"] = is_training

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if not self.param_groups[0]["train_mode"]:
            raise RuntimeError("Optimizer was not in train mode when step is called.")
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            k = group["k"]
            lr = group["lr"] * min(1.0, (k + 1) / max(1, group["warmup_steps"]))
            group["lr_max"] = max(lr, group["lr_max"])
            weight = group["lr_max"] ** 2
            group["weight_sum"] += weight
            ratio = weight / group["weight_sum"]
            active = [param for param in group["params"] if param.grad is not None]
            for param in active:
                state = self.state[param]
                if "z" not in state:
                    state["z"] = torch.clone(param)
                    state["exp_avg_sq"] = torch.zeros_like(param)
                state["exp_avg_sq"].mul_(0.99).addcmul_(param.grad, param.grad, value=0.01)
                denominators = state["exp_avg_sq"].div(1 - 0.99 ** (k + 1)).sqrt_().add_(1e-8)
                update = param.grad.div_(denominators).add_(param, alpha=group["weight_decay"])
                param.lerp_(end=state["z"], weight=ratio)
                param.add_(update, alpha=lr * (group["beta"] * (1 - ratio) - 1))
                state["z"].sub_(update, alpha=lr)
            group["k"] = k + 1
        return loss
