"""One pass over memory for an update, one for the norm: native where it could be built, else in plain PyTorch.

Both compute the same bits (`csrc/adam_math.h`), so which one runs shows in the time only.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from chunkmem.optim import reference
from chunkmem.optim.codes import SIGNED, UNSIGNED
from chunkmem.optim.segments import LOWP, HyperParameters, Outputs, SegmentPass, Segments
from chunkmem.runtime.build import BuildError, cpu_recipe, cuda_recipe_in, load_library
from chunkmem.runtime.own_folder import default_cache_dir

_PROBE_NUMEL = 4096
_PROBE_WIDTHS = (0, 4, 8, 16)
_TRIAL_HYPER = HyperParameters([1e-2], [0.9], [0.99], [1e-8], [0.1], [3])


@dataclass(frozen=True)
class Kernels:
    """The kernels that this process can run."""

    native_devices: frozenset[str]
    """Types of devices with a native kernel; on the others the PyTorch reference runs."""

    def adamw_(self, segments: Segments, hyper: HyperParameters, how: SegmentPass | None = None) -> None:
        """Update parameters and states in place, and write the low-precision outputs, in one pass.

        Autograd is told that parameters and outputs changed.

        Raises:
            RuntimeError: dtypes, shapes, devices or lengths do not fit, or a step is below 1; it names the argument.
        """
        how = SegmentPass() if how is None else how
        if not segments.params:
            return
        if segments.params[0].device.type in self.native_devices:
            torch.ops.chunkmem.adamw_(*arguments(segments, hyper, how))
        else:
            reference.adamw_(segments, hyper, how)
        tell_autograd((*segments.params, *segments.lowp_outs))

    def adamw_into(
        self,
        segments: Segments,
        outputs: Outputs,
        hyper: HyperParameters,
        how: SegmentPass | None = None,
        *,
        num_threads: int = 0,
    ) -> None:
        """Write what `adamw_` would make of parameters and states to `outputs`, with the same bits; those stay.

        The low-precision outputs of `segments` are written too, and autograd is told of all that is. Python's lock is
        free while the native kernel runs.

        Args:
            num_threads: on a CPU, 0: torch's; else at most so many, of the call's own, the calling one among them:
                torch's setting plays no part, and what torch does meanwhile is not held up. The reference ignores it.

        Raises:
            RuntimeError: as `adamw_`, or an output begins where another tensor of the call does.
        """
        how = SegmentPass() if how is None else how
        if not segments.params:
            return
        lists = (outputs.params, outputs.exp_avgs, outputs.exp_avg_sqs)
        if segments.params[0].device.type in self.native_devices:
            torch.ops.chunkmem.adamw_into(*arguments(segments, hyper, how), *lists, num_threads)
        else:
            reference.adamw_into(segments, outputs, hyper, how, num_threads=num_threads)
        tell_autograd((*segments.lowp_outs, *(tensor for tensors in lists for tensor in tensors)))

    def norm_and_finite(
        self, grads: Sequence[torch.Tensor], *, unscale: float = 1.0, num_threads: int = 0
    ) -> torch.Tensor:
        """Return the sum of squares of all `grads * unscale`, and 1 if all of these are finite, else 0, in one read.

        Two doubles, on the device of the gradients. The sum depends neither on threads nor on where the gradients,
        taken end to end, are cut into tensors. `num_threads` is that of `adamw_into`.

        Raises:
            RuntimeError: dtypes or devices differ, or `num_threads` is negative; it names the argument.
        """
        if not grads:
            return torch.tensor([0.0, 1.0], dtype=torch.float64)
        if grads[0].device.type in self.native_devices:
            result: torch.Tensor = torch.ops.chunkmem.norm_and_finite(list(grads), unscale, num_threads)
            return result
        return reference.norm_and_finite(grads, unscale=unscale, num_threads=num_threads)

    def torch_tail_width(self) -> int | None:
        """Return the `Pass.tail_width` that gives the bits of torch's fused CPU kernel; None: there is none.

        torch's order of operations depends on how it was compiled and on the processor, so it is tried, on some
        thousand elements. With None, use torch's kernel where its bits are asked for.
        """
        fitting = (width for width in _PROBE_WIDTHS if all(self._has_torch_bits(width, mode) for mode in (True, False)))
        return next(fitting, None)

    def _has_torch_bits(self, tail_width: int, decoupled: bool) -> bool:
        draw = torch.Generator().manual_seed(0)
        # Every length of a tail up to 15, in both vector and scalar loops of torch.
        lengths = [_PROBE_NUMEL, *(64 + extra for extra in range(32))]
        columns = [[torch.randn(n, generator=draw) for n in lengths] for _ in range(3)]
        exp_avg_sqs = [torch.rand(n, generator=draw) for n in lengths]
        params, grads, exp_avgs = columns
        for beta1 in (0.9, 0.3):  # torch interpolates from either end
            ours = Segments(*([t.clone() for t in ts] for ts in (params, grads, exp_avgs, exp_avg_sqs)))
            theirs = Segments(*([t.clone() for t in ts] for ts in (params, grads, exp_avgs, exp_avg_sqs)))
            hyper = HyperParameters([1e-2], [beta1], [0.99], [1e-8], [0.1], [3])
            self.adamw_(ours, hyper, SegmentPass(decoupled=decoupled, tail_width=tail_width))
            fused = torch._fused_adamw_ if decoupled else torch._fused_adam_
            steps = [torch.tensor(3.0)] * len(lengths)
            options: dict[str, Any] = {"lr": 1e-2, "beta1": beta1, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
            lists: Any = (theirs.params, theirs.grads, theirs.exp_avgs, theirs.exp_avg_sqs, [], steps)
            fused(*lists, **options, amsgrad=False, maximize=False)
            pairs = zip(
                (*ours.params, *ours.exp_avgs, *ours.exp_avg_sqs),
                (*theirs.params, *theirs.exp_avgs, *theirs.exp_avg_sqs),
                strict=True,
            )
            if not all(torch.equal(a, b) for a, b in pairs):
                return False
        return True


def arguments(segments: Segments, hyper: HyperParameters, how: SegmentPass) -> tuple[Any, ...]:
    """Return what `torch.ops.chunkmem.adamw_` is called with."""
    return (
        *(segments.params, segments.grads, segments.exp_avgs, segments.exp_avg_sqs, segments.lowp_outs),
        *(hyper.lr, hyper.beta1, hyper.beta2, hyper.eps, hyper.weight_decay, hyper.step),
        *(how.unscale, how.clip_coefficient, how.decoupled, how.tail_width),
        *(hyper.beta1_power, hyper.beta2_power),
    )


def tell_autograd(written: Sequence[torch.Tensor]) -> None:
    """Count writes of kernels that autograd does not see."""
    torch.autograd.graph.increment_version([tensor for tensor in written if not tensor.is_inference()])


def load_kernels(
    *,
    with_cuda: bool = False,
    cache_dir: Path | None = None,
    compiler: str | None = None,
    nvcc: str | None = None,
    try_cuda: Callable[[], Sequence[str]] | None = None,
) -> Kernels:
    """Return the native kernels, building them first if there are none (seconds, once), else the reference.

    Call it once and keep the result: each call that cannot build warns, once, why and what to do. Kernels for CUDA are
    part of it if a trial on some thousand elements shows that they give the bits of those for the CPU.

    Args:
        with_cuda: those for CUDA too; needs nvcc and a CUDA build of torch.
        cache_dir: default: `chunkmem/native` in the user's cache folder.
        compiler, nvcc: commands; default: the one in `CXX`, or c++; nvcc.
        try_cuda: the trial, which returns what differs; default: `differing_calls` on the current CUDA device.
    """
    folder = default_cache_dir() if cache_dir is None else cache_dir
    devices: set[str] = set()
    try:
        if not _is_registered("CPU"):
            load_library(cpu_recipe(compiler), folder)
        devices.add("cpu")
        if with_cuda:
            if not _is_registered("CUDA"):
                load_library(cuda_recipe_in(folder, nvcc=nvcc), folder)
            if problem := _problem_with_cuda(_try_cuda if try_cuda is None else try_cuda):
                raise BuildError(problem)
            devices.add("cuda")
    except BuildError as error:
        where = "on CUDA" if devices else "everywhere"
        warnings.warn(f"optimizer updates run in plain PyTorch {where}, which is slower: {error}", stacklevel=2)
    return Kernels(frozenset(devices))


def _is_registered(key: str) -> bool:
    """Return whether this process has loaded the library; a second one could not define the operators again."""
    return hasattr(torch.ops.chunkmem, "adamw_") and torch._C._dispatch_has_kernel_for_dispatch_key(
        "chunkmem::adamw_", key
    )


def _problem_with_cuda(trial: Callable[[], Sequence[str]]) -> str:
    """Return why the CUDA kernels are not used, in one line; empty: they are."""
    try:
        different = trial()
    except (RuntimeError, AssertionError) as error:  # no device, none that runs what nvcc made, or torch knows no CUDA
        return f"the CUDA kernels could not be tried: {str(error).strip().splitlines()[0]}"
    if not different:
        return ""
    others = f" and {len(different) - 1} other calls" if len(different) > 1 else ""
    return (
        f"in a trial the CUDA kernels gave other bits than those for the CPU in {different[0]}{others}; try another "
        "version of nvcc"
    )


def _try_cuda() -> list[str]:
    kernels = Kernels(frozenset({"cpu", "cuda"}))
    return [*differing_calls(kernels, "cuda", expected=kernels), *differing_block_calls("cuda")]


def differing_block_calls(device: str) -> list[str]:
    """Return the updates by blocks in which the native kernel of `device` does not give the bits of that of the CPU."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        results = [_trial_of_blocks(dtype, place).cpu() for place in (device, "cpu")]
        if not torch.equal(*results):
            found.append(f"adamw_blocks of {str(dtype).removeprefix('torch.')} weights")
    return found


