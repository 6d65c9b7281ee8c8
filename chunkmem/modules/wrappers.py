"""Wrappers of torch that exchange parameters or gradients between ranks, around managed parameters.

`DistributedDataParallel` is noticed when it registers the model as its child, which it does before it touches
anything, and becomes a `ManagedDataParallel` if all that the model trains is known to the manager; else it is refused.
`FullyShardedDataParallel` and `fully_shard` are noticed when they first use a parameter that serves itself: the first
one registers the model when it has flattened its parameters, the second one never does.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from chunkmem.data.errors import StateError
from chunkmem.modules.binding import ManagedParameter
from chunkmem.modules.fitted import on_children
from chunkmem.modules.gradient_values import GradientValues
from chunkmem.modules.registry import ModelRegistry


class ManagedDataParallel(DistributedDataParallel):
    """A `DistributedDataParallel` that exchanges nothing (ADR 41).

    Scripts and libraries put it around whatever they train over ranks, and use it by its name: `.module`, `no_sync()`,
    `require_backward_grad_sync`. So it stays one. Parameters and gradients are in chunks, which are exchanged as they
    are, and buffers and ordinary parameters follow rank 0's. What it says of micro-batches is passed on.
    """

    _declare: Callable[[bool], None]
    """Tells the manager whether the next backward is the last one before the step."""
    _syncs: bool

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model, with its inputs on the device that the wrapper was given."""
        if self.device_ids:
            device = torch.device(self.device_type, self.device_ids[0])
            inputs, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), (inputs, kwargs))
        if torch.is_grad_enabled():
            self._declare(self._syncs)
        return self.module(*inputs, **kwargs)

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next backward is the last one before the step; `no_sync()` says that it is not."""
        return self._syncs

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        vars(self)["_syncs"] = bool(value)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> NoReturn:
        """Refuse: gradients do not pass through buckets here."""
        raise StateError(
            "register_comm_hook() of DistributedDataParallel around a managed model: chunkmem exchanges gradients "
            "itself; give ChunkManager(exchange=...) a subclass of chunkmem.ExchangeMethod"
        )

    def join(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: ranks without a batch call `step()`."""
        raise StateError(
            "join() of DistributedDataParallel around a managed model: leave it out, and have ranks that have no batch "
            "left call optimizer.step() like the others"
        )

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return {}  # there is no reducer, which Lightning asks about

    # What `DistributedDataParallel.__init__` calls once it is of this class, in its middle.

    def _build_params_for_reducer(self) -> tuple[list[torch.Tensor], list[bool]]:
        self.modules_buffers: list[torch.Tensor] = []
        self.named_module_buffers: dict[str, torch.Tensor] = {}
        return [torch.zeros(1, device=self.device)], [False]  # ranks compare the shapes of something

    def _build_debug_param_to_name_mapping(self, parameters: Any) -> dict[int, str]:
        return {}

    def _ddp_init_helper(self, *_: Any, **__: Any) -> None:
        if self.mixed_precision is not None:
            raise StateError(
                "mixed_precision of DistributedDataParallel around a managed model: set "
                '"precision": "bf16" in the configuration'
            )

    def _set_static_graph(self) -> None:
        self.static_graph = True


def check_wrappers(
    registry: ModelRegistry, gradients: GradientValues, declare: Callable[[bool], None], num_ranks: int
) -> RemovableHandle:
    """Look at every `DistributedDataParallel` that is made around a model with managed parameters.

    So it is until the handle is removed, or nothing else refers to `registry`.

    Args:
        registry: of the manager's parameters.
        gradients: stand for means over ranks where there is a wrapper.
        declare: a method that is told whether the next backward is the last one before the step.
        num_ranks: that exchange; 1: there is one process.
    """
    shown, declaring = weakref.ref(gradients), weakref.WeakMethod(declare)

    def tell(is_last: bool) -> None:
        if (say := declaring()) is not None:
            say(is_last)

    def check(registry: ModelRegistry, parent: nn.Module, child: nn.Module) -> None:
        if not isinstance(parent, DistributedDataParallel):
            return
        managed = next((found for param in child.parameters() if (found := registry.find(param)) is not None), None)
        if managed is None:
            return
        _require_fit(registry, parent, child, managed, num_ranks)
        parent.__class__ = ManagedDataParallel
        parent.parameters_to_ignore = {name for name, _ in (*child.named_parameters(), *child.named_buffers())}
        cast(ManagedDataParallel, parent)._declare = tell
        if (values := shown()) is not None:
            values.shows_means = num_ranks > 1

    return on_children(registry, check)


