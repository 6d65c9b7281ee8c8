"""What users ask for modules, before these are packed: who fits modules looks here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary


@dataclass(frozen=True)
class ModulePolicy:
    """How a module is managed once it is packed."""

    is_unit: bool = False
    """Ranks exchange its weights as a whole: `manager.unit`."""
    activations: str | None = None
    """The policy for what its calls save: `manager.region`. None: it is no region, unless all blocks are."""
    is_on_host: bool = False
    """It computes on HOST: `manager.on_host`."""
    compile_options: Mapping[str, Any] | None = None
    """Those of `torch.compile`, with which it is still to be compiled: `manager.compile`. None: it is not."""


_NOTHING = ModulePolicy()


class ModulePolicies:
    """Policies by module, which are the same when a model is packed again."""

    def __init__(self) -> None:
        """Begin with none."""
        self._policies: WeakKeyDictionary[object, ModulePolicy] = WeakKeyDictionary()

    def of(self, module: object) -> ModulePolicy:
        """Return what was asked for a module."""
        return self._policies.get(module, _NOTHING)

    def ask(self, module: object, **changes: Any) -> None:
        """Have fields of a module's policy be others."""
        self._policies[module] = replace(self.of(module), **changes)
