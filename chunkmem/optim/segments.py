"""What one call of the optimizer kernels is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

LOWP = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Outputs:
    """What an update writes: parallel to `Segments`. Out of place, each has memory of its own."""

    params: list[torch.Tensor]
    exp_avgs: list[torch.Tensor]
    exp_avg_sqs: list[torch.Tensor]

    @property
    def lists(self) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """All, as the operators take them."""
        return self.params, self.exp_avgs, self.exp_avg_sqs


@dataclass(frozen=True)
class Segments:
    """Parallel lists, one entry a parameter: contiguous tensors of one shape, all on one device."""

    params: list[torch.Tensor]
    """Masters, fp32; in an update by blocks also bfloat16 without masters."""
    grads: list[torch.Tensor]
    """fp32, bfloat16 or float16, all alike."""
    exp_avgs: list[torch.Tensor]
    """fp32; in an update by blocks also as `BlockCodes` has them: uint8, 1D."""
    exp_avg_sqs: list[torch.Tensor]
    lowp_outs: list[torch.Tensor] = field(default_factory=list)
    """Empty, or bfloat16 or float16, all alike: take the new parameters, rounded to nearest even."""

    @property
    def in_place(self) -> Outputs:
        """What an update in place writes."""
        return Outputs(self.params, self.exp_avgs, self.exp_avg_sqs)


@dataclass(frozen=True)
class HyperParameters:
    """Lists of one entry for all parameters, or of one for each."""

    lr: Sequence[float]
    beta1: Sequence[float]
    beta2: Sequence[float]
    eps: Sequence[float]
    weight_decay: Sequence[float]
    step: Sequence[int]
    """The number of this update, from 1."""
    beta1_power: Sequence[float] = ()
    """``beta1 ** step`` as an accelerator makes it in float32. With both powers, an update on the CPU has the order of
    torch's fused kernel on CUDA; with neither, that of torch's for the CPU."""
    beta2_power: Sequence[float] = ()


@dataclass(frozen=True)
class SegmentPass:
    """What is the same for all parameters of a call."""

    unscale: float = 1.0
    clip_coefficient: float = 1.0
    """Gradients are multiplied by `unscale * clip_coefficient`, in fp32."""
    decoupled: bool = True
    """AdamW; otherwise weight decay is added to the gradient (L2)."""
    tail_width: int = 0
    """The last `numel % tail_width` elements are computed as torch's scalar tail does; 0: none."""
