"""What `layer.weight` of a tiled layer is: the whole, without memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from chunkmem.data.errors import StateError
from chunkmem.modules.tensor_functions import METADATA, is_write

_TENSOR: Any = torch.Tensor
_ALIAS = frozenset({_TENSOR.data.__get__, _TENSOR.detach})
_REFUSED = frozenset({"data_ptr", "untyped_storage", "register_hook"})


class WholeParameter(torch.Tensor):
    """Shape, dtype and device of a parameter that is in tiles; an operator gets a copy, made of the tiles for it.

    Gradients go to the tiles. A write would be to that copy, so it is a StateError.
    """

    _join: Callable[[], torch.Tensor]
    tiles: Sequence[str]
    """Names of the parameters, in the layer."""

    @staticmethod
    def __new__(
        cls,
        join: Callable[[], torch.Tensor],
        shape: tuple[int, ...],
        *,
        tiles: Sequence[str],
        like: torch.Tensor,
        requires_grad: bool,
    ) -> WholeParameter:
        """Make one of a function that joins the tiles; dtype and device are those of `like`."""
        made: WholeParameter = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=like.dtype, device=like.device, requires_grad=requires_grad
        )
        made._join, made.tiles = join, tiles
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if is_write(func) or name in _REFUSED or isinstance(kwargs.get("out"), cls):
            raise StateError(
                f"{name} of a tiled layer's weight or bias, which is a copy of its tiles: do that to each parameter in "
                "layer.parameters(), or load the whole with layer.load_state_dict()"
            )
        if func in _ALIAS:  # a write to it would be lost, too
            whole: WholeParameter = args[0]
            join = whole._join
            return cls(lambda: join().detach(), tuple(whole.shape), tiles=whole.tiles, like=whole, requires_grad=False)
        joined, options = tree_map_only(cls, lambda whole: whole._join(), (args, kwargs))
        return func(*joined, **options)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise StateError(f"{func} got a tiled layer's weight or bias past torch's functions; give it a clone()")
