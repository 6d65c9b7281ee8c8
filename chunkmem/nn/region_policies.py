"""Which modules are regions, and the policy of each."""

from __future__ import annotations

from collections.abc import Collection
from weakref import WeakKeyDictionary

from torch import nn


class RegionPolicies:
    """Policies by module, from when they are asked for to when a model is packed."""

    def __init__(self, policy: str | None) -> None:
        """Have all blocks be regions of a policy; None: only marked modules."""
        self.default = policy
        self.by_name: dict[str, set[str]] = {}
        """Of the regions of models that were packed; two models may have regions of one name."""
        self._marked: list[tuple[nn.Module, str]] = []
        self._ever_marked: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()

    def mark(self, module: nn.Module, policy: str) -> None:
        """Make a module a region of a policy when it is packed."""
        self._marked.append((module, policy))
        self._ever_marked[module] = policy

    def mark_as(self, other: RegionPolicies) -> None:
        """Mark what was marked there."""
        for module, policy in tuple(other._ever_marked.items()):
            self.mark(module, policy)

    def of(self, root: nn.Module) -> dict[nn.Module, str]:
        """Return the policies of the regions under `root`, a model that was packed."""
        found, self._marked = dict(self._marked), []
        if self.default is not None:
            found = dict.fromkeys(_regions_in(root, found) or root.children(), self.default) | found
        found |= dict.fromkeys(filter(_writes_to_input, found), "keep")
        for name, module in root.named_modules():
            if module in found:
                self.by_name.setdefault(name or type(module).__name__, set()).add(found[module])
        return found


def _regions_in(module: nn.Module, marked: Collection[nn.Module]) -> list[nn.Module]:
    """Return the outermost children of lists, and marked modules."""
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    found: list[nn.Module] = []
    for child in module.children():
        found += [child] if is_list or child in marked else _regions_in(child, marked)
    return found


def _writes_to_input(module: nn.Module) -> bool:
    """Tell whether a module is an activation in place, or begins with one: what it saves is its output, which is kept.

    To recompute it, its input would have to be copied.
    """
    if isinstance(module, nn.Sequential):
        return len(module) > 0 and _writes_to_input(module[0])
    return getattr(module, "inplace", False) is True and next(module.children(), None) is None
