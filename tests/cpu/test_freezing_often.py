"""Freezing again and again over two ranks: what they have learnt of their exchanges is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import nn

import chunkmem
from tests.helpers.audit import audit, kind_of_step
from tests.helpers.ranks import Team
from tests.helpers.twins import AMPLE_NBYTES, SEED, WIDTH, Blocks, config, copied, features

NUM_STEPS, FEW_STEPS = 20, 10


@dataclass
class Found:
    """What one rank has done."""

    steps: list[str] = field(default_factory=list)
    """Of each: "recorded", "planned" or "on demand", with the number of plan misses if there were any."""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    is_over: bool = False
    """The way to exchange was chosen."""


def freeze_once(rank: int, after: int) -> Found:
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    found = Found()
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        with manager.init():
            model = Blocks(num_blocks=3)
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        for step in range(9):
            if step == after:
                manager.freeze([model.inner, model.blocks[0]])
            model(features(10 * step + rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            audit(manager)
            found.steps.append(kind_of_step(manager))
        trial = manager.runtime.entry_points.first_steps
        assert trial is not None
        found.is_over = trial.is_over
    return found


def train(rank: int, every: int, policy: str | None, device_nbytes: int, by_manager: bool) -> Found:
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    keys = {} if policy is None else {"activations": {"policy": policy}}
    found = Found()
    with chunkmem.ChunkManager(config(device_nbytes, **keys)) as manager:
        with manager.init():
            model = Blocks(num_blocks=6)
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        num_frozen = 0
        for step in range(NUM_STEPS):
            if step and step % every == 0:
                num_frozen = (num_frozen + 1) % 5
                modules = [model.inner, *model.blocks[:num_frozen]]
                if num_frozen and by_manager:
                    manager.freeze(modules, keep_states=True)
                elif by_manager:
                    manager.unfreeze(model)
                else:
                    model.requires_grad_(True)
                    for module in modules if num_frozen else ():
                        module.requires_grad_(False)
            model(features(10 * step + rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            audit(manager)
            found.steps.append(kind_of_step(manager))
        found.weights = copied(manager.state_dict())
    return found


ORDINARY = ((3, "auto"),)
REST = [(every, policy) for every in (1, 2, 3, 4) for policy in (None, "keep", "offload", "auto")]


@pytest.mark.full
@pytest.mark.parametrize("device_nbytes", [AMPLE_NBYTES, pytest.param(24 << 10, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("every", "policy"),
    [*ORDINARY, *(pytest.param(*case, marks=pytest.mark.full) for case in REST if case not in ORDINARY)],
)
def test_each_kind_of_step_is_recorded_once(every: int, policy: str | None, device_nbytes: int, pair: Team) -> None:
    """The first step shows what is exchanged. With `auto`, the one that regions are chosen from is not followed."""
    ours = pair.run(train, every, policy, device_nbytes, True)
    assert ours[0].steps == ours[1].steps
    steps = ours[0].steps
    assert steps[0] == "on demand"
    assert set(steps) <= {"planned", "recorded", "on demand"}
    assert steps[-2:] == ["planned"] * 2
    assert steps.count("recorded") <= 5 + 3 * (policy == "auto")
    # It takes a step of each of five kinds to see what is exchanged, and the first of all does not tell how many
    # backwards a step has.
    assert steps.count("on demand") <= 6
    assert all("planned" not in (here, after) for here, after in pairwise(steps) if here == "on demand")
    theirs = pair.run(train, every, policy, device_nbytes, False)
    for found in (ours[1], *theirs):
        assert found.weights.keys() == ours[0].weights.keys()
        assert all(torch.equal(value, found.weights[name]) for name, value in ours[0].weights.items())


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("after", "first"),
    [
        (1, ["on demand", "on demand", "recorded"]),
        (2, ["on demand", "recorded", "on demand", "recorded"]),
        (3, ["on demand", "recorded", "planned", "on demand", "recorded"]),
    ],
)
def test_a_step_shows_what_is_exchanged_before_one_is_recorded(after: int, first: list[str], pair: Team) -> None:
    """Others are trained before a step is recorded, after that, and after one that was planned."""
    for found in pair.run(freeze_once, after):
        assert found.steps == first + ["planned"] * (9 - len(first))
        assert found.is_over


def freeze_in_between(rank: int, frozen: dict[int, tuple[int, ...]]) -> list[str]:
    """Before some steps, freeze so many blocks, one number after the other; return what each step was."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    kinds = []
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        with manager.init():
            model = Blocks(num_blocks=4)
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        for step in range(12):
            for num in frozen.get(step, ()):
                manager.unfreeze(model)
                if num:
                    manager.freeze([model.inner, *model.blocks[:num]])
            model(features(10 * step + rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            audit(manager)
            kinds.append(kind_of_step(manager))
    return kinds


@pytest.mark.parametrize(
    "frozen",
    [
        pytest.param({1: (1,), 5: (0,)}, id="after the first step", marks=pytest.mark.full),
        pytest.param({5: (1, 2), 8: (1,)}, id="without a step between"),
        pytest.param({5: (1, 0)}, id="and back", marks=pytest.mark.full),
    ],
)
def test_what_no_step_has_shown_is_not_taken_for_known(frozen: dict[int, tuple[int, ...]], pair: Team) -> None:
    for kinds in pair.run(freeze_in_between, frozen):
        assert set(kinds) <= {"on demand", "recorded", "planned"}, "no step misses its plan"
        assert kinds[-2:] == ["planned"] * 2


class Turned(nn.Module):
    """Reads its layers in another order once nothing before it is trained; has one that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        for block in self.blocks[1:] if x.requires_grad else reversed(self.blocks[1:]):
            x = block(x)
        return self.head(x)


def freeze_at_random(
    rank: int, build: Callable[[], Any], policy: str | None, device_nbytes: int, num_steps: int, by_manager: bool
) -> Found:
    """Freeze some and train others again before each step, the same on all ranks."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    keys = {} if policy is None else {"activations": {"policy": policy}}
    found = Found()
    with chunkmem.ChunkManager(config(device_nbytes, **keys)) as manager:
        with manager.init():
            model = build()
        modules = [*model.blocks, *(m for name, m in model.named_children() if name != "blocks")]
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        generator = torch.Generator().manual_seed(SEED)
        for step in range(num_steps):
            drawn = torch.randperm(len(modules), generator=generator).tolist()
            num_frozen = int(torch.randint(len(modules), (), generator=generator))
            frozen, trained = ([modules[at] for at in part] for part in (drawn[:num_frozen], drawn[num_frozen:]))
            if by_manager:
                manager.freeze(frozen, keep_states=True)
                manager.unfreeze(trained)
            else:
                for module in modules:
                    module.requires_grad_(module in trained)
            loss = model(features(10 * step + rank)).square().mean()
            if loss.requires_grad:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            audit(manager)
        found.weights = copied(manager.state_dict())
    return found


@pytest.mark.filterwarnings("ignore:.*missed their plans", "ignore:.*could not follow its plan")
@pytest.mark.parametrize(
    ("build", "policy", "device_nbytes", "num_steps"),
    [
        (Turned, None, 12 << 10, FEW_STEPS),
        *(
            pytest.param(*case, NUM_STEPS, marks=pytest.mark.full)
            for case in product((Turned, Blocks), (None, "offload", "recompute"), (12 << 10, AMPLE_NBYTES))
        ),
    ],
)
def test_in_any_order_every_step(
    build: Callable[[], Any], policy: str | None, device_nbytes: int, num_steps: int, pair: Team
) -> None:
    ours = pair.run(freeze_at_random, build, policy, device_nbytes, num_steps, True)
    theirs = pair.run(freeze_at_random, build, policy, device_nbytes, num_steps, False)
    for found in (ours[1], *theirs):
        assert found.weights.keys() == ours[0].weights.keys()
        assert all(torch.equal(value, found.weights[name]) for name, value in ours[0].weights.items())
