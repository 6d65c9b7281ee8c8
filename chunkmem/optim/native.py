"""The native kernels as a manager uses them: loaded when first needed, trusted where they have torch's bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch

from chunkmem.optim.kernels import Kernels


class NativeUpdate:
    """The native kernels of one manager."""

    def __init__(self, load: Callable[[], Kernels]) -> None:
        """Make one; `load` gives the kernels, and may have to compile them."""
        self._load = load

    @cached_property
    def kernels(self) -> Kernels:
        return self._load()

    @cached_property
    def tail_width(self) -> int | None:
        """`Pass.tail_width` that gives the bits of torch's fused Adam on the CPU; None: there is none."""
        return self.kernels.torch_tail_width() if "cpu" in self.kernels.native_devices else None

    @property
    def has_torch_bits(self) -> bool:
        """There is a native kernel for the CPU, and a trial shows that it gives the bits of torch's."""
        return self.tail_width is not None

    def runs_on(self, device: torch.device) -> bool:
        """Tell whether there is a native kernel for a device: it has the bits of the CPU's, so the place is free."""
        return self.has_torch_bits and device.type in self.kernels.native_devices

    def squares(self, grads: Sequence[torch.Tensor], *, num_threads: int = 0) -> torch.Tensor:
        """Return the sum of squares of gradients on one device, and 1 if all are finite, else 0: 2 doubles, on the CPU.

        The bits depend on the order of the gradients, on a CPU on nothing else.
        """
        if self.runs_on(grads[0].device):
            return self.kernels.norm_and_finite(grads, num_threads=num_threads).cpu()
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads]
        total = torch.stack(norms).double().square().sum()
        return torch.stack([total, total.isfinite().double()]).cpu()
