"""A trace with chunks of activations, saved and adopted by a new run: its calls are recomputed or kept as they were."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from torch import nn

import chunkmem
from chunkmem.data.activations import Content, activation_contents
from chunkmem.data.errors import TraceError
from chunkmem.data.trace import Trace
from tests.helpers.twins import cpu_only

pytestmark = cpu_only

KEPT, RECOMPUTED = {Content.ACTIVATIONS}, {Content.INPUTS, Content.RECOMPUTED}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(8, 16)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.blocks(self.embedding(x))
        return y


def build() -> nn.Module:
    torch.manual_seed(0)
    return Model()


class Run:
    """A training under a policy, by steps; some blocks have their own."""

    def __init__(self, manager: chunkmem.ChunkManager, marked: Mapping[int, str]) -> None:
        with manager.init():
            self.model = build()
            for at, policy in marked.items():
                manager.region(self.model.blocks[at], policy=policy)  # type: ignore[index, operator]
        self.optimizer = chunkmem.AdamW(self.model.parameters(), lr=1e-2, manager=manager)
        torch.manual_seed(1)

    def step(self) -> float:
        loss = self.model(torch.randn(8, 20, 8)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.item())


@contextmanager
def training(
    policy: str | None, device: str = "300KiB", *, marked: Mapping[int, str] = MappingProxyType({})
) -> Iterator[tuple[chunkmem.ChunkManager, Run]]:
    settings = {"memory": {"device": device, "host": "16MiB"}, "default_chunk_size": 2048}
    config = chunkmem.Config.from_dict(settings | {"activations": {"policy": policy}})
    with chunkmem.ChunkManager(config) as manager:
        yield manager, Run(manager, marked)


def trained(
    policy: str | None, device: str = "300KiB", *, marked: Mapping[int, str] = MappingProxyType({})
) -> tuple[list[float], Trace]:
    with training(policy, device, marked=marked) as (manager, run):
        losses = [run.step() for _ in range(5)]
        assert manager.trace is not None
        return losses, manager.trace


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("policy", "device", "contents"),
    [
        ("offload", "300KiB", KEPT),
        ("recompute", "300KiB", RECOMPUTED),
        ("auto", "300KiB", None),
        ("auto", "4MiB", KEPT),
    ],
)
def test_the_steps_of_an_adopted_trace_follow_its_plan(
    policy: str, device: str, contents: set[Content] | None, tmp_path: Path
) -> None:
    losses, trace = trained(policy, device)
    found = {held.content for held in activation_contents(trace).values()}
    assert found
    assert contents is None or found == contents
    trace.save(tmp_path / "trace.json")
    with training(policy, device) as (manager, run):
        manager.trace = Trace.load(tmp_path / "trace.json")
        again = [run.step()]  # which has no optimizer states yet
        for _ in range(4):
            again.append(run.step())
            timeline = manager.timeline()
            assert timeline is not None
            assert timeline.plan_misses == 0
        assert manager.trace.digest == trace.digest
    assert again == losses


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("recompute", "offload"),
        ("offload", "recompute"),
        ("offload", None),
        ("keep", "offload"),
        ("offload", "keep"),
        ("keep", "recompute"),
    ],
)
def test_a_trace_of_another_policy_is_refused(before: str, now: str | None) -> None:
    _, trace = trained(before, "4MiB")
    with training(now, "4MiB") as (manager, run):
        with pytest.raises(TraceError, match=rf"another activations\.policy, and here it is {now or 'null'}"):
            manager.trace = trace
        run.step()


def test_a_trace_without_activations_is_refused_where_they_are_managed() -> None:
    _, trace = trained(None)
    with training("auto") as (manager, _), pytest.raises(TraceError, match=r"another activations\.policy"):
        manager.trace = trace


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("policy", "before", "now", "said"),
    [
        (None, {1: "recompute"}, {1: "offload"}, "offload for blocks.1"),
        (None, {1: "offload"}, {1: "recompute"}, "recompute for blocks.1"),
        (None, {1: "keep"}, {1: "offload"}, "offload for blocks.1"),
        (None, {1: "recompute", 2: "recompute"}, {1: "recompute"}, "null for blocks.2"),
        (None, {}, {1: "keep"}, "null"),
        ("offload", {2: "recompute"}, {1: "recompute"}, "recompute for blocks.1"),
        ("auto", {0: "keep"}, {0: "offload"}, "offload for blocks.0"),
    ],
)
def test_a_trace_of_other_policies_of_regions_is_refused(
    policy: str | None, before: Mapping[int, str], now: Mapping[int, str], said: str
) -> None:
    _, trace = trained(policy, "4MiB", marked=before)
    with (
        training(policy, "4MiB", marked=now) as (manager, _),
        pytest.raises(TraceError, match=rf"another activations\.policy, and here it is {said}"),
    ):
        manager.trace = trace
    with training(policy, "4MiB", marked=before) as (manager, run):
        manager.trace = trace
        for _ in range(3):
            run.step()
        timeline = manager.timeline()
        assert timeline is not None
        assert timeline.plan_misses == 0


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["offload", None])
def test_a_trace_of_a_pipeline_by_layer_is_followed(policy: str | None) -> None:
    """Outputs wait in chunks for the next block, and the pipeline says itself what its blocks save."""

    def train(trace: Trace | None) -> tuple[list[float], Trace]:
        with training(policy) as (manager, run):
            if trace is not None:
                manager.trace = trace
            first, blocks = run.model.children()
            assert isinstance(blocks, nn.Sequential)
            loss_fn = lambda y, _: y.square().mean()  # noqa: E731
            pipe = manager.pipeline(blocks, first=first, loss_fn=loss_fn, micro_batches=2, checkpoint="never")
            losses = []
            for _ in range(5):
                x = torch.randn(8, 20, 8)
                losses.append(pipe.step(x, x).item())
                run.optimizer.step()
                run.optimizer.zero_grad()
                timeline = manager.timeline()
                assert trace is None or len(losses) == 1 or (timeline is not None and timeline.plan_misses == 0)
            assert manager.trace is not None
            return losses, manager.trace

    losses, trace = train(None)
    assert Content.OUTPUTS in {held.content for held in activation_contents(trace).values()}
    again, after = train(trace)
    assert again == losses
    assert after.digest == trace.digest
