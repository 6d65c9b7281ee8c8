"""Wrappers of torch that exchange parameters or gradients between ranks, around managed parameters.

`DistributedDataParallel` is noticed when it registers the model as its child, which it does before it touches
anything. From there on it exchanges nothing, see `chunkmem.nn.data_parallel`, if all that the model trains is known to
the manager; else it is refused. `FullyShardedDataParallel` and `fully_shard` are noticed when they first use a
parameter that serves itself, see [Note: Served parameters] in `chunkmem.nn.served`: the first one registers the model
when it has flattened its parameters, the second one never does.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from chunkmem.errors import StateError
from chunkmem.nn.binding import ManagedParameter
from chunkmem.nn.data_parallel import become_managed
from chunkmem.nn.gradient_values import GradientValues
from chunkmem.nn.registry import ModelRegistry

_SHARDING = "torch.distributed.fsdp"
_TRAINER = "transformers.trainer"


class WrapperCheck:
    """Hears of every `DistributedDataParallel` that is made around a model with managed parameters."""

    def __init__(
        self, registry: ModelRegistry, gradients: GradientValues, declare: Callable[[bool], None], *, num_ranks: int
    ) -> None:
        """Check from now on, until `remove` or until nothing else refers to `registry`.

        Args:
            registry: of the manager's parameters.
            gradients: stand for means over ranks where there is a wrapper.
            declare: a method that is told whether the next backward is the last one before the step.
            num_ranks: that exchange; 1: there is one process.
        """
        self._handle = register_module_module_registration_hook(_WrapperHook(registry, gradients, declare, num_ranks))
        hooks = self._handle.hooks_dict_ref() or {}
        # Not by a finalizer of the registry: it could run while torch goes through its hooks.
        for key in [key for key, hook in hooks.items() if isinstance(hook, _WrapperHook) and not hook.is_alive()]:
            hooks.pop(key)

    def remove(self) -> None:
        """Check no longer. Idempotent."""
        self._handle.remove()


class _WrapperHook:
    """What torch refers to: it keeps no manager alive."""

    def __init__(
        self, registry: ModelRegistry, gradients: GradientValues, declare: Callable[[bool], None], num_ranks: int
    ) -> None:
        self._registry = weakref.ref(registry)
        self._gradients = weakref.ref(gradients)
        self._declare_last = weakref.WeakMethod(declare)
        self._num_ranks = num_ranks

    def is_alive(self) -> bool:
        """Tell whether its manager is still there."""
        return self._registry() is not None

    def __call__(self, parent: nn.Module, _name: str, child: nn.Module | None) -> None:
        registry = self._registry()
        if registry is None or child is None or not isinstance(parent, DistributedDataParallel):
            return
        managed = next((found for param in child.parameters() if (found := registry.find(param)) is not None), None)
        if managed is None:
            return
        for name, param in child.named_parameters():
            if param.requires_grad and not registry.is_known(param):
                error = wrapped(type(parent).__name__, managed)
                error.add_note(
                    f"parameter {name} is in no chunk: if it was added to the model, make chunkmem's optimizer first"
                )
                raise error
        if parent.process_group.size() != self._num_ranks:
            raise StateError(
                f"DistributedDataParallel over {parent.process_group.size()} ranks around parameter {managed}, which a "
                f"manager of {self._num_ranks} exchanges: call init_process_group() before ChunkManager(config)"
            )
        if self._num_ranks > 1 and (strategy := saving_strategy()) is not None:
            raise StateError(
                f"Trainer with save_strategy={strategy!r} over {self._num_ranks} ranks: it asks the first rank alone "
                "for weights of which each rank has some, and would wait; before train(), call "
                "chunkmem.integrations.transformers.ChunkmemCallback(manager).add_to(trainer), or set "
                'save_strategy="no" and save with manager.save(path, optimizer) on all ranks '
                "(docs/integrations.md says how)"
            )
        become_managed(parent, child, self._declare)
        if (gradients := self._gradients()) is not None:
            gradients.shows_means = self._num_ranks > 1

    def _declare(self, is_last: bool) -> None:
        if (declare := self._declare_last()) is not None:
            declare(is_last)


def saving_strategy() -> str | None:
    """Return the `save_strategy` of the transformers Trainer further up the stack, if its first rank is to save alone.

    A script without our callback hands over nothing of Trainer's, and this is the last call of its on all ranks before
    one of them saves: the others may then wait in a barrier of Trainer's, where no agreement of ranks is reached.
    """
    frame: FrameType | None = sys._getframe(1) if _TRAINER in sys.modules else None
    while frame is not None:
        if frame.f_globals.get("__name__") == _TRAINER and "self" in frame.f_locals:
            trainer = frame.f_locals["self"]
            callbacks = getattr(getattr(trainer, "callback_handler", None), "callbacks", ())
            if any(getattr(callback, "gathers_checkpoints", False) for callback in callbacks):
                return None
            strategy = getattr(getattr(trainer, "args", None), "save_strategy", "no")
            found = str(getattr(strategy, "value", strategy))
            return None if found == "no" else found
        frame = frame.f_back
    return None


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
