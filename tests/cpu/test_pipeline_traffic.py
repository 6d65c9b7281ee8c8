"""By layer, what moves in a step does not depend on the number of micro-batches.

plain loop  | 0.0 1.0 2.0   2.0 1.0 0.0 | 0.1 1.1 2.1   2.1 1.1 0.1 |        b.m: block b, micro-batch m
PARAM       | 0   1   2         1   0   |     1   2         1   0   |        room for two blocks
by layer    | 0.0 0.1   1.0 1.1   2.0 2.1   2.1 2.0   1.1 1.0   0.1 0.0 |
PARAM       | 0         1         2                   1         0       |
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import chunkmem
from chunkmem.data.trace import Trace
from chunkmem.data.types import Role
from chunkmem.modules.backward_calls import BackwardCall
from chunkmem.modules.nodes import NodePins
from chunkmem.plan.model import Lane
from chunkmem.plan.timeline import Timeline

WIDTH, DEPTH, BATCH = 32, 6, 32
NUM_STEPS = 5
"""The first counts random numbers, two are recorded, and then a plan is followed."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 10)


@dataclass(frozen=True)
class Run:
    timeline: Timeline
    trace: Trace

    def copies(self, role: Role, lane: Lane) -> Counter[int]:
        """Return by group how often its chunk was copied."""
        spans = [span for span in self.timeline.spans if span.lane is lane and span.nbytes and not span.is_stall]
        return Counter(span.chunk.group for span in spans if span.chunk is not None and span.chunk.role is role)


def train(micro_batches: int, checkpoint: str, *, device: str) -> Run:
    """Train some steps by layer; return the last one."""
    config = {"memory": {"device": device, "host": "64MiB"}, "default_chunk_size": 8 * WIDTH * WIDTH + 256}
    torch.manual_seed(0)
    with chunkmem.ChunkManager(chunkmem.Config.from_dict(config)) as manager:
        with manager.init():
            model = Model()
        optimizer = chunkmem.AdamW(model.parameters(), lr=1e-3, manager=manager)
        pipe = manager.pipeline(
            model.blocks,
            last=model.head,
            loss_fn=nn.functional.cross_entropy,
            micro_batches=micro_batches,
            checkpoint=checkpoint,
        )
        x, y = torch.randn(BATCH, WIDTH), torch.randint(10, (BATCH,))
        for _ in range(NUM_STEPS):
            pipe.step(x, y)
            optimizer.step()
            optimizer.zero_grad()
        timeline, trace = manager.timeline(), manager.trace
    assert timeline is not None
    assert trace is not None
    assert timeline.plan_misses == 0
    return Run(timeline, trace)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "micro_batches", [2, 8, *(pytest.param(num, marks=pytest.mark.full) for num in (1, 3, 4, 16, 32))]
)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_weights_come_twice_and_gradients_leave_once(micro_batches: int, checkpoint: str) -> None:
    """Each chunk comes once in forward and once in backward; the last one stays in between."""
    run = train(micro_batches, checkpoint, device="160KiB")
    groups = {chunk.group for chunk in run.trace.chunk_nbytes if chunk.role is Role.PARAM}
    weights = run.copies(Role.PARAM, Lane.H2D)
    assert len(groups) > DEPTH / 2
    assert len(weights) > len(groups) / 2, "the cap has room for too many"
    num_kept = len(groups) - len(weights)
    assert weights.total() <= 2 * (len(groups) - num_kept) + 1
    gradients = run.copies(Role.GRAD, Lane.D2H)
    assert set(gradients.values()) <= {1}
    assert run.copies(Role.GRAD, Lane.H2D).total() == 0


@pytest.mark.parametrize("most", [8, pytest.param(32, marks=pytest.mark.full)])
def test_traffic_of_weights_is_the_same_for_any_number_of_micro_batches(most: int) -> None:
    """All blocks are recomputed: what is kept of them is as large for 2 parts of a batch as for 32."""
    moved = set()
    for micro_batches in (2, most):
        run = train(micro_batches, "always", device="160KiB")
        moved.add((run.copies(Role.PARAM, Lane.H2D).total(), run.copies(Role.GRAD, Lane.D2H).total()))
    assert len(moved) == 1


def test_backward_of_a_micro_batch_is_over_when_its_gradients_land(monkeypatch: pytest.MonkeyPatch) -> None:
    """All micro-batches have read the weights, and nodes were watched one by one, as if one backward came to all of
    them."""
    watched: list[str] = []
    announce = NodePins.announce

    def count(pins: NodePins, task: int, call: BackwardCall) -> bool:
        watched.append(call.name)
        return announce(pins, task, call)

    monkeypatch.setattr(NodePins, "announce", count)
    train(4, "never", device="64MiB")
    assert not watched
