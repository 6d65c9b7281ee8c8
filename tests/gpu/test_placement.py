"""Where chunks are and when they are copied changes no bit on the device: caps, blocking copies, streams held back."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import chunkmem
from chunkmem.plan.model import Lane
from chunkmem.runtime.device import ComputeDevice
from chunkmem.runtime.events import Event, Piece
from chunkmem.runtime.lanes import BlockingLanes, open_lanes
from chunkmem.runtime.queues import Lanes
from chunkmem.runtime.streams import StreamLanes
from tests.helpers.occupied import occupied_nbytes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WIDTH, NUM_LAYERS, NUM_STEPS = 1024, 12, 6
CHUNK_NUMEL = WIDTH * WIDTH + WIDTH
SLAB_NBYTES = 4 * CHUNK_NUMEL
LONGEST_CYCLES = 2_000_000
"""A millisecond or so: a copy of a chunk takes a hundredth of it."""
AMPLE = 512 << 20
TIGHT = 20 * SLAB_NBYTES
"""For 48 chunks and activations, in addition to what cuBLAS takes for itself when its results have to repeat."""


class SleepyLanes(StreamLanes):
    """Streams that sleep a random time before each copy, and now and then before computing continues."""

    def __init__(self, compute: ComputeDevice, seed: int) -> None:
        super().__init__(compute)
        self._draw = random.Random(seed)
        self.num_sleeps = 0

    def copy(self, lane: Lane, pieces: Sequence[Piece], *, after: Sequence[Event], label: str) -> Event:
        with torch.cuda.stream(self._streams[lane]):
            self._sleep()
        return super().copy(lane, pieces, after=after, label=label)

    def compute_event(self) -> Event:
        if self._draw.random() < 0.2:
            self._sleep()
        return super().compute_event()

    def _sleep(self) -> None:
        torch.cuda._sleep(self._draw.randrange(1, LONGEST_CYCLES))
        self.num_sleeps += 1


def build() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(NUM_LAYERS)))


@functools.cache
def second_stream() -> torch.cuda.Stream:
    """One for all tests: cuBLAS keeps its workspaces for each stream."""
    return torch.cuda.Stream()


class Towers(nn.Module):
    """Two halves of the layers, each on a stream of its own."""

    def __init__(self) -> None:
        super().__init__()
        layers = build()
        self.first, self.second = layers[: NUM_LAYERS // 2], layers[NUM_LAYERS // 2 :]
        self.stream = second_stream()

    def forward(self, x: Tensor) -> Tensor:
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            second = self.second(x)
        x.record_stream(self.stream)
        first = self.first(x)
        current.wait_stream(self.stream)
        second.record_stream(current)
        return first * second


def batch(step: int) -> Tensor:
    return torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(step)).cuda()


def train(
    device_nbytes: int,
    *,
    make_lanes: Callable[[ComputeDevice], Lanes] | None = None,
    asynchronous: bool = True,
    build: Callable[[], nn.Module] = build,
    streams: Sequence[torch.cuda.Stream] = (),
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the losses and the weights after some steps, `device_nbytes` being for chunks and activations.

    `streams` are those that the model computes on, in addition to the current one.
    """
    keys = {
        "memory": {"device": occupied_nbytes(*streams) + device_nbytes, "host": AMPLE},
        "default_chunk_size": CHUNK_NUMEL,
        "client": {"opts": {"with_async_move": asynchronous}},
    }
    with chunkmem.ChunkManager(chunkmem.Config.from_dict(keys), make_lanes=make_lanes) as manager:
        with manager.init():
            model = build()
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        losses = []
        for step in range(NUM_STEPS):
            loss = model(batch(step)).square().mean()
            manager.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().cpu())
        timeline = manager.timeline()
        assert timeline is not None
        assert timeline.plan_misses == 0
        assert device_nbytes == AMPLE or sum(timeline.moved_nbytes.values()) > 0, f"all of it fits: {timeline}"
        return losses, manager.state_dict(model)


def train_plain(build: Callable[[], nn.Module] = build) -> tuple[list[Tensor], dict[str, Tensor]]:
    model = build().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses = []
    for step in range(NUM_STEPS):
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    return losses, {name: value.detach().cpu() for name, value in model.state_dict().items()}


def assert_same(
    found: tuple[list[Tensor], dict[str, Tensor]], expected: tuple[list[Tensor], dict[str, Tensor]]
) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found[0], expected[0], strict=True))
    assert found[1].keys() == expected[1].keys()
    assert [name for name, value in expected[1].items() if not torch.equal(found[1][name], value)] == []


@pytest.mark.parametrize("device_nbytes", [AMPLE, TIGHT])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_caps_and_blocking_copies_change_no_bit(device_nbytes: int, asynchronous: bool) -> None:
    assert_same(train(device_nbytes, asynchronous=asynchronous), train_plain())


def test_blocking_copies_are_what_without_async_move_means() -> None:
    assert isinstance(open_lanes(ComputeDevice.default(), blocking=True), BlockingLanes)
    assert isinstance(open_lanes(ComputeDevice.default(), blocking=False), StreamLanes)


@pytest.mark.parametrize("seed", range(5))
def test_streams_held_back_at_random_change_no_bit(seed: int) -> None:
    made: list[SleepyLanes] = []

    def sleepy(compute: ComputeDevice) -> Lanes:
        made.append(SleepyLanes(compute, seed))
        return made[-1]

    assert_same(train(TIGHT, make_lanes=sleepy), train_plain())
    assert made[0].num_sleeps > NUM_STEPS * NUM_LAYERS


@pytest.mark.parametrize("seed", range(5))
def test_streams_of_a_program_change_no_bit(seed: int) -> None:
    found = train(TIGHT, make_lanes=lambda compute: SleepyLanes(compute, seed), build=Towers, streams=[second_stream()])
    assert_same(found, train_plain(Towers))
