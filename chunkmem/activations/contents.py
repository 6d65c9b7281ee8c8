"""Read and write what is in a container: list, dict, set, deque, array, cell of a closure, object with slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from operator import is_
from types import CellType
from typing import Any

import numpy as np
import torch

_EMPTY = object()
"""Stands for what an empty cell has."""


class Slots:
    """An object with `__slots__`, as a container."""

    def __init__(self, value: object, names: Sequence[str]) -> None:
        self.value = value
        self.names = names

    def read(self) -> dict[str, Any]:
        return {name: getattr(self.value, name) for name in self.names if hasattr(self.value, name)}

    def fill(self, content: Mapping[str, Any]) -> None:
        for name in self.names:
            if name in content:
                object.__setattr__(self.value, name, content[name])
            elif hasattr(self.value, name):
                object.__delattr__(self.value, name)


class Weights:
    """The parameters of a module, as a container: tensors may stand in for them, and any may be frozen."""

    def __init__(self, parameters: dict[str, Any]) -> None:
        self._parameters = parameters

    def read(self) -> list[Any]:
        found: list[Any] = []
        with torch._C.DisableTorchFunctionSubclass():
            for param in dict.values(self._parameters):
                found += param, param is not None and param.requires_grad
        return found

    def fill(self, content: Sequence[Any]) -> None:
        now = self.read()
        pairs = content[::2], content[1::2], now[::2], now[1::2]
        for name, param, requires_grad, other, other_requires_grad in zip(self._parameters, *pairs, strict=True):
            if param is not other:
                dict.__setitem__(self._parameters, name, param)  # past the mapping that tells of reads
            elif param is not None and param.is_leaf and requires_grad != other_requires_grad:
                param.requires_grad_(requires_grad)


def slots_of(kind: type) -> tuple[str, ...]:
    """Return the names of slots that hold values; private ones of classes are left alone."""
    found: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        found += [slots] if isinstance(slots, str) else slots
    return tuple(name for name in found if not name.startswith("__"))


def content_of(container: Any) -> Any:
    """Return what is in a container: a dict, a list in its order, or a copy of an array."""
    if isinstance(container, dict):
        return dict(container)
    if isinstance(container, (Slots, Weights)):
        return container.read()
    if isinstance(container, np.ndarray):
        return container.copy()
    if isinstance(container, CellType):
        try:
            return [container.cell_contents]
        except ValueError:
            return [_EMPTY]
    return list(container)


def is_same(one: Any, other: Any) -> bool:
    """Compare contents by identity; values such as tensors have no equality of their own."""
    if isinstance(one, np.ndarray):
        return bool(one.tobytes() == other.tobytes())
    if len(one) != len(other):
        return False
    if isinstance(one, dict):
        return all(map(is_, one, other)) and all(map(is_, one.values(), other.values()))
    return all(map(is_, one, other))


def replaced(content: Any, scratch: Mapping[int, torch.Tensor]) -> Any:
    """Return contents with the tensors of `scratch` in place of those with these identities."""
    if not scratch or isinstance(content, np.ndarray):
        return content
    if isinstance(content, dict):
        return {key: scratch.get(id(value), value) for key, value in content.items()}
    return [scratch.get(id(value), value) for value in content]


def fill(container: Any, content: Any) -> None:
    """Have a container contain what `content_of` returned."""
    if isinstance(container, CellType):
        if content[0] is _EMPTY:
            del container.cell_contents
        else:
            container.cell_contents = content[0]
    elif isinstance(container, Slots | Weights):
        container.fill(content)
    elif isinstance(container, np.ndarray):
        container[...] = content
    elif isinstance(container, list):
        container[:] = content
    else:  # a dict, a set or a deque
        container.clear()
        container.extend(content) if isinstance(container, deque) else container.update(content)
