"""Stages cut from recorded steps: as good as any contiguous partition, on three models."""

from __future__ import annotations

import functools
import time
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import chunkmem
from chunkmem.data.errors import TraceError
from chunkmem.data.trace import Kind, Mode, Moment, Trace
from chunkmem.data.types import ChunkId, Role
from chunkmem.plan.balance import balance, tie_groups, tied_over
from chunkmem.report.blocks import blocks_of
from tests.helpers.traces import LAYOUT
from tests.helpers.twins import cpu_only
from tests.helpers.zoo import ZOO

pytestmark = cpu_only


class Block(nn.Module):
    def __init__(self, width: int, factor: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, factor * width)
        self.down = nn.Linear(factor * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + y


class Text(nn.Module):
    """Tied embedding and head around blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, 64)
        self.blocks = nn.ModuleList(Block(64) for _ in range(6))
        self.head = nn.Linear(64, 64, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x.flatten(1).abs().mul(9).long().clamp(max=63))
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


class Images(nn.Sequential):
    """A CNN: layers without parameters between others, and fewer and fewer pixels."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for one, other in pairwise((3, 16, 32, 64)):
            layers += [nn.Conv2d(one, other, 3, padding=1), nn.BatchNorm2d(other), nn.ReLU(), nn.MaxPool2d(2)]
        super().__init__(*layers, nn.Flatten(), nn.Linear(64, 10))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return y.square().mean()


class Uneven(nn.Module):
    """Blocks of very different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 96)
        self.blocks = nn.ModuleList(Block(96, factor) for factor in (1, 1, 16, 1, 2, 8, 1))
        self.last = nn.Linear(96, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.flatten(2).mT)
        for block in self.blocks:
            x = block(x)
        return self.last(x).square().mean()


KINDS = {"text": Text, "images": Images, "uneven": Uneven}


@functools.cache
def recorded(name: str) -> tuple[Trace, dict[str, int]]:
    """A planned step, and the elements of parameters by name."""
    config = {"memory": {"device": "2MiB", "host": "64MiB"}, "default_chunk_size": 16384}
    with chunkmem.ChunkManager(chunkmem.Config.from_dict(config)) as manager:
        torch.manual_seed(0)
        with manager.init():
            model = KINDS[name]()
        optimizer = chunkmem.Adam(model.parameters(), manager=manager)
        numels = {name: param.numel() for name, param in model.named_parameters()}
        for _ in range(4):
            manager.backward(model(torch.randn(4, 3, 8, 8)))
            optimizer.step()
            optimizer.zero_grad()
        return manager.trace, numels


@pytest.mark.parametrize("by_numel", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_blocks_have_the_time_and_the_bytes_of_the_step(name: str, by_numel: bool) -> None:
    trace, numels = recorded(name)
    blocks = blocks_of(trace, numels=numels if by_numel else None)
    in_step_s = sum(moment.duration_s for moment in trace.moments if moment.kind not in (Kind.UPDATE, Kind.CONSUME))
    assert sum(block.seconds for block in blocks) == pytest.approx(trace.before_s + in_step_s)
    assert all(block.forward_s > 0 and block.backward_s > 0 for block in blocks if block.name != "words")
    (whole,) = balance(blocks, 1)
    assert whole.nbytes == sum(trace.chunk_nbytes.values())


def test_blocks_are_named_in_the_order_of_forward() -> None:
    names = [block.name for block in blocks_of(recorded("text")[0])]
    assert names == ["words", *(f"blocks.{at}" for at in range(6)), "head"]
    # Layers without parameters belong to those before.
    assert [block.name for block in blocks_of(recorded("images")[0])] == ["0", "1", "4", "5", "8", "9", "13"]


class Works(torch.autograd.Function):
    """Takes so many seconds, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grads[0], None


class Working(nn.Module):
    """Reads its weight before or after it works."""

    def __init__(self, seconds: float, *, first: bool) -> None:
        super().__init__()
        self.layer, self.seconds, self.first = nn.Linear(8, 8), seconds, first

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            return self.layer(Works.apply(x, self.seconds))  # type: ignore[no-untyped-call, no-any-return]
        return Works.apply(self.layer(x), self.seconds)  # type: ignore[no-untyped-call, no-any-return]


@pytest.mark.few(2)
@pytest.mark.parametrize("chunk_numel", [72, 1024], ids=["a chunk each", "one chunk"])
@pytest.mark.parametrize("first", [True, False], ids=["works first", "reads first"])
def test_what_a_block_computes_before_it_reads_a_parameter_is_its_own(first: bool, chunk_numel: int) -> None:
    """It was charged to the block before: "no other cut is faster", of one that was a third slower than another."""
    takes_s = [0.1, 0.0, 0.0, 0.1]
    values = {"default_chunk_size": chunk_numel, "memory": {"device": 8192, "host": 1 << 20}}
    with chunkmem.ChunkManager(chunkmem.Config.from_dict(values)) as manager:
        with manager.init():
            model = nn.Sequential(*(Working(seconds, first=first) for seconds in takes_s))
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager)
        for _ in range(2):
            manager.backward(model(torch.randn(2, 8, requires_grad=True)).sum())
            optimizer.step()
            optimizer.zero_grad()
        assert manager.trace is not None
        traces = manager.trace, Trace.from_dict(manager.trace.to_dict())
    for trace in traces:
        blocks = blocks_of(trace)
        for block, seconds in zip(blocks, takes_s, strict=True):
            for found_s in (block.forward_s, block.backward_s):
                assert seconds <= found_s if seconds else found_s < max(takes_s), blocks


