"""Nothing grows from step to step: slabs, threads, open files, Python's objects, resident memory."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest
import torch
from torch import Tensor, nn

import chunkmem
from chunkmem.data.types import Tier
from chunkmem.runtime.device import give_back_freed_ram

WIDTH, NUM_LAYERS = 32, 8
CHUNK_NUMEL = WIDTH * WIDTH + WIDTH
"""One layer, so that a cap of a few chunks evicts all the time."""
CAP_NBYTES = 8 * 4 * CHUNK_NUMEL
"""Of 32 chunks, which are 8 layers with gradients and two states each."""
WARM_UP = 10
"""The first step is recorded, the second is planned, the third may follow a better plan; the rest is margin."""
NUM_STEPS = 210


@dataclass(frozen=True)
class Holdings:
    """What a process holds between two steps, as counts."""

    device_slabs: int
    """In use, or kept for reuse."""
    host_segments: int
    host_slabs: int
    threads: int
    files: int


class Loop:
    """A model whose training evicts, with copies in threads."""

    def __init__(self) -> None:
        memory = {"device": CAP_NBYTES, "host": 1 << 20}
        self.manager = chunkmem.ChunkManager(
            chunkmem.Config.from_dict({"memory": memory, "default_chunk_size": CHUNK_NUMEL})
        )
        with self.manager.init():
            self.model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(NUM_LAYERS)))
        self.optimizer = chunkmem.AdamW(self.model.parameters(), manager=self.manager, lr=1e-3)
        self.batch = torch.randn(4, WIDTH)

    def step(self) -> None:
        loss: Tensor = self.model(self.batch).square().mean()
        self.manager.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def holdings(self) -> Holdings:
        device, host = self.manager.runtime.tiers.device_pool, self.manager.runtime.tiers.host_pool
        chunks = self.manager.runtime.memory.store.chunks.values()
        in_use = {tier: sum(tier in chunk.replicas for chunk in chunks) for tier in Tier}
        return Holdings(
            device_slabs=in_use[Tier.DEVICE] + len(device._kept),
            host_segments=len(host._segments),
            host_slabs=in_use[Tier.HOST] + sum(map(len, host._idle.values())),
            threads=threading.active_count(),
            files=psutil.Process().num_fds(),
        )

    def require_planned_step(self) -> None:
        """The last step followed a plan, and copied."""
        timeline = self.manager.timeline()
        assert timeline is not None
        assert self.manager.plan is not None
        assert timeline.plan_misses == 0
        assert all(nbytes > 0 for nbytes in timeline.moved_nbytes.values())


@pytest.fixture
def loop() -> Iterator[Loop]:
    if torch.cuda.is_available():
        pytest.skip("resident memory of the process is what is measured")
    made = Loop()
    yield made
    made.manager.close()


def resident_nbytes() -> int:
    gc.collect()
    give_back_freed_ram()
    return int(psutil.Process().memory_info().rss)


def slope(samples: list[tuple[int, int]]) -> float:
    """Least squares through (step, bytes): bytes a step."""
    steps, nbytes = zip(*samples, strict=True)
    mean_step, mean_nbytes = sum(steps) / len(steps), sum(nbytes) / len(nbytes)
    covariance = sum((step - mean_step) * (n - mean_nbytes) for step, n in samples)
    return covariance / sum((step - mean_step) ** 2 for step in steps)


def test_the_slope_of_a_leak_of_one_kib_a_step_is_that() -> None:
    assert slope([(step, 5_000_000 + 1024 * step) for step in range(200, 1001, 20)]) == pytest.approx(1024)


def num_objects() -> int:
    gc.collect()
    return len(gc.get_objects())


def test_many_steps_hold_no_more_than_ten(loop: Loop) -> None:
    for _ in range(WARM_UP):
        loop.step()
    before, objects_before = loop.holdings(), num_objects()
    for _ in range(WARM_UP, NUM_STEPS):
        loop.step()
        loop.require_planned_step()
        assert loop.holdings() == before
    # As a step ends, up to 32 copies are kept account of, and their times; what leaks at all leaks every step.
    assert num_objects() - objects_before < NUM_STEPS - WARM_UP


@pytest.mark.full
def test_a_thousand_steps_need_no_more_memory_than_two_hundred(loop: Loop) -> None:
    samples = []
    for _ in range(WARM_UP):
        loop.step()
    before = loop.holdings()
    for step in range(WARM_UP, 1001):
        loop.step()
        loop.require_planned_step()
        assert loop.holdings() == before, step
        if step >= 200 and step % 20 == 0:
            samples.append((step, resident_nbytes()))
    assert slope(samples) <= 1024, samples
