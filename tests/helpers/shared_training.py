"""Small models trained over ranks, and what one process has to do for the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import chunkmem
from chunkmem.data.types import Tier
from chunkmem.testing import AdversarialLanes
from tests.helpers.any_class import Several, muon_and_adamw
from tests.helpers.late_exchange import LateExchange

WIDTH = 16
WORDS = 11
MAX_NORM = 0.05


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """An embedding, blocks in a list, and a head tied to the embedding."""

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.body(self.words(x)))
        return result


class Checkpointed(Net):
    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class OneSegment(Net):
    segments = 1

    def body(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint_sequential(list(self.blocks), self.segments, x, use_reentrant=False)
        return result


class FourSegments(OneSegment):
    segments = 4


class TwoSegments(Net):
    """Two units are recomputed together."""

    def body(self, x: Tensor) -> Tensor:
        result: Tensor = chunkmem.checkpoint_sequential(self.blocks, 2, x)
        return result


class Reused(Net):
    """The same blocks twice, the other way round."""

    def body(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, *reversed(self.blocks)):
            x = block(x)
        return x


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.blocks[2].up.requires_grad_(False)


class Experts(nn.Module):
    """Which one is used depends on the input, and so on the rank; the last one never is."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({str(index): Block() for index in range(4)})

    def forward(self, x: Tensor) -> Tensor:
        index = int(x.detach().sum().mul(1000)) % 3
        result: Tensor = self.experts[str(index)](x)
        return result


class Routed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts() if index % 2 else Block() for index in range(4))


