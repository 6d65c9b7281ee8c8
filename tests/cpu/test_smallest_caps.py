"""Backwards in which no gradient lands, or lands late, need no more room than training does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import chunkmem
from chunkmem.data.types import Role
from tests.helpers.audit import audit
from tests.helpers.lanes import adversarial
from tests.helpers.twins import CHUNK_NUMEL, WIDTH, Twin, assert_equal, config, copied, cpu_only, features, same

CHUNK_NBYTES = 4 * CHUNK_NUMEL
NUM_LAYERS = 6
Step = Callable[[nn.Module, Tensor], Tensor]

pytestmark = cpu_only


def linear() -> nn.Module:
    """One chunk."""
    return nn.Linear(WIDTH, WIDTH, bias=False)


def layers(num: int = NUM_LAYERS) -> nn.Sequential:
    return nn.Sequential(*(module for _ in range(num) for module in (linear(), nn.Tanh())))


class Recurrent(nn.Module):
    """A core of several layers that runs three times, between others."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.core, self.after = layers(2), layers(4), layers(1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for _ in range(3):
            x = self.core(x)
        return self.after(x)


class Attends(nn.Module):
    """Frozen modules with children, which read weights of theirs, below a trained head."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).requires_grad_(False)
        self.head = linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x[:, None]))


class Branches(nn.Module):
    """Two outputs of one call, of which the second's gradient comes when all of the first has run."""

    def __init__(self) -> None:
        super().__init__()
        self.fork, self.rest = Fork(), layers()

    def forward(self, x: Tensor) -> Tensor:
        late, early = self.fork(x)
        return early + self.rest(late)


class Fork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(x @ self.weight), x @ self.weight.t()


