"""One pass over memory for an update, one for the norm: native where it could be built, else in plain PyTorch.

Both compute the same bits (`csrc/adam_math.h`), so which one runs shows in the time only.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
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

    def adamw_(
        self,
        segments: Segments,
        hyper: HyperParameters,
        how: SegmentPass | None = None,
        *,
        outputs: Outputs | None = None,
        keys: Sequence[int] | None = None,
        num_threads: int = 0,
    ) -> None:
        """Update parameters and states, and write the low-precision outputs, in one pass.

        Autograd is told of all that is written. Python's lock is free while a native kernel runs out of place.

        Args:
            segments: what is read.
            hyper: of the parameters.
            how: of the call.
            outputs: where what `segments` would become is written, with the same bits; None: to `segments`, in place.
            keys: of the random bits of each parameter's update, see `update_key`: it goes by blocks, and rounds states
                to codes and weights in bfloat16 stochastically. None: states and weights are fp32.
            num_threads: out of place or by blocks on a CPU, 0: torch's; else at most so many, of the call's own, the
                calling one among them: torch's setting plays no part, and what torch does meanwhile is not held up.
                The reference ignores it.

        Raises:
            RuntimeError: dtypes, shapes, devices or lengths do not fit, a step is below 1, or an output begins where
                another tensor of the call does; it names the argument.
        """
        how = SegmentPass() if how is None else how
        if not segments.params:
            return
        to = segments.in_place if outputs is None else outputs
        if segments.params[0].device.type not in self.native_devices:
            reference.adamw_(segments, hyper, how, outputs=outputs, keys=keys)
        elif keys is not None:
            torch.ops.chunkmem.adamw_blocks(*arguments(segments, hyper, how), *to.lists, list(keys), num_threads)
        elif outputs is not None:
            torch.ops.chunkmem.adamw_into(*arguments(segments, hyper, how), *to.lists, num_threads)
        else:
            torch.ops.chunkmem.adamw_(*arguments(segments, hyper, how))
        written = (tensor for tensors in (segments.lowp_outs, *to.lists) for tensor in tensors)
        torch.autograd.graph.increment_version([tensor for tensor in written if not tensor.is_inference()])

    def norm_and_finite(
        self, grads: Sequence[torch.Tensor], *, unscale: float = 1.0, num_threads: int = 0
    ) -> torch.Tensor:
        """Return the sum of squares of all `grads * unscale`, and 1 if all of these are finite, else 0, in one read.

        There has to be a native kernel for their device.

        Two doubles, on the device of the gradients. The sum depends neither on threads nor on where the gradients,
        taken end to end, are cut into tensors. `num_threads` is that of `adamw_into`.

        Raises:
            RuntimeError: dtypes or devices differ, or `num_threads` is negative; it names the argument.
        """
        if not grads:
            return torch.tensor([0.0, 1.0], dtype=torch.float64)
        result: torch.Tensor = torch.ops.chunkmem.norm_and_finite(list(grads), unscale, num_threads)
        return result

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
        columns.append([torch.rand(n, generator=draw) for n in lengths])
        how = SegmentPass(decoupled=decoupled, tail_width=tail_width)
        return all(  # torch interpolates from either end
            has_bits_of_torch(self.adamw_, columns, HyperParameters([1e-2], [beta1], [0.99], [1e-8], [0.1], [3]), how)
            for beta1 in (0.9, 0.3)
        )


def has_bits_of_torch(
    adamw_: Callable[[Segments, HyperParameters, SegmentPass], object],
    columns: Sequence[Sequence[torch.Tensor]],
    hyper: HyperParameters,
    how: SegmentPass,
    *,
    device: torch.device | str = "cpu",
) -> bool:
    """Tell whether an update on HOST by `adamw_` has the bits of torch's fused kernel on a device.

    Args:
        adamw_: as `Kernels.adamw_`.
        columns: parameters, gradients, exp_avgs and exp_avg_sqs, on the CPU; they stay.
        hyper: the same for all parameters.
        how: decides between Adam and AdamW.
        device: of torch's kernel.

    Raises:
        NotImplementedError: torch has none there.
    """
    ours, theirs = ([[t.to(to, copy=True) for t in column] for column in columns] for to in ("cpu", device))
    adamw_(Segments(*ours), hyper, how)
    fused = torch._fused_adamw_ if how.decoupled else torch._fused_adam_
    lists: Any = (*theirs, [], [torch.full((), float(hyper.step[0]), device=device)] * len(columns[0]))
    options: Any = {name: getattr(hyper, name)[0] for name in ("lr", "beta1", "beta2", "eps", "weight_decay")}
    fused(*lists, **options, amsgrad=False, maximize=False)
    return all(torch.equal(a, b.cpu()) for a, b in zip(chain(*ours), chain(*theirs), strict=True))


def arguments(segments: Segments, hyper: HyperParameters, how: SegmentPass) -> tuple[Any, ...]:
    """Return what `torch.ops.chunkmem.adamw_` is called with."""
    return (
        *(segments.params, segments.grads, segments.exp_avgs, segments.exp_avg_sqs, segments.lowp_outs),
        *(hyper.lr, hyper.beta1, hyper.beta2, hyper.eps, hyper.weight_decay, hyper.step),
        *(how.unscale, how.clip_coefficient, how.decoupled, how.tail_width),
        *(hyper.beta1_power, hyper.beta2_power),
    )


def load_kernels(
    *,
    with_cuda: bool = False,
    cache_dir: Path | None = None,
    compiler: str | None = None,
    nvcc: str | None = None,
) -> Kernels:
    """Return the native kernels, building them first if there are none (seconds, once), else the reference.

    Call it once and keep the result: each call that cannot build warns, once, why and what to do. Kernels for CUDA are
    part of it if a trial on some thousand elements shows that they give the bits of those for the CPU.

    Args:
        with_cuda: those for CUDA too; needs nvcc and a CUDA build of torch.
        cache_dir: default: `chunkmem/native` in the user's cache folder.
        compiler, nvcc: commands; default: the one in `CXX`, or c++; nvcc.
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
            if problem := _problem_with_cuda():
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