class Plain(nn.Sequential):
    """Nothing but a list: every unit is its child."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(WORDS, WIDTH), Block(), Block(), nn.Linear(WIDTH, WORDS))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": Plain,
    "tied": Net,
    "checkpointed": Checkpointed,
    "one segment": OneSegment,
    "four segments": FourSegments,
    "two segments": TwoSegments,
    "reused": Reused,
    "frozen": Frozen,
    "routed": Routed,
}


@dataclass(frozen=True)
class Task:
    """What every rank does."""

    model: str = "tied"
    steps: int = 6
    config: dict[str, Any] = field(default_factory=dict)
    device_nbytes: int = 64 << 10
    micro_batches: int = 1
    says_last: bool = False
    batch: int = 3
    empty: tuple[tuple[int, int], ...] = ()
    """(step, rank): that rank has no batch in that step."""
    short: tuple[tuple[int, int, int], ...] = ()
    """(step, rank, number): that rank has so many micro-batches in that step."""
    without_backward: tuple[tuple[int, int], ...] = ()
    """(step, rank): that rank leaves out every backward in that step."""
    optimizer: str = "AdamW"
    options: dict[str, Any] = field(default_factory=dict)
    """Of the optimizer, besides the learning rate."""
    compiler: dict[str, Any] | None = None
    """Options of torch.compile for the blocks."""
    clip: str = ""
    """To `MAX_NORM`: by the optimizer's "method", or by torch's function below DistributedDataParallel: "torch"."""
    adversarial: int | None = None
    """Seed of copies and exchanges that are as late as they may be, over memory full of NaN; None: they are not."""

    def num_micro_batches(self, step: int, rank: int) -> int:
        if (step, rank) in self.empty:
            return 0
        return next((number for *where, number in self.short if where == [step, rank]), self.micro_batches)


@dataclass
class Outcome:
    """What one rank ends with."""

    losses: list[float]
    weights: dict[str, Tensor]
    states: dict[int, dict[str, Tensor]]
    memory: chunkmem.MemoryReport
    num_gathers: int
    num_reductions: int


def batch_of(task: Task, step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    shape = (task.batch + rank, 7)
    return torch.randint(0, WORDS, shape, generator=draw), torch.randint(0, WORDS, shape, generator=draw)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def make_config(task: Task) -> chunkmem.Config:
    base = {"default_chunk_size": 1600, "memory": {"device": task.device_nbytes, "host": 8 << 20}}
    return chunkmem.Config.from_dict({**base, **task.config})


def open_manager(rank: int, task: Task, **options: Any) -> chunkmem.ChunkManager:
    """The manager of one rank, with options of `ChunkManager`."""
    seed = task.adversarial
    if seed is None:
        return chunkmem.ChunkManager(make_config(task), **options)
    options["make_lanes"] = lambda compute: AdversarialLanes(1000 * rank + seed)
    manager = chunkmem.ChunkManager(make_config(task), **options)
    for tier in (Tier.DEVICE, Tier.HOST):
        manager.runtime.memory.store.pools[tier].poison = True
    assert manager.runtime.sharding.shards is not None
    manager.runtime.sharding.shards.exchange = LateExchange(
        manager.runtime.sharding.shards.exchange, rank=manager.runtime.ranks.shard.rank, seed=seed
    )
    return manager


def make_optimizer(task: Task, model: nn.Module, manager: chunkmem.ChunkManager | None) -> Any:
    """The optimizer of a task, in plain PyTorch if there is no manager; several have a class for matrices."""
    params = list(model.parameters())
    if task.optimizer == "Muon and AdamW":
        pairs = muon_and_adamw(model)
        if manager is not None:
            return chunkmem.Optimizer(pairs, manager=manager)
        return Several([kind(own, **options) for kind, own, options in pairs])
    if manager is None:
        options = {"fused": True, **task.options} if task.optimizer == "AdamW" else task.options
        return getattr(torch.optim, task.optimizer)(params, lr=1e-2, **options)
    if own := getattr(chunkmem, task.optimizer, None):
        return own(params, manager=manager, lr=1e-2, **task.options)
    return chunkmem.Optimizer(getattr(torch.optim, task.optimizer), params, manager=manager, lr=1e-2, **task.options)


def train(rank: int, task: Task) -> Outcome:
    """Train on one rank of the default process group."""
    torch.set_num_threads(1)
    with open_manager(rank, task) as manager:
        torch.manual_seed(0)
        with manager.init():
            model = MODELS[task.model]()
        if task.compiler is not None:
            manager.compile(model, **task.compiler)
        optimizer = make_optimizer(task, model, manager)
        called = DistributedDataParallel(model) if task.clip == "torch" else model
        losses = []
        for step in range(task.steps):
            for micro in range(task.num_micro_batches(step, rank)):
                if task.clip == "torch":
                    called.require_backward_grad_sync = micro == task.micro_batches - 1
                loss = loss_of(called, batch_of(task, step, micro, rank))
                if (step, rank) in task.without_backward:
                    continue
                last = micro == task.micro_batches - 1 if task.says_last else None
                manager.backward(loss, last=last)
                losses.append(loss.item())
            if task.clip == "torch":
                nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            elif task.clip:
                optimizer.clip_grad_norm_(MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
        assert manager.runtime.sharding.shards is not None
        traffic = manager.runtime.sharding.shards.exchange.traffic
        counts = traffic.num_gathers, traffic.num_reductions
        memory = manager.memory()
        states = optimizer.state_dict()["state"]
        return Outcome(losses, manager.state_dict(), states, memory, *counts)


def serial(task: Task, size: int) -> tuple[list[list[float]], dict[str, Tensor], dict[int, dict[str, Tensor]]]:
    """Do the same in one process: the gradients of ranks are added in their order, and divided by their number."""
    torch.manual_seed(0)
    model: Any = MODELS[task.model]()
    for block in model.blocks if task.compiler is not None else ():
        block.compile(**task.compiler)
    params = list(model.parameters())
    optimizer = make_optimizer(task, model, None)
    losses: list[list[float]] = [[] for _ in range(size)]
    for step in range(task.steps):
        grads: list[list[Tensor | None]] = []
        for rank in range(size):
            optimizer.zero_grad()
            for micro in range(task.num_micro_batches(step, rank)):
                loss = loss_of(model, batch_of(task, step, micro, rank))
                if (step, rank) in task.without_backward:
                    continue
                loss.backward()
                losses[rank].append(loss.item())
            grads.append([param.grad for param in params])
        for param, *each in zip(params, *grads, strict=True):
            param.grad = mean_of(param, each)
        if clip := (MAX_NORM if task.clip else task.config.get("gradient_clipping")):
            nn.utils.clip_grad_norm_(params, clip)
        optimizer.step()
    state = optimizer.state_dict()["state"]
    return losses, {key: value.detach() for key, value in model.state_dict().items()}, state


def mean_of(param: Tensor, grads: Sequence[Tensor | None]) -> Tensor | None:
    """The mean over ranks, added in their order; None if no rank has a gradient."""
    if all(grad is None for grad in grads):
        return None
    first, *others = (torch.zeros_like(param) if grad is None else grad for grad in grads)
    total = first.clone()
    for other in others:
        total += other
    return total / len(grads)
