"""The update by blocks: states in 8 bits, weights in bfloat16 without masters; native, or in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from chunkmem.optim.codes import SIGNED, UNSIGNED, BlockCodes, random_words, to_bfloat16
from chunkmem.optim.kernels import Kernels, arguments, tell_autograd
from chunkmem.optim.reference import AdamStep
from chunkmem.optim.segments import HyperParameters, Outputs, SegmentPass, Segments, check_num_threads


@dataclass(frozen=True)
class BlockUpdate:
    """Parallel lists, one entry a parameter: contiguous tensors on one device. Outputs may be the inputs."""

    segments: Segments
    """Weights in fp32 or bfloat16; states in fp32 or as `BlockCodes` has them: uint8, 1-D."""
    outputs: Outputs
    keys: list[int] = field(default_factory=list)
    """Of the random bits of each one's update; see `update_key`."""


def adamw_blocks(
    kernels: Kernels, update: BlockUpdate, hyper: HyperParameters, how: SegmentPass, *, num_threads: int = 0
) -> None:
    """Update weights and states: as `Kernels.adamw_into`, then states are rounded to codes, and bfloat16 weights, too.

    Raises:
        RuntimeError: dtypes, sizes, devices or lengths do not fit; it names the argument.
    """
    segments, outputs = update.segments, update.outputs
    if not segments.params:
        return
    written = (*segments.lowp_outs, *outputs.params, *outputs.exp_avgs, *outputs.exp_avg_sqs)
    if is_native(kernels, segments.params[0].device):
        lists = (outputs.params, outputs.exp_avgs, outputs.exp_avg_sqs)
        torch.ops.chunkmem.adamw_blocks(*arguments(segments, hyper, how), *lists, update.keys, num_threads)
    else:
        reference(update, hyper, how, num_threads=num_threads)
    tell_autograd(written)


def is_native(kernels: Kernels, device: torch.device) -> bool:
    """Tell whether there is a native kernel for a device."""
    return device.type in kernels.native_devices and torch._C._dispatch_has_kernel_for_dispatch_key(
        "chunkmem::adamw_blocks", device.type.upper()
    )


def reference(update: BlockUpdate, hyper: HyperParameters, how: SegmentPass, *, num_threads: int = 0) -> None:
    """Do what the native kernel does, with the same bits; the arguments are those of `adamw_blocks`."""
    check_num_threads(num_threads)
    segments, outputs = update.segments, update.outputs
    for index, param in enumerate(segments.params):
        numel, key = param.numel(), update.keys[index]
        step = AdamStep(hyper, index, grad_scale=how.unscale * how.clip_coefficient, decoupled=how.decoupled)
        weights = param.reshape(-1).float() if param.dtype is not torch.float32 else param.reshape(-1).clone()
        exp_avg = _loaded(segments.exp_avgs[index], SIGNED, numel)
        exp_avg_sq = _loaded(segments.exp_avg_sqs[index], UNSIGNED, numel)
        rows = (weights, segments.grads[index].reshape(-1), exp_avg, exp_avg_sq)
        num_main = numel - (numel % how.tail_width if how.tail_width else 0)
        step.update_(*(row[:num_main] for row in rows), is_tail=False)
        step.update_(*(row[num_main:] for row in rows), is_tail=True)
        random = random_words(key, numel, param.device)
        _store(outputs.exp_avgs[index], exp_avg, SIGNED, random)
        _store(outputs.exp_avg_sqs[index], exp_avg_sq, UNSIGNED, random >> 16)
        if param.dtype is not torch.float32:
            weights = to_bfloat16(weights, random_words(key, numel, param.device, of_weights=True))
        outputs.params[index].view(-1).copy_(weights)
        if segments.lowp_outs:
            segments.lowp_outs[index].view(-1).copy_(weights)


def _loaded(stored: torch.Tensor, codes: BlockCodes, numel: int) -> torch.Tensor:
    return codes.decode(stored, numel) if stored.dtype is torch.uint8 else stored.reshape(-1).clone()


def _store(to: torch.Tensor, values: torch.Tensor, codes: BlockCodes, dither: torch.Tensor) -> None:
    to.view(-1).copy_(codes.encode(values, dither=(dither & 0x7FFF).int()) if to.dtype is torch.uint8 else values)
