"""What modules are given and return: hidden outputs, side effects, hooks, odd inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.hostile.harness import User, script
from tests.hostile.models import WIDTH, LanguageModel


class Reads(nn.Module):
    """Its own weight, used directly: only its outputs tell when backward comes to it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def compute(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ F.softplus(self.weight) + x @ self.weight.t())


class Body(nn.Module):
    """A few modules of a kind between a stem and a head; `visit` does what the script is about."""

    def __init__(self, kind: Callable[[], nn.Module], visit: Callable[[nn.Module, Tensor], Tensor], n: int = 3) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.layers = nn.ModuleList(kind() for _ in range(n))
        self.visit = visit

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = self.visit(layer, x)
        return self.head(x)


class InAClosure(Reads):
    def forward(self, x: Tensor) -> Callable[[], Tensor]:
        out = self.compute(x)
        return lambda: out


@script(model=lambda: Body(InAClosure, lambda layer, x: layer(x)()))
def output_in_a_closure(user: User) -> None:
    user.train(0, 1, 2)


class Lazily(Reads):
    def forward(self, x: Tensor) -> Callable[[], Tensor]:
        return lambda: self.compute(x)


@script(model=lambda: Body(Lazily, lambda layer, x: layer(x)()))
def computed_after_the_module_has_returned(user: User) -> None:
    user.train(0, 1, 2)


@dataclass
class Box:
    content: Any
    rest: dict[str, Any] = field(default_factory=dict)


class ThreeDeep(Reads):
    def forward(self, x: Tensor) -> Box:
        return Box([Box({"value": Box(self.compute(x))})])


@script(model=lambda: Body(ThreeDeep, lambda layer, x: layer(x).content[0].content["value"].content))
def output_in_objects_three_deep(user: User) -> None:
    user.train(0, 1, 2)


class Generates(Reads):
    def forward(self, x: Tensor) -> Iterator[Tensor]:
        for row in x:
            yield self.compute(row)


@script(model=lambda: Body(Generates, lambda layer, x: torch.stack(list(layer(x)))))
def generator_as_an_output(user: User) -> None:
    user.train(0, 1, 2)


class TakesAGenerator(Reads):
    def forward(self, rows: Iterator[Tensor]) -> Tensor:
        return torch.stack([self.compute(row) for row in rows])


@script(model=lambda: Body(TakesAGenerator, lambda layer, x: layer(row for row in x)))
def generator_as_an_input(user: User) -> None:
    user.train(0, 1, 2)


class Appends(Reads):
    """Its visible output does not depend on the weight; what it appends does."""

    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        seen.append(self.compute(x))
        return x * 2


@script(model=lambda: nn.ModuleList([*(Appends() for _ in range(3)), nn.Linear(WIDTH, 4)]))
def output_appended_to_a_list_of_the_caller(user: User) -> None:
    for seed in range(3):
        seen: list[Tensor] = []
        x = user.batch(seed)
        for layer in user.model[:-1]:
            x = layer(x, seen)
        loss = user.model[-1](x).square().mean() + sum(t.square().mean() for t in seen)
        user.backward(loss)
        user.update()
        user.record(loss.item())


class Penalised(Reads):
    """Keeps a penalty as an attribute, for the loss to collect."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.compute(x)
        self.penalty = out.abs().mean() + self.weight.square().sum() * 1e-3
        return out


@script(model=lambda: Body(Penalised, lambda layer, x: layer(x)))
def penalties_collected_from_attributes(user: User) -> None:
    for seed in range(3):
        loss = user.loss(seed) + sum(layer.penalty for layer in user.model.layers)
        user.backward(loss)
        user.update()
        user.record(loss.item())


class ReturnsItsWeight(Reads):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.compute(x), self.weight


@script(model=lambda: Body(ReturnsItsWeight, lambda layer, x: (lambda out, w: out + x @ w * 0.1)(*layer(x))))
def weight_returned_by_forward(user: User) -> None:
    user.train(0, 1, 2)


class ReturnsAView(Reads):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight[: x.shape[0]]


@script(model=lambda: Body(ReturnsAView, lambda layer, x: x + layer(x)))
def view_of_a_weight_returned(user: User) -> None:
    user.train(0, 1, 2)


class NoGradInside(Reads):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            goal = self.compute(x)
        return x + F.mse_loss(self.compute(x * 0.9), goal)


@script(model=lambda: Body(NoGradInside, lambda layer, x: layer(x)))
def no_grad_inside_of_forward(user: User) -> None:
    user.train(0, 1, 2)


class Normalises(Reads):
    """Writes its own weight in forward, as some normalisations and quantisers do."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.div_(self.weight.norm(dim=1, keepdim=True))
        return x @ self.weight


@script(model=lambda: Body(Normalises, lambda layer, x: layer(x)))
def weight_written_inside_of_forward(user: User) -> None:
    user.train(0, 1, 2)


class Masked(Reads):
    """A bf16 mask beside fp32 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", (torch.rand(WIDTH, WIDTH) > 0.3).to(torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight * self.mask)


@script(model=lambda: Body(Masked, lambda layer, x: layer(x)))
def bf16_masks(user: User) -> None:
    user.train(0, 1, 2)


class Rescaled(Reads):
    """ReZero: a scalar parameter, of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.alpha * self.compute(x)


@script(model=lambda: Body(Rescaled, lambda layer, x: layer(x)))
def scalars(user: User) -> None:
    for seed in range(3):
        user.step(seed)
        user.record([layer.alpha.item() for layer in user.model.layers])


@script(model=LanguageModel)
def positions_of_growing_length(user: User) -> None:
    """Each step slices the positions to another length."""
    for seed in range(4):
        loss = user.model(user.tokens(seed, 2, 3 + seed)).square().mean()
        user.backward(loss)
        user.update()
        user.record(loss.item())
