"""What one call of the optimizer kernels is given, and whether it fits together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

LOWP = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Segments:
    """Parallel lists, one entry a parameter: contiguous tensors of one shape, all on one device."""

    params: list[torch.Tensor]
    """Masters, fp32."""
    grads: list[torch.Tensor]
    """fp32, bfloat16 or float16, all alike."""
    exp_avgs: list[torch.Tensor]
    exp_avg_sqs: list[torch.Tensor]
    lowp_outs: list[torch.Tensor] = field(default_factory=list)
    """Empty, or bfloat16 or float16, all alike: take the new parameters, rounded to nearest even."""


@dataclass(frozen=True)
class Outputs:
    """Where an update out of place writes: parallel to `Segments`, fp32, each in memory of its own."""

    params: list[torch.Tensor]
    exp_avgs: list[torch.Tensor]
    exp_avg_sqs: list[torch.Tensor]


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


def check_segments(
    segments: Segments,
    hyper: HyperParameters,
    how: SegmentPass,
    outputs: Outputs | None = None,
    *,
    num_threads: int = 0,
) -> None:
    """Check a call, as `csrc/arguments.h` does and with its words; without `outputs` it is in place.

    Raises:
        RuntimeError: the message names the argument.
    """
    check_num_threads(num_threads)
    names = ("params", "grads", "exp_avgs", "exp_avg_sqs")
    inputs = [(name, getattr(segments, name)) for name in names]
    for name, tensors in inputs:
        _check_list(name, tensors, segments.params, (torch.float32, *(LOWP if name == "grads" else ())))
    if segments.lowp_outs:
        _check_list("lowp_outs", segments.lowp_outs, segments.params, LOWP)
    if outputs is not None:
        outs = [(f"out_{name}", getattr(outputs, name)) for name in ("params", "exp_avgs", "exp_avg_sqs")]
        for name, tensors in outs:
            _check_list(name, tensors, segments.params, (torch.float32,))
        _check_memory_of_outputs(inputs, outs)
    for name in ("lr", "beta1", "beta2", "eps", "weight_decay", "step"):
        _check_length(name, len(getattr(hyper, name)), len(segments.params), may_be_one=True)
    for index, step in enumerate(hyper.step):
        if step < 1:
            raise _refusal(f"step[{index}] is {step}; updates are counted from 1")
    if how.tail_width < 0:
        raise _refusal(f"tail_width is {how.tail_width}; it must be at least 0")
    if hyper.beta1_power or hyper.beta2_power:
        for name in ("beta1_power", "beta2_power"):
            _check_length(name, len(getattr(hyper, name)), len(segments.params), may_be_one=True)


def check_grads(grads: Sequence[torch.Tensor]) -> None:
    """Check the gradients of a norm; RuntimeError names the one that is wrong."""
    _check_tensors("grads", grads, grads[0], (torch.float32, *LOWP))


def check_num_threads(num_threads: int) -> None:
    """Check the number of threads of a call; RuntimeError if it is negative."""
    if num_threads < 0:
        raise _refusal(f"num_threads is {num_threads}; it must be at least 0")


def _check_list(
    name: str, tensors: Sequence[torch.Tensor], params: Sequence[torch.Tensor], dtypes: tuple[torch.dtype, ...]
) -> None:
    _check_length(name, len(tensors), len(params))
    _check_tensors(name, tensors, params[0], dtypes)
    for index, (tensor, param) in enumerate(zip(tensors, params, strict=True)):
        if tensor.shape != param.shape:
            raise _refusal(f"{name}[{index}] has another shape than params[{index}]")


_Named = Sequence[tuple[str, Sequence[torch.Tensor]]]


def _check_memory_of_outputs(inputs: _Named, outputs: _Named) -> None:
    """Check that no output begins where an input or another output does."""
    taken: dict[int, str] = {}
    for name, tensors in inputs:
        for index, tensor in enumerate(tensors):
            if tensor.numel():
                taken.setdefault(tensor.data_ptr(), f"{name}[{index}]")
    for name, tensors in outputs:
        for index, tensor in enumerate(tensors):
            if not tensor.numel():
                continue
            which = f"{name}[{index}]"
            if (other := taken.setdefault(tensor.data_ptr(), which)) != which:
                raise _refusal(f"{which} begins where {other} does; an output needs memory of its own")


def _check_length(name: str, length: int, num_tensors: int, *, may_be_one: bool = False) -> None:
    if length != num_tensors and not (may_be_one and length == 1):
        raise _refusal(f"{name} has {length} entries for {num_tensors} tensors in params")


def _check_tensors(
    name: str, tensors: Sequence[torch.Tensor], like: torch.Tensor, dtypes: tuple[torch.dtype, ...]
) -> None:
    for index, tensor in enumerate(tensors):
        which = f"{name}[{index}]"
        if tensor.dtype not in dtypes:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise _refusal(f"{which} has a dtype that is not one of {allowed}")
        if tensor.dtype != tensors[0].dtype:
            raise _refusal(f"{which} has another dtype than {name}[0]; a call takes one")
        if tensor.device != like.device:
            raise _refusal(f"{which} is on another device than the first tensor of the call")
        if not tensor.is_contiguous():
            raise _refusal(f"{which} is not contiguous")


def _refusal(message: str) -> RuntimeError:
    return RuntimeError(f"chunkmem: {message}")
