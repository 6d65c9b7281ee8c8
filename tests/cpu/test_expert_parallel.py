"""Experts that are divided over the ranks which shard the rest of the model train in chunks as without them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import chunkmem
from tests.helpers.experts import WORDS, Mixture
from tests.helpers.ranks import Team
from tests.helpers.spread import spread
from tests.helpers.tensor_parallel import full, in_two_groups

STEPS = 5


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    with Team(2) as team:
        yield team


@pytest.fixture(scope="module")
def four() -> Iterator[Team]:
    with Team(4) as team:
        yield team


def built() -> Mixture:
    torch.manual_seed(0)
    return Mixture(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",)))


def loss_of(model: nn.Module, step: int) -> Tensor:
    made = torch.Generator().manual_seed(10 * step + dist.get_rank())
    batch = torch.randint(0, WORDS, (2, 8), generator=made)
    return nn.functional.cross_entropy(model(batch).flatten(0, 1).float(), batch.flatten())


class PlainTraining:
    """Dense gradients are averaged; those of experts have come together already, and are divided."""

    def __init__(self, precision: str, max_norm: float) -> None:
        self.max_norm = max_norm
        self.model = built()
        self.low = built().to(torch.bfloat16) if precision == "bf16" else self.model
        self.optimizer = torch.optim.AdamW(in_two_groups(self.model), lr=1e-2, fused=True)

    def step(self, number: int) -> float:
        self.low.zero_grad()
        loss = loss_of(self.low, number)
        loss.backward()
        squares = torch.zeros(2, dtype=torch.float64)
        pairs = list(zip(self.model.parameters(), self.low.parameters(), strict=True))
        for param, low in pairs:
            is_expert = isinstance(low, DTensor)
            if low.grad is None:
                param.grad = None
                continue
            local: Tensor = low.grad.to_local() if is_expert else low.grad
            mean = local.float()
            if not is_expert:
                dist.all_reduce(mean)
            local.copy_(mean / dist.get_world_size())
            squares[int(is_expert)] += local.double().square().sum()
            param.grad = low.grad.to(param.dtype)
        dist.all_reduce(squares[1:])
        if self.max_norm:
            factor = min(1.0, self.max_norm / (float(squares.sum().sqrt()) + 1e-6))
            for param, _ in pairs:
                if param.grad is not None:
                    (param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad).mul_(factor)
        self.optimizer.step()
        with torch.no_grad():
            for param, low in pairs:
                low.copy_(param)
        return loss.item()

    def state(self) -> dict[str, Tensor]:
        return {name: full(value) for name, value in self.low.state_dict().items()}


class ChunkTraining:
    def __init__(self, config: dict[str, Any], max_norm: float = 0.0) -> None:
        self.max_norm = max_norm
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
        self.manager = chunkmem.ChunkManager(chunkmem.Config.from_dict(config), mesh=mesh)
        self.model = self.manager.wrap(built())
        self.optimizer = chunkmem.AdamW(self.model.parameters(), manager=self.manager, lr=1e-2)

    def step(self, number: int) -> float:
        self.optimizer.zero_grad()
        loss = loss_of(self.model, number)
        self.manager.backward(loss)
        if self.max_norm:
            self.optimizer.clip_grad_norm_(self.max_norm)
        self.optimizer.step()
        return loss.item()

    def state(self) -> dict[str, Tensor]:
        found = {name: full(value) for name, value in self.manager.state_dict().items()}
        return {name: value.to(dict(self.model.named_parameters())[name].dtype) for name, value in found.items()}


def compare(rank: int, config: dict[str, Any], max_norm: float) -> int:
    torch.set_num_threads(1)
    # Over four ranks, torch adds up in another order than owners do.
    is_exact = dist.get_world_size() == 2 and not max_norm
    low = config.get("precision") == "bf16"
    tolerance = {"rtol": 0, "atol": 0} if is_exact else {"rtol": 1e-2 if low else 1e-5, "atol": 1e-2 if low else 1e-6}
    plain, ours = PlainTraining(config.get("precision", "fp32"), max_norm), ChunkTraining(config, max_norm)
    with ours.manager as manager:
        for number in range(STEPS):
            torch.testing.assert_close(ours.step(number), plain.step(number), **tolerance)
        torch.testing.assert_close(ours.state(), plain.state(), **tolerance)
        trained = {name for name, param in ours.model.named_parameters() if ours.optimizer.state[param]}
        is_last = rank == dist.get_world_size() - 1
        assert ("blocks.2.1.up" in trained) != is_last, "no token comes to the last rank's experts in the last block"
        return manager.memory().moved.h2d_nbytes


@pytest.mark.few(1)
@spread(device=(28 << 10, None), precision=("fp32", "bf16"), activations=(None, "recompute", "offload"))
def test_two_ranks(team: Team, device: int | None, precision: str, activations: str | None) -> None:
    device = device and device * (1 if activations is None else 3)
    config = {"precision": precision, "memory": {"device": device}, "activations": {"policy": activations}}
    for moved in team.run(compare, config, 0.0):
        assert (moved > 0) == (device is not None)


@pytest.mark.full
@pytest.mark.parametrize("max_norm", [0.3, 0.0])
def test_four_ranks(four: Team, max_norm: float) -> None:
    four.run(compare, {"memory": {"device": 24 << 10}}, max_norm)


def save(rank: int, folder: str) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    training = ChunkTraining({"memory": {"device": 28 << 10}})
    with training.manager as manager:
        for number in range(3):
            training.step(number)
        manager.save(folder, training.optimizer)
        saved = training.state()
        again = ChunkTraining({})
        with again.manager:
            again.manager.load(folder, again.optimizer)
            assert [again.step(number) for number in (3, 4)] == [training.step(number) for number in (3, 4)]
            torch.testing.assert_close(again.state(), training.state(), rtol=0, atol=0)
            pairs = zip(training.model.parameters(), again.model.parameters(), strict=True)
            counts = [(training.optimizer.state[a].get("step", 0), again.optimizer.state[b]["step"]) for a, b in pairs]
            assert all(a == b for a, b in counts), "each rank goes on with its own counts of updates"
        return saved


def load(rank: int, folder: str, expected: dict[str, Tensor]) -> None:
    torch.set_num_threads(1)
    training = ChunkTraining({})
    with training.manager as manager:
        manager.load(folder, training.optimizer)
        torch.testing.assert_close(training.state(), expected, rtol=0, atol=0)
        training.step(3)
    plain = built()
    state = {"model": plain.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    torch.testing.assert_close({name: full(v) for name, v in state["model"].items()}, expected, rtol=0, atol=0)


def test_a_checkpoint_has_all_experts(team: Team, four: Team, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    expected, *_ = team.run(save, folder)
    four.run(load, folder, expected)


class Attention(nn.Module):
    """Each rank has a part of the sequence, and attends to all of it, as in context parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        query, *others = self.qkv(x).split(16, -1)
        key, value = (all_gather_tensor_autograd(each.contiguous(), 1, dist.group.WORLD) for each in others)
        result: Tensor = self.out(nn.functional.scaled_dot_product_attention(query, key, value))
        return result


