"""The native kernels as a manager uses them: loaded when first needed, trusted where they have torch's bits."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from chunkmem.optim.device_order import DevicePowers, has_order
from chunkmem.optim.kernels import Kernels

LOG = logging.getLogger("chunkmem.optim")
CPU = torch.device("cpu")

OTHER_BITS = (
    "torch's fused Adam has other bits than chunkmem's kernels: fp32 weights are updated by torch's, at step() and not "
    "beside backward; master weights of bf16 and fp16 by chunkmem's, whose bits are the same wherever they run"
)
"""For warnings and reports."""


@dataclass(eq=False)
class NativeUpdate:
    """The native kernels of one manager.

    Of fp32 weights the bits of torch's fused kernels are promised, and on a CPU these depend on how torch was compiled
    for it. Where a trial finds other bits, fp32 weights are updated by torch's kernels, at `step()`. Master weights are
    updated by ours all the same: of mixed precision no bits of torch's are promised, and ours are the same on all
    devices, at `step()` and before.
    """

    load: Callable[[], Kernels]
    """Gives the kernels, and may have to compile them."""
    device: torch.device = CPU
    """That models compute on."""

    @cached_property
    def kernels(self) -> Kernels:
        return self.load()

    @cached_property
    def tail_width(self) -> int | None:
        """`Pass.tail_width` that gives the bits of torch's fused Adam on the CPU; None: there is none."""
        if not self.runs_on_host:
            return None
        found = self.kernels.torch_tail_width()
        if found is None:
            warnings.warn(f"on this CPU {OTHER_BITS}", stacklevel=2)
        return found

    @property
    def runs_on_host(self) -> bool:
        """There is a native kernel for the CPU."""
        return "cpu" in self.kernels.native_devices

    @cached_property
    def powers(self) -> DevicePowers | None:
        """Of the betas, for updates on HOST with the bits of torch's fused Adam on the accelerator; None: there are
        none with those bits, or there is no accelerator."""
        if self.device.type == "cpu":
            return None
        powers = DevicePowers(self.device)
        try:
            has_order_of_device = has_order(self.kernels.adamw_, self.device, powers)
        except NotImplementedError as error:  # torch has no fused kernel there
            LOG.info("no fused Adam could be tried on %s: %s", self.device, error)
            has_order_of_device = False
        if not has_order_of_device:
            warnings.warn(
                f"torch's fused Adam on {self.device} has other bits than chunkmem's kernels: fp32 weights that are "
                "updated on HOST have the bits of torch's Adam on the CPU, so numbers depend on memory.device in their "
                "last place",
                stacklevel=2,
            )
        return powers if has_order_of_device else None

    def powers_for(self, device: torch.device) -> DevicePowers | None:
        """Return `powers` for weights that compute on a device; None: they are updated as on a CPU."""
        return None if device.type == "cpu" else self.powers

    @property
    def has_torch_bits(self) -> bool:
        """There is a native kernel for the CPU, and a trial shows that it gives the bits of torch's."""
        return self.tail_width is not None

    def runs_on(self, device: torch.device) -> bool:
        """Tell whether there is a native kernel for a device: it has the bits of the CPU's, so the place is free."""
        return self.runs_on_host and device.type in self.kernels.native_devices

    def squares(self, grads: Sequence[torch.Tensor], *, num_threads: int = 0) -> torch.Tensor:
        """Return the sum of squares of gradients on one device, and 1 if all are finite, else 0: 2 doubles, there.

        The bits depend on the order of the gradients, on a CPU on nothing else.
        """
        if self.runs_on(grads[0].device):
            return self.kernels.norm_and_finite(grads, num_threads=num_threads)
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads]
        total = torch.stack(norms).double().square().sum()
        return torch.stack([total, total.isfinite().double()])
