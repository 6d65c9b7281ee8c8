"""Casts where tensors go from a module to another that computes in another dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from chunkmem.activations.saved_tensors import in_backward
from chunkmem.modules.compiled import CompiledCall
from chunkmem.modules.fitted import FittedModules
from chunkmem.modules.parameter_reads import NotPicklable


@dataclass(eq=False, slots=True)
class _ModuleCasts:
    """One module."""

    inside: torch.dtype
    """What it computes in."""
    outside: torch.dtype
    """What it returns to a caller that is not part of a model."""
    is_root: bool
    is_shareable: bool
    """It has no parameters, nor has what is in it: models that are not managed may have it, too."""
    seen: torch.dtype | None = None
    """What it returned the last time, recomputations left out."""
    is_foreign: bool = False
    """One of those called it the last time, recomputations left out."""


class DtypeCasts(NotPicklable):
    """Fits modules with casts, and knows which of them are running.

    What is returned is cast to the dtype of the caller, and who that is shows only in the call: a model calls modules
    of its children (`self.encoder.embed(x)`), and two parents share one. So the calls under way are a stack. A
    recomputation in backward may begin in the middle of it (`checkpoint(self._attend, x)`), with no caller to be seen:
    then it is the dtype of the module's last call before backward. Of a module without parameters, that may have been
    one by a model that is not managed, for which nothing is cast.

    Inside of a compiled module the caller is taken to be the module's parent, so that the compiler sees only casts.
    """

    def __init__(self, *, is_outermost: Callable[[nn.Module], bool] = lambda module: False) -> None:
        """Make borders; `is_outermost` tells of a module that begins whether what seems to run was interrupted."""
        self._is_outermost = is_outermost
        self.fitted = FittedModules()
        """What was fitted so far."""
        self._of: WeakKeyDictionary[nn.Module, _ModuleCasts] = WeakKeyDictionary()
        self._running: list[tuple[_ModuleCasts, torch.dtype]] = []
        """Calls under way, each with the dtype it returns."""

    def fit(self, root: nn.Module, homes: Mapping[nn.Module, torch.dtype], dtype: torch.dtype) -> None:
        """Cast around `root`, around modules that do not compute in `dtype`, the low one, and around all below these.

        `homes` says what modules compute in; those that are not there compute in what they are given.
        """
        for module in root.modules():
            if homes.get(module, dtype) is not dtype:
                for below in module.modules():
                    if below in homes and below is not root:
                        self._fit(below, homes[below], dtype)
        self._fit(root, homes.get(root, dtype), torch.float32, is_root=True)

    def _fit(self, module: nn.Module, inside: torch.dtype, outside: torch.dtype, *, is_root: bool = False) -> None:
        if module in self.fitted:
            return
        is_shareable = not is_root and next(module.parameters(), None) is None
        casts = self._of[module] = _ModuleCasts(inside, outside, is_root, is_shareable)
        self.fitted.surround(module, partial(self._cast_in, casts), partial(self._cast_out, casts))

    def enclose(self, unit: nn.Module, call: CompiledCall) -> None:
        """Cast around a compiled call in place of its module, and inside of it by hooks that a compiler can follow."""
        casts = self._of.get(unit)
        for child in unit.children():
            self._make_static(child, None if casts is None else casts.inside)
        if casts is not None:
            self.fitted.strip(unit)
            call.surround(partial(self._cast_in, casts), partial(self._cast_out, casts))

    def _make_static(self, module: nn.Module, outside: torch.dtype | None) -> None:
        """Cast around a module, and those below it, as if its parent called it.

        Args:
            module: in a compiled one.
            outside: what its parent computes in; None: what models do.
        """
        casts = self._of.get(module)
        if casts is not None:
            self.fitted.strip(module)
            back = casts.outside if outside is None else outside
            begin = module.register_forward_pre_hook(partial(_cast_arguments, casts.inside), with_kwargs=True)
            end = module.register_forward_hook(partial(_cast_result, back))
            self.fitted.add(module, begin, end)
            outside = casts.inside
        for child in module.children():
            self._make_static(child, outside)

    def _cast_in(self, casts: _ModuleCasts, module: nn.Module, args: Any, kwargs: Any) -> Any:
        recomputing, may_begin = in_backward(), casts.is_root or casts.is_shareable
        if may_begin and self._running and not recomputing and self._is_outermost(module):
            self._running.clear()
        if casts.is_shareable and not self._running:  # a model that is not managed calls, or backward recomputes
            casts.is_foreign = casts.is_foreign or not recomputing
            if casts.is_foreign:
                return None
        casts.is_foreign = False
        if self._running:
            outside = self._running[-1][0].inside
        else:
            outside = casts.seen or casts.outside if recomputing else casts.outside
        if not recomputing:
            casts.seen = outside
        self._running.append((casts, outside))
        return _cast_arguments(casts.inside, module, args, kwargs)

    def _cast_out(self, casts: _ModuleCasts, _module: nn.Module, _args: Any, result: Any) -> Any:
        """End a call, and those in it that were interrupted; nothing if it did not get as far as `_cast_in`."""
        if not any(running is casts for running, _ in self._running):
            return None
        while True:
            running, outside = self._running.pop()
            if running is casts:
                return cast_floats(result, outside)


def _cast_arguments(dtype: torch.dtype, _module: nn.Module, args: Any, kwargs: Any) -> Any:
    return tuple(cast_floats(arg, dtype) for arg in args), {key: cast_floats(arg, dtype) for key, arg in kwargs.items()}


def _cast_result(dtype: torch.dtype, _module: nn.Module, _args: Any, result: Any) -> Any:
    return cast_floats(result, dtype)


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floats in a value. What has none to be cast is returned itself: it may be a list to put outputs into."""
    if isinstance(value, torch.Tensor):
        return _cast_tensor(value, dtype)
    leaves, spec = tree_flatten(value)
    cast = [_cast_tensor(leaf, dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return value if all(new is old for new, old in zip(cast, leaves, strict=True)) else tree_unflatten(cast, spec)


def _cast_tensor(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # What the model itself has made wider than float32 stays so between modules in float32, as in plain PyTorch.
    is_wider = dtype is torch.float32 and tensor.dtype is torch.float64
    return tensor.to(dtype) if tensor.is_floating_point() and not is_wider else tensor
