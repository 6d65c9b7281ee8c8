"""A small model with tensor parallelism, trained by chunkmem over a mesh, and by plain PyTorch over the same ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import chunkmem
from tests.helpers.shared_training import WORDS, Net

LENGTH = 8


def parallel(model: Any, mesh: DeviceMesh) -> Any:
    """The weights of linear layers divided over the ranks, activations in between by position."""
    plan: dict[str, Any] = {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for index in range(len(model.blocks)):
        plan |= {
            f"blocks.{index}.norm": SequenceParallel(),
            f"blocks.{index}.up": ColwiseParallel(input_layouts=Shard(1)),
            f"blocks.{index}.down": RowwiseParallel(output_layouts=Shard(1)),
        }
    made: Any = parallelize_module(model, mesh, plan)
    made.head.weight = made.words.weight  # tied, as they were
    return made


def built(mesh: DeviceMesh) -> Any:
    torch.manual_seed(0)
    return parallel(Net(), mesh)


def in_two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return parameter groups of DTensors and of others: torch's fused optimizers take no group that has both."""
    params = list(model.parameters())
    kinds = [[param for param in params if isinstance(param, DTensor) is kind] for kind in (True, False)]
    return [{"params": found} for found in kinds if found]


def full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


@dataclass(frozen=True)
class Parallel:
    """What all ranks do."""

    sizes: dict[str, int]
    config: dict[str, Any] = field(default_factory=dict)
    steps: int = 6
    micro_batches: int = 1
    max_norm: float = 0.0
    lr: float = 1e-2

    def mesh(self) -> DeviceMesh:
        return init_device_mesh("cpu", tuple(self.sizes.values()), mesh_dim_names=tuple(self.sizes))

    def replica_of(self, mesh: DeviceMesh) -> int:
        found = 0
        for name in self.sizes:
            if name != "tp":
                found = found * mesh[name].size() + mesh[name].get_local_rank()
        return found

    def batch(self, step: int, number: int, replica: int) -> Tensor:
        made = torch.Generator().manual_seed(1000 * step + 10 * replica + number)
        return torch.randint(0, WORDS, (2, LENGTH), generator=made)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(batch).flatten(0, 1).float(), batch.flatten())


class PlainTraining:
    """Gradients are averaged over the ranks that have the same parts."""

    def __init__(self, task: Parallel) -> None:
        self.task, self.mesh = task, task.mesh()
        self.model = built(self.mesh["tp"])
        self.is_lowered = task.config.get("precision") == "bf16"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=task.lr, fused=True)
        if self.is_lowered:
            self.low = built(self.mesh["tp"]).to(torch.bfloat16)

    def step(self, number: int) -> float:
        task, total = self.task, 0.0
        self.optimizer.zero_grad()
        model = self.low if self.is_lowered else self.model
        model.zero_grad()
        for micro in range(task.micro_batches):
            loss = loss_of(model, task.batch(number, micro, task.replica_of(self.mesh))) / task.micro_batches
            loss.backward()
            total += full(loss.detach()).item()
        for param, low in zip(self.model.parameters(), model.parameters(), strict=True):
            grad = low.grad
            assert isinstance(grad, DTensor)
            grad = grad.redistribute(placements=param.placements)
            local = grad.to_local()
            mean = local.float()
            for name in reversed([name for name in task.sizes if name != "tp"]):  # shards first, as with FSDP2
                dist.all_reduce(mean, group=self.mesh[name].get_group())
                mean /= task.sizes[name]
            local.copy_(mean)
            param.grad = DTensor.from_local(
                local.to(param.dtype), grad.device_mesh, grad.placements, shape=param.shape, stride=param.stride()
            )
        if task.max_norm:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), task.max_norm)
        self.optimizer.step()
        if self.is_lowered:
            with torch.no_grad():
                for param, low in zip(self.model.parameters(), model.parameters(), strict=True):
                    low.copy_(param)
        return total

    def state(self) -> tuple[dict[str, Tensor], list[Tensor]]:
        states = self.optimizer.state_dict()["state"]
        moments = [full(states[index][key]) for index in sorted(states) for key in ("exp_avg", "exp_avg_sq")]
        return {name: full(value) for name, value in self.model.state_dict().items()}, moments


class ChunkTraining:
    """The same program, but for `wrap` and the manager's optimizer."""

    def __init__(self, task: Parallel) -> None:
        self.task, self.mesh = task, task.mesh()
        self.manager = chunkmem.ChunkManager(chunkmem.Config.from_dict(task.config), mesh=self.mesh)
        self.model: Any = self.manager.wrap(built(self.mesh["tp"]))
        self.averages: Any = None
        self.optimizer: Any = self.manager.optimizer(torch.optim.AdamW(self.model.parameters(), lr=task.lr))

    def step(self, number: int) -> float:
        task, total = self.task, 0.0
        self.optimizer.zero_grad()
        for micro in range(task.micro_batches):
            loss = loss_of(self.model, task.batch(number, micro, task.replica_of(self.mesh))) / task.micro_batches
            self.manager.backward(loss, last=micro == task.micro_batches - 1)
            total += full(loss.detach()).item()
        if task.max_norm:
            self.optimizer.clip_grad_norm_(task.max_norm)
        self.optimizer.step()
        return total

    def state(self) -> tuple[dict[str, Tensor], list[Tensor]]:
        saved = self.optimizer.state_dict()
        states, masters = saved["state"], saved.get("master_weights", {})
        moments = [full(states[index][key]) for index in sorted(states) for key in ("exp_avg", "exp_avg_sq")]
        weights = {name: full(value) for name, value in self.manager.state_dict().items()}
        names = [name for name, _ in self.model.named_parameters()]
        return weights | {names[index]: full(value) for index, value in masters.items()}, moments
