"""Policies for activations, where ranks do different things inside of a unit, or have no batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.hostile.models import WIDTH, Net
from tests.hostile_ranks.batches import train_with
from tests.hostile_ranks.harness import EQUAL_BUT_FOR_ORDER, User, script
from tests.hostile_ranks.models import RoutedInside

POLICIES = ("recompute", "auto", "offload")


class Expert(nn.Module):
    """Ends with an operator that has saved something: it is recomputed before a gradient has come to its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(x))


class Choosing(nn.Module):
    """Takes one of two experts, both or none, by values; to be a unit, in which the experts are regions."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(Expert() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.gate(x))
        number = int(x.detach().sum().abs() * 1000)
        for index, expert in enumerate(self.experts):
            if number >> index & 1:
                x = x + expert(x)
        return x


class TwoLayers(nn.Module):
    def __init__(self, unit: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = unit(Choosing()), unit(Choosing())
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)))


def under_each_policy(run: Callable[[User], Any], model: Callable[[], nn.Module] | None) -> None:
    """Register a script for each policy, named after it."""
    for policy in POLICIES:

        def named(user: User) -> None:
            run(user)

        named.__name__, named.__module__ = f"{run.__name__}_{policy}", run.__module__
        script(model=model, expect=EQUAL_BUT_FOR_ORDER, activations={"policy": policy})(named)


def layers_as_regions(user: User) -> None:
    train_with(user, [1, 1, 2, 1, 1, 1])


def experts_as_regions(user: User) -> None:
    user.build(lambda: TwoLayers(user.unit))
    train_with(user, [1] * 8)


def no_batch_early(user: User) -> None:
    train_with(user, [0, 1, 1, 1, 1, 1] if user.rank == 0 else [1] * 6)


def no_batch_in_turn(user: User) -> None:
    train_with(user, [int(step % user.size != user.rank) for step in range(7)])


def no_batch_at_all(user: User) -> None:
    """One rank never sees a region, nor that there is a choice to make."""
    train_with(user, [int(user.rank > 0)] * 5)


under_each_policy(layers_as_regions, RoutedInside)
under_each_policy(experts_as_regions, None)
under_each_policy(no_batch_early, Net)
under_each_policy(no_batch_in_turn, Net)
under_each_policy(no_batch_at_all, Net)
