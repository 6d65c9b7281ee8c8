"""Watch modules being built inside `manager.init()`, without changing what torch or they do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)


class Collector:
    """The modules built while it watches. It holds none of them alive: what is thrown away is not packed."""

    def __init__(self) -> None:
        self._modules: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()
        self._excluded: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
        """Those that stay ordinary: are their gradients averaged over ranks?"""
        self._excluding: list[bool] = []
        """For each block around what is built: are gradients averaged over ranks?"""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Collect every module that registers a parameter or a child meanwhile."""
        handles = (
            register_module_parameter_registration_hook(self._on_parameter),
            register_module_module_registration_hook(self._on_module),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def excluding(self, *, reduce: bool) -> Iterator[None]:
        """Leave the modules that register parameters meanwhile ordinary PyTorch; see `ChunkManager.exclude`."""
        self._excluding.append(reduce)
        try:
            yield
        finally:
            self._excluding.pop()

    def roots(self) -> list[nn.Module]:
        """Return the collected modules that are no module's child, in the order they were seen."""
        alive = list(self._modules)
        children = {child for module in alive for child in module.children()}
        return [module for module in alive if module not in children]

    def excluded(self) -> list[nn.Module]:
        """Return the modules that stay ordinary."""
        return list(self._excluded)

    def not_reduced(self) -> list[nn.Module]:
        """Return those of them whose gradients are not averaged over ranks."""
        return [module for module, is_reduced in self._excluded.items() if not is_reduced]

    def _on_parameter(self, module: nn.Module, _name: str, _param: nn.Parameter | None) -> None:
        self._modules.setdefault(module)
        if self._excluding:
            self._excluded[module] = self._excluding[-1] and self._excluded.get(module, True)

    def _on_module(self, module: nn.Module, _name: str, child: nn.Module | None) -> None:
        for seen in (module,) if child is None else (child, module):
            self._modules.setdefault(seen)
