"""Find the tensors in what modules are given, return and keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType, ModuleType, NoneType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

MODULE_FIELDS = frozenset(vars(nn.Module()))
_OBJECT_DEPTH = 2
"""Objects of other people's classes are looked into so deep: a cache with an object for each layer."""
_OPAQUE = (nn.Module, type, ModuleType, FunctionType)
_LEAVES = (torch.Tensor, int, float, str, NoneType)
"""What holds no other values."""
_PLAIN = frozenset((bool, int, float, str, NoneType, partial))
"""Types of most attributes of modules that are no tensors, and hold none."""


def tensors_in(value: object, *, object_depth: int = _OBJECT_DEPTH) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested containers and in the attributes of plain objects, in order."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, (list, tuple, set, frozenset, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item, object_depth=object_depth)
    if object_depth and not isinstance(value, _OPAQUE):
        for item in _attributes(value):
            yield from tensors_in(item, object_depth=object_depth - 1)


def kept_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors that a module holds as attributes, or in lists, tuples and dicts that are attributes."""
    for name, value in module.__dict__.items():
        if type(value) in _PLAIN or name in MODULE_FIELDS:
            continue
        if isinstance(value, (torch.Tensor, list, tuple, dict)):
            yield from tensors_in(value, object_depth=0)


@dataclass(frozen=True, slots=True)
class _Slot:
    """Stands for a tensor in arguments."""

    index: int


class Structure:
    """A value without its tensors, in tuples, lists and dicts. The same tensor twice is one."""

    def __init__(self, leaves: list[Any], spec: TreeSpec | None) -> None:
        """Have leaves in a tree; None: in a tuple, as most arguments are."""
        self._leaves = leaves
        self._spec = spec

    @classmethod
    def of(cls, value: Any, *, is_leaf: Callable[[Any], bool] | None = None) -> tuple[Structure, list[torch.Tensor]]:
        """Return that of a value, and its tensors; `is_leaf` tells of what is not taken apart."""
        leaves, spec = (value, None) if is_flat(value) else tree_flatten(value, is_leaf=is_leaf)
        known = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
        slots = {key: _Slot(index) for index, key in enumerate(known)}
        return cls([slots.get(id(leaf), leaf) for leaf in leaves], spec), list(known.values())

    @property
    def others(self) -> list[Any]:
        """What is in the value besides tensors."""
        return [leaf for leaf in self._leaves if not isinstance(leaf, _Slot)]

    def filled(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the value with these tensors."""
        leaves = [tensors[leaf.index] if isinstance(leaf, _Slot) else leaf for leaf in self._leaves]
        return tuple(leaves) if self._spec is None else tree_unflatten(leaves, self._spec)


def is_flat(value: object) -> bool:
    """Tell whether a value is a tuple of tensors and plain values."""
    return type(value) is tuple and all(isinstance(each, _LEAVES) for each in value)


def storage_id(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage; 0 for one that has none (sparse, a wrapper of a transform)."""
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.layout is not torch.strided or tensor.is_meta:
            return 0
        try:
            return int(torch.Tensor.untyped_storage(tensor)._cdata)
        except (NotImplementedError, RuntimeError):
            return 0


def over(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor that lies in a storage as another one does in its own."""
    return like.new_empty(0).set_(storage, like.storage_offset(), like.shape, like.stride())


def _attributes(value: object) -> Iterator[object]:
    yield from getattr(value, "__dict__", {}).values()
    for name in getattr(type(value), "__slots__", ()):
        yield getattr(value, name, None)
