"""A trace with chunks of activations, saved and adopted by a new run: its calls are recomputed or kept as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import chunkmem
from chunkmem.errors import TraceError
from chunkmem.trace.activations import Content, activation_contents
from chunkmem.trace.model import Trace
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
    """A training under a policy, by steps."""

    def __init__(self, manager: chunkmem.ChunkManager) -> None:
        with manager.init():
            self.model = build()
        self.optimizer = chunkmem.AdamW(self.model.parameters(), lr=1e-2, manager=manager)
        torch.manual_seed(1)

    def step(self) -> float:
        loss = self.model(torch.randn(8, 20, 8)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.item())


@contextmanager
def training(policy: str | None, device: str = "300KiB") -> Iterator[tuple[chunkmem.ChunkManager, Run]]:
    settings = {"memory": {"device": device, "host": "16MiB"}, "default_chunk_size": 2048}
    config = chunkmem.Config.from_dict(settings | {"activations": {"policy": policy}})
    with chunkmem.ChunkManager(config) as manager:
        yield manager, Run(manager)


def trained(policy: str | None, device: str = "300KiB") -> tuple[list[float], Trace]:
    with training(policy, device) as (manager, run):
        losses = [run.step() for _ in range(5)]
        assert manager.trace is not None
        return losses, manager.trace


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


@pytest.mark.parametrize(("before", "now"), [("recompute", "offload"), ("offload", "recompute"), ("offload", None)])
def test_a_trace_of_another_policy_is_refused(before: str, now: str | None) -> None:
    _, trace = trained(before)
    with training(now) as (manager, run):
        with pytest.raises(TraceError, match=rf"another activations\.policy, and here it is {now or 'null'}"):
            manager.trace = trace
        run.step()


def test_a_trace_without_activations_is_refused_where_they_are_managed() -> None:
    _, trace = trained(None)
    with training("auto") as (manager, _), pytest.raises(TraceError, match=r"another activations\.policy"):
        manager.trace = trace
