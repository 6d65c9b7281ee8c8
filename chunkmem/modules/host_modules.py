"""Modules that compute on HOST, where their weights are: what they are given goes there, what they return comes back.

Their chunks are on HOST for good, in all roles, and no event tells of them (ADR 32). Of an embedding, DEVICE gets the
rows that a batch looks up:

    DEVICE   ids ---.                          .--> rows        gradient of rows ---.
    HOST            '--> weight[ids] --> rows -'                                    '--> gradient of weight, update
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from chunkmem.data.errors import LayoutError, StateError
from chunkmem.data.module_policy import ModulePolicies
from chunkmem.data.types import Tier
from chunkmem.modules.access import AccessTracker
from chunkmem.modules.fitted import FittedModules
from chunkmem.modules.parameter_reads import NotPicklable, is_managed
from chunkmem.runtime.values import tensors_in

_HOST = torch.device("cpu")
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


class HostModules(NotPicklable):
    """Knows which modules compute on HOST, and takes tensors there and back."""

    def __init__(
        self,
        access: AccessTracker,
        device: torch.device,
        asked: ModulePolicies,
        *,
        every_embedding: bool = False,
        is_one_tier: bool = False,
        always_copies: bool = False,
    ) -> None:
        """Begin with none.

        Args:
            access: knows which modules run.
            device: where all other modules compute.
            asked: what users have asked for modules.
            every_embedding: each nn.Embedding and nn.EmbeddingBag does, as `use_cpu_embedding` asks.
            is_one_tier: DEVICE and HOST are one piece of RAM: modules compute where they would without being marked.
            always_copies: what they return is copied, also if both tiers are RAM, as to an accelerator that is played.
        """
        self._access = access
        self._device = device
        self._every_embedding = every_embedding
        self._is_one_tier = is_one_tier
        self._always_copies = always_copies
        self._asked = asked
        self.fitted = FittedModules()
        """What was fitted so far."""

    def ask(self, module: nn.Module) -> None:
        """Have a module, and all modules below it, compute on HOST once it is packed.

        Raises:
            LayoutError: it has no parameters.
            StateError: it is packed already.
        """
        what = type(module).__name__
        if any(is_managed(below) for below in module.modules()):
            raise StateError(
                f"manager.on_host({what}): it was packed already; say so inside manager.init(), or before "
                "manager.wrap()"
            )
        if next(module.parameters(), None) is None:
            raise LayoutError(
                f"manager.on_host({what}): it has no parameters, so there is nothing to keep off DEVICE; mark the "
                "module that has them"
            )
        self._asked.ask(module, is_on_host=True)

    def among(self, roots: Iterable[nn.Module], excluded: Collection[nn.Module]) -> frozenset[nn.Module]:
        """Return the modules under `roots` that compute on HOST.

        Raises:
            LayoutError: one of them shares a parameter with a module that computes on DEVICE, or is excluded.
        """
        named = {module: name or type(module).__name__ for root in roots for name, module in root.named_modules()}
        meant = [module for module in named if self._asked.of(module).is_on_host]
        if self._every_embedding:
            meant += [module for module in named if isinstance(module, _EMBEDDINGS) and module not in excluded]
        chosen = frozenset() if self._is_one_tier else frozenset(below for one in meant for below in one.modules())
        owners = {id(p): one for one in chosen for p in one._parameters.values() if p is not None}
        for module, name in named.items():
            if module in chosen and module in excluded:
                raise LayoutError(
                    f"module {name} was built in manager.exclude(), and stays ordinary PyTorch on the compute device; "
                    "leave out manager.on_host(), or build it outside of that block"
                )
            for key, param in module._parameters.items() if module not in chosen else ():
                if id(param) in owners:
                    raise LayoutError(
                        f"parameter {key} of module {name}, which computes on DEVICE, is tied to module "
                        f"{named[owners[id(param)]]}, which is to compute on HOST: DEVICE would need all of it in each "
                        "step, and nothing would be gained; untie them, or leave that module on DEVICE (without "
                        "manager.on_host() and use_cpu_embedding)"
                    )
        return chosen

    def fit(self, modules: Iterable[nn.Module]) -> None:
        """Move what modules on HOST are given, and what they return; after they have all their other hooks."""
        for module in modules:
            if module not in self.fitted:
                # Around all others: a call on HOST begins, and ends, with tensors on HOST.
                begin = module.register_forward_pre_hook(self._move_in, with_kwargs=True, prepend=True)
                end = module.register_forward_hook(self._move_out, prepend=True)
                self.fitted.add(module, begin, end)

    def _move_in(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        if all(tensor.device == _HOST for tensor in tensors_in((args, kwargs))):
            return None
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(_HOST), (args, kwargs))

    def _move_out(self, _module: nn.Module, _args: Any, result: Any) -> Any:
        callers = self._access.stack[:-1]
        if callers and callers[-1].tier is Tier.HOST:
            return None
        return tree_map_only(torch.Tensor, self._to_device, result)

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        # Where DEVICE is RAM, too, a view of a weight would be read on DEVICE.
        is_weight = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        copies = self._always_copies or (is_weight and self._device == _HOST)
        return tensor.to(self._device, copy=copies)