def _problem_with_cuda() -> str:
    """Return why the CUDA kernels are not used, in one line; empty: they are."""
    kernels = Kernels(frozenset({"cpu", "cuda"}))
    try:
        different = differing_calls(kernels, "cuda", expected=kernels)
    except (RuntimeError, AssertionError) as error:  # no device, none that runs what nvcc made, or torch knows no CUDA
        return f"the CUDA kernels could not be tried: {str(error).strip().splitlines()[0]}"
    if not different:
        return ""
    others = f" and {len(different) - 1} other calls" if len(different) > 1 else ""
    return (
        f"in a trial the CUDA kernels gave other bits than those for the CPU in {different[0]}{others}; try another "
        "version of nvcc"
    )


def differing_calls(kernels: Kernels, device: str, *, expected: Kernels) -> list[str]:
    """Return the calls in which `kernels` on `device` do not give the bits that `expected` give on the CPU.

    Updates in place, out of place and by blocks, and norms of gradients, of each type, in tensors that begin anywhere;
    some thousand elements each, denormals among them.
    """
    calls: dict[str, Callable[[Kernels, str], torch.Tensor]] = {}
    for dtype in (torch.float32, *LOWP):
        flat = _trial_values(dtype)
        grads = f"{_name(dtype)} gradients"
        for width in (0, 8):
            how = SegmentPass(0.5, 0.7, tail_width=width)
            calls[f"adamw_ of {grads} and tail_width {width}"] = partial(_trial, flat, how)
            outputs = [torch.zeros(_PROBE_NUMEL)] * 3
            calls[f"adamw_into of {grads} and tail_width {width}"] = partial(_trial, [*flat, *outputs], how)
        calls[f"norm_and_finite of {grads}"] = partial(_trial_of_norm, flat)
    param, grad, exp_avg, exp_avg_sq, _ = _trial_values(torch.bfloat16)
    codes = [SIGNED.encode(exp_avg), UNSIGNED.encode(exp_avg_sq)]
    for dtype in (torch.float32, torch.bfloat16):
        blocks = partial(_trial, [param.to(dtype), grad, *codes], SegmentPass(0.5), keys=[12345])
        calls[f"adamw_blocks of {_name(dtype)} weights"] = blocks
    return [name for name, call in calls.items() if not torch.equal(call(kernels, device).cpu(), call(expected, "cpu"))]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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


def _trial(
    flat: Sequence[torch.Tensor],
    how: SegmentPass,
    kernels: Kernels,
    device: str,
    *,
    keys: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return the bits of all tensors of an update afterwards; the last three of eight are where it writes to."""
    columns = _trial_copies(flat, device) if keys is None else [[tensor.to(device, copy=True)] for tensor in flat]
    outputs = Outputs(*columns[5:]) if columns[5:] else None
    kernels.adamw_(Segments(*columns[:5]), _TRIAL_HYPER, how, outputs=outputs, keys=keys)
    return torch.cat([tensor.view(torch.uint8) for tensor in chain(*columns)])


def _trial_of_norm(flat: Sequence[torch.Tensor], kernels: Kernels, device: str) -> torch.Tensor:
    grads = _trial_copies(flat, device)[1]
    return kernels.norm_and_finite(grads, unscale=0.3).view(torch.uint8)
