"""The kernels in plain PyTorch, with the norm of gradients that native ones are held against."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from chunkmem.optim.kernels import Kernels

NORM_BLOCK = 2048
NORM_LANES = 32
_BLOCKS_AT_ONCE = 4096


class Reference(Kernels):
    """What a process without native kernels has, and the norm."""

    def __init__(self) -> None:
        super().__init__(frozenset())

    def norm_and_finite(
        self, grads: Sequence[torch.Tensor], *, unscale: float = 1.0, num_threads: int = 0
    ) -> torch.Tensor:
        return norm_and_finite(grads, unscale=unscale) if grads else super().norm_and_finite(grads)


def norm_and_finite(grads: Sequence[torch.Tensor], *, unscale: float = 1.0) -> torch.Tensor:
    """Return the sum of squares of all `grads * unscale` and 1 or 0: all of these are finite; 2 doubles.

    [Note: Order of the norm] in csrc/adam_math.h says in which order it adds.
    """
    device = grads[0].device
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    scale = torch.tensor(unscale, dtype=torch.float32, device=device)
    sums = [_sums_of_blocks(part.float() * scale) for part in flat.split(NORM_BLOCK * _BLOCKS_AT_ONCE) if part.numel()]
    level = torch.cat(sums) if sums else torch.zeros(1, dtype=torch.float64, device=device)
    while level.numel() > 1:
        level = _fold(_in_lanes(level))
    return torch.cat([level, level.isfinite().double()])


def _in_lanes(values: torch.Tensor) -> torch.Tensor:
    """Return blocks of rows of lanes, filled up with zeros: [blocks, NORM_BLOCK / NORM_LANES, NORM_LANES]."""
    missing = -values.numel() % NORM_BLOCK
    return torch.nn.functional.pad(values, (0, missing)).view(-1, NORM_BLOCK // NORM_LANES, NORM_LANES)


def _sums_of_blocks(values: torch.Tensor) -> torch.Tensor:
    return _fold(_in_lanes(values).double().square())


def _fold(rows: torch.Tensor) -> torch.Tensor:
    """Add the rows in order, then the lanes in halves."""
    lanes = torch.zeros_like(rows[:, 0])
    for row in range(rows.shape[1]):
        lanes += rows[:, row]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]
