"""Find the tensors in what modules are given, return and keep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType

import torch
from torch import nn

MODULE_FIELDS = frozenset(vars(nn.Module()))
_OBJECT_DEPTH = 2
"""Objects of other people's classes are looked into so deep: a cache with an object for each layer."""
_OPAQUE = (nn.Module, type, ModuleType, FunctionType)


def tensors_in(value: object, *, object_depth: int = _OBJECT_DEPTH) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested containers and in the attributes of plain objects, in order."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from tensors_in(item, object_depth=object_depth)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, object_depth=object_depth)
    if object_depth and not isinstance(value, _OPAQUE):
        for item in _attributes(value):
            yield from tensors_in(item, object_depth=object_depth - 1)


def kept_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors that a module holds as attributes, or in lists, tuples and dicts that are attributes."""
    for name, value in vars(module).items():
        if name not in MODULE_FIELDS and isinstance(value, (torch.Tensor, list, tuple, dict)):
            yield from tensors_in(value, object_depth=0)


def storage_id(tensor: torch.Tensor) -> int | None:
    """Return the identity of a tensor's storage; None for one that has none (sparse, a wrapper of a transform)."""
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.layout is not torch.strided or tensor.is_meta:
            return None
        try:
            return int(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):
            return None


def _attributes(value: object) -> Iterator[object]:
    yield from getattr(value, "__dict__", {}).values()
    for name in getattr(type(value), "__slots__", ()):
        yield getattr(value, name, None)
