"""`copy.deepcopy` of managed modules: ordinary modules on HOST, with the weights that there are now.

Averages of weights, frozen reference models and quantisers begin with such a copy. What modules were fitted with is
left out of it, and its Parameters are ordinary ones, in the dtypes that the model was built in.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from chunkmem.data.errors import StateError
from chunkmem.modules.binding import ManagedParameter
from chunkmem.modules.fitted import FittedModules
from chunkmem.modules.local_parts import leave_out, ordinary_class
from chunkmem.modules.registry import ModelRegistry
from chunkmem.runtime.device import runtime_mode

_HOST = torch.device("cpu")


class ModelCopies:
    """Has `copy.deepcopy` make ordinary modules of managed ones."""

    def __init__(
        self,
        registry: ModelRegistry,
        *,
        read: Callable[[ManagedParameter], torch.Tensor],
        reading: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Make copies of what is in `registry`.

        Args:
            registry: of models.
            read: returns a CPU copy of a parameter's newest values.
            reading: surrounds the reading of all values, by all ranks.
        """
        self._registry = registry
        self._read = read
        self.fitted = FittedModules()
        """What was fitted so far."""
        self._parts: Sequence[FittedModules] = ()
        self._reading = reading

    def know(self, parts: Sequence[FittedModules]) -> None:
        """`parts` are all that modules were fitted with."""
        self._parts = parts

    def fit(self, root: nn.Module) -> None:
        """Have copies of every module under `root` be ordinary."""
        for module in root.modules():
            if module not in self.fitted:
                self.fitted.set(module, "__deepcopy__", partial(_copied, weakref.ref(self), module))
                if next(module.parameters(), None) is None:  # models that are not managed may have it, and be saved
                    self.fitted.set(module, "__reduce_ex__", partial(_reduced, weakref.ref(self), module))

    def ordinary(self, managed: ManagedParameter) -> torch.Tensor:
        """Return a parameter's values on HOST, laid out as it was built."""
        value = self._read(managed)
        if value.stride() == managed.stride:
            return value
        with runtime_mode():
            return torch.empty_strided(managed.shape, managed.stride, dtype=value.dtype).copy_(value)

    def copy(self, module: nn.Module, memo: dict[int, Any]) -> Any:
        """Return an ordinary copy; `memo` is that of `copy.deepcopy`.

        Raises:
            StateError: another pipeline stage has one of its parameters, or the manager is closed.
        """
        self._fill(module, memo)
        with self._as_ordinary(module):
            return copy.deepcopy(module, memo)

    def attributes(self, module: nn.Module) -> dict[str, Any]:
        """Return what a module has but for what it was fitted with."""
        own = dict(vars(module))
        own["_parameters"] = dict(module._parameters)
        leave_out(own)
        for part in self._parts:
            part.take_out(module, own)
        return own

    def _fill(self, module: nn.Module, memo: dict[int, Any]) -> None:
        """Put ordinary tensors into `memo` for what is in a module; a part of what is being copied has them there."""
        params = {id(param): param for param in module.parameters() if id(param) not in memo}
        if away := [name for name, param in module.named_parameters() if self._registry.is_of_other_stage(param)]:
            raise StateError(
                f"copy.deepcopy() of a model over pipeline stages: another one has parameter {away[0]}; build the "
                "model again, and load manager.state_dict()"
            )
        managed = {key: found for key, param in params.items() if (found := self._registry.find(param)) is not None}
        if managed:
            with self._reading():
                for key, found in managed.items():
                    copied, part = found.like(self.ordinary(found)), self._registry.local_parts.get(key)
                    with torch.no_grad():
                        memo[key] = copied if part is None else nn.Parameter(part.whole(copied), found.requires_grad)
        for tensor in (*params.values(), *module.buffers()):
            if id(tensor) not in memo and tensor.device != _HOST and not tensor.is_meta and tensor.is_leaf:
                value = tensor.detach().to(_HOST)
                is_parameter = isinstance(tensor, nn.Parameter)
                memo[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if is_parameter else value

    @contextmanager
    def _as_ordinary(self, module: nn.Module) -> Iterator[None]:
        fitted, shown_class = vars(module), type(module)
        ordinary = ordinary_class(module)
        object.__setattr__(module, "__dict__", self.attributes(module))
        module.__class__ = ordinary
        try:
            yield
        finally:
            object.__setattr__(module, "__dict__", fitted)
            module.__class__ = shown_class


def _copied(made: weakref.ref[ModelCopies], module: nn.Module, memo: dict[int, Any]) -> Any:
    """Stand in for `__deepcopy__`, which modules have not."""
    copies = made()
    if copies is None:
        raise StateError("copy.deepcopy() of a module whose manager is gone: keep the manager as long as its models")
    return copies.copy(module, memo)


def _reduced(made: weakref.ref[ModelCopies], module: nn.Module, protocol: Any) -> Any:
    """Stand in for `__reduce_ex__` of a module without parameters, by which it is pickled."""
    copies = made()
    ordinary = type(module).__new__(type(module))
    object.__setattr__(ordinary, "__dict__", vars(module) if copies is None else copies.attributes(module))
    return type(module).__reduce_ex__(ordinary, protocol)