class Attribute(torch.autograd.Function):
    """Keeps a weight where no search of saved tensors finds it, and computes past torch's functions with it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        with torch._C.DisableTorchFunctionSubclass():
            return grads[0] @ ctx.weight.t(), None


class Hides(Fork):
    def forward(self, x: Tensor) -> Any:
        return torch.tanh(Attribute.apply(x, self.weight))  # type: ignore[no-untyped-call]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def trains(model: nn.Module, x: Tensor) -> Tensor:
    loss_of(model, x).backward()
    assert x.grad is not None
    return x.grad


def asks_for_input(model: nn.Module, x: Tensor) -> Tensor:
    return torch.autograd.grad(loss_of(model, x), x)[0]


def asks_for_weights(model: nn.Module, x: Tensor) -> Tensor:
    return torch.stack([grad.sum() for grad in torch.autograd.grad(loss_of(model, x), list(model.parameters()))])


def stops_at_input(model: nn.Module, x: Tensor) -> Tensor:
    loss_of(model, x).backward(inputs=[x])
    assert x.grad is not None
    return x.grad


def begins_at_output(model: nn.Module, x: Tensor) -> Tensor:
    """At the node of the last layer, which has saved its weight, for each of two graphs."""
    outputs = model(x), model(2 * x)
    for output in outputs:
        torch.autograd.backward(output, torch.ones_like(output))
    assert x.grad is not None
    return x.grad


def stops_at_weight(model: nn.Module, x: Tensor) -> Tensor:
    """Of one weight in the middle, and then all by a second backward over the same graph."""
    loss = loss_of(model, x)
    loss.backward(inputs=[model.get_parameter("4.weight")], retain_graph=True)
    loss.backward()
    assert x.grad is not None
    return x.grad


def penalizes(model: nn.Module, x: Tensor) -> Tensor:
    """A gradient penalty, as of WGAN-GP."""
    loss = loss_of(model, x)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + slope.square().sum()).backward()
    return slope.detach()


def thrice(model: nn.Module, x: Tensor) -> Tensor:
    (first,) = torch.autograd.grad(loss_of(model, x), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    second.square().sum().backward()
    return second.detach()


CASES: dict[str, tuple[Callable[[], nn.Module], Step, int]] = {
    "trained": (layers, trains, 2),
    "gradient of the input": (layers, asks_for_input, 1),
    "gradients of the weights": (layers, asks_for_weights, 1),
    "inputs=[x]": (layers, stops_at_input, 1),
    "inputs=[weight]": (layers, stops_at_weight, 2),
    "from an output": (lambda: layers()[:-1], begins_at_output, 2),
    "penalty": (layers, penalizes, 2),
    "third derivative": (layers, thrice, 2),
    "recurrent": (Recurrent, trains, 2),
    "recurrent, gradient of the input": (Recurrent, asks_for_input, 1),
    "recurrent, penalty": (Recurrent, penalizes, 2),
    "frozen attention": (Attends, trains, 5),
    "frozen attention, gradient of the input": (Attends, asks_for_input, 5),
    "branches": (Branches, trains, 2),
    "branches, gradient of the input": (Branches, asks_for_input, 1),
    "hidden in a function": (lambda: nn.Sequential(Hides(), Hides(), Hides()), asks_for_input, 1),
}
"""A model, a step, and the smallest cap in chunks."""


def steps(twin: Twin, step: Step) -> list[Any]:
    """Three steps, and an update after each that leaves gradients."""
    seen: list[Any] = []
    for seed in range(3):
        seen.append(step(twin.model, features(seed).requires_grad_()).clone())
        if any(param.grad is not None for param in twin.model.parameters()):
            twin.update()
        elif twin.manager is not None:
            audit(twin.manager)
    return seen


@pytest.mark.few(5)
@pytest.mark.parametrize("name", CASES)
def test_the_smallest_cap(name: str) -> None:
    """All weights were needed at once: each was pinned until a gradient landed that never came, or came last."""
    build, step, most = CASES[name]
    assert same(build, lambda twin: steps(twin, step)) <= most * CHUNK_NBYTES


@pytest.mark.few(3)
@pytest.mark.parametrize("name", CASES)
def test_late_copies_do_not_show_at_the_smallest_cap(name: str) -> None:
    build, step, most = CASES[name]
    plain = Twin(None, build)
    expected = copied(steps(plain, step)), plain.left()
    for seed in range(4):
        with chunkmem.ChunkManager(config(most * CHUNK_NBYTES), make_lanes=adversarial(seed)) as manager:
            for pool in manager.runtime.memory.store.pools.values():
                pool.poison = True
            twin = Twin(manager, build)
            assert_equal((copied(steps(twin, step)), twin.left()), expected)


def test_a_node_that_fails_keeps_nothing() -> None:
    """What was pinned around it is let go, and the same graph can be run again."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(weight)
            return x @ weight

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
            (weight,) = ctx.saved_tensors
            if failing:
                raise ValueError("no gradient today")
            return F.linear(grads[0], weight), None

    class Block(Fork):
        def forward(self, x: Tensor) -> Any:
            return torch.tanh(Fails.apply(x, self.weight))  # type: ignore[no-untyped-call]

    failing = True
    plain = Twin(None, Block)
    with chunkmem.ChunkManager(config(2 * CHUNK_NBYTES)) as manager:
        twin = Twin(manager, Block)
        x = features(0).requires_grad_()
        loss = twin.loss(x)
        with pytest.raises(ValueError, match="no gradient today"):
            torch.autograd.grad(loss, x, retain_graph=True)
        failing = False
        twin.loss(x)
        audit(manager)
        expected = torch.autograd.grad(plain.loss(x), x)
        assert_equal(torch.autograd.grad(loss, x), expected)
        audit(manager)


class LowRank(nn.Module):
    """LoRA: frozen weights of a chunk, adapters of an eighth of one."""

    def __init__(self) -> None:
        super().__init__()
        self.base = linear().requires_grad_(False)
        self.a = nn.Linear(WIDTH, 1, bias=False)
        self.b = nn.Linear(1, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.b(self.a(x)))


def test_frozen_weights_have_no_gradients_and_no_optimizer_states() -> None:
    """They shared chunks with adapters, whose states were as large as all weights."""
    build = lambda: nn.Sequential(*(LowRank() for _ in range(NUM_LAYERS)))  # noqa: E731
    plain = Twin(None, build, params=lambda model: [p for p in model.parameters() if p.requires_grad])
    with chunkmem.ChunkManager(config(3 * CHUNK_NBYTES)) as manager:
        twin = Twin(manager, build, params=lambda model: [p for p in model.parameters() if p.requires_grad])
        assert twin.steps(0, 1) == plain.steps(0, 1)
        assert_equal(twin.left(), plain.left())
        chunks = [chunk for chunk in manager.runtime.memory.store.chunks.values() if chunk.replicas]
        num = Counter(chunk.id.role for chunk in chunks)
    # 6 x 2 x 16 elements of adapters fit one chunk of 256; the six base weights take one each.
    assert (num[Role.PARAM], num[Role("exp_avg")], num[Role("exp_avg_sq")]) == (NUM_LAYERS + 1, 1, 1)
