"""A small model trained as a pipeline over ranks, and what one process has to do for the same numbers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import chunkmem
from chunkmem.optim.scaler import LossScaler
from chunkmem.pipeline.staged import StagedPipeline
from tests.helpers.low_precision import LowPlain
from tests.helpers.pipelined import parted
from tests.helpers.shared_training import WIDTH, WORDS, Block, mean_of

AMPLE = 4 << 20
LIFO = ("looped-bfs",)
"""Schedules that run the backward of the last micro-batch first."""


class Norm(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, 1)).view_as(x)


class Pair(Block):
    """Gives two values, of which one goes around the next block."""

    def forward(self, x: Tensor, skipped: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return super().forward(x if skipped is None else x + skipped), x


class Hot(Block):
    """Its gradients overflow long before those of others do."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 2.0**10 * (x - x.detach()))


class InPlace(Block):
    """Changes what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2.0))


class SavesOutput(Block):
    """Autograd saves what it returns: it is not the sender's alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


class SavesWeight(Block):
    """Autograd's last node has saved a weight of it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))  # type: ignore[no-any-return]


class EndsInLinear(Block):
    """The same, of a layer, whose last node has saved it as a view."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(super().forward(x))  # type: ignore[no-any-return]


class LooksAtValues(Block):
    """What it returns in addition has as many rows as values say."""

    def forward(self, x: Tensor, chosen: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y = super().forward(x if chosen is None else x + chosen.mean(0))
        rows = y.flatten(0, 1)
        return y, rows[: 1 + int((rows.detach()[:, 0] > 0).sum().item())]


class Head(nn.Linear):
    def forward(self, x: Tensor, skipped: Tensor | None = None) -> Tensor:
        return super().forward(x if skipped is None else x + (skipped if skipped.dim() == x.dim() else skipped.mean(0)))


class Net(nn.Module):
    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        kinds = {"pairs": Pair, "in place": InPlace, "saves its output": SavesOutput, "ends in a norm": SavesWeight}
        kinds |= {"looks at values": LooksAtValues, "ends in a layer": EndsInLinear}
        block = kinds.get(kind, Block)
        self.blocks = nn.ModuleList(block() for _ in range(4))
        if kind == "hot":
            self.blocks[0] = Hot()
        if kind == "norms":
            self.blocks.insert(1, Norm(WIDTH))
            self.blocks.insert(4, Norm(WIDTH))
        self.head = Head(WIDTH, WORDS, bias=False)
        if kind == "tied":
            self.head.weight = self.words.weight
        if kind == "wide":
            self.blocks[3].up, self.blocks[3].down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)
        if kind == "frozen":
            self.words.requires_grad_(False)
            self.blocks[:2].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        value: Any = self.words(x)
        for block in (*self.blocks, self.head):
            value = block(*value) if isinstance(value, tuple) else block(value)
        result: Tensor = value
        return result


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


