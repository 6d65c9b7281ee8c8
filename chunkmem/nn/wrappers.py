"""Wrappers of torch that exchange parameters or gradients between ranks, refused around managed parameters.

`DistributedDataParallel` is noticed when it registers the model as its child, which it does before it touches
anything. `FullyShardedDataParallel` and `fully_shard` are noticed when they first use a parameter that serves itself,
see [Note: Served parameters] in `chunkmem.nn.served`: the first one registers the model when it has flattened its
parameters, the second one never does.
"""

from __future__ import annotations

import sys
import weakref
from types import FrameType

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from chunkmem.errors import StateError
from chunkmem.nn.binding import ManagedParameter
from chunkmem.nn.registry import ModelRegistry

_SHARDING = "torch.distributed.fsdp"


class WrapperCheck:
    """Raises when a `DistributedDataParallel` is made around a model with managed parameters."""

    def __init__(self, registry: ModelRegistry) -> None:
        """Check from now on, until `remove` or until nothing else refers to `registry`."""
        self._handle = register_module_module_registration_hook(_WrapperHook(registry))
        hooks = self._handle.hooks_dict_ref() or {}
        # Not by a finalizer of the registry: it could run while torch goes through its hooks.
        for key in [key for key, hook in hooks.items() if isinstance(hook, _WrapperHook) and not hook.is_alive()]:
            hooks.pop(key)

    def remove(self) -> None:
        """Check no longer. Idempotent."""
        self._handle.remove()


class _WrapperHook:
    """What torch refers to: it keeps no manager alive."""

    def __init__(self, registry: ModelRegistry) -> None:
        self._registry = weakref.ref(registry)

    def is_alive(self) -> bool:
        """Tell whether its manager is still there."""
        return self._registry() is not None

    def __call__(self, parent: nn.Module, _name: str, child: nn.Module | None) -> None:
        registry = self._registry()
        if registry is None or child is None or not isinstance(parent, DistributedDataParallel):
            return
        for param in child.parameters():
            managed = registry.find(param)
            if managed is not None:
                raise wrapped(type(parent).__name__, managed)


def sharding_caller() -> str | None:
    """Return the name of the wrapper of `torch.distributed.fsdp` that is being made further up the stack, if any is."""
    if _SHARDING not in sys.modules:
        return None
    found = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_name
        if name in ("__init__", "fully_shard") and frame.f_globals.get("__name__", "").startswith(_SHARDING):
            # The outermost one is what the user called.
            found = name if name == "fully_shard" else type(frame.f_locals["self"]).__name__
        frame = frame.f_back
    return found


def wrapped(wrapper: str, managed: ManagedParameter) -> StateError:
    """Return the error about a parameter that was given to a wrapper."""
    return StateError(
        f"{wrapper} around parameter {managed}, which is managed: chunkmem exchanges parameters and gradients itself; "
        f"use the model as it is, without {wrapper} (docs/integrations.md says how, where a library adds it)"
    )
