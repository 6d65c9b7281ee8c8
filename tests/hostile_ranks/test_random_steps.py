"""Random steps of a mixture of experts: which rank uses what, how often, and what is dropped are drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from torch import Tensor, nn

from tests.helpers.ranks import Team
from tests.helpers.twins import cpu_only
from tests.hostile.harness import Script
from tests.hostile.models import WIDTH
from tests.hostile_ranks.harness import EQUAL_BUT_FOR_ORDER, EXCHANGES, User
from tests.hostile_ranks.judge import verdict
from tests.hostile_ranks.worker import run_script

NUM_EXPERTS, NUM_LAYERS = 3, 2
Micro = tuple[int, ...]
"""Which expert of each layer a micro-batch uses."""
pytestmark = cpu_only


@dataclass(frozen=True)
class Step:
    dropped: str
    """How a micro-batch that each rank has first is dropped after its backward; "": there is none."""
    micros: tuple[tuple[Micro, ...], ...]
    """By rank."""


@dataclass(frozen=True)
class Case:
    chunk_numel: int
    exchange: str
    policy: str
    steps: tuple[Step, ...]


def drawn(seed: int, size: int) -> Case:
    draw = random.Random(seed)

    def micros() -> tuple[Micro, ...]:
        count = draw.choice((0, 1, 1, 2, 2, 3))
        return tuple(tuple(draw.randrange(NUM_EXPERTS) for _ in range(NUM_LAYERS)) for _ in range(count))

    steps = [
        Step(draw.choice(("", "", "none", "zeros", "model")), tuple(micros() for _ in range(size)))
        for _ in range(draw.randint(3, 5))
    ]
    policy = draw.choice(("keep", "recompute", "auto"))
    return Case(draw.choice((64, 300, 1000, 5000)), draw.choice(list(EXCHANGES)), policy, tuple(steps))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_EXPERTS))

    def forward(self, x: Tensor, choice: int) -> Tensor:
        return x + self.experts[choice](x)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, choices: Micro) -> Tensor:
        for layer, choice in zip(self.layers, choices, strict=True):
            x = layer(x, choice)
        return self.head(x)


def run_case(rank: int, case: Case) -> dict[str, object]:
    def train(user: User) -> None:
        _ = user.opt
        for number, step in enumerate(case.steps):
            if step.dropped:
                backward(user, 10 * number + 9, ((number + user.rank) % NUM_EXPERTS,) * NUM_LAYERS)
                if step.dropped == "model":
                    user.model.zero_grad()
                else:
                    user.opt.zero_grad(set_to_none=step.dropped == "none")
            for micro, choices in enumerate(step.micros[user.rank]):
                backward(user, 10 * number + micro, choices)
            user.update()

    def backward(user: User, seed: int, choices: Micro) -> None:
        user.backward(user.model(user.batch(seed), choices).square().mean())

    keys = {"default_chunk_size": case.chunk_numel, "activations": {"policy": case.policy}}
    script = Script("random steps", "", train, Mixture, EQUAL_BUT_FOR_ORDER, tuple(keys.items()))
    return run_script(rank, script, case.exchange)


def smaller(case: Case) -> Iterator[Case]:
    """Cases with one thing less: a step, a drop, or a micro-batch of a rank."""
    for at, step in enumerate(case.steps):
        before, after = case.steps[:at], case.steps[at + 1 :]
        yield replace(case, steps=(*before, *after))
        if step.dropped:
            yield replace(case, steps=(*before, replace(step, dropped=""), *after))
        for rank, micros in enumerate(step.micros):
            if micros:
                fewer = (*step.micros[:rank], micros[:-1], *step.micros[rank + 1 :])
                yield replace(case, steps=(*before, replace(step, micros=fewer), *after))


def wrong(team: Team, case: Case) -> str | None:
    return verdict(EQUAL_BUT_FOR_ORDER, team.run(run_case, case))


def shrunk(team: Team, case: Case) -> Case:
    """The smallest case that is wrong, of those that one comes to by leaving out one thing at a time."""
    found = next((each for each in smaller(case) if wrong(team, each)), None)
    return case if found is None else shrunk(team, found)


@pytest.fixture(scope="module")
def teams() -> Iterator[dict[int, Team]]:
    found = {size: Team(size) for size in (2, 3)}
    yield found
    for team in found.values():
        team.close()


@pytest.mark.parametrize(
    ("size", "seeds"),
    [
        pytest.param(2, range(5)),
        pytest.param(2, range(5, 105), marks=pytest.mark.full),
        pytest.param(3, range(100), marks=pytest.mark.full),
    ],
)
def test_random_steps_are_those_of_one_process(size: int, seeds: range, teams: dict[int, Team]) -> None:
    for seed in seeds:
        case = drawn(seed, size)
        if wrong(teams[size], case):
            least = shrunk(teams[size], case)
            pytest.fail(f"seed {seed}, {least}: {wrong(teams[size], least)}")