def _trial_of_blocks(dtype: torch.dtype, device: str) -> torch.Tensor:
    """Return what an update of some thousand random weights and 8-bit states makes of them."""
    param, gradient, exp_avg, exp_avg_sq, _ = _trial_values(torch.bfloat16)
    states = [SIGNED.encode(exp_avg).to(device), UNSIGNED.encode(exp_avg_sq).to(device)]
    weights = param.to(device, dtype)
    segments = Segments([weights], [gradient.to(device)], [states[0]], [states[1]])
    outputs = ([weights], [states[0]], [states[1]])
    torch.ops.chunkmem.adamw_blocks(*arguments(segments, _TRIAL_HYPER, SegmentPass(0.5)), *outputs, [12345], 0)
    return torch.cat([weights.view(torch.uint8), *states])


def differing_calls(kernels: Kernels, device: str, *, expected: Kernels) -> list[str]:
    """Return the calls in which `kernels` on `device` do not give the bits that `expected` give on the CPU.

    Updates in place and out of place and norms of gradients of each type, in tensors that begin anywhere; some thousand
    elements each, denormals among them.
    """
    calls: dict[str, Callable[[Kernels, str], torch.Tensor]] = {}
    for dtype in (torch.float32, *LOWP):
        flat = _trial_values(dtype)
        grads = f"{str(dtype).removeprefix('torch.')} gradients"
        for width in (0, 8):
            how = SegmentPass(0.5, 0.7, tail_width=width)
            calls[f"adamw_ of {grads} and tail_width {width}"] = partial(_trial_of_adamw_, flat, how)
            calls[f"adamw_into of {grads} and tail_width {width}"] = partial(_trial_of_adamw_into, flat, how)
        calls[f"norm_and_finite of {grads}"] = partial(_trial_of_norm, flat)
    return [name for name, call in calls.items() if not torch.equal(call(kernels, device).cpu(), call(expected, "cpu"))]


