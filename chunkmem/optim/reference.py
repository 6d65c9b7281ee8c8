"""The optimizer kernels in plain PyTorch: what `csrc/` computes, bit for bit, on any device.

It runs where there is no compiler, several times slower than the native kernels, and the tests hold those against it.
The steps and their order are `csrc/adam_math.h`; [Note: The same bits] there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from chunkmem.optim.codes import SIGNED, UNSIGNED, BlockCodes, fused_multiply_add, random_words, to_bfloat16
from chunkmem.optim.segments import HyperParameters, Outputs, SegmentPass, Segments


def adamw_(
    segments: Segments,
    hyper: HyperParameters,
    how: SegmentPass,
    *,
    outputs: Outputs | None = None,
    keys: Sequence[int] | None = None,
) -> None:
    """Update parameters and states; the arguments are those of `Kernels.adamw_`, and have to fit together."""
    to = segments.in_place if outputs is None else outputs
    for index, param in enumerate(segments.params):
        numel = param.numel()
        step = AdamStep(hyper, index, grad_scale=how.unscale * how.clip_coefficient, decoupled=how.decoupled)
        exp_avg = _loaded(segments.exp_avgs[index], SIGNED, numel)
        exp_avg_sq = _loaded(segments.exp_avg_sqs[index], UNSIGNED, numel)
        weights = param.reshape(-1).to(torch.float32, copy=True)
        rows = (weights, segments.grads[index].reshape(-1), exp_avg, exp_avg_sq)
        num_main = numel - (numel % how.tail_width if how.tail_width else 0)
        step.update_(*(row[:num_main] for row in rows), is_tail=False)
        step.update_(*(row[num_main:] for row in rows), is_tail=True)
        if keys is not None:
            random = random_words(keys[index], numel, param.device)
            exp_avg = _encoded(exp_avg, SIGNED, random, like=to.exp_avgs[index])
            exp_avg_sq = _encoded(exp_avg_sq, UNSIGNED, random >> 16, like=to.exp_avg_sqs[index])
            if param.dtype is not torch.float32:
                weights = to_bfloat16(weights, random_words(keys[index], numel, param.device, of_weights=True))
        written = [to.params, to.exp_avgs, to.exp_avg_sqs, *([segments.lowp_outs] if segments.lowp_outs else [])]
        for tensors, values in zip(written, (weights, exp_avg, exp_avg_sq, weights), strict=False):
            tensors[index].view(-1).copy_(values)


def _loaded(stored: torch.Tensor, codes: BlockCodes, numel: int) -> torch.Tensor:
    return codes.decode(stored, numel) if stored.dtype is torch.uint8 else stored.reshape(-1).clone()


def _encoded(values: torch.Tensor, codes: BlockCodes, dither: torch.Tensor, *, like: torch.Tensor) -> torch.Tensor:
    return codes.encode(values, dither=(dither & 0x7FFF).int()) if like.dtype is torch.uint8 else values


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
