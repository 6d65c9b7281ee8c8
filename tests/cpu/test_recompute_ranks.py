"""Recomputed segments over ranks: exact means, and the bytes of a training that keeps its activations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import chunkmem
from tests.helpers.audit import assert_as_predicted
from tests.helpers.ranks import Team
from tests.helpers.shared_training import Block, mean_of

NUM_BLOCKS = 6
BLOCK_NUMEL = 1104
CHUNK_NBYTES = 4 * BLOCK_NUMEL
NONE_STAYS_NBYTES = (3 * NUM_BLOCKS // 2 + NUM_BLOCKS + 2 + 1) * CHUNK_NBYTES
"""Own weights and states, all gradients, two units that come and go, and a gradient that lands; for no unit more."""
"""One block is one chunk, and one unit."""
NUM_STEPS = 6


def sequentially(blocks: nn.ModuleList, x: Tensor, *, segments: int) -> Tensor:
    result: Tensor = chunkmem.checkpoint_sequential(blocks, segments, x)
    return result


def by_torch(blocks: nn.ModuleList, x: Tensor, *, segments: int) -> Tensor:
    """All segments, the last one too, by torch's own checkpoint."""
    size = NUM_BLOCKS // segments
    for start in range(0, NUM_BLOCKS, size):
        x = torch_checkpoint(nn.Sequential(*blocks[start : start + size]).forward, x, use_reentrant=False)
    return x


def reentrantly(blocks: nn.ModuleList, x: Tensor, *, segments: int) -> Tensor:
    size = NUM_BLOCKS // segments
    for start in range(0, NUM_BLOCKS, size):
        x = torch_checkpoint(nn.Sequential(*blocks[start : start + size]).forward, x, use_reentrant=True)
    return x


def kept(blocks: nn.ModuleList, x: Tensor, *, segments: int) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


WAYS: dict[str, Callable[..., Tensor]] = {
    "kept": kept,
    "sequential": sequentially,
    "torch": by_torch,
    "reentrant": reentrantly,
}


class NormBlock(Block):
    """With running statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(16, affine=False)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.drop(self.batch(super().forward(x)))
        return result


class Stack(nn.Module):
    def __init__(self, way: str, segments: int, block: type[Block] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(NUM_BLOCKS))
        self.way, self.segments = way, segments

    def forward(self, x: Tensor) -> Tensor:
        return WAYS[self.way](self.blocks, x, segments=self.segments)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(3, 16, generator=torch.Generator().manual_seed(10 * step + rank)).requires_grad_()


@dataclass
class Found:
    """What one rank ends with, and what it exchanged in its last step."""

    weights: dict[str, Tensor]
    num_reductions: int
    nbytes: int
    num_pinned: int
    buffers: dict[str, Tensor]


def train(rank: int, way: str, segments: int, device_nbytes: int, block: type[Block] = Block) -> Found:
    torch.set_num_threads(1)
    values = {"default_chunk_size": BLOCK_NUMEL, "memory": {"device": device_nbytes, "host": 8 << 20}}
    with chunkmem.ChunkManager(chunkmem.Config.from_dict(values)) as manager:
        torch.manual_seed(0)
        with manager.init():
            model = Stack(way, segments, block)
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        manager.accumulate(1)
        assert manager.runtime.sharding.shards is not None
        traffic = manager.runtime.sharding.shards.exchange.traffic
        before = (0, 0)
        for step in range(NUM_STEPS):
            before = traffic.num_reductions, traffic.sent_nbytes + traffic.received_nbytes
            manager.backward(model(batch(step, rank)).square().mean())
            chunks = manager.runtime.memory.store.chunks.values()
            num_pinned = sum(replica.pins for chunk in chunks for replica in chunk.replicas.values())
            optimizer.step()
            optimizer.zero_grad()
        assert_as_predicted(manager)
        after = traffic.num_reductions, traffic.sent_nbytes + traffic.received_nbytes
        counts = [now - then for now, then in zip(after, before, strict=True)]
        buffers = {key: value.clone() for key, value in model.named_buffers()}
        return Found(manager.state_dict(), *counts, num_pinned, buffers)


def serial() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Stack("kept", 1)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=1e-2, fused=True)
    for step in range(NUM_STEPS):
        grads = []
        for rank in range(2):
            optimizer.zero_grad()
            model(batch(step, rank)).square().mean().backward()
            grads.append([param.grad for param in params])
        for param, *each in zip(params, *grads, strict=True):
            param.grad = mean_of(param, each)
        optimizer.step()
    return {key: value.detach() for key, value in model.state_dict().items()}


@pytest.mark.few(1)
@pytest.mark.parametrize("way", ["sequential", "torch"])
@pytest.mark.parametrize("segments", [1, 2, 3, 6])
@pytest.mark.parametrize("stay", [True, False])
def test_the_bytes_are_those_without_recomputation(pair: Team, way: str, segments: int, stay: bool) -> None:
    """Each unit is gathered for forward and for backward, but the last one, which backward begins with; reduced once.

    forward   0 1 2 3 4 5
    backward            5 | recompute 3 4 | 4 3 | recompute 0 1 2 | 2 1 0      of segments 0-2, 3-4, 5
    held                5   3 4             4 3   0 1 2             2 1 0

    With room for all of them units stay, and are gathered once.
    """
    expected = serial()
    num_gathers = NUM_BLOCKS if stay else 2 * NUM_BLOCKS - 1
    for found in pair.run(train, way, segments, 1 << 20 if stay else NONE_STAYS_NBYTES):
        assert [key for key, value in expected.items() if not torch.equal(value, found.weights[key])] == []
        assert found.num_reductions == (NUM_BLOCKS / 2 if stay else NUM_BLOCKS), "of both owners at a time, with room"
        assert found.nbytes == (num_gathers + NUM_BLOCKS) * CHUNK_NBYTES
        assert found.num_pinned == 0


@pytest.mark.few(1)
@pytest.mark.parametrize("segments", [1, 3])
def test_reentrant_segments_are_backwards_of_their_own(pair: Team, segments: int) -> None:
    expected = serial()
    for found in pair.run(train, "reentrant", segments, 1 << 20):
        assert [key for key, value in expected.items() if not torch.equal(value, found.weights[key])] == []
        assert found.num_pinned == 0


@pytest.mark.few(1)
@pytest.mark.parametrize("way", ["sequential", "torch"])
@pytest.mark.parametrize("segments", [2, 3])
def test_where_a_segment_does_not_fit_units_come_one_by_one(pair: Team, way: str, segments: int) -> None:
    """At the smallest cap that a training without recomputation has: a unit's weights and its gradient."""
    expected = serial()
    for found in pair.run(train, way, segments, 2 * CHUNK_NBYTES):
        assert [key for key, value in expected.items() if not torch.equal(value, found.weights[key])] == []
        assert found.num_reductions == NUM_BLOCKS
        assert found.num_pinned == 0


@pytest.mark.few(1)
@pytest.mark.parametrize("device_nbytes", [1 << 20, 2 * CHUNK_NBYTES])
def test_statistics_of_each_rank_count_once(pair: Team, device_nbytes: int) -> None:
    expected = pair.run(train, "kept", 1, device_nbytes, NormBlock)
    for kept_one, found in zip(expected, pair.run(train, "sequential", 3, device_nbytes, NormBlock), strict=True):
        for key, value in (kept_one.weights | kept_one.buffers).items():
            assert torch.equal(value, (found.weights | found.buffers)[key]), key
        assert int(found.buffers["blocks.0.batch.num_batches_tracked"]) == NUM_STEPS
