"""`DistributedDataParallel` around a managed model: it calls the model, and leaves the exchange to chunkmem.

Scripts and libraries put it around whatever they train over ranks, and use it by its name: `.module`, `no_sync()`,
`require_backward_grad_sync`. So it stays one, and none of what it would exchange is left: parameters and gradients are
in chunks, which are exchanged as they are, and buffers and ordinary parameters follow rank 0's. What it says of
micro-batches is passed on.

[Note: Made in the middle] torch tells of a wrapper when it registers the model as its child, in the middle of
`DistributedDataParallel.__init__`. From there on it is of this class, and the rest of that method calls what is here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from chunkmem.errors import StateError


class ManagedDataParallel(DistributedDataParallel):
    """A `DistributedDataParallel` that exchanges nothing."""

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

    # What `DistributedDataParallel.__init__` calls once it is of this class.

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


def become_managed(wrapper: DistributedDataParallel, model: nn.Module, declare: Callable[[bool], None]) -> None:
    """Have a wrapper that is being made around `model` exchange nothing; see [Note: Made in the middle]."""
    wrapper.__class__ = ManagedDataParallel
    wrapper.parameters_to_ignore = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    managed = cast(ManagedDataParallel, wrapper)
    managed._declare = declare
