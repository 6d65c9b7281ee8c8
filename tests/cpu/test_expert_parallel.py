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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
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


def mesh_of(num_replicas: int) -> DeviceMesh:
    sizes = num_replicas, dist.get_world_size() // num_replicas
    return init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))


def built(num_replicas: int = 1) -> Mixture:
    torch.manual_seed(0)
    return Mixture(mesh_of(num_replicas)["shard"])


def loss_of(model: nn.Module, step: int, replica: int = 0) -> Tensor:
    made = torch.Generator().manual_seed(10 * step + dist.get_rank())
    batch = torch.randint(0, WORDS, (2, 8), generator=made)
    if replica and step % 2:
        batch[:] = step  # all tokens go to one expert
    return nn.functional.cross_entropy(model(batch).flatten(0, 1).float(), batch.flatten())


class PlainTraining:
    """Dense gradients are averaged; those of experts have come together within a replica already, and are divided."""

    def __init__(self, precision: str, max_norm: float, num_replicas: int) -> None:
        self.max_norm = max_norm
        self.mesh = mesh_of(num_replicas)
        self.replica = self.mesh["replicate"].get_local_rank()
        self.model = built(num_replicas)
        self.low = built(num_replicas).to(torch.bfloat16) if precision == "bf16" else self.model
        self.optimizer = torch.optim.AdamW(in_two_groups(self.model), lr=1e-2, fused=True)

    def step(self, number: int) -> float:
        self.low.zero_grad()
        loss = loss_of(self.low, number, self.replica)
        loss.backward()
        squares = torch.zeros(2, dtype=torch.float64)
        groups = [self.mesh[name].get_group() for name in ("shard", "replicate")]
        pairs = list(zip(self.model.parameters(), self.low.parameters(), strict=True))
        for param, low in pairs:
            is_expert = isinstance(low, DTensor)
            is_trained = torch.tensor(float(low.grad is not None))
            dist.all_reduce(is_trained, group=groups[1])
            if not is_trained:
                param.grad = None
                continue
            low.grad = torch.zeros_like(low) if low.grad is None else low.grad
            local: Tensor = low.grad.to_local() if is_expert else low.grad
            mean = local.float()
            for group in groups[is_expert:]:
                dist.all_reduce(mean, group=group)
            local.copy_(mean / dist.get_world_size())
            squares[int(is_expert)] += local.double().square().sum()
            param.grad = low.grad.to(param.dtype)
        dist.all_reduce(squares[1:], group=groups[0])
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

    def gradients(self) -> list[Tensor | None]:
        found = [param.grad for param in self.low.parameters()]
        return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in found]


class ChunkTraining:
    def __init__(self, config: dict[str, Any], max_norm: float = 0.0, num_replicas: int = 1) -> None:
        self.max_norm = max_norm
        mesh = mesh_of(num_replicas)
        self.replica = mesh["replicate"].get_local_rank()
        self.manager = chunkmem.ChunkManager(chunkmem.Config.from_dict(config), mesh=mesh)
        model = built(num_replicas)
        if self.replica:
            for param in model.parameters():
                nn.init.zeros_(param)  # the first replica's values are sent
        self.model = self.manager.wrap(model)
        self.optimizer = chunkmem.AdamW(self.model.parameters(), manager=self.manager, lr=1e-2)

    def step(self, number: int) -> float:
        self.optimizer.zero_grad()
        loss = loss_of(self.model, number, self.replica)
        self.manager.backward(loss)
        if self.max_norm:
            self.optimizer.clip_grad_norm_(self.max_norm)
        self.optimizer.step()
        return loss.item()

    def state(self) -> dict[str, Tensor]:
        found = {name: full(value) for name, value in self.manager.state_dict().items()}
        return {name: value.to(dict(self.model.named_parameters())[name].dtype) for name, value in found.items()}


def compare(rank: int, config: dict[str, Any], max_norm: float, num_replicas: int = 1) -> int:
    torch.set_num_threads(1)
    # Over four ranks of a replica, torch adds up in another order than owners do.
    is_exact = dist.get_world_size() == 2 * num_replicas and not max_norm
    low = config.get("precision") == "bf16"
    tolerance = {"rtol": 0, "atol": 0} if is_exact else {"rtol": 1e-2 if low else 1e-5, "atol": 1e-2 if low else 1e-6}
    plain = PlainTraining(config.get("precision", "fp32"), max_norm, num_replicas)
    ours = ChunkTraining(config, max_norm, num_replicas)
    with ours.manager as manager:
        for number in range(STEPS):
            torch.testing.assert_close(ours.step(number), plain.step(number), **tolerance)
        torch.testing.assert_close(ours.state(), plain.state(), **tolerance)
        trained = {name for name, param in ours.model.named_parameters() if ours.optimizer.state[param]}
        shards = plain.mesh["shard"]
        is_last = shards.get_local_rank() == shards.size() - 1
        assert ("blocks.2.1.up" in trained) != is_last, "no token comes to the last rank's experts in the last block"
        moved = manager.memory().moved.h2d_nbytes
        if config["memory"]["device"] is None:
            plain.step(STEPS)
            ours.optimizer.zero_grad()
            manager.backward(loss_of(ours.model, STEPS, ours.replica))
            with manager.gather(list(ours.model.parameters()), grads=True):
                found = [param.grad for param in ours.model.parameters()]
                torch.testing.assert_close(found, plain.gradients(), **tolerance)
        return moved


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


@pytest.mark.few(1)
@spread(device=(30 << 10, None), precision=("bf16", "fp32"), max_norm=(0.0, 0.3))
def test_two_replicas(four: Team, device: int | None, precision: str, max_norm: float) -> None:
    for moved in four.run(compare, {"precision": precision, "memory": {"device": device}}, max_norm, 2):
        assert (moved > 0) == (device is not None)


def save(rank: int, folder: str, num_replicas: int) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    training = ChunkTraining({"memory": {"device": 30 << 10}}, num_replicas=num_replicas)
    with training.manager as manager:
        for number in range(3):
            training.step(number)
        manager.save(folder, training.optimizer)
        saved = training.state()
        again = ChunkTraining({}, num_replicas=num_replicas)
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


@pytest.mark.parametrize("num_replicas", [2, pytest.param(1, marks=pytest.mark.full)])
def test_a_checkpoint_has_all_experts(team: Team, four: Team, tmp_path: Path, num_replicas: int) -> None:
    folder = str(tmp_path / "checkpoint")
    expected, *_ = (team if num_replicas == 1 else four).run(save, folder, num_replicas)
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
        pytest.raises(
            chunkmem.LayoutError, match=r"blocks\.0\.1\.up is a DTensor .* a replica.*: here, \[[02], [13]\]"
        ),
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
