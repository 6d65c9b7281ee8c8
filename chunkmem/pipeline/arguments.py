"""What a block is called with, and called again with where it is recomputed.

All tensors that it is given are inputs of the call, also those in dicts and lists. Blocks that write in place to what
they are given begin with copies where they are going to be recomputed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from chunkmem.data.errors import StateError
from chunkmem.modules.dtype_casts import cast_floats
from chunkmem.pipeline.micro_batches import loss_of
from chunkmem.pipeline.options import PipelineOptions
from chunkmem.runtime.values import Structure, storage_id, tensors_in


def arguments_of(value: Any) -> tuple[Any, ...]:
    """Return what a block is called with that is given a value: a tuple is its arguments."""
    return value if type(value) is tuple else (value,)


def call_with(module: nn.Module, arguments: Structure, *tensors: torch.Tensor) -> Any:
    """Call a module, given all tensors in its arguments in place of those."""
    return module(*arguments.filled(tensors))


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
                if other is not tensor and memory and storage_id(other) == memory:
                    raise StateError(
                        f"{name} writes in place to a tensor of shape {list(tensor.shape)} that shares memory with "
                        f"another one of shape {list(other.shape)} that it is given: give it a copy (.clone())"
                    )
        return bool(written)


class LossItem(nn.Module):
    """What comes after the blocks, and the loss."""

    def __init__(self, options: PipelineOptions, *, casts: bool) -> None:
        super().__init__()
        self.module = options.last
        self.loss_fn = options.loss_fn
        self._casts = casts

    def forward(self, given: Any, target: Any, divisor: float | None) -> Any:
        output = given if self.module is None else self.module(*arguments_of(given))
        if self._casts:
            output = cast_floats(output, torch.float32)
        return output if divisor is None else loss_of(self.loss_fn, output, target, divisor)


class Item(nn.Module):
    """A block, or what comes before or after the blocks, which may be a `LossItem`.

    It is called itself where the block is going to be called again in backward, and may write in place to what it is
    given: then the block is given copies.
    """

    def __init__(self, module: nn.Module, *, name: str) -> None:
        super().__init__()
        self.module = module
        self.name = name
        self._writes: bool | None = None
        """Whether the block writes to its input in place; None: it was not called yet."""

    @property
    def own(self) -> nn.Module | None:
        """What the user has given; None: there is the loss alone."""
        return self.module.module if isinstance(self.module, LossItem) else self.module

    @property
    def unit(self) -> nn.Module:
        """What is exchanged between ranks before it runs."""
        return self.module if self.own is None else self.own

    @property
    def again(self) -> nn.Module:
        """What to call where it is going to be called again in backward."""
        return self.module if self._writes is False else self

    def run(self, arguments: tuple[Any, ...]) -> Any:
        """Call the block, which is not called again."""
        return self._run(arguments, Given(arguments))

    def forward(self, *arguments: Any) -> Any:
        structure, tensors = Structure.of(arguments)
        copies = {id(tensor): tensor.clone() for tensor in tensors}
        return self._run(structure.filled(list(copies.values())), Given(arguments, copies))

    def _run(self, arguments: tuple[Any, ...], given: Given) -> Any:
        result = self.module(*arguments)
        self._writes = given.is_written(self.name) or bool(self._writes)
        return result