@dataclass(frozen=True)
class StagedTask:
    """What all ranks do."""

    schedule: str = "1f1b"
    stages_per_rank: int = 1
    checkpoint: str = "never"
    model: str = "plain"
    precision: str = "fp32"
    device_nbytes: int = AMPLE
    micro_batches: int = 4
    batch: int = 8
    steps: int = 6
    accumulate: int = 1
    """How often a batch is run before the optimizer steps."""
    sizes: tuple[int, ...] = (2,)
    """Of the mesh: stages, and data-parallel ranks if there is a second number."""
    clip: float = 0.0
    initial_scale_power: int = 14
    timeout_s: float = 60.0
    on_meta: bool = False
    """The model is built on the meta device."""
    at_ends: bool = False
    """The first stage alone is given inputs, the last one alone a target."""
    outside: bool = False
    """The loss is of `pipe(x)`, and not the pipeline's."""
    empty: tuple[tuple[int, int], ...] = ()
    """(step, column): the data-parallel ranks of that number have no batch in that step."""

    def make_config(self) -> chunkmem.Config:
        memory = {"device": self.device_nbytes, "host": 8 << 20}
        base = {"default_chunk_size": 1600, "memory": memory, "distributed": {"timeout_s": self.timeout_s}}
        fp16 = {"enabled": True, "initial_scale_power": self.initial_scale_power, "loss_scale_window": 2}
        low = {} if self.precision == "fp32" else {"precision": self.precision}
        return chunkmem.Config.from_dict({**base, **low, **({"fp16": fp16} if self.precision == "fp16" else {})})

    def given(self, rank: int, x: Tensor, y: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return what a rank is given of a batch."""
        stage = rank * self.sizes[0] // math.prod(self.sizes)
        is_first, is_last = stage == 0, stage == self.sizes[0] - 1
        return (x if is_first or not self.at_ends else None), (y if is_last or not self.at_ends else None)

    def batches(self, column: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        draw = torch.Generator().manual_seed(7 + column)
        for _ in range(self.steps):
            x, y = (torch.randint(0, WORDS, (self.batch, 5), generator=draw) for _ in range(2))
            yield x, y


@dataclass
class StagedOutcome:
    """What one rank ends with."""

    losses: list[float]
    weights: dict[str, Tensor]
    states: dict[int, dict[str, Tensor]]
    """Of the parameters of its stages, by place in `model.parameters()`."""
    required_nbytes: int
    misses: list[int]
    """Of each step; -1 where there was no plan."""
    norms: list[float] = field(default_factory=list)
    scale: float = 1.0


def run(pipe: Any, manager: chunkmem.ChunkManager, x: Any, y: Any, *, outside: bool) -> list[float]:
    """Run a batch; return its loss, where there is one."""
    if not outside:
        return [pipe.step(x, y).item()]
    with torch.no_grad():
        before = pipe(x)
    output = pipe(x)
    if output is None:
        pipe.backward()
        return []
    assert torch.equal(output, before)
    loss = loss_of(output, y)
    manager.backward(loss)
    return [loss.item()]


Watch = Callable[[StagedPipeline, chunkmem.ChunkManager, int], None]


def train(rank: int, task: StagedTask, watch: Watch | None = None) -> StagedOutcome:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    mesh = init_device_mesh("cpu", task.sizes, mesh_dim_names=("stage", "shard")[: len(task.sizes)])
    column = rank % task.sizes[-1] if len(task.sizes) > 1 else 0
    with chunkmem.ChunkManager(task.make_config(), mesh=mesh) as manager:
        torch.manual_seed(0)
        with manager.init(), torch.device("meta" if task.on_meta else "cpu"):
            model = Net(task.model)
        pipe = manager.pipeline(
            model.blocks,
            first=model.words,
            last=model.head,
            loss_fn=loss_of,
            micro_batches=task.micro_batches,
            checkpoint=task.checkpoint,
            schedule=task.schedule,
            stages_per_rank=task.stages_per_rank,
        )
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        losses, misses, norms = [], [], []
        for step, (x, y) in enumerate(task.batches(column)):
            for _ in range(0 if (step, column) in task.empty else task.accumulate):
                losses += run(pipe, manager, *task.given(rank, x, y), outside=task.outside)
            if task.clip:
                norms.append(optimizer.clip_grad_norm_(task.clip).item())
            optimizer.step()
            optimizer.zero_grad()
            timeline = manager.timeline()
            misses.append(-1 if timeline is None or manager.plan is None else timeline.plan_misses)
            if watch is not None:
                watch(pipe, manager, step)
        states = {
            index: {key: value.clone() for key, value in state.items()}
            for index, state in optimizer.state_dict()["state"].items()
        }
        memory = manager.memory()
        weights = manager.state_dict()
        return StagedOutcome(losses, weights, states, memory.device.required_nbytes, misses, norms, manager.loss_scale)


@functools.cache
def serial(task: StagedTask, *, untied: bool = False) -> StagedOutcome:
    """Do the same in one process: the gradients of micro-batches are added in the order of the schedule.

    With `untied`, the head is a copy of the embedding, and their sums over all micro-batches are added up.
    """
    torch.manual_seed(0)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[task.precision]
    scaler = LossScaler(task.make_config().fp16) if task.precision == "fp16" else None
    low = LowPlain(dtype, scaler)
    model = Net(task.model)
    if untied:
        model.head.weight = nn.Parameter(model.words.weight.detach().clone())
    options = {"lr": 1e-2}
    if task.precision == "fp32":
        optimizer: Any = torch.optim.AdamW(model.parameters(), fused=True, **options)
    else:
        model = low.ready(model)
        optimizer = low.optimizer(model.parameters(), **options)
    losses, norms = [], []
    num_columns = task.sizes[-1] if len(task.sizes) > 1 else 1
    for step, batches in enumerate(zip(*map(task.batches, range(num_columns)), strict=True)):
        grads = []
        for column, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            for _ in range(0 if (step, column) in task.empty else task.accumulate):
                pairs = zip(parted(x, task.micro_batches), parted(y, task.micro_batches), strict=True)
                if task.outside:
                    whole = loss_of(torch.cat([model(a) for a, _ in pairs]), y)
                    losses.append(whole.item())
                    low.backward(whole, last=True, by_manager=True)
                    continue
                parts = [loss_of(model(a), b) / (len(x) / len(a)) for a, b in pairs]
                losses.append(float(sum(part.detach() for part in parts)))
                for part in reversed(parts) if task.schedule in LIFO else parts:
                    low.backward(part, last=True, by_manager=True)
            grads.append([param.grad for param in model.parameters()])
        for param, *each in zip(model.parameters(), *grads, strict=True):
            param.grad = mean_of(param, each)
        if untied:
            assert model.words.weight.grad is not None
            assert model.head.weight.grad is not None
            model.words.weight.grad = model.head.weight.grad = model.words.weight.grad + model.head.weight.grad
        if task.clip:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), task.clip)))
        optimizer.step()
        optimizer.zero_grad()
    weights = model.state_dict() if task.precision == "fp32" else low.state_dict(model)
    states = optimizer.state_dict()["state"]
    scale = 1.0 if scaler is None else scaler.loss_scale
    return StagedOutcome(losses, {k: v.detach() for k, v in weights.items()}, states, 0, [], norms, scale)


def different(task: StagedTask, outcomes: list[StagedOutcome]) -> list[str]:
    """The names of what differs in a bit from one process."""
    plain = serial(task)
    found = [
        f"rank {rank}: {key}"
        for rank, outcome in enumerate(outcomes)
        for key, value in plain.weights.items()
        if not torch.equal(value, outcome.weights[key])
    ]
    states = {index: state for outcome in outcomes for index, state in outcome.states.items()}
    found += [f"state {index}" for index in plain.states.keys() ^ states.keys()]
    for index, state in plain.states.items():
        if index in states:
            for key, value in state.items():
                if not torch.equal(value, states[index][key].to(value.dtype)):
                    found.append(f"{key} of parameter {index}")
    if any(outcome.scale != plain.scale for outcome in outcomes):
        found.append("loss scale")
    told = [outcome.losses for outcome in outcomes[-1 if task.outside else 0 :]]
    if any(losses != plain.losses for losses in told) and len(task.sizes) == 1:
        found.append("losses")
    return found
