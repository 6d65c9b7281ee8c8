"""Managed activations over two ranks: exact means by every policy, with room for everything and with little."""

from __future__ import annotations

import math
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import chunkmem
from chunkmem.activations.region_choice import RegionChoices
from chunkmem.data.types import Role, Tier
from tests.helpers.audit import assert_as_predicted
from tests.helpers.low_precision import LowPlain
from tests.helpers.ranks import Team
from tests.helpers.shared_training import WIDTH, Block, mean_of
from tests.helpers.training import Plain, Side

NUM_BLOCKS = 4
BLOCK_NUMEL = 1104
NUM_STEPS = 8
AMPLE_NBYTES = 1 << 20
POLICIES = ("keep", "offload", "recompute", "auto")


class Noisy(Block):
    """With dropout."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Noisy() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x)
        return result


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
    torch.manual_seed(100 * step + rank)  # of dropout
    loss: Tensor = model(x).square().mean()
    return loss


@dataclass
class Found:
    """What one rank ends with."""

    weights: dict[str, Tensor]
    activation_nbytes: int
    """The most on DEVICE."""
    required_nbytes: int
    num_searches: int
    """For what had better not be recomputed."""


def train(rank: int, policy: str, device_nbytes: int, precision: str = "fp32") -> Found:
    torch.set_num_threads(1)
    values = {"default_chunk_size": BLOCK_NUMEL, "activations": {"policy": policy}, "precision": precision}
    memory = {"device": device_nbytes, "host": 8 << 20}
    searches = patch.object(RegionChoices, "choose", autospec=True, side_effect=RegionChoices.choose)
    with searches as search, chunkmem.ChunkManager(chunkmem.Config.from_dict(values | {"memory": memory})) as manager:
        torch.manual_seed(0)
        with manager.init():
            model = Model()
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        for step in range(NUM_STEPS):
            manager.backward(loss_of(model, step, rank))
            optimizer.step()
            optimizer.zero_grad()
        assert_as_predicted(manager)
        peak_nbytes = manager.runtime.memory.store.pools[Tier.DEVICE].ledger.peak[Role.ACTIVATION]
        required_nbytes = manager.memory().device.required_nbytes
        return Found(manager.state_dict(), peak_nbytes, required_nbytes, search.call_count)


def serial(precision: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    side: Side = Plain() if precision == "fp32" else LowPlain(torch.bfloat16)
    model = side.ready(Model())
    params = list(model.parameters())
    optimizer = side.optimizer(params, lr=1e-2)
    for step in range(NUM_STEPS):
        grads = []
        for rank in range(2):
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            grads.append([param.grad for param in params])
        for param, *each in zip(params, *grads, strict=True):
            param.grad = mean_of(param, each)
        optimizer.step()
    return {key: value.detach() for key, value in side.state_dict(model).items()}


@pytest.mark.few(1)
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.full)])
@pytest.mark.parametrize("policy", POLICIES)
def test_means_are_exact(pair: Team, policy: str, precision: str) -> None:
    expected = serial(precision)
    ample = pair.run(train, policy, AMPLE_NBYTES, precision)
    little = math.ceil(1.1 * max(found.required_nbytes for found in ample))
    for found in (*ample, *pair.run(train, policy, little, precision)):
        assert [key for key, value in expected.items() if not torch.equal(value, found.weights[key])] == []
        assert found.activation_nbytes > 0


def test_all_ranks_choose_the_same(pair: Team) -> None:
    """With room for everything, auto keeps what recomputation would drop. The first rank alone looks for that."""
    kept, auto = (pair.run(train, policy, AMPLE_NBYTES) for policy in ("keep", "auto"))
    assert [found.num_searches for found in auto] == [1, 0]
    assert [found.activation_nbytes for found in auto] == [found.activation_nbytes for found in kept]
