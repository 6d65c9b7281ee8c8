"""Pipelines in the hands of a user who does everything that plain PyTorch allows."""

from __future__ import annotations

import dataclasses
import gc
import random
import weakref
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
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

FULL = pytest.mark.full
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


@pytest.mark.parametrize("checkpoint", ["always", pytest.param("never", marks=FULL)])
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


def test_saved_tensor_hooks_of_a_user() -> None:
    with managed() as manager:
        twins = Twins(manager, simple(Residual, Residual))
        with torch.autograd.graph.save_on_cpu():
            twins.run()
        assert not any(label.startswith("inputs of") for label in labels(manager))


@pytest.mark.parametrize("checkpoint", ["always", pytest.param("never", marks=FULL)])
def test_autocast(checkpoint: str) -> None:
    with managed() as manager, torch.autocast("cpu", dtype=torch.bfloat16):
        Twins(manager, simple(Residual, Residual), checkpoint=checkpoint).run()


# Random numbers.


class Drops(Owner):
    """A layer that is dropped at random draws no other numbers then."""

    def forward(self, x: Tensor) -> Tensor:
        return x if torch.rand(()) < 0.5 else self.layer(x) + torch.randn(len(x), 1)


class FewNumbers(Owner):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * torch.randn(3)[0]


class ManyNumbers(Owner):
    """Several periods of the generator, and numbers that take two draws each."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.layer(x).repeat(1, 50), 0.3)[:, :WIDTH]
        return x + torch.randn(len(x), WIDTH, dtype=torch.float64).float() + torch.randperm(len(x))[:, None]


class OwnGenerator(Owner):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * torch.rand(1, generator=self.generator)


@pytest.mark.parametrize("checkpoint", ["always", pytest.param("never", marks=FULL)])
@pytest.mark.parametrize("block", [Drops, FewNumbers, ManyNumbers, OwnGenerator])
def test_random_numbers_are_those_of_a_plain_loop(block: type[nn.Module], checkpoint: str) -> None:
    with managed() as manager:
        Twins(manager, simple(block, Residual, block), checkpoint=checkpoint).run()


class PythonNumbers(Owner):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * random.random()


class NumpyNumbers(Owner):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * float(np.random.rand())


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("block", [PythonNumbers, NumpyNumbers])
def test_random_numbers_of_python_and_numpy(block: type[nn.Module], checkpoint: str) -> None:
    """Recomputed calls draw the same ones, and micro-batches those of a plain loop."""
    with managed() as manager:
        twins = Twins(manager, simple(block, Residual, block), checkpoint=checkpoint)
        for step in range(STEPS):
            batch = features(step)
            random.seed(step)
            np.random.seed(step)
            expected = loop_step(twins.plain, twins.loss, *batch, num=PARTS)
            random.seed(step)
            np.random.seed(step)
            assert twins.pipe.step(*batch).item() == expected.item()
            twins.update()


class DrawsMore(Owner):
    """From some step on, some micro-batches draw more numbers than others."""

    is_on = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.is_on and x.detach().sum() > 0:
            y = y + torch.randn(5)[0]
        return F.dropout(y, 0.1)


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_micro_batches_that_begin_to_draw_different_amounts(checkpoint: str) -> None:
    with managed() as manager:
        twins = Twins(manager, simple(DrawsMore, Residual, DrawsMore), checkpoint=checkpoint)
        twins.run()
        for model in (twins.plain, twins.model):
            model.blocks[0].is_on = model.blocks[2].is_on = True
        state = torch.get_rng_state()
        with pytest.raises(chunkmem.StateError, match="another amount of random numbers"):
            twins.pipe.step(*features(STEPS))
        assert torch.equal(torch.get_rng_state(), state)
        assert all(parameter.grad is None for parameter in twins.model.parameters())
        twins.run(lambda step: features(STEPS + step))


# Interruptions.


class Fails(Owner):
    """Raises something in the `at`-th call of forward, or of backward."""

    error: type[BaseException] | None = None
    is_backward = False
    left = 0

    def arm(self, error: type[BaseException], at: int, *, is_backward: bool = False) -> None:
        self.error, self.left, self.is_backward = error, at, is_backward

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(self.layer(x), 0.2)
        if self.is_backward:
            y.register_hook(self._fail)
        else:
            self._fail()
        return y

    def _fail(self, _gradient: Tensor | None = None) -> None:
        self.left -= 1
        if self.error is not None and self.left == 0:
            raise self.error("on purpose")


@pytest.mark.parametrize("at", [pytest.param(0, marks=FULL), 1, pytest.param(2, marks=FULL), 4])
@pytest.mark.parametrize("error", [ValueError, pytest.param(KeyboardInterrupt, marks=FULL)])
@pytest.mark.parametrize("is_backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("checkpoint", ["auto", *(pytest.param(c, marks=FULL) for c in ("always", "never"))])
def test_training_goes_on_after_an_exception(
    checkpoint: str, is_backward: bool, error: type[BaseException], at: int
) -> None:
    """The step is left, its gradients are discarded, and the same batch comes again; a step's recording is repeated."""
    with managed() as manager:
        twins = Twins(manager, simple(Residual, Fails, Residual), checkpoint=checkpoint)
        twins.run(steps=at)
        state, fails = torch.get_rng_state(), twins.model.blocks[1]
        fails.arm(error, 2, is_backward=is_backward)
        with pytest.raises(error, match="on purpose"):
            twins.pipe.step(*features(at))
        fails.error, fails.is_backward = None, False
        twins.optimizer.zero_grad()
        torch.set_rng_state(state)
        misses = []
        for step in range(at, 7):
            twins.backward(*features(step))
            twins.update()
            timeline = manager.timeline()
            misses.append(0 if timeline is None or step == at else timeline.plan_misses)
        assert not any(misses), misses


