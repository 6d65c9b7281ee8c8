"""Parameters that are used in the loop itself, before the model is called: the step begins with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import chunkmem
from tests.helpers.audit import assert_as_predicted
from tests.helpers.twins import AMPLE_NBYTES, WIDTH, Twin, config, cpu_only, features, mlp

pytestmark = cpu_only
STEPS = range(10)
FROM = 4
"""The step from which on all follow a plan."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.scale = nn.Embedding(50, WIDTH), nn.Parameter(torch.full((WIDTH,), 0.7))
        self.blocks, self.head = nn.ModuleList(mlp() for _ in range(3)), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def ids(seed: int) -> Tensor:
    return torch.randint(50, (8,), generator=torch.Generator().manual_seed(seed))


def embedded(twin: Twin, seed: int) -> Tensor:
    return twin.loss(F.embedding(ids(seed), twin.model.embed.weight))


def scaled(twin: Twin, seed: int) -> Tensor:
    return twin.loss(twin.model.scale * features(seed))


def both(twin: Twin, seed: int) -> Tensor:
    return twin.loss(twin.model.scale * F.embedding(ids(seed), twin.model.embed.weight))


def micro_batches(twin: Twin, seed: int) -> Tensor:
    both(twin, seed).backward()
    return both(twin, seed + 50)


def penalised(twin: Twin, seed: int) -> Tensor:
    penalty = sum(p.square().sum() for p in twin.model.parameters())
    return twin.loss(features(seed)) + 1e-3 * penalty


def evaluated(twin: Twin, seed: int) -> Tensor:
    with torch.no_grad():
        twin.loss(features(seed + 50))
    return scaled(twin, seed)


def read_before_an_evaluation(twin: Twin, seed: int) -> Tensor:
    twin.model.scale.norm().item()
    return evaluated(twin, seed)


def logged_now_and_then(twin: Twin, seed: int) -> Tensor:
    if seed % 2:
        twin.model.head.weight.norm().item()
    return twin.loss(features(seed))


def written_before(twin: Twin, seed: int) -> Tensor:
    """As for a GAN's critic."""
    with torch.no_grad():
        for p in twin.model.parameters():
            p.clamp_(-0.3, 0.3)
    return scaled(twin, seed)


SCENARIOS = (embedded, scaled, both, micro_batches, penalised, evaluated, read_before_an_evaluation)


def train(twin: Twin, loss_of: Callable[[Twin, int], Tensor], *, follows: bool) -> list[float]:
    losses = []
    for seed in STEPS:
        loss = loss_of(twin, seed)
        loss.backward()
        twin.update()
        losses.append(loss.item())
        if follows and twin.manager is not None and seed >= FROM:
            assert twin.manager.plan is not None
            assert_as_predicted(twin.manager)
    return losses


OFFLOAD = {"activations": {"policy": "offload"}}
CASES = [
    pytest.param(each, keys, id=f"{each.__name__}-{name}", marks=() if each in few else pytest.mark.full)
    for name, keys, few in (("weights", {}, (embedded, penalised, evaluated)), ("offload", OFFLOAD, (micro_batches,)))
    for each in (*SCENARIOS, logged_now_and_then, written_before)
]


@pytest.mark.few(1)
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("loss_of", "keys"), CASES)
def test_steps_follow_a_plan(loss_of: Callable[[Twin, int], Tensor], keys: dict[str, Any]) -> None:
    plain = Twin(None, Model)
    expected = train(plain, loss_of, follows=False)
    device_nbytes = AMPLE_NBYTES
    for _ in range(3):
        with chunkmem.ChunkManager(config(device_nbytes, **keys)) as manager:
            twin = Twin(manager, Model)
            assert train(twin, loss_of, follows=loss_of in SCENARIOS) == expected
            least = manager.memory().device.required_nbytes
        device_nbytes = least if device_nbytes == AMPLE_NBYTES else 2 * least


def test_the_step_begins_with_the_first_use() -> None:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        twin = Twin(manager, Model)
        train(twin, embedded, follows=False)
        assert manager.trace is not None
        assert manager.trace.moments[0].label == "embedding outside of modules"
