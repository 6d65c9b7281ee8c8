"""`torch.distributed.pipelining.PipelineStage` around managed modules: bits of the same stages unmanaged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

import chunkmem
from tests.helpers.ranks import Team

WIDTH, SAMPLES, STEPS = 8, 16, 6
AMPLE_NBYTES = 1 << 20


@dataclass(frozen=True)
class Task:
    """What both ranks do."""

    schedule: str = "gpipe"
    stages_per_rank: int = 1
    micro_batches: int = 4
    is_static: bool = True
    """Shapes are given; else the stages run forward to find them out."""
    policy: str | None = None
    """For activations."""
    device_nbytes: int = AMPLE_NBYTES
    is_v_shaped: bool = False
    """The first rank has the first and the last stage."""
    has_norms: bool = True

    @property
    def num_stages(self) -> int:
        return 2 * self.stages_per_rank

    def of_rank(self, rank: int) -> list[int]:
        return [k for k in range(self.num_stages) if rank == (min(k, 3 - k) if self.is_v_shaped else k % 2)]

    def make_config(self) -> chunkmem.Config:
        given = {"memory": {"device": self.device_nbytes, "host": 1 << 20}, "default_chunk_size": 160}
        return chunkmem.Config.from_dict(given | ({"activations": {"policy": self.policy}} if self.policy else {}))


class Block(nn.Module):
    def __init__(self, has_norm: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(2 * WIDTH) if has_norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(nn.functional.dropout(self.norm(self.up(x)).tanh(), 0.1))
        return y


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@dataclass
class Outcome:
    """What a rank ends with."""

    state: dict[str, Tensor]
    """Of its stages."""
    misses: list[int] = field(default_factory=list)
    """Of the plan, by step."""
    required_nbytes: int = 0


def train(rank: int, task: Task, is_managed: bool) -> Outcome:
    torch.set_num_threads(1)
    alone = [dist.new_group([each]) for each in range(2)][rank]
    torch.manual_seed(0)
    modules = [nn.Sequential(Block(task.has_norms), Block(task.has_norms)) for _ in range(task.num_stages)]
    own = nn.ModuleList(modules[k] for k in task.of_rank(rank))
    if not is_managed:
        run(rank, task, own, torch.optim.AdamW(own.parameters(), lr=1e-2, fused=True))
        return Outcome(own.state_dict())
    with chunkmem.ChunkManager(task.make_config(), process_group=alone) as manager:
        manager.wrap(own)
        misses: list[int] = []

        def watch() -> None:
            timeline = manager.timeline()
            misses.append(-1 if timeline is None else timeline.plan_misses)

        run(rank, task, own, chunkmem.AdamW(own.parameters(), manager=manager, lr=1e-2), watch)
        return Outcome(manager.state_dict(), misses, manager.memory().device.required_nbytes)


def run(rank: int, task: Task, own: nn.ModuleList, optimizer: Any, watch: Callable[[], None] = lambda: None) -> None:
    numbers, size = task.of_rank(rank), SAMPLES // task.micro_batches
    stages = [
        PipelineStage(
            module,
            number,
            task.num_stages,
            torch.device("cpu"),
            # Gradients are received for what requires them, and sent for what is said here to require them.
            input_args=(torch.zeros(size, WIDTH, requires_grad=number > 0),) if task.is_static else None,
            output_args=(torch.zeros(size, WIDTH, requires_grad=True),) if task.is_static else None,
        )
        for number, module in zip(numbers, own, strict=True)
    ]
    make: Any = get_schedule_class(task.schedule)
    schedule = make(stages if task.stages_per_rank > 1 else stages[0], task.micro_batches, loss_fn=loss_of)
    draw = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        x, y = (torch.randn(SAMPLES, WIDTH, generator=draw) for _ in range(2))
        torch.manual_seed(step)
        schedule.step(*([x] if 0 in numbers else []), **({"target": y} if task.num_stages - 1 in numbers else {}))
        optimizer.step()
        optimizer.zero_grad()
        watch()


def _of(task: Task, name: str, *, is_usual: bool = False) -> Any:
    return pytest.param(task, id=name, marks=() if is_usual else (pytest.mark.full,))


TASKS = [
    _of(Task(), "gpipe"),
    _of(Task("1f1b"), "1f1b", is_usual=True),
    _of(Task("1f1b", policy="recompute"), "recomputed"),
    _of(Task("1f1b", policy="offload"), "offloaded", is_usual=True),
    _of(Task("1f1b", policy="auto"), "policies by the planner"),
    _of(Task("1f1b", is_static=False, has_norms=False), "shapes found out"),
    _of(Task("LoopedBFS", 2, is_static=False, has_norms=False), "shapes of several stages found out"),
    _of(Task("Interleaved1F1B", 2), "interleaved"),
    _of(Task("LoopedBFS", 2), "looped-bfs"),
    _of(Task("InterleavedZeroBubble", 2), "zero bubble", is_usual=True),
    _of(Task("ZBVZeroBubble", 2, is_v_shaped=True), "zero bubble in a V"),
    _of(Task("DualPipeV", 2, is_v_shaped=True, micro_batches=8), "dualpipev"),
]


@pytest.mark.few(1)
@pytest.mark.parametrize("task", TASKS)
def test_stock_stages_train_as_unmanaged_ones(pair: Team, task: Task) -> None:
    plain, ample = pair.run(train, task, False), pair.run(train, task, True)
    smallest = replace(task, device_nbytes=max(outcome.required_nbytes for outcome in ample))
    for managed in (ample, pair.run(train, smallest, True)):
        for expected, found in zip(plain, managed, strict=True):
            different = [key for key, value in expected.state.items() if not torch.equal(value, found.state[key])]
            assert different == []
            if task.schedule in ("gpipe", "1f1b") and task.is_static:
                assert found.misses[3:] == [0, 0, 0]
