"""The optimizer kernels in plain PyTorch: what `csrc/` computes, bit for bit, on any device.

It runs where there is no compiler, several times slower than the native kernels, and the tests hold those against it.
The steps and their order are `csrc/adam_math.h`; [Note: The same bits] there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from chunkmem.optim.segments import (
    HyperParameters,
    Outputs,
    SegmentPass,
    Segments,
    check_grads,
    check_num_threads,
    check_segments,
)

NORM_BLOCK = 2048
NORM_LANES = 32
_BLOCKS_AT_ONCE = 4096


def adamw_(segments: Segments, hyper: HyperParameters, how: SegmentPass) -> None:
    """Update the parameters and states of `segments` in place; the arguments are those of `Kernels.adamw_`."""
    check_segments(segments, hyper, how)
    grad_scale = how.unscale * how.clip_coefficient
    for index, param in enumerate(segments.params):
        step = AdamStep(hyper, index, grad_scale=grad_scale, decoupled=how.decoupled)
        tensors = (param, segments.grads[index], segments.exp_avgs[index], segments.exp_avg_sqs[index])
        flat = [tensor.view(-1) for tensor in tensors]
        num_main = param.numel() - (param.numel() % how.tail_width if how.tail_width else 0)
        step.update_(*(tensor[:num_main] for tensor in flat), is_tail=False)
        step.update_(*(tensor[num_main:] for tensor in flat), is_tail=True)
        if segments.lowp_outs:
            segments.lowp_outs[index].copy_(param)


def adamw_into(
    segments: Segments, outputs: Outputs, hyper: HyperParameters, how: SegmentPass, *, num_threads: int = 0
) -> None:
    """Write what `adamw_` would make of parameters and states to `outputs`; the arguments are those of `Kernels`."""
    check_segments(segments, hyper, how, outputs, num_threads=num_threads)
    pairs = zip(
        (*outputs.params, *outputs.exp_avgs, *outputs.exp_avg_sqs),
        (*segments.params, *segments.exp_avgs, *segments.exp_avg_sqs),
        strict=True,
    )
    for output, old in pairs:
        output.copy_(old)
    written = Segments(outputs.params, segments.grads, outputs.exp_avgs, outputs.exp_avg_sqs, segments.lowp_outs)
    adamw_(written, hyper, how)


def norm_and_finite(grads: Sequence[torch.Tensor], *, unscale: float = 1.0, num_threads: int = 0) -> torch.Tensor:
    """Return the sum of squares of all `grads * unscale` and 1 or 0: all of these are finite; 2 doubles.

    [Note: Order of the norm] in csrc/adam_math.h says in which order it adds.
    """
    check_grads(grads)
    check_num_threads(num_threads)
    device = grads[0].device
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    scale = torch.tensor(unscale, dtype=torch.float32, device=device)
    sums = [_sums_of_blocks(part.float() * scale) for part in flat.split(NORM_BLOCK * _BLOCKS_AT_ONCE) if part.numel()]
    level = torch.cat(sums) if sums else torch.zeros(1, dtype=torch.float64, device=device)
    while level.numel() > 1:
        level = _fold(_in_lanes(level))
    return torch.cat([level, level.isfinite().double()])


class AdamStep:
    """What is the same for all elements of a tensor, and the update of one."""

    def __init__(self, hyper: HyperParameters, index: int, *, grad_scale: float, decoupled: bool) -> None:
        def of(values: Sequence[float]) -> float:
            return values[0 if len(values) == 1 else index]

        lr, beta1, beta2, weight_decay = of(hyper.lr), of(hyper.beta1), of(hyper.beta2), of(hyper.weight_decay)
        self._is_cuda_order = bool(hyper.beta1_power)
        if self._is_cuda_order:
            power1, power2 = _single(of(hyper.beta1_power)), _single(of(hyper.beta2_power))
            self._has_l2, self._has_decay = not decoupled and weight_decay != 0, decoupled and weight_decay != 0
            self._grad_scale, self._l2, self._eps = _single(grad_scale), _single(weight_decay), _single(of(hyper.eps))
            self._decay = -(_single(lr) * _single(weight_decay))
            self._beta1, self._beta2 = _single(beta1), _single(beta2)
            self._bias_correction2_sqrt = (1 - power2).double().sqrt().float()
            self._neg_step_size = -(_single(lr) / (1 - power1))
            return
        step = float(of(hyper.step))
        towards_grad = _single(1 - beta1)
        self._from_exp_avg = bool(towards_grad.abs() < 0.5)
        self._lerp = towards_grad if self._from_exp_avg else towards_grad - 1
        self._has_l2 = not decoupled and weight_decay != 0
        self._l2 = _single(weight_decay)
        self._decay = _single(_fused_double(-lr, weight_decay, 1.0) if decoupled else 1.0)
        self._grad_scale = _single(grad_scale)
        self._beta2 = _single(beta2)
        self._grad_sq_weight = _single(1 - beta2)
        self._bias_correction2_sqrt = _single(math.sqrt(1 - beta2**step))
        self._eps = _single(of(hyper.eps))
        self._neg_step_size = _single(_quotient(-lr, 1 - beta1**step))

    def update_(
        self,
        param: torch.Tensor,
        grad: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        *,
        is_tail: bool,
    ) -> None:
        """Do `adam_update` of adam_math.h."""
        g = grad.float() * self._grad_scale
        if self._has_l2:
            g = fused_multiply_add(param, self._l2, g)
        if self._is_cuda_order:
            square = g * g
            exp_avg.copy_(fused_multiply_add(self._beta1, exp_avg, fused_multiply_add(-self._beta1, g, g)))
            rest = fused_multiply_add(-self._beta2, square, square)
            exp_avg_sq.copy_(fused_multiply_add(self._beta2, exp_avg_sq, rest))
            decayed = fused_multiply_add(self._decay, param, param) if self._has_decay else param
            param.copy_(self._moved(decayed, exp_avg, exp_avg_sq))
            return
        decayed = param * self._decay
        exp_avg.copy_(fused_multiply_add(self._lerp, g - exp_avg, exp_avg if self._from_exp_avg else g))
        weighted = self._grad_sq_weight * g
        if is_tail:
            exp_avg_sq.copy_(fused_multiply_add(exp_avg_sq, self._beta2, weighted * g))
        else:
            exp_avg_sq.copy_(fused_multiply_add(weighted, g, exp_avg_sq * self._beta2))
        param.copy_(self._moved(decayed, exp_avg, exp_avg_sq))

    def _moved(self, decayed: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> torch.Tensor:
        # By way of fp64: torch's own fp32 root may come from a library that is off by a bit.
        denominator = exp_avg_sq.double().sqrt().float() / self._bias_correction2_sqrt + self._eps
        return decayed + self._neg_step_size * exp_avg / denominator


def fused_multiply_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Return `a * b + c` of fp32 tensors, rounded once.

    The product is exact in fp64. The sum there is rounded to odd, after which a second rounding, to fp32, does no harm.

    Source: Boldo and Melquiond, IEEE Transactions on Computers 57(4), 2008.
    """
    product = a.double() * b.double()
    addend = c.double()
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(torch.int64)
    needs_odd = (error != 0) & total.isfinite() & (bits & 1 == 0)
    odd = bits + torch.where((error > 0) == (total > 0), 1, -1)
    return torch.where(needs_odd, odd, bits).view(torch.float64).float()


def _single(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


def _quotient(a: float, b: float) -> float:
    """Return `a / b` as C++ does: beta1 = 1 makes no exception."""
    return (torch.tensor(a, dtype=torch.float64) / torch.tensor(b, dtype=torch.float64)).item()


def _fused_double(a: float, b: float, c: float) -> float:
    """Return `a * b + c`, rounded once, of finite numbers; of others the plain result."""
    if not all(map(math.isfinite, (a, b, c))):
        return a * b + c
    from fractions import Fraction

    exact = Fraction(a) * Fraction(b) + Fraction(c)
    return float(exact)


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
