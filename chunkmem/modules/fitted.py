"""Modules that were fitted with hooks and attributes, and the way back to what they were."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle

_ABSENT = object()
Paused = list[tuple[dict[int, Any], list[int], dict[int, Any]]]
"""Of hooks that are paused: where they were registered, the order of all hooks there, and the hooks."""


class FittedModules:
    """Keeps no module alive."""

    def __init__(self) -> None:
        """Begin with none."""
        self._handles: WeakKeyDictionary[nn.Module, list[RemovableHandle]] = WeakKeyDictionary()
        self._before: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()
        """What modules had as attributes of their own under names that are ours now."""

    def __contains__(self, module: object) -> bool:
        return module in self._handles

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._handles)

    def add(self, module: nn.Module, *handles: RemovableHandle) -> None:
        """Count a module as fitted, with hooks that were registered on it."""
        self._handles.setdefault(module, []).extend(handles)

    def surround(
        self, module: nn.Module, before: Callable[..., Any], after: Callable[..., Any], *, is_first: bool = False
    ) -> None:
        """Have hooks called around a module: `before` with keyword arguments, `after` also where it raises something.

        With `is_first`, `before` comes before the hooks that are there.
        """
        begin = module.register_forward_pre_hook(before, with_kwargs=True, prepend=is_first)
        self.add(module, begin, module.register_forward_hook(after, always_call=True))

    def set(self, module: nn.Module, name: str, value: object) -> None:
        """Give a module an attribute of its own, in place of what its class, or the module, has under that name."""
        self._before.setdefault(module, {}).setdefault(name, vars(module).get(name, _ABSENT))
        vars(module)[name] = value
        self.add(module)

    def strip(self, module: nn.Module) -> None:
        """Take its hooks away from a module, which still counts as fitted."""
        for handle in self._handles.get(module, ()):
            handle.remove()
        if module in self._handles:
            self._handles[module] = []

    def pause(self, module: nn.Module) -> Paused:
        """Take the hooks away that were registered on a module, until `resume` is given what this returns."""
        keys = {handle.id for handle in self._handles[module]}
        paused = []
        for handle in self._handles[module]:
            hooks = handle.hooks_dict_ref()
            if hooks is not None and handle.id in hooks:
                paused.append((hooks, list(hooks), {key: hooks.pop(key) for key in list(hooks) if key in keys}))
        return paused

    def resume(self, paused: Paused) -> None:
        """Have hooks called again, in the order they had; those that others have registered since come after them."""
        for hooks, order, own in paused:
            now = {**hooks, **own}
            hooks.clear()
            hooks.update((key, now[key]) for key in dict.fromkeys((*order, *now)) if key in now)

    def take_out(self, module: nn.Module, attributes: dict[str, Any]) -> None:
        """Take out of the attributes of a module, of which these are a copy, what was set and registered here."""
        _put_back(self._before.get(module, {}), attributes)
        keys = {handle.id for handle in self._handles.get(module, ())}
        for name, value in attributes.items() if keys else ():
            if isinstance(value, OrderedDict) and "_hooks" in name and not keys.isdisjoint(value):
                attributes[name] = OrderedDict((key, hook) for key, hook in value.items() if key not in keys)

    def undo(self, *, besides: Collection[nn.Module] = ()) -> None:
        """Take all hooks and attributes away again, but for those of some modules; no other one is fitted any more."""
        for module in [module for module in self._handles if module not in besides]:
            self.strip(module)
            _put_back(self._before.pop(module, {}), vars(module))
            del self._handles[module]


def _put_back(before: Mapping[str, Any], attributes: dict[str, Any]) -> None:
    for name, value in before.items():
        if value is _ABSENT:
            attributes.pop(name, None)
        else:
            attributes[name] = value


class _ChildHook:
    """What torch calls when a module gets a child: it keeps no manager alive."""

    def __init__(self, owner: object, notice: Callable[[Any, nn.Module, nn.Module], None]) -> None:
        self.owner = weakref.ref(owner)
        self._notice = notice

    def __call__(self, parent: nn.Module, _name: str, child: nn.Module | None) -> None:
        owner = self.owner()
        if owner is not None and child is not None:
            self._notice(owner, parent, child)


def on_children(owner: object, notice: Callable[[Any, nn.Module, nn.Module], None]) -> RemovableHandle:
    """Have something called when any module becomes the child of another one, as long as its owner is alive.

    Args:
        owner: whose life counts; `notice` refers to it weakly, or not at all.
        notice: called with the owner, the parent and the child, in the middle of what registers the child.
    """
    handle = register_module_module_registration_hook(_ChildHook(owner, notice))
    hooks = handle.hooks_dict_ref() or {}
    # Not by a finalizer of the owner: it could run while torch goes through its hooks.
    for key in [key for key, hook in hooks.items() if isinstance(hook, _ChildHook) and hook.owner() is None]:
        hooks.pop(key)
    return handle
