"""The parameters of an optimizer, as the manager that holds them knows them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from operator import is_
from typing import Any, Protocol

import torch

from chunkmem.modules.binding import ManagedParameter
from chunkmem.optim.entries import TensorForm
from chunkmem.optim.host import OptimizerHost


class Optimized(Protocol):
    """An optimizer, as a user has it."""

    param_groups: list[dict[str, Any]]
    max_grad_norm: float
    """0 or less: gradients are not clipped."""


@dataclass(frozen=True)
class Numbering:
    """The parameters of all parameter groups, as these were when somebody last looked."""

    params: list[torch.Tensor] = field(default_factory=list)
    """They themselves, group after group."""
    num_managed: int = 0
    """How many parameters the manager has: an ordinary one may become managed."""
    ends: list[int] = field(default_factory=list)
    """By group: how many parameters it and those before it have."""
    known: list[ManagedParameter] = field(default_factory=list)
    """The managed ones, on whichever rank."""
    numbers: dict[ManagedParameter, int] = field(default_factory=dict)
    """The place of each of those among all."""


class GroupMembers:
    """Looks up those of its parameter groups, which may change between any two calls."""

    def __init__(self, optimizer: Optimized, host: OptimizerHost) -> None:
        """Look up those of an optimizer."""
        self.optimizer = optimizer
        self._host = host
        self._registry = host.registry
        self._numbering = Numbering()

    def groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups as they are now."""
        return self.optimizer.param_groups

    def params(self) -> Iterator[torch.Tensor]:
        """Yield all."""
        return chain.from_iterable([group["params"] for group in self.groups()])

    def numbering(self) -> Numbering:
        """Return the places that they have now: the same object as long as they are the same."""
        ends = list(accumulate(len(group["params"]) for group in self.groups()))
        num_managed, last = len(self._registry.managed), self._numbering
        is_same = num_managed == last.num_managed and ends == last.ends
        if not (is_same and all(map(is_, self.params(), last.params))):
            params = list(self.params())
            found = list(map(self._registry.lookup, params))
            numbers = {managed: number for number, managed in enumerate(found) if managed is not None}
            known = [managed for managed in found if managed is not None]
            self._numbering = Numbering(params, num_managed, ends, known, numbers)
        return self._numbering

    def known(self) -> list[ManagedParameter]:
        """Return the managed ones, on whichever rank."""
        return self.numbering().known

    def owned(self, known: list[ManagedParameter]) -> list[ManagedParameter]:
        """Return those of `known` that this rank owns: over ranks, it has their states."""
        return [managed for managed in known if self._host.owns(managed)] if self._host.is_shared else known

    def is_trainable(self) -> bool:
        """Tell whether a managed one, of any rank, may get a gradient."""
        return any(managed.param.requires_grad for managed in self.known())

    def with_excluded_gradients(self) -> list[list[torch.Tensor]]:
        """Return by parameter group those that no chunk holds and that have a gradient."""
        if not self._registry.excluded:
            return [[] for _ in self.groups()]
        lookup = self._registry.lookup
        return [[p for p in group["params"] if lookup(p) is None and p.grad is not None] for group in self.groups()]

    def pending(
        self, known: list[ManagedParameter], *, besides: Collection[ManagedParameter] = ()
    ) -> list[ManagedParameter]:
        """Return those of `known` that this rank owns and that have a gradient; `besides` have had their update.

        Raises:
            StateError: plain PyTorch would use a gradient that is gone.
        """
        gradients = self._host.updater.gradients
        others = (managed for managed in known if managed not in besides)
        gradients.values.require_known(others, has_new=bool(besides))
        landed = set[ManagedParameter]().union(*gradients.slots.landed.values())
        return [managed for managed in self.owned(known) if managed in landed]

    def by_index(self, saved: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, ManagedParameter]]:
        """Yield the managed ones with the index that each has in the parameter groups of a `state_dict`."""
        for group, own in zip(saved, self.groups(), strict=True):
            for index, param in zip(group["params"], own["params"], strict=True):
                managed = self._registry.lookup(param)
                if managed is not None:
                    yield index, managed

    def name(self, param: torch.Tensor, index: int) -> str:
        """Return what messages call a parameter, also one that is in no model."""
        managed = self._registry.find(param)
        return f"parameter {index}" if managed is None else managed.name


def weight_form(host: OptimizerHost, param: torch.Tensor) -> TensorForm:
    """Return what an update sees of a parameter: float32 where there are master weights, or going to be."""
    managed = host.registry.find(param)
    return TensorForm.of(param) if managed is None else host.updater.weight_form(managed)
