"""Which of torch's functions of a tensor need none of its values, which write them, and which are of lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

_TENSOR: Any = torch.Tensor
METADATA = frozenset(
    getattr(_TENSOR, name).__get__
    for name in (
        "shape", "dtype", "device", "ndim", "layout", "itemsize", "nbytes", "requires_grad", "is_cpu", "is_cuda",
        "is_meta", "is_sparse", "is_quantized", "is_nested",
    )
) | frozenset(
    getattr(_TENSOR, name)
    for name in (
        "size", "dim", "numel", "element_size", "is_floating_point", "is_complex", "get_device", "__len__", "__hash__",
    )
)  # fmt: skip
"""What is answered without values."""
_REFUSED = frozenset({"__set__", "__delete__", "__setitem__"})


def is_write(func: object) -> bool:
    """Tell whether a function writes to its first argument."""
    name = getattr(func, "__name__", "")
    if name.startswith("__") and name.endswith("__"):
        return name in _REFUSED or (name[2:3] == "i" and hasattr(_TENSOR, f"__{name[3:]}"))
    return name.endswith("_")


def listed(name: str, args: Sequence[Any]) -> Sequence[Any]:
    """Return what an operator over lists (`torch._foreach_...`) is called for in each place; others: nothing."""
    lists = (value for value in args if isinstance(value, (list, tuple)))
    return next(lists, ()) if "_foreach_" in name else ()


def one_by_one(
    call: Callable[[tuple[Any, ...], dict[str, Any]], Any], num: int, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Any]:
    """Make a call of an operator over lists of `num` items (`torch._foreach_...`) as one for each on its own."""

    def at(place: int, value: Any) -> Any:
        return [value[place]] if isinstance(value, (list, tuple)) and len(value) == num else value

    made: list[Any] = []
    for place in range(num):
        given = tuple(at(place, value) for value in args), {key: at(place, value) for key, value in kwargs.items()}
        made += call(*given) or ()
    return made
