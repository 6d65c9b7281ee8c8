"""Pipelines in the hands of a user who does everything that plain PyTorch allows."""

from __future__ import annotations

import dataclasses
import gc
import random
import threading
import weakref
from collections import Counter, namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import chunkmem
from chunkmem.data.activations import Content, activation_contents
from chunkmem.data.trace import Kind
from chunkmem.data.types import Role
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
    manager.runtime.modules.regions.pack_last()  # as when the next step begins: what an exception referred to is gone
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
        pytest.param((Residual, Same, Residual), marks=FULL),
        (Residual, View, Residual),
        pytest.param((Twice, Sum), marks=FULL),
        (Halves, Sum),
        pytest.param((WithBuffer, Sum), marks=FULL),
        (WithParameter, Sum),
        pytest.param((WithNone, TakesNone), marks=FULL),
        pytest.param((MakesPair, TakesPair), marks=FULL),
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


@pytest.mark.parametrize("checkpoint", ["always", pytest.param("never", marks=FULL)])
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
    """The history of each begins again where the next block takes it over: autograd would not see the other one's."""
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
@pytest.mark.parametrize(
    "block", [Drops, pytest.param(FewNumbers, marks=FULL), ManyNumbers, pytest.param(OwnGenerator, marks=FULL)]
)
def test_random_numbers_are_those_of_a_plain_loop(block: type[nn.Module], checkpoint: str) -> None:
    with managed() as manager:
        Twins(manager, simple(block, Residual, block), checkpoint=checkpoint).run()


class PythonNumbers(Owner):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * random.random()


class NumpyNumbers(Owner):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * float(np.random.rand())


@pytest.mark.parametrize("checkpoint", ["always", pytest.param("never", marks=FULL)])
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

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.num_calls = 0
        self.seen = list[float]()

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.num_calls += 1
        self.seen.append(float(x.detach().sum()))
        if self.is_on and x.detach().sum() > 0:
            y = y + torch.randn(5)[0]
        return F.dropout(self.norm(y), 0.1) * (1 + self.num_calls / 100)


@pytest.mark.parametrize("checkpoint", ["always", pytest.param("never", marks=FULL)])
def test_micro_batches_that_begin_to_draw_different_amounts(checkpoint: str) -> None:
    with managed() as manager:
        manager.runtime.memory.pager.events.has_inner_hooks.append(lambda: True)  # else they run as a plain loop
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
        for ours, plain in zip(twins.model.blocks, twins.plain.blocks, strict=True):
            assert getattr(ours, "seen", None) == getattr(plain, "seen", None)
            for (name, buffer), (_, other) in zip(ours.named_buffers(), plain.named_buffers(), strict=True):
                assert torch.equal(buffer, other), name


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


@pytest.mark.few(1)
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


@pytest.mark.parametrize("checkpoint", ["always", pytest.param("never", marks=FULL)])
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


# Whose modules blocks are, and what they keep.


class Around(nn.Module):
    """Made after the model, of a part of it."""

    def __init__(self, inner: nn.Module, *, is_twice: bool = False) -> None:
        super().__init__()
        self.inner = inner
        self.own = linear() if is_twice else None

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_blocks_may_be_wrappers_of_parts_of_a_model() -> None:
    with managed() as manager:
        twins = Twins(manager, simple(Residual, Residual))
        model = twins.model
        twins.pipe = manager.pipeline(
            [Around(block) for block in model.blocks],
            first=Around(model.first),
            last=Around(model.last),
            loss_fn=twins.loss,
            micro_batches=PARTS,
            checkpoint="always",
        )
        twins.run()
        assert "inputs of blocks.1" in labels(manager)


def test_parameters_of_no_model_are_refused() -> None:
    with managed() as manager:
        twins = Twins(manager, simple(Residual))
        for block in (linear(), Around(twins.model.blocks[0], is_twice=True)):
            with pytest.raises(chunkmem.LayoutError, match="has parameters of no model of this manager"):
                manager.pipeline([block], loss_fn=mean, micro_batches=2)


class KeepsLoss(Owner):
    """Leaves a loss on itself."""

    kept: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.kept = y.square().mean()
        return y


