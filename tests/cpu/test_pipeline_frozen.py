"""Frozen blocks of a pipeline, by layer: they run once, without what backward needs, or not at all with a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chunkmem
from chunkmem.plan.model import Lane
from chunkmem.types import Role
from tests.helpers.audit import audit
from tests.helpers.twins import AMPLE_NBYTES, SEED, WIDTH, assert_equal, config, copied, cpu_only, mlp

pytestmark = cpu_only

NUM_BLOCKS, BATCH, NUM_SAMPLES = 6, 8, 24
HOST_NBYTES = NUM_SAMPLES * WIDTH * 4


def sample(number: int) -> Tensor:
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(number))


def order(epoch: int) -> list[list[int]]:
    shuffled = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(epoch)).tolist()
    return [shuffled[at : at + BATCH] for at in range(0, NUM_SAMPLES, BATCH)]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


class Counted(nn.Module):
    """Counts the calls of a block."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        result: Tensor = self.inner(x)
        return result


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Counted(nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(Counted(mlp()) for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, 4)

    def take_counts(self) -> list[int]:
        """Of the first module and the blocks, since the last time."""
        counted: list[Any] = [self.first, *self.blocks]
        counts = [each.num_calls for each in counted]
        for each in counted:
            each.num_calls = 0
        return counts


class Run:
    """A pipeline over a model whose blocks are frozen, epoch by epoch."""

    def __init__(self, manager: chunkmem.ChunkManager, *, host: int = 0, alpha: float = 1 / 3, **options: Any) -> None:
        torch.manual_seed(SEED)
        self.manager = manager
        with manager.init():
            self.model = Net()
        self.optimizer = chunkmem.AdamW(self.model.parameters(), manager=manager, lr=1e-2)
        self.cache = chunkmem.FrozenCache(manager, host=host) if host else None
        self.schedule = chunkmem.FreezeSchedule(self.model.blocks, alpha=alpha, first=self.model.first)
        self.pipe: Any = manager.pipeline(
            self.model.blocks,
            first=self.model.first,
            last=self.model.head,
            loss_fn=loss_of,
            micro_batches=4,
            freeze=self.schedule,
            cache=self.cache,
            **options,
        )

    def step(self, ids: list[int]) -> float:
        x = torch.stack([sample(each) for each in ids])
        y = torch.stack([sample(1000 + each)[:4] for each in ids])
        loss: float = self.pipe.step(x, y, ids=ids).item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        audit(self.manager)
        return loss

    def epoch(self, number: int) -> list[float]:
        return [self.step(ids) for ids in order(number)]


def weights_copied(manager: chunkmem.ChunkManager) -> set[int]:
    """The groups whose weights were copied to DEVICE in the last step."""
    timeline = manager.timeline()
    assert timeline is not None
    spans = [span for span in timeline.spans if span.lane is Lane.H2D and span.nbytes and not span.is_stall]
    return {span.chunk.group for span in spans if span.chunk is not None and span.chunk.role is Role.PARAM}


def groups_of(manager: chunkmem.ChunkManager, *modules: nn.Module) -> set[int]:
    found = (manager.runtime.registry.find(param) for module in modules for param in module.parameters())
    return {managed.group for managed in found if managed is not None}


@pytest.mark.parametrize("checkpoint", ["auto", pytest.param("always", marks=pytest.mark.full)])
@pytest.mark.parametrize("device_nbytes", [20 << 10, pytest.param(AMPLE_NBYTES, marks=pytest.mark.full)])
def test_losses_are_those_without_a_cache(checkpoint: str, device_nbytes: int) -> None:
    found = []
    for host in (0, HOST_NBYTES, 10 * WIDTH * 4):
        with chunkmem.ChunkManager(config(device_nbytes)) as manager:
            run, losses, reports = Run(manager, host=host, checkpoint=checkpoint), [], []
            for number in range(7):
                losses += run.epoch(number)
                if number % 2:
                    reports.append(run.pipe.end_epoch().num_params)
            assert reports[0] > reports[1] > 0
            found.append((losses, reports, copied(manager.state_dict())))
            if host == HOST_NBYTES:
                assert run.cache is not None
                report = run.cache.report
                assert (report.num_found, report.num_computed) == (2 * NUM_SAMPLES, 3 * NUM_SAMPLES)
    assert_equal(found[1], found[0])
    assert_equal(found[2], found[0])


def test_with_a_cache_a_block_runs_once_for_each_sample() -> None:
    with chunkmem.ChunkManager(config(20 << 10)) as manager:
        run = Run(manager, host=HOST_NBYTES)
        run.epoch(0)
        run.pipe.end_epoch()
        run.model.take_counts()
        run.epoch(1)
        assert run.model.take_counts() == [12] * (NUM_BLOCKS + 1)
        run.epoch(2)
        assert run.model.take_counts() == [0] * 3 + [12] * 4
        run.pipe.end_epoch()
        run.epoch(3)  # begins where fewer blocks had ended
        assert run.model.take_counts() == [0] * 3 + [12] * 4
        run.epoch(4)
        assert run.model.take_counts() == [0] * 5 + [12] * 2


def test_weights_of_frozen_blocks_are_copied_once_a_step_or_never() -> None:
    for host in (0, HOST_NBYTES):
        with chunkmem.ChunkManager(config(20 << 10)) as manager:
            run = Run(manager, host=host)
            run.epoch(0)
            run.pipe.end_epoch()
            for number in range(1, 5):
                run.epoch(number)
            frozen = groups_of(manager, *run.schedule.frozen) - groups_of(
                manager, *run.model.blocks[run.schedule.prefix :]
            )
            timeline = manager.timeline()
            assert timeline is not None
            assert timeline.plan_misses == 0
            assert manager.plan is not None
            copied_groups = weights_copied(manager)
            assert bool(copied_groups & frozen) is not bool(host)
