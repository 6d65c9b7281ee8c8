"""Update groups whose weights are rounded from a float32 master copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from chunkmem.optim.kernels import Kernels
from chunkmem.optim.ops import AdamTensors, fused_adam_, global_norm
from chunkmem.optim.segments import HyperParameters, Pass, Segments
from chunkmem.types import Role


class LoweredUpdate:
    """One pass over gradient, master copy, states and weights where there is a native kernel; else torch's calls.

    On a CPU both give the same bits: the kernel is used where a trial shows that it has those of torch's.
    """

    def __init__(self, load: Callable[[], Kernels]) -> None:
        """Make one; `load` gives the kernels, and is called when they are first needed, for it may compile them."""
        self._load = load

    @cached_property
    def _kernels(self) -> Kernels:
        return self._load()

    @cached_property
    def _tail_width(self) -> int | None:
        return self._kernels.torch_tail_width() if "cpu" in self._kernels.native_devices else None

    def update(
        self,
        slots: Mapping[Role, Sequence[torch.Tensor]],
        steps: Sequence[torch.Tensor],
        options: Mapping[str, Any],
        *,
        multiplier: float,
    ) -> None:
        """Update parameters of one group.

        Args:
            slots: by role, the memory of each parameter as 1-D elements, on one device.
            steps: the number of each one's update, already counted up.
            options: of a parameter group.
            multiplier: of the gradients, in float32.
        """
        roles = (Role.PARAM, Role.GRAD, Role.MASTER, Role.EXP_AVG, Role.EXP_AVG_SQ)
        params, grads, masters, exp_avgs, exp_avg_sqs = (list(slots[role]) for role in roles)
        if params[0].device.type == "cpu" and self._tail_width is not None:
            beta1, beta2 = map(float, options["betas"])
            hyper = HyperParameters(
                lr=[float(options["lr"])],
                beta1=[beta1],
                beta2=[beta2],
                eps=[float(options["eps"])],
                weight_decay=[float(options["weight_decay"])],
                step=[int(step) for step in steps],
            )
            how = Pass(unscale=multiplier, decoupled=options["decoupled_weight_decay"], tail_width=self._tail_width)
            self._kernels.adamw_(Segments(masters, grads, exp_avgs, exp_avg_sqs, params), hyper, how)
            return
        full = [grad.float().mul(multiplier) for grad in grads]
        on_device = [step.to(params[0].device) for step in steps]
        fused_adam_(AdamTensors(masters, full, exp_avgs, exp_avg_sqs, on_device), dict(options))
        for param, master in zip(params, masters, strict=True):
            param.copy_(master)

    def norm(self, grads: Mapping[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return the 2-norm over gradients wherever each is; inf or NaN if one of them has such an element."""
        if self._tail_width is None or any(grad.device.type != "cpu" for grad in grads.values()):
            return global_norm(grads, dtype=torch.float32)
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for grad in grads.values():
            by_dtype.setdefault(grad.dtype, []).append(grad)
        sums = [self._kernels.norm_and_finite(alike) for alike in by_dtype.values()]
        if not all(bool(is_finite) for _, is_finite in sums):
            return torch.tensor(float("inf"))
        return torch.stack([squares for squares, _ in sums]).sum().sqrt().float()
