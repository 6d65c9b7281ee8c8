"""What modules return: backward is announced by it, however it is packed up and whatever is done to it afterwards."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.twins import WIDTH, Blocks, Twin, Weighted, mlp, same

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Output:
    hidden: Tensor
    extra: Any


@dataclass(slots=True)
class SlotOutput:
    hidden: Tensor


class PlainObject:
    def __init__(self, hidden: Tensor) -> None:
        self.cache = [PlainCache(hidden)]


class PlainCache:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Unwrapping(nn.Module):
    def __init__(self, inner: nn.Module, unwrap: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.inner, self.unwrap = inner, unwrap

    def forward(self, x: Tensor) -> Tensor:
        return self.unwrap(self.inner(x))


def rows_of(out: Tensor) -> tuple[Tensor, Tensor]:
    return out, out[1]


OUTPUTS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dict": (lambda out: {"a": {"b": out}}, lambda result: result["a"]["b"]),
    "dataclass": (lambda out: Output(hidden=out, extra=None), lambda result: result.hidden),
    "dataclass in a dataclass": (lambda out: Output(torch.ones(1), Output(out, 1)), lambda result: result.extra.hidden),
    "slots": (lambda out: SlotOutput(out), lambda result: result.hidden),
    "nested tuples": (lambda out: (1, ("text", [out], None)), lambda result: result[1][1][0]),
    "named tuple": (lambda out: Pair(out, None), lambda result: result.first),
    "plain object": (PlainObject, lambda result: result.cache[0].hidden),
    "distribution": (lambda out: torch.distributions.Normal(out, 1.0), lambda result: result.loc),
    "only one used": (lambda out: (out.sin(), out.cos(), out), lambda result: result[1]),
    "parts of one": (lambda out: out.chunk(2, dim=-1), lambda result: torch.cat([result[1], result[0]], dim=-1)),
    "a view, overwritten": (lambda out: (out + 1).view(2, 2, WIDTH), lambda result: result.mul_(2).flatten(0, 1)),
    "a row, overwritten": (lambda out: rows_of(out + 1), lambda result: (result[1].zero_(), result[0] * 1)[1]),
    "overwritten": (lambda out: out * 1, lambda result: result.add_(1).relu_()),
    "a generator": (lambda out: (x for x in [out]), lambda result: next(result)),
    "a function": (lambda out: lambda: out, lambda result: result()),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs(kind: str, frozen: bool) -> None:
    """Also of a frozen module in the middle: gradients go through it, and none arrives in it."""
    wrap, unwrap = OUTPUTS[kind]
    # Into these nobody can look; the layers inside are watched one by one all the same.
    module = Layers if kind in ("a generator", "a function") else Weighted

    def build() -> nn.Module:
        model = Blocks(Unwrapping(module(wrap), unwrap), Unwrapping(module(wrap), unwrap))
        model.blocks[1].requires_grad_(not frozen)
        return model

    same(build, Twin.train)


class Layers(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layers, self.wrap = mlp(), wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.layers(x))