@pytest.mark.parametrize("name", ["vit", "cnn", "moe", "loose"])
def test_parameters_of_the_model_itself_and_experts_that_were_not_read(name: str) -> None:
    """Nothing is left over, and what reads its own parameters is tied to nobody."""
    (case,) = (case for case in ZOO if case.name == name)
    config = {"memory": {"device": "32MiB", "host": "64MiB"}, "default_chunk_size": case.chunk_numel}
    with chunkmem.ChunkManager(chunkmem.Config.from_dict(config)) as manager:
        with manager.init():
            model = case.build()
        optimizer = chunkmem.Adam(model.parameters(), manager=manager)
        for _ in range(2):
            manager.backward(case.loss(model, case.batch(0)))
            optimizer.step()
            optimizer.zero_grad()
        trace = manager.trace
    assert trace is not None
    blocks = blocks_of(trace)
    (whole,) = balance(blocks, 1)
    assert whole.nbytes == sum(trace.chunk_nbytes.values())
    in_step_s = sum(moment.duration_s for moment in trace.moments if moment.kind not in (Kind.UPDATE, Kind.CONSUME))
    assert whole.seconds == pytest.approx(trace.before_s + in_step_s)
    assert tie_groups(blocks) == ()


def test_bytes_are_in_proportion_to_parameters() -> None:
    trace, numels = recorded("uneven")
    by_name = {block.name: block for block in blocks_of(trace, numels=numels)}
    # 16 bytes a parameter, and what is left over in chunks.
    numel = sum(count for name, count in numels.items() if name.startswith("blocks.2."))
    assert 16 * numel <= by_name["blocks.2"].nbytes <= 16 * numel + 4 * 16 * 16384
    assert by_name["blocks.2"].weight_nbytes == pytest.approx(by_name["blocks.2"].nbytes / 4, rel=0.01)


def test_a_tied_head_shares_the_weights_of_the_embedding() -> None:
    trace, numels = recorded("text")
    blocks = blocks_of(trace, numels=numels)
    assert tie_groups(blocks) == ((0, 7),)
    assert blocks[0].shared == blocks[-1].shared
    assert list(tied_over(balance(blocks, 3)).values()) == [(0, 2)]
    with pytest.raises(chunkmem.ConfigError, match="8 blocks, which ties keep together in 1 groups"):
        balance(blocks, 2, ties=tie_groups(blocks))


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("name", KINDS)
def test_the_slowest_stage_is_as_fast_as_that_of_any_partition(name: str, num_stages: int) -> None:
    blocks = blocks_of(recorded(name)[0])
    best_s = min(
        max(sum(block.seconds for block in blocks[start:stop]) for start, stop in pairwise([0, *cuts, len(blocks)]))
        for cuts in combinations(range(1, len(blocks)), num_stages - 1)
    )
    assert max(stage.seconds for stage in balance(blocks, num_stages)) <= 1.0001 * best_s


def test_a_trace_that_names_no_modules_has_no_blocks() -> None:
    chunk = ChunkId(Role.PARAM, 0)
    moments = (Moment(Kind.HOLD, chunk), Moment(Kind.RELEASE, chunk))
    with pytest.raises(TraceError, match="the trace names no modules"):
        blocks_of(Trace(Mode.TRAIN, LAYOUT, {chunk: 64}, moments))
