"""Ordinary operations on parameters that are away, each in a process of its own that may die.

They are forked before torch has touched an accelerator, so that every operation meets a fresh model, and a crash is
that of one operation.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import chunkmem
from chunkmem.data.types import Tier
from tests.helpers.evicted_operations import OPERATIONS, Op, Outcome, Scene
from tests.helpers.training import compute_device

TIMEOUT_S = 120
SLAB_ELEMENTS = 288
"""Holds one layer of the model with its bias."""


class Small(nn.Module):
    """Four chunks of layers, and a parameter of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return self.head(hidden) * self.scale


def build(manager: chunkmem.ChunkManager | None) -> Scene:
    """A model that has been trained for one step, in chunks or in plain PyTorch."""
    torch.manual_seed(11)
    if manager is None:
        model = Small().to(compute_device())
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    else:
        with manager.init():
            model = Small()
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
    parameters = dict(model.named_parameters())
    scene = Scene(model, optimizer, manager, parameters["second.weight"], parameters["scale"])
    train(scene, 0)
    return scene


def train(scene: Scene, seed: int) -> None:
    batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)).to(compute_device())
    scene.model(batch).square().sum().backward()
    scene.optimizer.step()
    scene.optimizer.zero_grad()


def evict_all(manager: chunkmem.ChunkManager) -> None:
    """Move every chunk of parameters to HOST."""
    store = manager.runtime.memory.store
    for chunk in list(store.resident[Tier.DEVICE].values()):
        if chunk.home is not None:
            manager.runtime.memory.pager.use(chunk, Tier.HOST, reader="test")
            store.drop(chunk, Tier.DEVICE)


def try_out(op: Op) -> dict[str, Any]:
    """Run one operation on evicted parameters, then train a step; compare with plain PyTorch."""
    config = chunkmem.Config.from_dict(
        {"memory": {"device": "64KiB", "host": "1MiB"}, "default_chunk_size": SLAB_ELEMENTS}
    )
    manager = chunkmem.ChunkManager(config)
    scene, plain = build(manager), build(None)
    evict_all(manager)
    report: dict[str, Any] = {"value": None, "error": None, "same": None}
    torch.manual_seed(3)
    try:
        value = op.run(scene)
        report["value"] = repr(value)[:200]
    except Exception as error:
        report["error"] = f"{type(error).__name__}: {error}"
    if op.outcome is Outcome.SAME:
        torch.manual_seed(3)
        report["same"] = report["error"] is None and _same(value, op.run(plain))
    train(plain, 1)
    train(scene, 1)
    expected, actual = plain.model.state_dict(), manager.state_dict(scene.model)
    report["trained"] = all(torch.equal(actual[key], value.cpu()) for key, value in expected.items())
    manager.close()
    return report


def _same(actual: Any, expected: Any) -> bool:
    pairs = list(zip(tree_leaves(actual), tree_leaves(expected), strict=True))
    return all(
        torch.equal(a.cpu(), e.cpu()) if isinstance(a, Tensor) and not a.is_meta else _plain_same(a, e)
        for a, e in pairs
    )


def _plain_same(actual: Any, expected: Any) -> bool:
    if isinstance(actual, Tensor):
        return actual.shape == expected.shape and actual.dtype == expected.dtype
    return bool(actual == expected)


def in_a_child(op: Op) -> dict[str, Any]:
    """Fork, try the operation out there, and tell what it reported or which signal ended it."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            signal.alarm(TIMEOUT_S)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            try:
                report = try_out(op)
            except BaseException as error:
                report = {"broken": f"{type(error).__name__}: {error}"}
            os.write(writer, json.dumps(report).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        written = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return {"died": signal.Signals(os.WTERMSIG(status)).name}
    return json.loads(written) if written else {"broken": "reported nothing"}


def run_all(rank: int, names: Collection[str]) -> dict[str, dict[str, Any]]:
    """Try out operations, each in a child, and tell what became of them, by name. A `Team` calls it."""
    return {op.name: in_a_child(op) for op in OPERATIONS if op.name in names}
