"""Pipelines in the hands of a user who does everything that plain PyTorch allows."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import chunkmem
from chunkmem.types import Role
from tests.helpers.audit import audit
from tests.helpers.pipelined import WIDTH, Chain, Residual, features, loop_step
from tests.helpers.twins import cpu_only

pytestmark = cpu_only

STEPS = 4
PARTS = 3
Loss = Callable[..., Tensor]


def linear(width: int = WIDTH) -> nn.Linear:
    return nn.Linear(WIDTH, width)


def managed(device_nbytes: int = 8 << 20, **keys: Any) -> chunkmem.ChunkManager:
    memory = {"device": device_nbytes, "host": 64 << 20}
    return chunkmem.ChunkManager(chunkmem.Config.from_dict({"memory": memory, "default_chunk_size": 2048} | keys))


class Twins:
    """The same chain and optimizer in plain PyTorch and in a pipeline."""

    def __init__(
        self,
        manager: chunkmem.ChunkManager,
        build: Callable[[], Chain],
        *,
        checkpoint: str = "always",
        loss: Loss = F.cross_entropy,
        num: int = PARTS,
    ) -> None:
        self.manager, self.loss, self.num = manager, loss, num
        torch.manual_seed(7)
        self.plain = build()
        torch.manual_seed(7)
        with manager.init():
            self.model = build()
        options = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
        self.plain_optimizer = torch.optim.AdamW(self.plain.parameters(), fused=True, **options)
        self.optimizer = chunkmem.AdamW(self.model.parameters(), manager=manager, **options)
        self.pipe = self.pipeline(num, checkpoint)

    def pipeline(self, num: int, checkpoint: str = "always", loss: Loss | None = None) -> Any:
        model = self.model
        return self.manager.pipeline(
            model.blocks,
            first=model.first,
            last=model.last,
            loss_fn=loss or self.loss,
            micro_batches=num,
            checkpoint=checkpoint,
        )

    def backward(self, inputs: Any, target: Any) -> None:
        """Forward and backward of a batch on both sides, with the same random numbers."""
        state = torch.get_rng_state()
        expected = loop_step(self.plain, self.loss, inputs, target, num=self.num)
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        loss = self.pipe.step(inputs, target)
        assert loss.item() == expected.item()
        assert torch.equal(torch.get_rng_state(), after)

    def update(self) -> None:
        """Both optimizers step; then everything is the same, and nothing is left."""
        for optimizer in (self.plain_optimizer, self.optimizer):
            optimizer.step()
            optimizer.zero_grad()
        self.check()

    def check(self) -> None:
        assert_nothing_left(self.manager)
        state = self.manager.state_dict(self.model)
        for name, value in self.plain.state_dict().items():
            assert torch.equal(state[name], value), name

    def run(self, batch: Callable[[int], Any] = features, steps: int = STEPS) -> None:
        for step in range(steps):
            self.backward(*batch(step))
            self.update()


def assert_nothing_left(manager: chunkmem.ChunkManager) -> None:
    """Assert that nothing is pinned, and no activations are a chunk any more."""
    manager.runtime.modules.regions.settle()  # as when the next step begins: what an exception referred to is gone
    audit(manager)
    chunks = manager.runtime.memory.store.chunks.values()
    assert not [c.label for c in chunks if c.id.role is Role.ACTIVATION and c.newest_tier() is not None]


def labels(manager: chunkmem.ChunkManager) -> set[str]:
    """Return what the chunks of activations hold."""
    return {chunk.label for chunk in manager.runtime.memory.store.chunks.values() if chunk.id.role is Role.ACTIVATION}


def simple(*blocks: Callable[[], nn.Module]) -> Callable[[], Chain]:
    return lambda: Chain(linear(), [block() for block in blocks], nn.Linear(WIDTH, 10))


# What blocks return.


class Owner(nn.Module):
    """A block with a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()


