"""Watch modules being built inside `manager.init()`, without changing what torch or they do."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)


class Collector:
    """The modules built while it watches. It holds none of them alive: what is thrown away is not packed."""

    def __init__(self) -> None:
        self._modules: dict[int, weakref.ref[nn.Module]] = {}
        self._excluded: dict[int, weakref.ref[nn.Module]] = {}
        self._not_reduced: dict[int, weakref.ref[nn.Module]] = {}
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
        alive = [module for ref in self._modules.values() if (module := ref()) is not None]
        children = {id(child) for module in alive for child in module.children()}
        return [module for module in alive if id(module) not in children]

    def excluded(self) -> list[nn.Module]:
        """Return the modules that stay ordinary."""
        return [module for ref in self._excluded.values() if (module := ref()) is not None]

    def not_reduced(self) -> list[nn.Module]:
        """Return those of them whose gradients are not averaged over ranks."""
        return [module for ref in self._not_reduced.values() if (module := ref()) is not None]

    def _on_parameter(self, module: nn.Module, _name: str, _param: nn.Parameter | None) -> None:
        self._see(module)
        if self._excluding:
            self._excluded[id(module)] = weakref.ref(module)
            if not self._excluding[-1]:
                self._not_reduced[id(module)] = weakref.ref(module)

    def _on_module(self, module: nn.Module, _name: str, child: nn.Module | None) -> None:
        if child is not None:
            self._see(child)
        self._see(module)

    def _see(self, module: nn.Module) -> None:
        known = self._modules.get(id(module))
        if known is None or known() is not module:  # an id is reused once its module is gone
            self._modules[id(module)] = weakref.ref(module)
