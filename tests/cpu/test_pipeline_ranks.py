"""Blocks by micro-batches over data-parallel ranks: exact means, and exchanges that do not grow with micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import chunkmem
from chunkmem.plan.timeline import Timeline
from chunkmem.ranks.methods import PointToPoint
from tests.helpers.ranks import Team
from tests.helpers.shared_training import Block, mean_of
from tests.helpers.spread import spread

NUM_BLOCKS = 6
CHUNK_NUMEL = 1104
"""One block is one chunk, and one unit; so are stem and head."""
CHUNK_NBYTES = 4 * CHUNK_NUMEL
NUM_CHUNKS = NUM_BLOCKS + 2
NUM_STEPS = 8
AMPLE_NBYTES = 1 << 20
TIGHT_NBYTES = 6 * CHUNK_NBYTES
SLOW_BPS = 1e4
"""Bytes exchanged in a second: a chunk takes longer than all else of a step."""


class Net(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(nn.Sequential(Block(), nn.Dropout(p)) for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(16, 4)


def batch(step: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(size, 8, generator=generator), torch.randint(4, (size,), generator=generator)


SAME = (16,)
RAGGED = (16, 11, 5)
"""Samples of a rank's batches, in turn; the ranks begin at different ones."""


def size_of(step: int, rank: int, sizes: Sequence[int]) -> int:
    return sizes[(step + rank) % len(sizes)]


@dataclass
class Found:
    """What one rank ends with, and what its last step was."""

    weights: dict[str, Tensor]
    losses: list[Tensor]
    num_gathers: int
    num_reductions: int
    nbytes: int
    timelines: list[Timeline | None]


def train(
    rank: int, micro_batches: int, checkpoint: str, device_nbytes: int, p: float = 0.0, sizes: Sequence[int] = SAME
) -> Found:
    torch.set_num_threads(1)
    values = {"default_chunk_size": CHUNK_NUMEL, "memory": {"device": device_nbytes, "host": 8 << 20}}
    # One way to exchange, said to be slow: measured on a busy machine, plans might exchange more to copy less.
    with (
        patch("chunkmem.assembly.speeds.measure_exchanges", return_value=(SLOW_BPS, SLOW_BPS)),
        chunkmem.ChunkManager(chunkmem.Config.from_dict(values), exchange=PointToPoint) as manager,
    ):
        torch.manual_seed(0)
        with manager.init():
            model = Net(p)
            manager.unit(model.stem)
            manager.unit(model.head)
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        pipe = manager.pipeline(
            model.blocks,
            first=model.stem,
            last=model.head,
            loss_fn=F.cross_entropy,
            micro_batches=micro_batches,
            checkpoint=checkpoint,
        )
        assert manager.runtime.sharding.shards is not None
        traffic = manager.runtime.sharding.shards.exchange.traffic
        before, losses, timelines = (0, 0, 0), [], []
        for step in range(NUM_STEPS):
            before = traffic.num_gathers, traffic.num_reductions, traffic.sent_nbytes + traffic.received_nbytes
            torch.manual_seed(100 * step + rank)
            losses.append(pipe.step(*batch(step, rank, size_of(step, rank, sizes))))
            optimizer.step()
            optimizer.zero_grad()
            timelines.append(manager.timeline())
        after = traffic.num_gathers, traffic.num_reductions, traffic.sent_nbytes + traffic.received_nbytes
        counts = [now - then for now, then in zip(after, before, strict=True)]
        return Found(manager.state_dict(), losses, *counts, timelines)


def serial(micro_batches: int, p: float = 0.0, sizes: Sequence[int] = SAME) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Plain PyTorch: all forwards of a rank's micro-batches, then all backwards in reverse; means over both ranks."""
    torch.manual_seed(0)
    model = Net(p)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=1e-2, fused=True)
    losses = []
    for step in range(NUM_STEPS):
        grads = []
        for rank in range(2):
            optimizer.zero_grad()
            torch.manual_seed(100 * step + rank)
            x, y = batch(step, rank, size_of(step, rank, sizes))
            parts = []
            count = min(micro_batches, len(x))
            for given, target in zip(x.tensor_split(count), y.tensor_split(count), strict=True):
                output = model.stem(given)
                for block in model.blocks:
                    output = block(output)
                parts.append(F.cross_entropy(model.head(output), target) / (len(x) / len(given)))
            for part in reversed(parts):
                part.backward()
            losses.append(sum(part.detach() for part in parts))
            grads.append([param.grad for param in params])
        for param, *each in zip(params, *grads, strict=True):
            param.grad = mean_of(param, each)
        optimizer.step()
    return {key: value.detach() for key, value in model.state_dict().items()}, losses


def assert_equal(found: list[Found], expected: tuple[dict[str, Tensor], list[Tensor]]) -> None:
    weights, losses = expected
    for rank, each in enumerate(found):
        assert [key for key, value in weights.items() if not torch.equal(value, each.weights[key])] == []
        assert all(map(torch.equal, each.losses, losses[rank::2]))


@pytest.mark.few(1)
@spread(micro_batches=[2, 16, 4], device_nbytes=[AMPLE_NBYTES, TIGHT_NBYTES])
def test_exchanges_do_not_grow_with_micro_batches(pair: Team, micro_batches: int, device_nbytes: int) -> None:
    """Each chunk is gathered for forward and for backward, and reduced once, however many micro-batches there are."""
    found = pair.run(train, micro_batches, "always", device_nbytes)
    assert_equal(found, serial(micro_batches))
    for each in found:
        assert each.num_gathers <= 2 * NUM_CHUNKS
        assert each.num_reductions <= NUM_CHUNKS
        assert each.nbytes <= 3 * NUM_CHUNKS * CHUNK_NBYTES
        for timeline in each.timelines[4:]:
            assert timeline is not None
            assert timeline.plan_misses == 0


@pytest.mark.few(1)
@spread(checkpoint=["never", "auto"], device_nbytes=[AMPLE_NBYTES, TIGHT_NBYTES])
def test_dropout(pair: Team, checkpoint: str, device_nbytes: int) -> None:
    assert_equal(pair.run(train, 4, checkpoint, device_nbytes, 0.2), serial(4, 0.2))


@pytest.mark.full
@pytest.mark.parametrize("checkpoint", [pytest.param("except_last", marks=pytest.mark.full), "auto"])
def test_a_rank_with_another_batch(pair: Team, checkpoint: str) -> None:
    """In some steps, the micro-batches of one rank are shorter and fewer than those of the other one."""
    assert_equal(pair.run(train, 8, checkpoint, AMPLE_NBYTES, 0.2, RAGGED), serial(8, 0.2, RAGGED))
