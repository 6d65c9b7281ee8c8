"""The arithmetic of torch's fused Adam on an accelerator, for groups of fp32 weights that are updated on HOST."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import product

import torch

from chunkmem.optim.kernels import has_bits_of_torch
from chunkmem.optim.segments import HyperParameters, SegmentPass, Segments
from chunkmem.runtime.device import runtime_mode

_PAGE = 256
"""Steps whose powers are made at once: to fetch them waits for the device."""
_MOST_PAGES = 32
"""That are kept: schedulers may change a beta in every step."""
_NUMEL = 4099
"""Of the trial: no multiple of what the device takes at once."""


class DevicePowers:
    """Powers of Adam's betas as a device makes them, whose function is not exactly rounded."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._page = lru_cache(maxsize=_MOST_PAGES)(self._made)

    def of(self, beta: float, step: int) -> float:
        """Return ``beta ** step`` in float32; of one beta, this waits for the device once in 256 steps."""
        return self._page(beta, step // _PAGE)[step % _PAGE]

    def _made(self, beta: float, page: int) -> list[float]:
        with runtime_mode():
            steps = torch.arange(page * _PAGE, (page + 1) * _PAGE, dtype=torch.float32, device=self._device)
            powers: list[float] = torch.pow(torch.full_like(steps, beta), steps).tolist()
            return powers


def has_order(
    adamw_: Callable[[Segments, HyperParameters, SegmentPass], object], device: torch.device, powers: DevicePowers
) -> bool:
    """Tell whether updates on HOST by `adamw_` have the bits of torch's fused kernels on a device.

    Else a group's bits would depend on where a plan has it updated. Not tried is L2 weight decay, where torch 2.11's
    kernel rounds `grad + param * weight_decay` once in some lanes of a vector and twice in others (ADR 66).
    Tried on some thousand elements each, denormals among them, by several hyper-parameters.
    """
    draw = torch.Generator().manual_seed(0)
    scales = torch.ones(_NUMEL)
    scales[::5] = 1e-20
    columns = [[scales * torch.randn(_NUMEL, generator=draw)] for _ in range(4)]
    columns[3][0].square_()
    for (decoupled, decay), (beta1, beta2), step in product(
        ((True, 0.0), (True, 0.013), (False, 0.0)), ((0.9, 0.999), (0.3, 0.95)), (1, 2, 7, 1000)
    ):
        hyper = HyperParameters(
            *([1.3e-3], [beta1], [beta2], [1e-8], [decay], [step]),
            beta1_power=[powers.of(beta1, step)],
            beta2_power=[powers.of(beta2, step)],
        )
        how = SegmentPass(decoupled=decoupled)
        if not has_bits_of_torch(adamw_, columns, hyper, how, device=device):
            return False
    return True
