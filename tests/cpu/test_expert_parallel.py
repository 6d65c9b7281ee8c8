"""Experts that are divided over the ranks which shard the rest of the model train in chunks as without them."""

from __future__ import annotations

import math
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


def mesh_of(**sizes: int) -> DeviceMesh:
    """Return a mesh of all ranks; those that no other dimension has shard the model."""
    sizes["shard"] = dist.get_world_size() // math.prod(sizes.values())
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def built(mesh: DeviceMesh) -> Mixture:
    torch.manual_seed(0)
    return Mixture(mesh["shard"])


def replica_of(mesh: DeviceMesh) -> int:
    return mesh["replicate"].get_local_rank() if "replicate" in (mesh.mesh_dim_names or ()) else 0


def batch_of(step: int, mesh: DeviceMesh) -> Tensor:
    replica, shard = replica_of(mesh), mesh["shard"].get_local_rank()
    made = torch.Generator().manual_seed(10 * step + replica * mesh["shard"].size() + shard)
    batch = torch.randint(0, WORDS, (2, 8), generator=made)
    # In a replica, all tokens may go to one expert.
    return torch.full_like(batch, step) if replica and step % 2 else batch


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(batch).flatten(0, 1).float(), batch.flatten())


class PlainTraining:
    """Dense gradients are averaged; those of experts have come together within a replica already, and are divided."""

    def __init__(self, precision: str, max_norm: float, mesh: DeviceMesh) -> None:
        self.max_norm, self.norm, self.mesh = max_norm, 0.0, mesh
        self.model = built(mesh)
        self.low = built(mesh).to(torch.bfloat16) if precision == "bf16" else self.model
        self.optimizer = torch.optim.AdamW(in_two_groups(self.model), lr=1e-2, fused=True)

    def step(self, number: int, micro_batches: int = 1) -> float:
        self.low.zero_grad()
        parts = batch_of(number, self.mesh).chunk(micro_batches)
        losses = [loss_of(self.low, part) / micro_batches for part in parts]
        for loss in losses:
            loss.backward()
        squares = torch.zeros(2, dtype=torch.float64)
        names = [name for name in ("shard", "replicate") if name in (self.mesh.mesh_dim_names or ())]
        groups = [self.mesh[name].get_group() for name in names]
        num_ranks = math.prod(self.mesh[name].size() for name in names)
        pairs = list(zip(self.model.parameters(), self.low.parameters(), strict=True))
        for param, low in pairs:
            is_expert = isinstance(low, DTensor)
            is_trained = torch.tensor(float(low.grad is not None))
            for group in groups[1:]:
                dist.all_reduce(is_trained, group=group)
            if not is_trained:
                param.grad = None
                continue
            low.grad = torch.zeros_like(low) if low.grad is None else low.grad
            local: Tensor = low.grad.to_local() if is_expert else low.grad
            mean = local.float()
            for group in groups[is_expert:]:
                dist.all_reduce(mean, group=group)
            local.copy_(mean / num_ranks)
            squares[int(is_expert)] += local.double().square().sum()
            param.grad = low.grad.to(param.dtype)
        dist.all_reduce(squares[1:], group=groups[0])
        self.norm = float(squares.sum().sqrt())
        if self.max_norm:
            factor = min(1.0, self.max_norm / (self.norm + 1e-6))
            for param, _ in pairs:
                if param.grad is not None:
                    (param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad).mul_(factor)
        self.optimizer.step()
        with torch.no_grad():
            for param, low in pairs:
                low.copy_(param)
        return sum(loss.item() for loss in losses)

    def state(self) -> dict[str, Tensor]:
        return {name: full(value) for name, value in self.low.state_dict().items()}

    def gradients(self) -> list[Tensor | None]:
        found = [param.grad for param in self.low.parameters()]
        return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in found]


class ChunkTraining:
    def __init__(self, config: dict[str, Any], max_norm: float = 0.0, **sizes: int) -> None:
        self.max_norm, self.mesh = max_norm, mesh_of(**sizes)
        self.manager = chunkmem.ChunkManager(chunkmem.Config.from_dict(config), mesh=self.mesh)
        model = built(self.mesh)
        if replica_of(self.mesh):
            for param in model.parameters():
                nn.init.zeros_(param)  # the first replica's values are sent
        self.model = self.manager.wrap(model)
        self.optimizer = chunkmem.AdamW(self.model.parameters(), manager=self.manager, lr=1e-2)

    def step(self, number: int) -> float:
        self.optimizer.zero_grad()
        loss = loss_of(self.model, batch_of(number, self.mesh))
        self.manager.backward(loss)
        if self.max_norm:
            self.optimizer.clip_grad_norm_(self.max_norm)
        self.optimizer.step()
        return loss.item()

    def state(self) -> dict[str, Tensor]:
        found = {name: full(value) for name, value in self.manager.state_dict().items()}
        return {name: value.to(dict(self.model.named_parameters())[name].dtype) for name, value in found.items()}


