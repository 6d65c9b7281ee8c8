"""A small model that is saved and loaded: over tiles, precisions, ranks and stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import chunkmem
from chunkmem.optim.optimizer import RuleOptimizer

WIDTH = 48


class Net(nn.Module):
    """Tied weights, buffers, a frozen layer, and a wide one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)) for _ in "ab"
        )
        self.norm = nn.BatchNorm1d(WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        result: Tensor = self.last(self.frozen(self.norm(x)))
        return result


@dataclass(frozen=True)
class Saved:
    """How a model is trained before it is saved, or after."""

    precision: str = "fp32"
    built_low: bool = False
    tiled: bool = False
    device_nbytes: int = 1 << 20
    host_nbytes: int = 8 << 20
    disk: Path | None = None
    """Where there is a third tier; None: there is none."""
    optimizer: str = "AdamW"
    states: str = "fp32"
    master: str = "fp32"
    sizes: tuple[int, ...] = ()
    """Of the mesh, with stages first if there are two; none is one process."""

    def open(self, *, timeout_s: float = 60, **options: Any) -> Training:
        """Build it, in a manager with these options; ranks wait so long for each other."""
        torch.set_num_threads(1)
        mesh: dict[str, Any] = {}
        if self.sizes:
            names = ("shard",) if len(self.sizes) == 1 else ("stage", "shard")
            mesh = {"mesh": init_device_mesh("cpu", self.sizes, mesh_dim_names=names)}
        low = {} if self.precision == "fp32" else {"precision": self.precision}
        config: dict[str, Any] = {
            "memory": {"device": self.device_nbytes, "host": self.host_nbytes},
            "default_chunk_size": 4800,
            **low,
        }
        if self.states != "fp32":
            config["optimizer"] = {"params": {"states": self.states, "master": self.master}}
        if self.disk is not None:
            config["memory"]["disk"] = {"path": str(self.disk), "capacity": 64 << 20}
        config |= {"distributed": {"timeout_s": timeout_s}}
        manager = chunkmem.ChunkManager(chunkmem.Config.from_dict(config), **mesh, **options)
        with manager.init():
            torch.manual_seed(0)
            model = Net()
            if self.built_low:
                model.bfloat16()
            if self.tiled:
                manager.tile(model, max_numel=WIDTH * WIDTH)
        pipe = None
        if len(self.sizes) == 2:
            loss_fn, blocks = _mean_square, [*model.blocks, model.norm, model.frozen]
            pipe = manager.pipeline(blocks, first=model.first, last=model.last, loss_fn=loss_fn, micro_batches=2)
        options = {"lr": 1e-2} | ({"momentum": 0.9} if self.optimizer == "SGD" else {})
        optimizer = getattr(chunkmem, self.optimizer)(model.parameters(), manager=manager, **options)
        return Training(manager, model, optimizer, pipe)


def _mean_square(output: Tensor, _target: Tensor) -> Tensor:
    return output.float().square().mean()


@dataclass
class Training:
    """One that runs."""

    manager: chunkmem.ChunkManager
    model: nn.Module
    optimizer: RuleOptimizer
    pipe: Any = None

    def run(self, steps: int, *, seed: int = 1) -> None:
        """Train some steps."""
        draw = torch.Generator().manual_seed(seed)
        dtype = self.manager.state_dict()["first.weight"].dtype
        for _ in range(steps):
            x = torch.randn(4, WIDTH, generator=draw).to(dtype)
            if self.pipe is None:
                self.manager.backward(_mean_square(self.model(x), x))
            else:
                self.pipe.step(x, x)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> dict[str, Tensor]:
        """Everything that is saved, by names of the untiled model; copies."""
        found = {f"model.{name}": value for name, value in self.manager.state_dict().items()}
        whole = chunkmem.untile_optimizer_state(self.model, self.optimizer)
        found |= {f"states.{i}.{k}": v.clone() for i, row in whole["state"].items() for k, v in row.items()}
        found |= {f"masters.{index}": value for index, value in whole.get("master_weights", {}).items()}
        return found


def assert_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    wrong = [name for name, value in one.items() if not torch.equal(value, other[name])]
    assert not wrong