class PassesLoss(Owner):
    """Returns it with its output."""

    def forward(self, x: Tensor, penalty: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
        y = self.layer(x)
        return y, penalty + y.square().mean()


class LastOfTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor, penalty: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(x), penalty


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_loss_that_a_block_leaves_on_itself_is_refused(checkpoint: str) -> None:
    """By layer, it is that of another micro-batch, and its history ends with the block."""
    with managed() as manager:
        twins = Twins(manager, simple(KeepsLoss, Residual), checkpoint=checkpoint)
        kept = twins.model.blocks[0]
        pipe = twins.pipeline(PARTS, checkpoint, loss=lambda output, y: F.cross_entropy(output, y) + kept.kept)
        with pytest.raises(chunkmem.StateError, match="a gradient comes to what first has returned from elsewhere"):
            pipe.step(*features(0))
        twins.optimizer.zero_grad()
        kept.kept = torch.tensor(0.0)
        assert_nothing_left(manager)


@pytest.mark.parametrize("checkpoint", ["always", pytest.param("never", marks=FULL)])
def test_a_loss_that_is_passed_on(checkpoint: str) -> None:
    def build() -> Chain:
        return Chain(linear(), [PassesLoss(), PassesLoss()], LastOfTwo())

    with managed() as manager:
        loss: Loss = lambda output, target: F.cross_entropy(output[0], target) + 0.1 * output[1]  # noqa: E731
        Twins(manager, build, checkpoint=checkpoint, loss=loss).run()


class KeepsOutput(Owner):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.kept.append(y)
        return torch.tanh(y)


@pytest.mark.parametrize("checkpoint", ["always", pytest.param("never", marks=FULL)])
def test_what_a_block_keeps_stays_as_it_is(checkpoint: str) -> None:
    with managed() as manager:
        twins = Twins(manager, simple(KeepsOutput, Residual), checkpoint=checkpoint)
        for step in range(STEPS):
            kept, expected = (model.blocks[0].kept for model in (twins.model, twins.plain))
            kept.clear()
            expected.clear()
            twins.backward(*features(step))
            twins.update()
            assert [torch.equal(a, b) for a, b in zip(kept, expected, strict=True)] == [True] * PARTS


# What comes between steps, and during them.


def with_evaluation(twins: Twins, step: int) -> None:
    for model in (twins.plain, twins.model):
        model.eval()
    with torch.no_grad():
        assert torch.equal(twins.plain(features(step)[0]), twins.model(features(step)[0]))
    for model in (twins.plain, twins.model):
        model.train()
    twins.backward(*features(step))


def with_two_steps(twins: Twins, step: int) -> None:
    """Gradients add up."""
    twins.backward(*features(step))
    twins.backward(*features(step + 100))


def with_plain_backward(twins: Twins, step: int) -> None:
    inputs, target = features(step + 100)
    for model in (twins.plain, twins.model):
        twins.loss(model(inputs), target).backward()
    twins.backward(*features(step))


def with_another_pipeline(twins: Twins, step: int) -> None:
    twins.backward(*features(step))
    num, pipe = twins.num, twins.pipe
    twins.num, twins.pipe = 2, twins.pipeline(2)
    twins.backward(*features(step + 100))
    twins.num, twins.pipe = num, pipe


def with_short_batches(twins: Twins, step: int) -> None:
    twins.backward(*features(step, 5 if step % 3 == 2 else 8))


def with_looks_at_gradients(twins: Twins, step: int) -> None:
    twins.backward(*features(step))
    for own, plain in zip(twins.model.parameters(), twins.plain.parameters(), strict=True):
        assert torch.equal(own.grad, plain.grad)


@pytest.mark.few(1)
@pytest.mark.parametrize("checkpoint", [pytest.param("always", marks=FULL), "auto", pytest.param("never", marks=FULL)])
@pytest.mark.parametrize(
    "way",
    [
        with_evaluation,
        with_two_steps,
        with_plain_backward,
        pytest.param(with_another_pipeline, marks=FULL),
        with_short_batches,
        pytest.param(with_looks_at_gradients, marks=FULL),
    ],
)
def test_other_loops(way: Callable[[Twins, int], None], checkpoint: str) -> None:
    with managed() as manager:
        twins = Twins(manager, simple(Residual, Residual), checkpoint=checkpoint)
        for step in range(6):
            way(twins, step)
            twins.update()


def test_gradients_are_clipped() -> None:
    """To what plain PyTorch clips them to; its norm adds up in another order."""
    with managed() as manager:
        twins = Twins(manager, simple(Residual, Residual))
        for step in range(STEPS):
            twins.backward(*features(step))
            plain, own = (
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1) for model in (twins.plain, twins.model)
            )
            torch.testing.assert_close(own, plain)
            for optimizer in (twins.plain_optimizer, twins.optimizer):
                optimizer.step()
                optimizer.zero_grad()
            state = manager.state_dict(twins.model)
            twins.plain.load_state_dict(state)
            assert_nothing_left(manager)


def test_steps_in_several_threads() -> None:
    """One after the other."""
    with managed() as manager:
        twins = Twins(manager, simple(Residual, Residual))
        errors: list[BaseException] = []

        def work() -> None:
            try:
                for _ in range(3):
                    twins.pipe.step(*features(0))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        for _ in range(9):
            loop_step(twins.plain, twins.loss, *features(0), num=PARTS)
        twins.update()


def test_a_step_inside_of_a_step_is_refused() -> None:
    with managed() as manager:
        twins = Twins(manager, simple(Residual))
        inner: list[Any] = []
        outer = twins.pipeline(PARTS, loss=lambda output, target: inner[0].step(*features(1)))
        inner.append(outer)
        with pytest.raises(chunkmem.StateError, match=r"pipe\.step\(\) inside of pipe\.step\(\)"):
            outer.step(*features(0))
        twins.run(steps=2)


# Hooks of a user.