def tolerance_of(config: dict[str, Any], *, is_exact: bool) -> dict[str, float]:
    if is_exact:
        return {"rtol": 0, "atol": 0}
    is_low = config.get("precision") == "bf16"
    return {"rtol": 1e-2 if is_low else 1e-5, "atol": 1e-2 if is_low else 1e-6}


def compare(rank: int, config: dict[str, Any], max_norm: float, num_replicas: int = 1) -> int:
    torch.set_num_threads(1)
    # Over four ranks of a replica, torch adds up in another order than owners do.
    is_exact = dist.get_world_size() == 2 * num_replicas and not max_norm
    tolerance = tolerance_of(config, is_exact=is_exact)
    ours = ChunkTraining(config, max_norm, replicate=num_replicas)
    plain = PlainTraining(config.get("precision", "fp32"), max_norm, ours.mesh)
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
            manager.backward(loss_of(ours.model, batch_of(STEPS, ours.mesh)))
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
    training = ChunkTraining({"memory": {"device": 30 << 10}}, replicate=num_replicas)
    with training.manager as manager:
        for number in range(3):
            training.step(number)
        manager.save(folder, training.optimizer)
        saved = training.state()
        again = ChunkTraining({}, replicate=num_replicas)
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
    plain = built(training.mesh)
    state = {"model": plain.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    torch.testing.assert_close({name: full(v) for name, v in state["model"].items()}, expected, rtol=0, atol=0)


@pytest.mark.parametrize("num_replicas", [2, pytest.param(1, marks=pytest.mark.full)])
def test_a_checkpoint_has_all_experts(team: Team, four: Team, tmp_path: Path, num_replicas: int) -> None:
    folder = str(tmp_path / "checkpoint")
    expected, *_ = (team if num_replicas == 1 else four).run(save, folder, num_replicas)
    four.run(load, folder, expected)


def staged(rank: int, sizes: dict[str, int], config: dict[str, Any], folder: str) -> int:
    """A pipeline whose stages have experts over their ranks, against plain accumulation; other ranks take its state."""
    torch.set_num_threads(1)
    mesh = mesh_of(**sizes)
    plain = PlainTraining(config["precision"], 0.0, mesh)
    with chunkmem.ChunkManager(chunkmem.Config.from_dict(config), mesh=mesh) as manager:
        with manager.init():
            model = built(mesh)
        pipe = manager.pipeline(
            model.blocks,
            first=model.words,
            last=model.head,
            loss_fn=lambda y, t: nn.functional.cross_entropy(y.flatten(0, 1).float(), t.flatten()),
            micro_batches=2,
        )
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        for number in range(STEPS):
            batch = batch_of(number, mesh)
            optimizer.zero_grad()
            loss = pipe.step(batch, batch)
            norm = optimizer.clip_grad_norm_(1e9)
            optimizer.step()
            torch.testing.assert_close(float(loss), plain.step(number, micro_batches=2), rtol=1e-6, atol=0)
            torch.testing.assert_close(float(norm), plain.norm, rtol=1e-5, atol=0)
        expected = plain.state()
        saved = {name: full(value).to(expected[name].dtype) for name, value in manager.state_dict().items()}
        torch.testing.assert_close(saved, expected, rtol=0, atol=0)
        manager.save(folder, optimizer)
        moved = manager.memory().moved.h2d_nbytes
        with pytest.raises(chunkmem.StateError, match="experts over the ranks of a stage"):
            pipe.repartition(1)
    other = ChunkTraining(config, replicate=dist.get_world_size() // 4)
    with other.manager:
        other.manager.load(folder, other.optimizer)
        torch.testing.assert_close(other.state(), saved, rtol=0, atol=0)
    return moved


@pytest.mark.few(1)
@spread(device=(28 << 10, None), precision=("fp32", "bf16"))
def test_stages_of_experts(four: Team, tmp_path: Path, device: int | None, precision: str) -> None:
    config = {"precision": precision, "memory": {"device": device}}
    for moved in four.run(staged, {"stage": 2}, config, str(tmp_path / "checkpoint")):
        assert (moved > 0) == (device is not None)


@pytest.mark.full
def test_stages_of_replicas_of_experts(tmp_path: Path) -> None:
    with Team(8) as eight:
        config = {"precision": "fp32", "memory": {"device": 30 << 10}}
        eight.run(staged, {"stage": 2, "replicate": 2}, config, str(tmp_path / "checkpoint"))


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
        manager.wrap(built(mesh_of()))
    whole = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    with (
        chunkmem.ChunkManager(mesh=whole) as manager,
        pytest.raises(chunkmem.LayoutError, match=r"up is a DTensor, and each rank .* set release_after_init to true"),
        manager.init(),
    ):
        _model = built(mesh_of())
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), whole, [Replicate()]))
    with chunkmem.ChunkManager(mesh=whole) as manager, pytest.raises(chunkmem.LayoutError, match="Replicate"):
        manager.wrap(layer)


def test_refusals(four: Team) -> None:
    four.run(refuse)
