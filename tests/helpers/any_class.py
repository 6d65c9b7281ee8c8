"""Optimizer classes over a model: plain ones of torch's, or one `chunkmem.Optimizer` of the same classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import chunkmem
from tests.helpers.twins import Twin
from tests.helpers.whole_classes import Prodigy, ScheduleFree, StackedMuon


class Lion(torch.optim.Optimizer):
    """As a user writes it: signs of an interpolated momentum, which is made in the first step."""

    is_elementwise = True

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                    state["num_updates"] = 0
                state["num_updates"] += 1
                param.mul_(1 - group["lr"] * group["weight_decay"])
                update = state["exp_avg"] * beta1 + param.grad * (1 - beta1)
                param.add_(update.sign(), alpha=-group["lr"])
                state["exp_avg"] = state["exp_avg"] * beta2 + param.grad * (1 - beta2)  # a new tensor
        return loss


@dataclass(frozen=True)
class Way:
    """A class with its options."""

    name: str
    kind: type[torch.optim.Optimizer]
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    whole: bool = False
    """It has all parameters at once."""

    @property
    def chunked(self) -> dict[str, Any]:
        """Options of `chunkmem.Optimizer`."""
        return {**self.options, "whole": True} if self.whole else self.options


WAYS = (
    Way("SGD", torch.optim.SGD, {"lr": 1e-2}),
    Way("nesterov", torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    Way("AdamW", torch.optim.AdamW, {"lr": 1e-2}),
    Way("fused AdamW", torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    Way("amsgrad", torch.optim.Adam, {"lr": 1e-2, "amsgrad": True, "foreach": True}),
    Way("Adagrad", torch.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.1, "lr_decay": 0.1}),
    Way("NAdam", torch.optim.NAdam, {"lr": 1e-2}),
    Way("RAdam", torch.optim.RAdam, {"lr": 1e-2}),
    Way("RMSprop", torch.optim.RMSprop, {"lr": 1e-3, "centered": True, "momentum": 0.5}),
    Way("Rprop", torch.optim.Rprop, {"lr": 1e-3}),
    Way("Adadelta", torch.optim.Adadelta, {"lr": 0.5, "maximize": True}),
    Way("Adamax", torch.optim.Adamax, {"lr": 1e-2}),
    Way("ASGD", torch.optim.ASGD, {"lr": 1e-2, "t0": 2.0}),
    Way("Adafactor", torch.optim.Adafactor, {"lr": 1e-2}),
    Way("Lion", Lion, {"lr": 1e-3, "weight_decay": 0.1}),
)
WHOLE = (
    Way("stacked", StackedMuon, {"lr": 1e-2}, whole=True),
    Way("Prodigy", Prodigy, {"lr": 0.5, "weight_decay": 0.1}, whole=True),
    Way("schedule-free", ScheduleFree, {"lr": 1e-2, "weight_decay": 0.1, "warmup_steps": 3}, whole=True),
)
"""Classes that update a parameter by others, too."""
MUON = Way("Muon", torch.optim.Muon, {"lr": 1e-2})


def by_name(name: str) -> Way:
    return next(way for way in (*WAYS, *WHOLE, MUON) if way.name == name)


def muon_and_adamw(model: nn.Module) -> list[tuple[Any, ...]]:
    """Matrices by Muon and the rest by AdamW, which are in the same chunks."""
    parameters = list(model.parameters())
    return [
        (torch.optim.Muon, [p for p in parameters if p.dim() == 2], {"lr": 1e-2}),
        (torch.optim.AdamW, [p for p in parameters if p.dim() != 2], {"lr": 3e-3, "weight_decay": 0.1}),
    ]


class Several:
    """Plain optimizers as one."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for one in self.optimizers for group in one.param_groups]

    def step(self) -> None:
        for one in self.optimizers:
            one.step()

    def zero_grad(self) -> None:
        for one in self.optimizers:
            one.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Indices of the second one come after those of the first."""
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        at = 0
        for one in self.optimizers:
            own = one.state_dict()
            state |= {at + index: entry for index, entry in own["state"].items()}
            groups += [{**group, "params": [at + i for i in group["params"]]} for group in own["param_groups"]]
            at += sum(len(group["params"]) for group in own["param_groups"])
        return {"state": state, "param_groups": groups}


class ClassTwin(Twin):
    """A model and classes over it, in plain PyTorch or in chunkmem; `kind` is the name of a way, or "pairs"."""

    def make(self, kind: str, params: Any, **options: Any) -> Any:
        for name in ("betas", "lr", "weight_decay"):  # what `Twin` has for AdamW
            options.pop(name, None)
        max_grad_norm = {key: options.pop(key) for key in ("max_grad_norm",) if key in options}
        if kind == "pairs":
            if self.manager is not None:
                return chunkmem.Optimizer(params, manager=self.manager, **max_grad_norm)
            return Several([cls(own, **(rest[0] if rest else {})) for cls, own, *rest in params])
        way = by_name(kind)
        if self.manager is None:
            return way.kind(params, **{**way.options, **options})
        options = {**way.chunked, **options}
        return chunkmem.Optimizer(way.kind, params, manager=self.manager, **options, **max_grad_norm)


def entries(optimizer: Any) -> dict[int, Any]:
    """The states by index, in ascending order."""
    return dict(sorted(optimizer.state_dict()["state"].items()))


def gradients(params: Sequence[Tensor]) -> list[Tensor]:
    return [grad for param in params if (grad := param.grad) is not None]
