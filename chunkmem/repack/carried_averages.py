"""Averages of weights that are carried over when the parts of a manager are made again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from chunkmem.assembly import Runtime
from chunkmem.comm.ranks import Ranks
from chunkmem.nn.binding import ManagedParameter
from chunkmem.optim.rule import StateSpec
from chunkmem.types import Role


class CarriedAverages:
    """Each `chunkmem.EMA` of a manager; what is in chunks moves as optimizer states do."""

    def __init__(
        self, before: Runtime, ranks: Ranks, *, numbers: Mapping[int, int], of_all: Callable[[Any, str], list[Any]]
    ) -> None:
        """Find out what all ranks average; give back chunks of averages that nobody has any more.

        Args:
            before: the parts that have them so far.
            ranks: those that have one replica.
            numbers: by the identity of a Parameter, its number on all ranks.
            of_all: returns what each rank passes.
        """
        self._numbers = numbers
        self._averages = before.averages
        roles = [ema.role for ema in self._averages]
        ranks.agree("the averages of a manager", ", ".join(roles))
        store = before.memory.store
        for chunk in [chunk for chunk in store.chunks.values() if chunk.is_kept and chunk.id.role not in roles]:
            store.remove(chunk)
        self.specs = {role: StateSpec(role) for role in roles}
        self._ordinary = [dict(ema.ordinary) for ema in self._averages]
        """By parameter that no chunk holds: its average, as far as this rank has it."""
        self._everywhere: list[set[int]] = []
        """Numbers of the parameters that any rank averages."""
        for ema, ordinary in zip(self._averages, self._ordinary, strict=True):
            own = [numbers[id(param)] for param in (*(managed.param for managed in ema.own), *ordinary)]
            self._everywhere.append({number for found in of_all(own, "what is averaged") for number in found})

    def enter(self, states: dict[ManagedParameter, tuple[Role, ...]]) -> None:
        """Add the roles of averages to the states that parameters of this rank have."""
        for ema in self._averages:
            states.update({managed: (*states.get(managed, ()), ema.role) for managed in ema.own})

    def ordinary(self) -> list[dict[int, torch.Tensor]]:
        """Return averages of parameters that no chunk holds, by number, on the CPU."""
        return [{self._numbers[id(param)]: value.cpu() for param, value in own.items()} for own in self._ordinary]

    def take(self, found: Sequence[Mapping[int, torch.Tensor]], params: Sequence[torch.Tensor]) -> None:
        """Take in what `ordinary` has returned on another rank; `params` are those of the model by number."""
        for own, values in zip(self._ordinary, found, strict=False):
            for number, value in values.items():
                own.setdefault(params[number], value)

    def move_to(self, after: Runtime, params: Sequence[torch.Tensor]) -> None:
        """Have chunks in other parts, without content so far."""
        for ema, numbers, ordinary in zip(self._averages, self._everywhere, self._ordinary, strict=True):
            ema.move_to(after, [params[number] for number in sorted(numbers)], ordinary)

    def come_home(self) -> None:
        """All content has arrived."""
        for ema in self._averages:
            ema.come_home()


def is_swapped(runtime: Runtime) -> bool:
    """Tell whether averages are the weights now."""
    return any(ema.is_swapped for ema in runtime.averages)
