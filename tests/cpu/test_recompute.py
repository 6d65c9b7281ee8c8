"""`chunkmem.checkpoint` without a manager: losses, gradients, buffers and all other state as without checkpointing."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import set_checkpoint_early_stop

import chunkmem

Run = Callable[..., Any]


def plainly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Stands for `chunkmem.checkpoint` on the side that keeps its activations."""
    return function(*args, **kwargs)


class NormBlock(nn.Module):
    """Running statistics of three kinds, spectral norm, dropout and two states of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.utils.parametrizations.spectral_norm(nn.Conv1d(6, 6, 3, padding=1))
        self.batch = nn.BatchNorm1d(6)
        self.average = nn.BatchNorm1d(6, momentum=None)
        self.instance = nn.InstanceNorm1d(6, affine=True, track_running_stats=True)
        self.linear = torch.nn.utils.spectral_norm(nn.Linear(5, 5))
        self.drop = nn.Dropout(0.3)
        self.register_buffer("ema", torch.zeros(6))
        self.register_buffer("table", torch.zeros(40_000))
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        x = self.instance(self.average(self.batch(self.conv(x)))) * self.num_calls
        with torch.no_grad():
            self.ema = 0.9 * self.ema + 0.1 * x.mean((0, 2))
            self.table[self.num_calls] += x.std()
        return self.drop(self.linear(F.gelu(x + self.ema[:, None] + self.table.max())))


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def trained(model: nn.Module, step: Callable[[nn.Module, torch.Tensor], torch.Tensor], *, num_steps: int = 3) -> Any:
    """Return the losses, gradients of the input and state after some steps."""
    torch.manual_seed(7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found = []
    for _ in range(num_steps):
        x = torch.randn(4, 6, 5, requires_grad=True)
        loss = step(model, x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.detach(), x.grad]
    return found, state_of(model), torch.get_rng_state()


def assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


WAYS: dict[str, Callable[[Run, nn.Module, torch.Tensor], torch.Tensor]] = {
    "module": lambda run, model, x: run(model, x),
    "keyword": lambda run, model, x: run(model, x=x),
    "method": lambda run, model, x: run(model.forward, x),
    "partial": lambda run, model, x: run(functools.partial(model, x)),
    "closure": lambda run, model, x: run(lambda value: model(value) * 2, x),
    "list in a closure": lambda run, model, x: (lambda blocks: run(lambda value: blocks[0](value), x))([model]),
    "argument": lambda run, model, x: run(lambda block, value: block(value), model, x),
    "default": lambda run, model, x: run(lambda value, block=model: block(value), x),
    "nested": lambda run, model, x: run(lambda value: run(model, run(torch.sin, value)), x),
    "twice": lambda run, model, x: run(model, run(model, x)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("early_stop", [True, False])
def test_state_counts_once(way: str, early_stop: bool) -> None:
    plain = NormBlock()
    again = copy.deepcopy(plain)
    expected = trained(plain, functools.partial(WAYS[way], plainly))
    with set_checkpoint_early_stop(early_stop):
        found = trained(again, functools.partial(WAYS[way], chunkmem.checkpoint))
    assert_same(found, expected)
    assert again.num_calls == plain.num_calls
    assert int(again.batch.num_batches_tracked) == (6 if way == "twice" else 3)
