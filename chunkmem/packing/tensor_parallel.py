"""Pack models with tensor parallelism by the local parts of their DTensors; see `chunkmem.modules.local_parts`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from chunkmem.data.errors import LayoutError
from chunkmem.modules.binding import ManagedParameter
from chunkmem.modules.local_parts import parts_of, put_together, shown, shown_class, take_apart
from chunkmem.modules.parameter_reads import own_parameters
from chunkmem.modules.registry import ModelRegistry
from chunkmem.ranks.local_parts import LocalPart, is_dtensor
from chunkmem.ranks.ranks import Ranks


class TensorParallel:
    """The DTensors of a manager's models, and the local parts that are managed in their places."""

    def __init__(self, ranks: Ranks, registry: ModelRegistry) -> None:
        """Begin with none; `ranks` have the others' parts, and `registry` gets to know those of this one."""
        self._ranks = ranks
        self._registry = registry
        self._parts: dict[int, tuple[nn.Parameter, LocalPart]] = {}
        """By the identity of a DTensor: its local part."""
        self._wholes: dict[int, nn.Parameter] = {}
        """DTensors, without memory, by the identity of what has their places."""
        self._classes: dict[tuple[type[nn.Module], tuple[str, ...]], type[nn.Module]] = {}
        """Of modules with DTensors, by what they were and the names of these."""

    @contextmanager
    def taking_apart(
        self, roots: Sequence[nn.Module], excluded: Iterable[nn.Module] = (), *, is_released: bool = False
    ) -> Iterator[None]:
        """Surround what packs models whose DTensors were taken apart; where it fails, they are put together again.

        Raises what `take_apart` does, and a `LayoutError` if memory `is_released` as soon as modules are attached: what
        divides their parameters afterwards has no values.
        """
        named = (pair for root in roots for pair in root.named_parameters())
        if is_released and (found := next((name for name, param in named if is_dtensor(param)), None)):
            raise LayoutError(
                f"parameter {found} is a DTensor, and each rank keeps what it owns alone while a model is built: set "
                "release_after_init to true, or build it outside of manager.init() and call manager.wrap(model)"
            )
        try:
            self.take_apart(roots, excluded)
            yield
        except BaseException:
            self.put_together(roots)
            raise

    def take_apart(self, roots: Iterable[nn.Module], excluded: Iterable[nn.Module] = ()) -> None:
        """Have local parts take the places of all DTensors of models, but for those of `excluded` modules.

        Raises:
            LayoutError: one is over other ranks than those of the manager, or no part of a sum; nothing has changed.
        """
        ordinary = own_parameters(excluded)
        for root in roots:
            found = {p: name for name, p in root.named_parameters() if is_dtensor(p) and id(p) not in ordinary}
            for param, name in found.items():
                self._check(param, name)
            for param, name in found.items():
                self._parts[id(param)] = self._local_of(param, name)
            for module in root.modules() if found else ():
                own = {name: self._parts[id(p)] for name, p in module._parameters.items() if p in found}
                if own:
                    key = type(module), tuple(own)
                    if key not in self._classes:  # one for all: torch.compile compiles blocks of one class once
                        self._classes[key] = shown_class(*key)
                    take_apart(module, own, become=self._classes[key])
                    module._register_state_dict_hook(_on_state_dict)
                    module.register_load_state_dict_pre_hook(_before_load)

    def put_together(self, roots: Iterable[nn.Module]) -> None:
        """Undo `take_apart`: the DTensors are there again, with the values that their local parts have now."""
        ended = {}
        for module in (module for root in roots for module in root.modules() if parts_of(module)):
            wholes = {}
            for name in parts_of(module):
                local: Any = module._parameters[name]
                whole: Any = self._wholes[id(local)]
                whole._local_tensor = local.detach()
                whole.requires_grad_(local.requires_grad)
                wholes[name] = ended[id(local)] = whole
            put_together(module, wholes)
        for key, whole in ended.items():  # identities may be others' from now on
            del self._wholes[key], self._parts[id(whole)], self._registry.local_parts[key]
            self._registry.each_ranks.discard(key)

    def count(self, parameters: Iterable[ManagedParameter]) -> None:
        """Note which of the parameters that were packed another rank counts in norms."""
        if self._ranks.parts is None:
            return
        for managed in parameters:
            part = self._registry.local_parts.get(id(managed.param))
            if not (self._ranks.parts.rank == 0 if part is None else part.is_counted):
                self._registry.counted_elsewhere.add(managed)

    def _check(self, param: Any, name: str) -> None:
        ranks = param.device_mesh.mesh.flatten().tolist()
        parts = self._ranks.parts
        own = (
            [self._ranks.name(self._ranks.rank)] if parts is None else [parts.name(rank) for rank in range(parts.size)]
        )
        if param.grad is not None or param._backward_hooks or param._post_accumulate_grad_hooks:
            raise LayoutError(
                f"parameter {name} is a DTensor that has a gradient, or hooks, and chunks have its local part in its "
                "place: call zero_grad() before manager.wrap(), and register hooks after it"
            )
        if param.to_local().is_meta:
            raise LayoutError(
                f"parameter {name} is a DTensor on the meta device, and has no values; materialise the model first "
                "(model.to_empty(device=...), then initialise it)"
            )
        if any(placement.is_partial() for placement in param.placements):
            raise LayoutError(f"parameter {name} is a DTensor of sums that have not been formed; redistribute it first")
        if sorted(ranks) != own and not self._is_over_shards(param, ranks):
            raise LayoutError(
                f"parameter {name} is a DTensor {param.placements} over the ranks {ranks}, and tensor parallelism of "
                f'this manager is over {own}: make it with ChunkManager(config, mesh=mesh), whose dimension "tp" has '
                f'those ranks. Experts may be divided over the ranks that shard a replica, mesh["shard"]: here, '
                f"{self._ranks.row}"
            )

    def _is_over_shards(self, param: Any, ranks: Sequence[int]) -> bool:
        """Tell whether each of the ranks over which a replica is sharded has a part of its own, as of experts."""
        is_divided = all(placement.is_shard() for placement in param.placements)
        return self._ranks.shard.size > 1 and is_divided and sorted(ranks) == self._ranks.row

    def _local_of(self, param: Any, name: str) -> tuple[nn.Parameter, LocalPart]:
        part = LocalPart.of(param, name)
        own = {key: value for key, value in vars(param).items() if key not in ("_local_tensor", "_spec")}
        local = nn.Parameter(param.to_local().detach(), param.requires_grad)
        vars(local).update(own)
        param._local_tensor = torch.empty(part.local_shape, dtype=param.dtype, device="meta")
        self._wholes[id(local)] = param
        self._registry.local_parts[id(local)] = part
        if self._is_over_shards(param, param.device_mesh.mesh.flatten().tolist()):
            self._registry.each_ranks.add(id(local))
        return local, part


def _on_state_dict(module: nn.Module, state: dict[str, Any], prefix: str, _meta: Any) -> None:
    for name, part in parts_of(module).items():
        if prefix + name in state:
            state[prefix + name] = shown(part, state[prefix + name])


def _before_load(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, part in parts_of(module).items():
        if prefix + name in state:
            state[prefix + name] = part.local(state[prefix + name])