class Same(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class View(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1, WIDTH)[:, :]


class Twice(Owner):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(x)
        return y, y


class Halves(nn.Module):
    """Two views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear(2 * WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(x)
        return y[:, :WIDTH], y[:, WIDTH:]


class WithBuffer(Owner):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ones", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), self.ones


class WithParameter(Owner):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), self.shift


class Sum(Owner):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.layer(a) + b


class WithNone(Owner):
    def forward(self, x: Tensor) -> tuple[Tensor, None, int]:
        return self.layer(x), None, 3


class TakesNone(Owner):
    def forward(self, x: Tensor, nothing: None, three: int) -> Tensor:
        assert nothing is None
        assert three == 3
        return self.layer(x)


Pair = namedtuple("Pair", "a b")


class MakesPair(Owner):
    def forward(self, x: Tensor) -> Pair:
        y = self.layer(x)
        return Pair(y, y * 2)


class TakesPair(Owner):
    """A named tuple is one argument."""

    def forward(self, pair: Pair) -> Tensor:
        return self.layer(pair.a) + pair.b


class Nested(Owner):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"x": [self.layer(x), (x, None)], "step": 1}


class TakesNested(Owner):
    """Changes what it is given."""

    def forward(self, state: dict[str, Any]) -> Tensor:
        x, (skip, _) = state.pop("x")
        state["step"] += 1
        return self.layer(x) + skip


@pytest.mark.parametrize("checkpoint", ["always", pytest.param("never", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "blocks",
    [
        (Residual, Same, Residual),
        (Residual, View, Residual),
        (Twice, Sum),
        (Halves, Sum),
        (WithBuffer, Sum),
        (WithParameter, Sum),
        (WithNone, TakesNone),
        (MakesPair, TakesPair),
        (Nested, TakesNested),
    ],
    ids=lambda blocks: blocks[0].__name__ + blocks[1].__name__,
)
def test_what_a_block_returns_comes_to_the_next(blocks: Sequence[Any], checkpoint: str) -> None:
    with managed() as manager:
        Twins(manager, simple(*blocks), checkpoint=checkpoint).run()


@dataclasses.dataclass
class Boxed:
    x: Tensor


class MakesBox(Owner):
    def forward(self, x: Tensor) -> Boxed:
        return Boxed(self.layer(x))


class TakesBox(Owner):
    def forward(self, box: Boxed) -> Tensor:
        return self.layer(box.x)


def test_an_object_that_cannot_be_taken_apart_is_refused() -> None:
    with managed() as manager:
        twins = Twins(manager, simple(MakesBox, TakesBox))
        with pytest.raises(chunkmem.StateError, match=r"blocks\.0 returns a Boxed with tensors inside"):
            twins.pipe.step(*features(0))
        assert_nothing_left(manager)


# Writes in place. The chain "inplace" of `test_pipeline` has what is served.


class WritesOne(Owner):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.layer(a.relu_()) + b


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = linear(), linear()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x), self.other(x)


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_block_may_write_to_one_of_several_tensors(checkpoint: str) -> None:
    with managed() as manager:
        Twins(manager, simple(Two, WritesOne, Residual), checkpoint=checkpoint).run()


def test_a_loss_function_may_write_to_its_output() -> None:
    with managed() as manager:
        Twins(manager, simple(Residual), loss=lambda output, target: F.cross_entropy(output.mul_(2), target)).run()


class Aliases(Owner):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(x)
        return y, y.view(-1)


class WritesAlias(Owner):
    def forward(self, x: Tensor, alias: Tensor) -> Tensor:
        return self.layer(x.relu_()) + alias.view(-1, WIDTH)


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_write_to_one_of_two_views_is_refused(checkpoint: str) -> None:
    """The history of each begins anew where the next block takes it over: autograd would not see the other one's."""
    with managed() as manager:
        twins = Twins(manager, simple(Aliases, WritesAlias), checkpoint=checkpoint)
        with pytest.raises(chunkmem.StateError, match="shares memory with another one"):
            twins.pipe.step(*features(0))
        assert_nothing_left(manager)


# Where a step is made.


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_step_while_an_exception_is_handled(checkpoint: str) -> None:
    """What calls are recomputed from is in the ledger there, too."""
    with managed() as manager:
        twins = Twins(manager, simple(Residual, Residual), checkpoint=checkpoint)
        try:
            raise ValueError
        except ValueError:
            twins.run()
        assert ("inputs of blocks.1" in labels(manager)) is (checkpoint == "always")
