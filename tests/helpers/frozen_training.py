"""A small model whose blocks are frozen and trained again, in every way to train, and the same in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import chunkmem
from tests.helpers.low_precision import LowPlain
from tests.helpers.shared_training import WIDTH, WORDS, Block, mean_of
from tests.helpers.twins import copied

NUM_SAMPLES, BATCH, LENGTH, NUM_BLOCKS = 16, 8, 5, 4
SAMPLE_NBYTES = LENGTH * WIDTH * 4
OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x)
        return result

    def named(self, name: str) -> nn.Module:
        """Return `words`, or a block by its number."""
        return self.words if name == "words" else self.blocks[int(name)]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


@dataclass(frozen=True)
class Event:
    """What changes between two steps."""

    freeze: Sequence[str] = ()
    unfreeze: Sequence[str] = ()
    is_epoch: bool = False
    """What the schedule says is frozen, of three epochs: 2, 3, then 4 of 4 blocks, and the embedding."""


SCENES: dict[str, tuple[Event, ...]] = {
    "a growing prefix": (
        Event(), Event(("words", "0")), Event(("1", "2")), Event(unfreeze=("words", "0", "1", "2"))
    ),
    "a schedule": (Event(), Event(is_epoch=True), Event(is_epoch=True), Event(unfreeze=("1", "2"))),
    "every second block": (Event(), Event(("0", "2")), Event(("1", "3"), unfreeze=("0", "2")), Event(unfreeze=("1",))),
    "from the beginning": (
        Event(("words", "0", "1", "2")), Event(unfreeze=("2",)), Event(("2", "3")), Event(unfreeze=("words", "3"))
    ),
    "behind a trained one": (Event(), Event(("1", "2", "3")), Event(("words", "0")), Event(unfreeze=("0",))),
}  # fmt: skip
"""What changes before each of four phases."""


@dataclass(frozen=True)
class Way:
    """How to train."""

    num_ranks: int = 1
    num_stages: int = 1
    is_pipeline: bool = True
    is_cached: bool = False
    checkpoint: str = "auto"

    @property
    def num_columns(self) -> int:
        return self.num_ranks // self.num_stages

    @property
    def is_lifo(self) -> bool:
        """The backward of the last micro-batch comes first."""
        return self.is_pipeline and self.num_stages == 1


WAYS = {
    "by layer": Way(),
    "by layer, cached": Way(is_cached=True),
    "a loop": Way(is_pipeline=False),
    "by layer, recomputed": Way(checkpoint="always"),
    "ranks by layer": Way(2),
    "ranks by layer, cached": Way(2, is_cached=True),
    "ranks in a loop": Way(2, is_pipeline=False),
    "stages": Way(2, 2, checkpoint="never"),
    "stages, cached": Way(2, 2, is_cached=True),
}


@dataclass(frozen=True)
class Task:
    """What all ranks do."""

    scene: str
    way: str
    precision: str = "fp32"
    steps_a_phase: int = 4
    device_nbytes: int = 24 << 10

    @property
    def how(self) -> Way:
        return WAYS[self.way]

    def samples(self, column: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets."""
        draw = torch.Generator().manual_seed(7 + column)
        x, y = (torch.randint(0, WORDS, (NUM_SAMPLES, LENGTH), generator=draw) for _ in range(2))
        return x, y

    def batches(self, column: int) -> Iterator[tuple[list[int], Tensor, Tensor]]:
        """Return ids, inputs and targets: two batches are an epoch."""
        draw, (x, y) = torch.Generator().manual_seed(70 + column), self.samples(column)
        order: list[int] = []
        for _ in range(len(SCENES[self.scene]) * self.steps_a_phase):
            order = order or torch.randperm(NUM_SAMPLES, generator=draw).tolist()
            ids, order = order[:BATCH], order[BATCH:]
            yield [1000 * column + each for each in ids], x[ids], y[ids]

    def make_config(self) -> chunkmem.Config:
        memory = {"device": self.device_nbytes, "host": 8 << 20}
        values = {"default_chunk_size": 1200, "memory": memory}
        return chunkmem.Config.from_dict(values | ({} if self.precision == "fp32" else {"precision": self.precision}))


@dataclass
class Found:
    """What a rank, or plain PyTorch, ends with."""

    losses: list[list[float]]
    """By column."""
    weights: dict[str, Tensor]
    states: dict[int, Any]
    rates: list[float]
    num_found: int = 0
    """Samples, in the cache."""