def test_an_exception_in_the_loss_function() -> None:
    calls = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("on purpose")
        return F.cross_entropy(output, target)

    with managed() as manager:
        twins = Twins(manager, simple(Residual), loss=F.cross_entropy)
        twins.pipe = twins.pipeline(PARTS, loss=loss)
        with pytest.raises(ValueError, match="on purpose"):
            twins.pipe.step(*features(0))
        twins.optimizer.zero_grad()
        twins.run()


def test_a_step_that_does_not_fit() -> None:
    """A batch of far more samples; the usual ones go on."""
    with managed(memory={"device": 48 << 10, "host": 200 << 10}) as manager:
        twins = Twins(manager, simple(Residual), checkpoint="never")
        del twins.plain_optimizer, twins.plain
        twins.pipe.step(*features(0))
        twins.optimizer.zero_grad()
        with pytest.raises(chunkmem.CapacityError):
            twins.pipe.step(*features(1, 512))
        twins.optimizer.zero_grad()
        assert_nothing_left(manager)
        twins.pipe.step(*features(0))
        twins.optimizer.step()
        assert_nothing_left(manager)


def test_a_pipeline_of_a_closed_manager() -> None:
    with managed() as manager:
        twins = Twins(manager, simple(Residual))
        twins.run(steps=2)
        manager.close()
        with pytest.raises(chunkmem.StateError, match="its manager is closed"):
            twins.pipe.step(*features(2))


def test_nothing_keeps_what_is_deleted() -> None:
    with managed() as manager:
        twins = Twins(manager, simple(Residual))
        twins.run()
        pipe = weakref.ref(twins.pipe)
        other = twins.pipeline(2)
        del twins.pipe
        gc.collect()
        assert pipe() is None
        other.step(*features(0))
        audit(manager)
    left = weakref.ref(manager)
    del manager, twins, other
    gc.collect()
    assert left() is None


# What a step is given.


def mean(output: Tensor) -> Tensor:
    return output.square().mean()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((None,), "no tensor with samples"),
        (("text",), "no tensor with samples"),
        ((torch.tensor(1.0),), "no tensor with samples"),
        ((torch.zeros(0, WIDTH), torch.zeros(0, dtype=torch.long)), "no tensor with samples"),
        ((torch.zeros(8, WIDTH), torch.zeros(7, dtype=torch.long)), "the target has 7 samples, and the input 8"),
        (((torch.zeros(8, WIDTH), {"y": torch.zeros(6)}), None), r"the input\[1\]\['y'\] has 6 samples"),
        ((np.zeros((8, WIDTH)), torch.zeros(8)), r"the input is a numpy.ndarray; give torch.from_numpy"),
        ((torch.zeros(8, WIDTH), {"y": np.zeros(8)}), r"the target\['y'\] is a numpy.ndarray"),
    ],
)
def test_what_cannot_be_split(given: Any, message: str) -> None:
    with managed() as manager:
        twins = Twins(manager, simple(Residual))
        with pytest.raises(chunkmem.StateError, match=message):
            twins.pipe.step(*given)
        twins.run(steps=1)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda output, target: F.cross_entropy(output, target, reduction="none"), r"a tensor of shape \[3\]"),
        (lambda output, target: 1.0, "loss_fn returned float"),
        (lambda output, target: None, "loss_fn returned NoneType"),
        (lambda output, target: torch.tensor(1.0), "the loss depends on no parameter"),
    ],
)
def test_a_loss_that_is_none(loss: Loss, message: str) -> None:
    with managed() as manager:
        twins = Twins(manager, simple(Residual))
        with pytest.raises(chunkmem.StateError, match=message):
            twins.pipeline(PARTS, loss=loss).step(*features(0))
        twins.optimizer.zero_grad()
        twins.run(steps=2)


def test_other_losses() -> None:
    """Without target, of a dict, of one element, not finite."""
    inputs, target = features(0)
    with managed() as manager:
        twins = Twins(manager, simple(Residual))
        assert torch.isfinite(twins.pipeline(PARTS, loss=mean).step(inputs))
        by_name = twins.pipeline(PARTS, loss=lambda output, y: F.cross_entropy(output, y["y"])[None])
        assert by_name.step(inputs, {"y": target, "name": "both"}).shape == (1,)
        assert twins.pipeline(PARTS, loss=lambda output, y: mean(output) * float("nan")).step(inputs, target).isnan()
        twins.optimizer.zero_grad()
        twins.run(steps=2)


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_gradients_of_the_input(checkpoint: str) -> None:
    with managed() as manager:
        twins = Twins(manager, simple(Residual), checkpoint=checkpoint)
        for step in range(STEPS):
            inputs, target = features(step)
            leaf, plain_leaf = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
            loop_step(twins.plain, twins.loss, plain_leaf, target, num=PARTS)
            twins.pipe.step(leaf, target)
            assert leaf.grad is not None
            assert torch.equal(leaf.grad, plain_leaf.grad)
            twins.update()


def test_a_step_without_gradients_is_refused() -> None:
    with managed() as manager:
        twins = Twins(manager, simple(Residual))
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode, pytest.raises(chunkmem.StateError, match="call the model itself"):
                twins.pipe.step(*features(0))
        twins.run(steps=1)
