"""Which modules are regions, and the policy of each."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from chunkmem.data.module_policy import ModulePolicies


class RegionPolicies:
    """Which modules of a model are regions."""

    def __init__(self, policy: str | None, asked: ModulePolicies) -> None:
        """Have all blocks be regions of a policy; None: only those that users have asked it for."""
        self.default = policy
        self._asked = asked
        self.by_name: dict[str, set[str]] = {}
        """Of the regions of models that were packed; two models may have regions of one name."""

    def of(self, root: nn.Module) -> dict[nn.Module, str]:
        """Return the policies of the regions under `root`, a model that was packed."""
        asked = ((module, self._asked.of(module).activations) for module in root.modules())
        found = {module: policy for module, policy in asked if policy is not None}
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
