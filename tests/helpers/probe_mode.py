"""A dispatch mode that hands every operator to a probe, as the runtime's own does."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from chunkmem.steps.probe import LiveStorageProbe


class watching(TorchDispatchMode):  # it reads as a function
    """Hands every operator to a probe."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run compiled: else torch would run it eagerly, to other bits, as long as this watches."""
        return True

    def __init__(self, probe: LiveStorageProbe) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._probe = probe

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():  # what comes here has been served
            return self._probe.run(func, args, kwargs or {})
