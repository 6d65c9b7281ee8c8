"""What a block is called with, and called again with where it is recomputed.

All tensors that it is given are inputs of the call, also those in dicts and lists. Blocks that write in place to what
they are given begin with copies where they are going to be recomputed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from chunkmem.errors import StateError
from chunkmem.nn.values import storage_id, tensors_in


def arguments_of(value: Any) -> tuple[Any, ...]:
    """Return what a block is called with that is given a value: a tuple is its arguments."""
    return value if type(value) is tuple else (value,)


@dataclass(frozen=True, slots=True)
class _Slot:
    """Stands for a tensor in arguments."""

    index: int


class OfTensors(nn.Module):
    """Calls a module, given all tensors in its arguments in place of those."""

    def __init__(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        """Call `module` as with `arguments`. The same tensor twice is given once."""
        super().__init__()
        self.module = module
        leaves, self._spec = tree_flatten(arguments)
        known = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
        slots = {key: _Slot(index) for index, key in enumerate(known)}
        self._leaves = [slots.get(id(leaf), leaf) for leaf in leaves]
        self._tensors = tuple(known.values())

    def take_tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors, which are not kept."""
        tensors, self._tensors = self._tensors, ()
        return tensors

    def forward(self, *tensors: torch.Tensor) -> Any:
        leaves = [tensors[leaf.index] if isinstance(leaf, _Slot) else leaf for leaf in self._leaves]
        return self.module(*tree_unflatten(leaves, self._spec))


class Given:
    """What a block is given, as it was before the call."""

    def __init__(self, arguments: tuple[Any, ...], copies: Mapping[int, torch.Tensor] | None = None) -> None:
        """Take note of the versions of all tensors, or of the copies that the block is given of them, by identity."""
        given = {id(tensor): tensor for tensor in tensors_in(arguments) if not tensor.is_inference()}
        watched = [(tensor, tensor if copies is None else copies.get(key, tensor)) for key, tensor in given.items()]
        self._versions = [(tensor, each, each._version) for tensor, each in watched]

    def is_written(self, name: str) -> bool:
        """Tell whether the block of that name, which has been called, has written to any of them.

        Raises:
            StateError: another one shares memory with it. It is a tensor of its own here, so that autograd does not see
                that it has changed, too.
        """
        written = [tensor for tensor, watched, version in self._versions if watched._version != version]
        for tensor in written:
            memory = storage_id(tensor)
            for other, *_ in self._versions:
                if other is not tensor and memory is not None and storage_id(other) == memory:
                    raise StateError(
                        f"{name} writes in place to a tensor of shape {list(tensor.shape)} that shares memory with "
                        f"another one of shape {list(other.shape)} that it is given: give it a copy (.clone())"
                    )
        return bool(written)


class OnCopies(nn.Module):
    """Calls a block with copies of what it is given, unless it turned out that the block does not write to that."""

    def __init__(self, module: nn.Module, *, name: str) -> None:
        super().__init__()
        self.module = module
        self.name = name
        self.writes: bool | None = None
        """Whether the block has written to what it was given; None: it was not called yet."""

    @property
    def again(self) -> nn.Module:
        """What to call where it is going to be called again in backward."""
        return self.module if self.writes is False else self

    def forward(self, *arguments: Any) -> Any:
        copies: dict[int, torch.Tensor] = {}
        copied = tree_map_only(torch.Tensor, lambda tensor: _copy(tensor, copies), arguments)
        given = Given(arguments, copies)
        result = self.module(*copied)
        self.writes = given.is_written(self.name) or bool(self.writes)
        return result


def _copy(tensor: torch.Tensor, known: dict[int, torch.Tensor]) -> torch.Tensor:
    """Copy a tensor; the same one twice is one copy."""
    if id(tensor) not in known:
        known[id(tensor)] = tensor.clone()
    return known[id(tensor)]