def in_context(rank: int) -> None:
    torch.set_num_threads(1)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Embedding(WORDS, 16), Attention()))
    plain, model = models
    expected_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    with chunkmem.ChunkManager(mesh=mesh["dp", "cp"]._flatten("shard")) as manager:
        manager.wrap(model)
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        for step in range(4):
            whole = torch.randint(0, WORDS, (2, 16), generator=torch.Generator().manual_seed(step))
            own = whole.chunk(2, 1)[rank]
            losses = [nn.functional.cross_entropy(each(own).flatten(0, 1), own.flatten()) for each in models]
            expected_optimizer.zero_grad()
            losses[0].backward()
            for param in plain.parameters():
                assert param.grad is not None
                dist.all_reduce(param.grad)
                param.grad.div_(2)
            expected_optimizer.step()
            optimizer.zero_grad()
            manager.backward(losses[1])
            optimizer.step()
            assert losses[0].item() == losses[1].item()


@pytest.mark.full
def test_ranks_of_context_parallelism_are_among_those_that_shard(team: Team) -> None:
    team.run(in_context)


def refuse(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with (
        chunkmem.ChunkManager(mesh=mesh) as manager,
        pytest.raises(chunkmem.LayoutError, match=r"blocks\.0\.1\.up is a DTensor .* where there is one replica"),
    ):
        manager.wrap(built())
    whole = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    with (
        chunkmem.ChunkManager(mesh=whole) as manager,
        pytest.raises(chunkmem.LayoutError, match=r"up is a DTensor, and each rank .* set release_after_init to true"),
        manager.init(),
    ):
        _model = built()
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), whole, [Replicate()]))
    with chunkmem.ChunkManager(mesh=whole) as manager, pytest.raises(chunkmem.LayoutError, match="Replicate"):
        manager.wrap(layer)


def test_refusals(four: Team) -> None:
    four.run(refuse)