def _require_fit(
    registry: ModelRegistry,
    wrapper: DistributedDataParallel,
    model: nn.Module,
    managed: ManagedParameter,
    num_ranks: int,
) -> None:
    """Raise a `StateError` for a wrapper whose part chunkmem cannot take over."""
    for name, param in model.named_parameters():
        if param.requires_grad and not registry.is_known(param):
            error = wrapped(type(wrapper).__name__, managed)
            error.add_note(
                f"parameter {name} is in no chunk: if it was added to the model, make chunkmem's optimizer first"
            )
            raise error
    if wrapper.process_group.size() != num_ranks:
        raise StateError(
            f"DistributedDataParallel over {wrapper.process_group.size()} ranks around parameter {managed}, which a "
            f"manager of {num_ranks} exchanges: call init_process_group() before ChunkManager(config)"
        )
    if num_ranks > 1 and (strategy := saving_strategy()) is not None:
        raise StateError(
            f"Trainer with save_strategy={strategy!r} over {num_ranks} ranks: it asks the first rank alone "
            "for weights of which each rank has some, and would wait; before train(), call "
            "chunkmem.integrations.transformers.ChunkmemCallback(manager).add_to(trainer), or set "
            'save_strategy="no" and save with manager.save(path, optimizer) on all ranks '
            "(docs/integrations.md says how)"
        )


def _callers(module: str) -> Iterator[FrameType]:
    """Yield what runs of a module of torch or transformers, and of those in it, the innermost call first."""
    frame: FrameType | None = sys._getframe(1) if module in sys.modules else None
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(module):
            yield frame
        frame = frame.f_back


def saving_strategy() -> str | None:
    """Return the `save_strategy` of the transformers Trainer further up the stack, if its first rank is to save alone.

    A script without our callback hands over nothing of Trainer's, and this is the last call of its on all ranks before
    one of them saves: the others may then wait in a barrier of Trainer's, where no agreement of ranks is reached.
    """
    for frame in _callers("transformers.trainer"):
        if frame.f_globals["__name__"] == "transformers.trainer" and "self" in frame.f_locals:
            trainer = frame.f_locals["self"]
            callbacks = getattr(getattr(trainer, "callback_handler", None), "callbacks", ())
            if any(getattr(callback, "gathers_checkpoints", False) for callback in callbacks):
                return None
            strategy = getattr(getattr(trainer, "args", None), "save_strategy", "no")
            found = str(getattr(strategy, "value", strategy))
            return None if found == "no" else found
    return None


def sharding_caller() -> str | None:
    """Return the name of the wrapper of `torch.distributed.fsdp` that is being made further up the stack, if any is."""
    found = None
    for frame in _callers("torch.distributed.fsdp"):
        name = frame.f_code.co_name
        if name in ("__init__", "fully_shard"):  # the outermost one is what the user called
            found = name if name == "fully_shard" else type(frame.f_locals["self"]).__name__
    return found


def wrapped(wrapper: str, managed: ManagedParameter) -> StateError:
    """Return the error about a parameter that was given to a wrapper."""
    return StateError(
        f"{wrapper} around parameter {managed}, which is managed: chunkmem exchanges parameters and gradients itself; "
        f"use the model as it is, without {wrapper} (docs/integrations.md says how, where a library adds it)"
    )