def _trial_values(grad: torch.dtype) -> list[torch.Tensor]:
    """Return param, grad, exp_avg, exp_avg_sq and a low-precision output, end to end."""
    draw = torch.Generator().manual_seed(0)
    scales = torch.ones(_PROBE_NUMEL)
    scales[::5] = 1e-20  # the square is denormal
    param, gradient, exp_avg, exp_avg_sq = (scales * torch.randn(_PROBE_NUMEL, generator=draw) for _ in range(4))
    lowp = torch.zeros(_PROBE_NUMEL, dtype=torch.bfloat16 if grad == torch.float32 else grad)
    return [param, gradient.to(grad), exp_avg, exp_avg_sq.square_(), lowp]


def _trial_copies(flat: Sequence[torch.Tensor], device: str) -> list[list[torch.Tensor]]:
    """Return copies on `device`, each cut into views; between them they have every address modulo 16 bytes."""
    ends = (*range(0, 150, 7), _PROBE_NUMEL // 2 + 5, _PROBE_NUMEL)
    return [[copy[a:b] for a, b in pairwise(ends)] for copy in (tensor.to(device, copy=True) for tensor in flat)]


def _trial_of_adamw_(flat: Sequence[torch.Tensor], how: SegmentPass, kernels: Kernels, device: str) -> torch.Tensor:
    segments = Segments(*_trial_copies(flat, device))
    kernels.adamw_(segments, _TRIAL_HYPER, how)
    return _bits((*segments.params, *segments.exp_avgs, *segments.exp_avg_sqs), segments.lowp_outs)


def _trial_of_adamw_into(flat: Sequence[torch.Tensor], how: SegmentPass, kernels: Kernels, device: str) -> torch.Tensor:
    segments = Segments(*_trial_copies(flat, device))
    outputs = Outputs(*_trial_copies([torch.zeros(_PROBE_NUMEL)] * 3, device))
    kernels.adamw_into(segments, outputs, _TRIAL_HYPER, how)
    kept = (*segments.params, *segments.exp_avgs, *segments.exp_avg_sqs)
    return _bits((*outputs.params, *outputs.exp_avgs, *outputs.exp_avg_sqs, *kept), segments.lowp_outs)


def _trial_of_norm(flat: Sequence[torch.Tensor], kernels: Kernels, device: str) -> torch.Tensor:
    grads = _trial_copies(flat, device)[1]
    return kernels.norm_and_finite(grads, unscale=0.3).view(torch.int64)


def _bits(fp32: Sequence[torch.Tensor], lowp: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.cat(list(fp32)).view(torch.int32), torch.cat(list(lowp)).view(torch.int16).int()])
