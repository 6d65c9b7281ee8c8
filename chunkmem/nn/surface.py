"""What a managed module answers when asked for its state, or to be moved or converted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from chunkmem.errors import StateError
from chunkmem.nn.binding import ManagedParameter

Gather = Callable[[list[ManagedParameter]], AbstractContextManager[None]]
"""Makes parameters present and writable for the time of a `with` block."""


class ModuleSurface:
    """Serves `state_dict` and `load_state_dict` of managed modules, and refuses `.to()` and its kin."""

    def __init__(self, *, export: Callable[[ManagedParameter], torch.Tensor], gather: Gather) -> None:
        """Make a surface; `export` returns a CPU copy of a parameter's newest values."""
        self._export = export
        self._gather = gather
        self._loading: dict[nn.Module, AbstractContextManager[None]] = {}
        self.exporting = True
        """Whether `state_dict` copies values; off where only keys and shapes are wanted."""

    def fit(self, root: nn.Module, owned: Mapping[nn.Module, Mapping[str, ManagedParameter]]) -> None:
        """Fit every module under `root`; `owned` holds the managed parameters of those that have some."""
        for module, own in owned.items():
            module._register_state_dict_hook(partial(self._on_state_dict, own))
            module.register_load_state_dict_pre_hook(partial(self._before_load, own))
            module.register_load_state_dict_post_hook(self._after_load)
            if isinstance(module, nn.RNNBase):
                # It would re-point the weights at a buffer of cuDNN's own.
                vars(module)["flatten_parameters"] = lambda: None
        for module in root.modules():
            vars(module)["_apply"] = partial(_apply_to_buffers, module, dict(owned.get(module, {})))

    def _on_state_dict(
        self, own: Mapping[str, ManagedParameter], _module: nn.Module, state: dict[str, Any], prefix: str, _meta: Any
    ) -> None:
        if self.exporting:
            for name, managed in own.items():
                if prefix + name in state:
                    state[prefix + name] = self._export(managed)

    def _before_load(self, own: Mapping[str, ManagedParameter], module: nn.Module, *_args: Any) -> None:
        present = self._loading[module] = self._gather(list(own.values()))
        present.__enter__()

    def _after_load(self, module: nn.Module, _incompatible: Any) -> None:
        self._loading.pop(module).__exit__(None, None, None)


def _apply_to_buffers(
    module: nn.Module,
    own: Mapping[str, ManagedParameter],
    fn: Callable[[torch.Tensor], torch.Tensor],
    recurse: bool = True,
) -> nn.Module:
    """Stand in for `nn.Module._apply`, which `.to()`, `.half()`, `.cuda()` and `.share_memory()` go through.

    Raises:
        StateError: `fn` would move or convert a managed parameter; nothing has been changed.
    """
    inside = {id(m.param): m for child in module.modules() for m in _owned_by(child)}
    for managed in inside.values():
        probe = torch.empty(1, dtype=managed.param.dtype, device=managed.bound.device)
        result = fn(probe)
        if result.dtype != probe.dtype or result.device != probe.device or result.is_shared() != _shareable(probe):
            raise StateError(
                f"parameter {managed.name} is {probe.dtype} on {probe.device} and chunkmem decides where it lives; "
                f"moving or converting it to {result.dtype} on {result.device} is refused. Choose the dtype before "
                "manager.wrap() or inside manager.init()"
            )

    def keep_managed(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if id(tensor) in inside else fn(tensor)

    return type(module)._apply(module, keep_managed, recurse)  # type: ignore[no-any-return]


def _owned_by(module: nn.Module) -> list[ManagedParameter]:
    stand_in = vars(module).get("_apply")
    return list(stand_in.args[1].values()) if isinstance(stand_in, partial) else []


def _shareable(probe: torch.Tensor) -> bool:
    return probe.device.type == "cuda"
