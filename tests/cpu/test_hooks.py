"""Habits of modules that hooks have missed: what they keep, share, hand out, and call themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.helpers.twins import WIDTH, Blocks, Twin, Weighted, features, mlp, same


class KeepsOutput(Weighted):
    """Returns nothing: the caller picks the result up."""

    def forward(self, x: Tensor) -> None:
        self.kept = self.compute(x)


class KeepsList(Weighted):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.kept.append(self.compute(x).square().mean())
        return x


class AuxiliaryLoss(Blocks):
    """The loss picks up what modules have left behind."""

    def __init__(self) -> None:
        super().__init__(KeepsList(), num_blocks=2)
        self.keeper = KeepsOutput()

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.keeper(x)
        return out + self.keeper.kept[:, :4] + self.blocks[0].kept.pop()


class AddsToArgument(Weighted):
    def forward(self, x: Tensor, losses: list[Tensor], *, named: dict[str, Tensor]) -> Tensor:
        losses.append(self.compute(x).square().mean())
        named["out"] = self.compute(x + 1)
        return x


class GivesLists(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.adders = nn.ModuleList([AddsToArgument(), AddsToArgument()])

    def forward(self, x: Tensor) -> Tensor:
        losses, named = [x.mean()], {"in": x}
        for adder in self.adders:
            x = x + adder(x, losses, named=named) + named["out"]
        return super().forward(x) + torch.stack(losses).sum()


class Query(nn.Module):
    """Returns its parameter, or a view of it."""

    def __init__(self, part: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.query, self.part = nn.Parameter(torch.randn(6, WIDTH)), part

    def forward(self) -> Tensor:
        return self.part(self.query)


class Queries(Blocks):
    """Uses what was returned long after, two callers up; one of the parameters is not used at all."""

    def __init__(self) -> None:
        super().__init__()
        self.whole, self.rows = Query(lambda q: q), Query(lambda q: q[:3])
        self.nested = nn.ModuleList([Returns(Query(lambda q: q.t())), Query(lambda q: q.unsqueeze(0))])

    def forward(self, x: Tensor) -> Tensor:
        whole, rows, columns, _ = self.whole(), self.rows(), self.nested[0](), self.nested[1]()
        x = super().forward(x)
        return x * whole[0, :4] * rows.sum(0)[:4] + (whole @ columns).sum()


class Returns(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self) -> Tensor:
        return self.inner()


class Recursive(Blocks):
    """Calls itself, and a part of itself that calls itself."""

    def __init__(self) -> None:
        super().__init__(num_blocks=2)
        self.part = CallsItself()

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        if depth:
            x = x + F.pad(self(x, depth - 1), (0, WIDTH - 4))
        return super().forward(self.part(x, 3))


class CallsItself(Weighted):
    def forward(self, x: Tensor, depth: int) -> Tensor:
        return self.compute(self(x, depth - 1) if depth else x)


class Reused(Blocks):
    def __init__(self) -> None:
        block = mlp()
        super().__init__(block, nn.Linear(WIDTH, WIDTH), block, block, num_blocks=1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.linear(x, self.blocks[1].weight, self.inner.bias)) + self.blocks[1].weight.sum()


class Generators(Blocks):
    """A forward that is a generator reads its parameters when it is asked for the next value, by then left."""

    class Steps(Weighted):
        def forward(self, x: Tensor) -> Iterator[Tensor]:
            for _ in range(2):
                x = self.compute(x)
                yield x

    def __init__(self) -> None:
        super().__init__()
        self.steps = self.Steps()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(sum(self.steps(x)))


class ReadsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        return x @ module.weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad @ ctx.module.weight.t() * ctx.module.scale, x.t() @ grad, None


class CustomFunction(nn.Module):
    """Its backward reads a weight as an attribute, and a scale that its forward never read."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.scale = nn.Parameter(torch.tensor(0.5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return ReadsInBackward.apply(x, self.weight, self)


class Checkpointed(Blocks):
    def __init__(self, *, reentrant: bool = False, nested: bool = False) -> None:
        super().__init__(Weighted(), nn.Dropout(0.2))
        self.reentrant, self.nested = reentrant, nested

    def block(self, index: int, x: Tensor) -> Tensor:
        if self.nested and index:
            x = checkpoint(self.blocks[index - 1], x, use_reentrant=self.reentrant)
        return self.blocks[index](x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for index in range(len(self.blocks)):
            x = checkpoint(self.block, index, x, use_reentrant=self.reentrant)
        return self.head(x)


class CheckpointedWhole(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "auxiliary loss": AuxiliaryLoss,
    "adds to its arguments": GivesLists,
    "returns parameters": Queries,
    "recursive": Recursive,
    "reused": Reused,
    "generators": Generators,
    "custom function": lambda: Blocks(CustomFunction(), CustomFunction()),
    "reentrant": lambda: Checkpointed(reentrant=True),
    "reentrant, nested": lambda: Checkpointed(reentrant=True, nested=True),
    "nested checkpoints": lambda: Checkpointed(nested=True),
    "checkpointed whole": CheckpointedWhole,
}


@pytest.mark.few(3)
@pytest.mark.filterwarnings("ignore:None of the inputs")
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    def scenario(twin: Twin) -> list[Any]:
        with torch.no_grad():
            before = twin.model(features(5))
        return [before, twin.train(), twin.model(features(6))]

    same(MODELS[name], scenario)
