"""The n-th copy between tiers fails, as reads and writes of a disk do: an error that names it, and nothing wrong after.

Half of the bytes are written before it fails, so a target that were taken for valid would show.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

import chunkmem
from chunkmem.data.errors import StateError, TierIOError
from chunkmem.runtime.device import ComputeDevice
from chunkmem.runtime.queues import Lanes
from chunkmem.runtime.store import ChunkStore
from tests.helpers.plain_chain import DEPTH, NUM_STEPS, WIDTH, batch_of, model_of, plain_weights, values

CHUNK_NUMEL = WIDTH * WIDTH
LOST = re.compile(r".*: grad chunk .* is lost, as the copy that was to save it has failed; call optimizer.zero_grad.*")
NAMED = re.compile(
    r"(param|grad|exp_avg|exp_avg_sq) chunk \d+.*: the copy from (HOST|DEVICE) to (HOST|DEVICE) failed: "
)


@dataclass
class Disk:
    """Copies in RAM, of which those from number `fails_at` on fail, `times` of them; counted from `arm` on."""

    times: int = 1
    fails_at: int | None = None
    count: int = 0
    failed: list[int] = field(default_factory=list)

    def arm(self, fails_at: int | None) -> None:
        self.fails_at, self.count = fails_at, 0

    def move(self, target: int, source: int, nbytes: int) -> None:
        at, self.count = self.count, self.count + 1
        if self.fails_at is not None and self.fails_at <= at < self.fails_at + self.times:
            self.failed.append(at)
            ctypes.memmove(target, source, nbytes // 2)
            raise OSError(5, "Input/output error")
        ctypes.memmove(target, source, nbytes)


@pytest.fixture(scope="module")
def plain() -> list[list[torch.Tensor]]:
    return plain_weights()


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def require_named(error: TierIOError) -> None:
    assert NAMED.search(str(error)), error


@dataclass
class Training:
    manager: chunkmem.ChunkManager
    model: nn.Module
    optimizer: chunkmem.AdamW

    def forward_backward(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.model(batch_of(step)).square().mean().backward()

    def state(self) -> list[torch.Tensor]:
        return values(self.manager.state_dict(self.model))


def config(slabs: int, way: Way) -> chunkmem.Config:
    return chunkmem.Config.from_dict(
        {
            "default_chunk_size": CHUNK_NUMEL,
            "memory": {"device": slabs * 4 * CHUNK_NUMEL, "host": 1 << 20},
            "client": {"opts": {"overlap_optimizer": way.is_ahead, "undo_log_ratio": 0.5 * way.is_ahead}},
            "optimizer": {"params": {"use_hybrid_adam": way.updates_on_device}},
        }
    )


def opened(manager: chunkmem.ChunkManager) -> Training:
    with manager.init():
        model = model_of()
    return Training(manager, model, chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2))


@dataclass(frozen=True)
class Way:
    """How copies are made in the step that is hit, and which one that is."""

    fails_in: int
    by_lanes: bool = True
    updates_on_device: bool = False
    is_ahead: bool = False

    def open(self, disk: Disk) -> chunkmem.ChunkManager:
        def lanes(compute: ComputeDevice) -> Lanes:
            if compute.is_accelerator:
                pytest.skip("these lanes work in RAM only")
            return Lanes(move=disk.move if self.by_lanes else ctypes.memmove)

        slabs = 9 if self.updates_on_device else 3
        return chunkmem.ChunkManager(config(slabs, self), make_lanes=lanes)


WAYS = {
    "on demand": Way(0, by_lanes=False),
    "planned": Way(3),
    "planned, with updates on DEVICE": Way(3, updates_on_device=True),
    "planned, with speculative updates": Way(3, is_ahead=True),
}


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """Blocking copies go over it, too; those of lanes do if a manager is opened for that."""
    disk = Disk()

    def transfer(store: ChunkStore, target: torch.Tensor, source: torch.Tensor) -> None:
        disk.move(target.data_ptr(), source.data_ptr(), target.nbytes)

    monkeypatch.setattr(ChunkStore, "transfer", transfer)
    return disk


def copies_of_a_step(way: Way, disk: Disk) -> int:
    with way.open(disk) as manager:
        training = opened(manager)
        for step in range(way.fails_in + 1):
            disk.arm(None)
            training.forward_backward(step)
            training.optimizer.step()
        return disk.count


def play(training: Training, way: Way, disk: Disk, fails_at: int, plain: list[list[torch.Tensor]]) -> str:
    """Train, with a copy that fails in the middle; return where the error was raised."""
    for step in range(way.fails_in):
        training.forward_backward(step)
        training.optimizer.step()
    disk.arm(fails_at)
    where = [attempt(training, step, plain) for step in range(way.fails_in, NUM_STEPS)]
    found = [each for each in where if each]
    assert len(found) == 1, "one copy fails, and one error is raised"
    return found[0]


def attempt(training: Training, step: int, plain: list[list[torch.Tensor]]) -> str:
    """Do a step, or what a failed copy leaves of it; return where the error was raised, if it was."""
    try:
        training.forward_backward(step)
    except TierIOError as error:
        require_named(error)
        assert same(training.state(), plain[step])
        training.forward_backward(step)
        training.optimizer.step()
        return "before step()"
    try:
        training.optimizer.step()
    except TierIOError as error:
        require_named(error)
        is_half = refuses_all(training)
        training.optimizer.step()
        return "in step(), after updates" if is_half else "in step()"
    return ""


def refuses_all(training: Training) -> bool:
    """Tell whether some groups have been updated: then weights are of before the step and of after it, and not read."""
    try:
        training.state()
    except StateError:
        with pytest.raises(StateError, match=r"call optimizer\.step\(\) again, which updates the others"):
            training.state()
        with pytest.raises(StateError, match=r"zero_grad\(\) after an error in optimizer\.step\(\)"):
            training.optimizer.zero_grad()
        return True
    return False


@pytest.mark.few(1)
@pytest.mark.parametrize("name", WAYS)
def test_each_copy_of_a_step(name: str, disk: Disk, plain: list[list[torch.Tensor]]) -> None:
    way = WAYS[name]
    total = copies_of_a_step(way, disk)
    assert total > DEPTH
    where = []
    for fails_at in range(total):
        disk.arm(None)
        disk.failed.clear()
        with way.open(disk) as manager:
            training = opened(manager)
            where.append(play(training, way, disk, fails_at, plain))
            assert disk.failed == [fails_at]
            assert same(training.state(), plain[NUM_STEPS]), fails_at
    assert "before step()" in where
    # Which groups a plan has updated before step() waits for a copy depends on the times that were measured.
    assert way.by_lanes or "in step(), after updates" in where


@pytest.mark.few(1)
@pytest.mark.parametrize("name", WAYS)
def test_a_link_that_stays_down_for_a_while(name: str, disk: Disk, plain: list[list[torch.Tensor]]) -> None:
    """From one copy on all fail, those that save what is left, too. No weight is wrong, and what is lost says so."""
    way = WAYS[name]
    disk.times = 1 << 30
    told = set()
    for fails_at in range(copies_of_a_step(way, disk)):
        disk.arm(None)
        with way.open(disk) as manager:
            training = opened(manager)
            for step in range(way.fails_in):
                training.forward_backward(step)
                training.optimizer.step()
            disk.arm(fails_at)
            with pytest.raises(TierIOError) as raised:
                for step in range(way.fails_in, NUM_STEPS):
                    training.forward_backward(step)
                    training.optimizer.step()
            require_named(raised.value)
            disk.arm(None)
            if refuses_all(training):
                with contextlib.suppress(StateError):  # a gradient is lost
                    training.optimizer.step()
                    assert same(training.state(), plain[step + 1])
                continue
            for index, value in enumerate(training.state()):
                assert any(torch.equal(value, at[index]) for at in plain[step : step + 2])
            with contextlib.suppress(StateError):
                told.add(message_of(training.optimizer.step))
            if not refuses_all(training):  # of what a backward that failed has left, some may be updated now
                training.forward_backward(step)
                training.optimizer.step()
    if way.by_lanes:
        assert any(LOST.fullmatch(text) for text in told), told


def message_of(call: Callable[[], object]) -> str:
    """What a TierIOError says that `call` raises; empty if none is."""
    try:
        call()
    except TierIOError as error:
        return str(error)
    return ""
