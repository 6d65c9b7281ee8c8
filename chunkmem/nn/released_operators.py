"""What operators do with weights that one rank holds while several build a model: [Note: Holders]."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from chunkmem.errors import StateError
from chunkmem.nn.guard import only_makes_a_view
from chunkmem.nn.released_memory import Released, ReleasedMemory

_SHAPE_ONLY = frozenset(
    f"aten::{name}"
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "is_same_size", "is_pinned"),
    )
)
"""Operators that use no value of the tensor they are given."""
_OVERWRITES = frozenset(
    f"aten::{name}"
    for name in (
        *("zero_", "fill_", "copy_", "normal_", "uniform_", "random_", "bernoulli_"),
        *("exponential_", "log_normal_", "cauchy_", "geometric_"),
    )
)
"""Operators that write every element of their first argument, and read none of it."""
_HAND_OUT_MEMORY = frozenset(
    (
        *(torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__, torch.Tensor.data_ptr),
        *(torch.Tensor.untyped_storage, torch.Tensor._typed_storage, torch.Tensor.storage),
        torch.Tensor.share_memory_,
    )
)
"""Functions after which memory is used by what is no operator."""
_READ_PAST_OPERATORS = frozenset((torch.Tensor.tolist, torch.Tensor.__deepcopy__))


class ReleasedGuard(TorchDispatchMode):
    """Sees to it that operators get the content that they need of released memory."""

    supports_higher_order_operators = True

    def __init__(self, memory: ReleasedMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator, as all ranks do, with the content that it needs of what it is given."""
        given = self._in((*args, *kwargs.values()))
        closed = [each for each in given if not each.is_open]
        if not closed or func._schema.name in _SHAPE_ONLY:
            return func(*args, **kwargs)
        if only_makes_a_view(func):  # which touches nothing, but has to stay within its storage
            with self._memory.scratch(closed, is_zero=False):
                return func(*args, **kwargs)
        overwritten = self._overwritten(func, args, kwargs)
        if overwritten is None and len(given) == 1 and self._stays_inside(func, args, kwargs):
            self._memory.close()
            with self._memory.scratch(given, is_zero=True):
                return func(*args, **kwargs)
        self._memory.open(given, overwritten=overwritten)
        try:
            return func(*args, **kwargs)
        except BaseException:
            self._memory.close()
            raise

    def _in(self, values: Sequence[Any]) -> list[Released]:
        """Return what arguments of an operator are in, each once."""
        found = {id(each): each for tensor in _tensors(values) if (each := self._memory.find(tensor)) is not None}
        return list(found.values())

    def _stays_inside(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Tell whether all that an operator makes is written to released memory."""
        returns = func._schema.returns
        if not func._schema.is_mutable or any(r.alias_info is None or not r.alias_info.is_write for r in returns):
            return False
        return all(self._memory.find(tensor) is not None for tensor in _tensors(_written(func, args, kwargs)))

    def _overwritten(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Released | None:
        """Return what an operator writes all of without reading any of it."""
        if func._schema.name not in _OVERWRITES or not isinstance(args[0], torch.Tensor):
            return None
        target = self._memory.find(args[0])
        if target is None or args[0].nbytes != target.nbytes or not is_non_overlapping_and_dense_or_false(args[0]):
            return None
        return None if target in self._in((*args[1:], *kwargs.values())) else target


class EscapeGuard(TorchFunctionMode):
    """Sees to functions that use released memory without an operator."""

    def __init__(self, memory: ReleasedMemory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HAND_OUT_MEMORY or func in _READ_PAST_OPERATORS:
            released = self._memory.find(args[0])
            if released is not None and func in _HAND_OUT_MEMORY:
                raise StateError(
                    f"{func.__name__} of {released.weight.name}, {tuple(args[0].shape)}, hands out memory that one "
                    "rank only holds since its module was attached; use a clone(), or set release_after_init to true"
                )
            if released is not None:
                self._memory.open([released])
        return func(*args, **(kwargs or {}))


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that an operator writes to."""
    return [
        args[position] if position < len(args) else kwargs.get(argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, torch.Tensor):
                yield tensor