def train(rank: int, task: Task) -> Found:
    torch.set_num_threads(1)
    way = task.how
    column = rank % way.num_columns
    mesh = None if way.num_stages == 1 else init_device_mesh("cpu", (way.num_stages,), mesh_dim_names=("stage",))
    with chunkmem.ChunkManager(task.make_config(), mesh=mesh) as manager:
        torch.manual_seed(0)
        with manager.init():
            model = Net()
        host_nbytes = NUM_SAMPLES * SAMPLE_NBYTES
        cache = chunkmem.FrozenCache(manager, host=host_nbytes) if way.is_cached else None
        schedule = chunkmem.FreezeSchedule(model.blocks, first=model.words)
        if way.is_pipeline:
            pipe: Any = manager.pipeline(
                model.blocks,
                first=model.words,
                last=model.head,
                loss_fn=loss_of,
                micro_batches=2,
                checkpoint=way.checkpoint,
                freeze=schedule,
                cache=cache,
            )
        else:
            manager.accumulate(2)
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, **OPTIONS)
        rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        losses, frozen = [], {}
        for step, (ids, x, y) in enumerate(task.batches(column)):
            if step % task.steps_a_phase == 0:
                event = SCENES[task.scene][step // task.steps_a_phase]
                now = copied(manager.state_dict())
                assert all(torch.equal(now[name], value) for name, value in frozen.items())
                manager.unfreeze([model.named(name) for name in event.unfreeze])
                if event.is_epoch and way.is_pipeline:
                    pipe.end_epoch()
                elif event.is_epoch:
                    manager.freeze(schedule.step())
                else:
                    manager.freeze([model.named(name) for name in event.freeze])
                names = [name for name, param in model.named_parameters() if not param.requires_grad]
                frozen = {name: copied(manager.state_dict())[name] for name in names}
            if way.is_pipeline:
                losses.append(pipe.step(x, y, ids=ids).item())
            else:
                parts = []
                for number, (a, b) in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
                    parts.append(loss_of(model(a), b) / 2)
                    manager.backward(parts[-1], last=number == 1)
                losses.append(float(sum(part.detach() for part in parts)))
            optimizer.step()
            optimizer.zero_grad()
            rates.step()
        weights, states = copied(manager.state_dict()), copied(optimizer.state_dict()["state"])
    return Found([losses], weights, states, rates.get_last_lr(), 0 if cache is None else cache.report.num_found)


def expected(task: Task) -> Found:
    """Train in plain PyTorch: the same `requires_grad_`, and no states of what is frozen."""
    torch.manual_seed(0)
    low = LowPlain(torch.bfloat16)
    model = Net()
    schedule = chunkmem.FreezeSchedule(model.blocks, first=model.words)
    if task.precision == "fp32":
        optimizer: Any = torch.optim.AdamW(model.parameters(), fused=True, **OPTIONS)
    else:
        model = low.ready(model)  # type: ignore[assignment]
        optimizer = low.optimizer(model.parameters(), **OPTIONS)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    columns = [list(task.batches(column)) for column in range(task.how.num_columns)]
    losses: list[list[float]] = [[] for _ in columns]
    for step in range(len(columns[0])):
        if step % task.steps_a_phase == 0:
            event = SCENES[task.scene][step // task.steps_a_phase]
            modules = schedule.step() if event.is_epoch else [model.named(name) for name in event.freeze]
            for name in event.unfreeze:
                model.named(name).requires_grad_(True)
            for param in (param for module in modules for param in module.parameters() if param.requires_grad):
                param.requires_grad_(False)
                owner = low.masters.get(param, param)
                optimizer.state.pop(owner, None)
                owner.data.copy_(param.data)
        grads = []
        for column, batches in enumerate(columns):
            optimizer.zero_grad()
            _, x, y = batches[step]
            parts = [loss_of(model(a), b) / 2 for a, b in zip(x.chunk(2), y.chunk(2), strict=True)]
            losses[column].append(float(sum(part.detach() for part in parts)))
            for part in reversed(parts) if task.how.is_lifo else parts:
                part.backward()
            grads.append([param.grad for param in model.parameters()])
        if len(columns) > 1:
            for param, *each in zip(model.parameters(), *grads, strict=True):
                param.grad = mean_of(param, each) if param.requires_grad else None
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
    weights = model.state_dict() if task.precision == "fp32" else low.state_dict(model)
    states = dict(sorted(optimizer.state_dict()["state"].items()))
    return Found(losses, copied(weights), copied(states), rates.get_last_lr())
