"""One pass over memory for an update, one for the norm: native where it could be built, else in plain PyTorch.

Both compute the same bits (`csrc/adam_math.h`), so which one runs shows in the time only.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from chunkmem.optim import reference
from chunkmem.optim.segments import HyperParameters, Pass, Segments
from chunkmem.runtime.build import BuildError, cpu_recipe, cuda_recipe, default_cache_dir, load_library

_PROBE_NUMEL = 4096
_PROBE_WIDTHS = (0, 4, 8, 16)


@dataclass(frozen=True)
class Kernels:
    """The kernels that this process can run."""

    native_devices: frozenset[str]
    """Types of devices with a native kernel; on the others the PyTorch reference runs."""

    def adamw_(self, segments: Segments, hyper: HyperParameters, how: Pass | None = None) -> None:
        """Update parameters and states in place, and write the low-precision outputs, in one pass.

        Autograd is told that parameters and outputs changed.

        Raises:
            RuntimeError: dtypes, shapes, devices or lengths do not fit, or a step is below 1; it names the argument.
        """
        how = Pass() if how is None else how
        if not segments.params:
            return
        if segments.params[0].device.type in self.native_devices:
            torch.ops.chunkmem.adamw_(*arguments(segments, hyper, how))
        else:
            reference.adamw_(segments, hyper, how)
        written = [tensor for tensor in (*segments.params, *segments.lowp_outs) if not tensor.is_inference()]
        torch.autograd.graph.increment_version(written)

    def norm_and_finite(self, grads: Sequence[torch.Tensor], *, unscale: float = 1.0) -> torch.Tensor:
        """Return the sum of squares of all `grads * unscale`, and 1 if all of these are finite, else 0, in one read.

        Two doubles, on the device of the gradients. The sum depends neither on threads nor on where the gradients,
        taken end to end, are cut into tensors.

        Raises:
            RuntimeError: dtypes or devices differ; it names the argument.
        """
        if not grads:
            return torch.tensor([0.0, 1.0], dtype=torch.float64)
        if grads[0].device.type in self.native_devices:
            result: torch.Tensor = torch.ops.chunkmem.norm_and_finite(list(grads), unscale)
            return result
        return reference.norm_and_finite(grads, unscale=unscale)

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
            self.adamw_(ours, hyper, Pass(decoupled=decoupled, tail_width=tail_width))
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


def arguments(segments: Segments, hyper: HyperParameters, how: Pass) -> tuple[Any, ...]:
    """Return what `torch.ops.chunkmem.adamw_` is called with."""
    return (
        *(segments.params, segments.grads, segments.exp_avgs, segments.exp_avg_sqs, segments.lowp_outs),
        *(hyper.lr, hyper.beta1, hyper.beta2, hyper.eps, hyper.weight_decay, hyper.step),
        *(how.unscale, how.clip_coefficient, how.decoupled, how.seed, how.first_element, how.tail_width),
    )


def load_kernels(
    *, with_cuda: bool = False, cache_dir: Path | None = None, compiler: str | None = None, nvcc: str | None = None
) -> Kernels:
    """Return the native kernels, building them first if there are none (seconds, once), else the reference.

    Call it once and keep the result: each call that cannot build warns, once, why and what to do.

    Args:
        with_cuda: those for CUDA too; needs nvcc and a CUDA build of torch.
        cache_dir: default: `chunkmem` in the user's cache folder.
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
                load_library(cuda_recipe(nvcc), folder)
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