def add_hooks(model: Chain, log: list[float]) -> None:
    """Hooks that change what blocks are given, and their gradients, and note these."""
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
        block.register_forward_hook(lambda module, args, output: output * 0.5)
        block.register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 2,))
        for each in (block, block.mlp):
            each.register_full_backward_hook(lambda module, inputs, outputs: log.append(inputs[0].sum().item()))


@pytest.mark.parametrize("checkpoint", ["always", pytest.param("never", marks=FULL)])
def test_hooks_on_blocks(checkpoint: str) -> None:
    with managed() as manager:
        twins = Twins(manager, simple(Residual, Residual), checkpoint=checkpoint)
        log: list[float] = []
        expected: list[float] = []
        add_hooks(twins.model, log)
        add_hooks(twins.plain, expected)
        twins.run()
        assert sorted(log) == sorted(expected)  # in another order: block by block


@pytest.mark.full
def test_a_compiled_loss() -> None:
    with managed() as manager:
        Twins(manager, simple(Residual), loss=torch.compile(F.cross_entropy)).run()


# What is saved.


@dataclasses.dataclass
class Lives:
    """Of chunks of activations in a step, by what they hold."""

    num_made: Counter[Content]
    most: Counter[Content]
    """At one time."""
    most_nbytes: Counter[Content]


def lives(manager: chunkmem.ChunkManager) -> Lives:
    trace = manager.trace
    assert trace is not None
    found, live, live_nbytes = activation_contents(trace), Counter[Content](), Counter[Content]()
    result = Lives(Counter(), Counter(), Counter())
    for moment in trace.moments:
        if moment.chunk.role is Role.ACTIVATION and moment.kind in (Kind.CREATE, Kind.CONSUME):
            content, sign = found[moment.chunk].content, 1 if moment.kind is Kind.CREATE else -1
            live[content] += sign
            live_nbytes[content] += sign * trace.chunk_nbytes[moment.chunk]
            result.num_made[content] += sign == 1
            result.most[content] = max(result.most[content], live[content])
            result.most_nbytes[content] = max(result.most_nbytes[content], live_nbytes[content])
    assert not any(live.values())
    return result


@pytest.mark.parametrize("num", [2, pytest.param(4, marks=FULL)])
def test_what_is_saved_follows_formulas(num: int) -> None:
    """Of three blocks, and of the last one, whose input is the third one's output; the first one's is the user's."""
    num_calls, hidden_nbytes = 4 * num, 8 // num * WIDTH * 4
    found: dict[str, Lives] = {}
    for checkpoint in ("always", "except_last", "never"):
        with managed() as manager:
            twins = Twins(manager, simple(Residual, Residual, Residual), checkpoint=checkpoint, num=num)
            twins.run()
            found[checkpoint] = lives(manager)
    always, except_last, never = found.values()

    assert always.num_made[Content.INPUTS] == always.most[Content.INPUTS] == num_calls
    assert always.most_nbytes[Content.INPUTS] == num_calls * hidden_nbytes
    assert always.most[Content.RECOMPUTED] == 1
    assert always.num_made[Content.ACTIVATIONS] == 0

    # All but the last micro-batch's, which comes first in backward.
    assert except_last.most[Content.INPUTS] == num_calls - 4
    assert except_last.most_nbytes[Content.INPUTS] == (num_calls - 4) * hidden_nbytes
    assert except_last.most[Content.RECOMPUTED] == 1
    assert except_last.num_made[Content.ACTIVATIONS] == 4
    assert except_last.most_nbytes[Content.ACTIVATIONS] * num == never.most_nbytes[Content.ACTIVATIONS]

    assert never.num_made[Content.ACTIVATIONS] == never.most[Content.ACTIVATIONS] == num_calls
    assert never.num_made[Content.INPUTS] == never.num_made[Content.RECOMPUTED] == 0

    for each in found.values():  # what is on its way
        assert each.most_nbytes[Content.OUTPUTS] <= (num + 1) * hidden_nbytes
        assert each.most_nbytes[Content.GRADIENTS] <= (num + 1) * hidden_nbytes


class InDict(nn.Module):
    """Carries hidden states in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Residual()

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        return {"x": [self.block(state["x"][0])]}


class ToDict(Owner):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"x": [self.layer(x)]}


class FromDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, state: dict[str, Any]) -> Tensor:
        return self.head(state["x"][0])


def test_inputs_in_containers_are_in_the_ledger() -> None:
    """They were kept by the call, as anything that is no tensor."""
    with managed() as manager:
        twins = Twins(manager, lambda: Chain(ToDict(), [InDict(), InDict()], FromDict()))
        twins.run()
        found = lives(manager)
        assert found.most[Content.INPUTS] == 3 * PARTS
        assert found.most_nbytes[Content.INPUTS] == 3 * features(0)[0].nbytes


class OneTuple(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.head(x),)


def test_without_a_last_module_loss_fn_is_given_what_the_last_block_returns() -> None:
    def loss(output: tuple[Tensor], target: Tensor) -> Tensor:
        assert type(output) is tuple
        return F.cross_entropy(output[0], target)

    with managed() as manager:
        Twins(manager, lambda: Chain(linear(), [Residual(), OneTuple()]), loss=loss).run()
