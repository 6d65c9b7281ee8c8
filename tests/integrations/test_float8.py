"""torchao's training in float8, emulated on CPU: its linear layers are managed, and train to the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import chunkmem
from tests.helpers.ranks import Team
from tests.helpers.twins import cpu_only

float8 = pytest.importorskip("torchao.float8")

pytestmark = [pytest.mark.full, cpu_only]


def built(recipe: str) -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
    config = replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    model: nn.Module = float8.convert_to_float8_training(nn.Sequential(*layers), config=config)
    return model


def train(rank: int, recipe: str, precision: str, device: int | None, size: int) -> None:
    torch.set_num_threads(1)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    masters, plain, model = built(recipe), built(recipe).to(dtype), built(recipe)
    expected_optimizer = torch.optim.AdamW(masters.parameters(), lr=1e-2, fused=True)
    config = chunkmem.Config.from_dict({"precision": precision, "memory": {"device": device}})
    with chunkmem.ChunkManager(config) as manager:
        manager.wrap(model)
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        for step in range(5):
            batch = torch.randn(16, 32, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype)
            plain.zero_grad()
            expected = plain(batch).float().square().mean()
            expected.backward()
            for master, param in zip(masters.parameters(), plain.parameters(), strict=True):
                assert param.grad is not None
                mean = param.grad.float()
                if size > 1:
                    dist.all_reduce(mean)
                master.grad = (mean / size).to(dtype).float()
            expected_optimizer.step()
            with torch.no_grad():
                for master, param in zip(masters.parameters(), plain.parameters(), strict=True):
                    param.copy_(master)
            optimizer.zero_grad()
            loss = model(batch).float().square().mean()
            manager.backward(loss)
            optimizer.step()
            assert loss.item() == expected.item(), f"step {step}"
        assert (manager.memory().moved.h2d_nbytes > 0) == (device is not None)


@pytest.mark.parametrize("device", [None, 40 << 10])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("size", [1, 2])
def test_the_bits_are_those_of_torchao(recipe: str, precision: str, device: int | None, size: int) -> None:
    device = device and (device // 2 if precision == "bf16" else device)
    if size == 1:
        train(0, recipe, precision, device, size)
        return
    with Team(size) as team:
        team.run(train, recipe, precision, device, size)
