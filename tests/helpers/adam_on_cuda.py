"""What torch's fused Adam makes of some elements on a CUDA device, recorded: ``python -m tests.helpers.adam_on_cuda``.

The record is of torch 2.11 on an H100. Where there is no card, the kernels for the CPU are held against it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from chunkmem.optim.device_order import DevicePowers
from chunkmem.optim.segments import HyperParameters, SegmentPass, Segments

PATH = Path(__file__).with_suffix(".json")
NUMEL = 24
NAMES = ("param", "grad", "exp_avg", "exp_avg_sq")
DECAYS = ((True, 0.0), (True, 0.013), (False, 0.0))
"""Decoupled or not, and how much; see `chunkmem.optim.device_order` for why there is no L2 decay."""
BETAS = ((0.9, 0.999), (0.3, 0.95))
STEPS = (1, 2, 7, 1000)


@dataclass(frozen=True)
class Case:
    """One call."""

    decoupled: bool
    weight_decay: float
    betas: tuple[float, float]
    step: int

    @property
    def numbers(self) -> dict[str, float]:
        beta1, beta2 = self.betas
        return {"lr": 1.3e-3, "beta1": beta1, "beta2": beta2, "eps": 1e-8, "weight_decay": self.weight_decay}

    def hyper(self, powers: tuple[float, float]) -> HyperParameters:
        """Return the numbers as the kernels take them."""
        lists = {name: [value] for name, value in self.numbers.items()}
        return HyperParameters(**lists, step=[self.step], beta1_power=[powers[0]], beta2_power=[powers[1]])


CASES = [Case(*how, *one) for how, one in product(DECAYS, product(BETAS, STEPS))]


def values() -> list[torch.Tensor]:
    """Return the elements before an update, by `NAMES`; every fifth has a denormal square."""
    draw = torch.Generator().manual_seed(11)
    scales = torch.ones(NUMEL)
    scales[::5] = 1e-20
    tensors = [scales * torch.randn(NUMEL, generator=draw) for _ in NAMES]
    tensors[-1].square_()
    return tensors


def on_card(case: Case, device: torch.device) -> dict[str, Any]:
    """Return the bits of weights and states after an update on a device, and the powers of the betas there."""
    tensors = [tensor.to(device) for tensor in values()]
    fused = torch._fused_adamw_ if case.decoupled else torch._fused_adam_
    steps = [torch.full((), float(case.step), device=device)]
    lists: Any = (*([tensor] for tensor in tensors), [], steps)
    options: dict[str, Any] = case.numbers
    fused(*lists, **options, amsgrad=False, maximize=False)
    powers = DevicePowers(device)
    return {
        "powers": [powers.of(beta, case.step) for beta in case.betas],
        **{name: tensor.cpu().view(torch.int32).tolist() for name, tensor in zip(NAMES, tensors, strict=True)},
    }


def on_host(adamw_: Any, case: Case, powers: tuple[float, float]) -> dict[str, list[int]]:
    """Return the bits after an update by the kernel for the CPU, in the order of CUDA."""
    tensors = values()
    adamw_(Segments(*([one] for one in tensors)), case.hyper(powers), SegmentPass(decoupled=case.decoupled))
    return {name: tensor.view(torch.int32).tolist() for name, tensor in zip(NAMES, tensors, strict=True)}


def recorded() -> list[dict[str, Any]]:
    """Return the record, one entry for each of `CASES`."""
    found: list[dict[str, Any]] = json.loads(PATH.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    rows = [json.dumps(on_card(case, torch.device("cuda"))) for case in CASES]
    print("[\n" + ",\n".join(rows) + "\n]")
