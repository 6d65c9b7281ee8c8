"""`pipe(x)`: outputs of the whole batch, for a loss outside, to the bits of plain PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import chunkmem
from chunkmem.optim.scaler import LossScaler
from tests.cpu.test_pipeline import (
    AMPLE_NBYTES,
    CHECKPOINTS,
    DTYPES,
    FP16,
    LOWERED,
    SEED,
    STEPS,
    Setup,
    Training,
    outcome,
    train,
)
from tests.helpers.audit import audit
from tests.helpers.low_precision import LowPlain
from tests.helpers.pipelined import CHAINS, ChainModel, parts_of
from tests.helpers.training import Outcome, Plain, assert_same
from tests.helpers.twins import assert_equal, copied, cpu_only

pytestmark = cpu_only


def joined(model: Callable[..., Any], inputs: Any, num: int) -> Tensor:
    """The outputs of all micro-batches in plain PyTorch."""
    samples = inputs[0] if isinstance(inputs, tuple | list) else inputs
    parts = parts_of(inputs, samples, num)
    return torch.cat([model(*(part.inputs if type(part.inputs) is tuple else (part.inputs,))) for part in parts])


@functools.cache
def expected(case: ChainModel, micro_batches: int, precision: str = "fp32") -> Outcome:
    scaler = LossScaler(chunkmem.Config.from_dict({"fp16": FP16}).fp16) if precision == "fp16" else None
    side: Any = Plain() if precision == "fp32" else LowPlain(DTYPES[precision], scaler)
    torch.manual_seed(SEED)
    model = side.ready(case.build())
    optimizer = side.optimizer(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        inputs, target = case.batch(step)
        losses.append(case.loss(joined(model, inputs, micro_batches), target))
        side.backward(losses[-1], last=True, by_manager=True)
        optimizer.step()
        optimizer.zero_grad()
    return outcome(side, model, optimizer, losses)


class Outside(Training):
    """The loss is not the pipeline's."""

    def step(self, number: int) -> None:
        inputs, target = self.case.batch(number)
        loss = self.case.loss(self.pipe(inputs), target)
        self.manager.backward(loss)
        self.losses.append(loss)
        self.update()


FEW = {("unet", 2, "except_last", "fp32")}


def matrix() -> list[Any]:
    return [
        pytest.param(
            Setup(case, num, checkpoint, precision),
            id=f"{case.name}-{num}-{checkpoint}-{precision}",
            marks=() if (case.name, num, checkpoint, precision) in FEW else pytest.mark.full,
        )
        for case in LOWERED
        for num, checkpoint in zip((3, 5, 2, 1), CHECKPOINTS, strict=True)
        for precision in ("fp32", *DTYPES)
    ]


@pytest.mark.few(1)
@pytest.mark.parametrize("setup", matrix())
def test_the_numbers_are_those_in_plain_pytorch(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.cpu.test_pipeline.Training", Outside)
    wanted = expected(setup.case, setup.micro_batches, setup.precision)
    result, misses, required_nbytes = train(setup, AMPLE_NBYTES, seed=3)
    assert_same(result, wanted)
    assert not setup.case.repeats or not any(misses[3:]), misses
    least = required_nbytes + (0 if setup.case.repeats else 8 * setup.case.chunk_numel)
    assert_same(train(setup, least)[0], wanted)


Pair = tuple[Any, Any, Callable[[Any], Any]]


@pytest.fixture(params=[pytest.param(AMPLE_NBYTES, id="ample"), pytest.param(5 << 17, id="small")])
def sides(request: pytest.FixtureRequest) -> Callable[..., Iterator[Pair]]:
    """Of plain PyTorch and chunkmem: the manager or None, a chain, and what runs it in 3 micro-batches."""
    case = CHAINS["cnn"]

    def made(build: Callable[[], Any] = case.build, **options: Any) -> Iterator[Pair]:
        for is_plain in (True, False):
            torch.manual_seed(SEED)
            if is_plain:
                model = build()
                yield None, model, functools.partial(joined, model, num=3)
                continue
            with chunkmem.ChunkManager(Setup(case, 3).config(request.param)) as manager:
                with manager.init():
                    model = build()
                options = {"loss_fn": case.loss, "micro_batches": 3, "checkpoint": "auto"} | options
                yield manager, model, manager.pipeline(model.blocks, first=model.first, last=model.last, **options)
                audit(manager)

    return made


def gradients(model: nn.Module) -> list[Tensor]:
    return [param.grad.clone() for param in model.parameters() if param.grad is not None]


class Gan(nn.Module):
    """A generator, and a discriminator in blocks."""

    def __init__(self) -> None:
        super().__init__()
        chain = CHAINS["cnn"].build()
        self.generator = nn.Conv2d(3, 3, 3, padding=1)
        self.first, self.blocks, self.last = chain.first, chain.blocks, chain.last


@pytest.mark.few(1)
def test_gradients_go_through_a_frozen_discriminator_to_a_generator(sides: Any) -> None:
    """And the discriminator is trained next, on what is real and on what is not."""
    found = []
    for manager, model, pipe in sides(Gan):
        discriminator = [param for name, param in model.named_parameters() if "generator" not in name]

        def made(params: Any, manager: Any = manager) -> Any:
            if manager is None:
                return torch.optim.AdamW(params, lr=1e-2, fused=True)
            return chunkmem.AdamW(params, manager=manager, lr=1e-2)

        optimizers = [made(model.generator.parameters()), made(discriminator)]
        if manager is None:

            def pipe(x: Tensor, model: Any = model) -> Tensor:  # type: ignore[misc]
                return joined(lambda part: model.last(nn.Sequential(*model.blocks)(model.first(part))), x, 3)

        losses = []
        for seed in range(5):
            images, _ = CHAINS["cnn"].batch(seed)
            for param in discriminator:
                param.requires_grad_(False)
            fake = model.generator(images)
            loss = F.softplus(-pipe(fake)).mean()
            loss.backward()
            optimizers[0].step()
            for param in discriminator:
                param.requires_grad_(True)
            both = pipe(torch.cat([images, fake.detach()]))
            other = F.softplus(-both[: len(images)]).mean() + F.softplus(both[len(images) :]).mean()
            other.backward()
            optimizers[1].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            losses += [loss.item(), other.item()]
        found.append((losses, copied(dict(model.state_dict() if manager is None else manager.state_dict(model)))))
    assert_equal(found[1], found[0])


def test_gradients_of_inputs_and_outputs_without_history(sides: Any) -> None:
    found = []
    for _, model, pipe in sides():
        images, target = CHAINS["cnn"].batch(0)
        images.requires_grad_()
        with torch.no_grad():
            before = pipe(images)
        assert not before.requires_grad
        out = pipe(images)
        assert torch.equal(out, before)
        F.cross_entropy(out[3:], target[3:]).backward()  # some outputs alone
        model.requires_grad_(False)
        frozen = pipe(images.detach())
        assert not frozen.requires_grad
        found.append((images.grad, gradients(model), out.detach(), frozen))
    assert_equal(found[1], found[0])


@pytest.mark.few(1)
def test_a_teacher_and_a_student(sides: Any) -> None:
    """Targets come from the pipeline itself, without gradients, before each step."""
    found = []
    for _, model, pipe in sides():
        losses = []
        for seed in range(4):
            images, _ = CHAINS["cnn"].batch(seed)
            with torch.no_grad():
                teacher = pipe(images.flip(0)).softmax(1)
            loss = F.cross_entropy(pipe(images), teacher)
            loss.backward()
            losses += [loss.item(), gradients(model)]
            model.zero_grad()
        found.append(losses)
    assert_equal(found[1], found[0])


@pytest.mark.few(1)
def test_what_is_refused_and_what_is_right_afterwards(sides: Any) -> None:
    found = []
    for manager, model, pipe in sides():
        images, target = CHAINS["cnn"].batch(0)
        if manager is not None:
            out = pipe(images)
            for call in (pipe, pipe.step, pipe.evaluate):
                with pytest.raises(chunkmem.StateError, match="before the backward of what pipe"):
                    call(images)
            del out
            watched = images.clone().requires_grad_()
            with pytest.raises(chunkmem.StateError, match="through what pipe"):
                torch.autograd.grad(pipe(watched).sum(), watched)
            out = pipe(images)
            loss = F.cross_entropy(out, target)
            loss.backward(retain_graph=True)
            with pytest.raises(chunkmem.StateError, match="runs a second time"):
                loss.backward()
            model.zero_grad()
            with pytest.raises(chunkmem.StateError, match="no tensor with samples"):
                pipe(3)
        F.cross_entropy(pipe(images[:7]), target[:7]).backward()  # another size of batches
        found.append(gradients(model))
    assert_equal(found[1], found[0])


class Failing(nn.Module):
    """Raises in a forward or a backward, once."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.raises = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.raises == "forward":
            self.raises = ""
            raise KeyError("forward")
        out: Tensor = self.inner(x)
        if self.raises == "backward" and out.requires_grad:
            self.raises = ""
            out.register_hook(self._raise)
        return out

    def _raise(self, _grad: Tensor) -> None:
        raise KeyError("backward")


def failing() -> Any:
    chain = CHAINS["cnn"].build()
    chain.blocks[1] = Failing(chain.blocks[1])
    return chain


@pytest.mark.few(2)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_in_the_middle(where: str, sides: Any) -> None:
    """The next batch is right, once gradients of before are discarded."""
    found = []
    for manager, model, pipe in sides(failing):
        images, target = CHAINS["cnn"].batch(0)
        if manager is not None:
            model.blocks[1].raises = where
            with pytest.raises(KeyError, match=where):
                F.cross_entropy(pipe(images), target).backward()
            model.zero_grad()
        F.cross_entropy(pipe(images), target).backward()
        found.append(gradients(model))
    assert_equal(found[1], found[0])


@pytest.mark.few(2)
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_weights_that_were_changed_before_the_backward(checkpoint: str, sides: Any) -> None:
    """As in plain PyTorch, also where blocks are recomputed."""
    for manager, model, pipe in sides(checkpoint=checkpoint):
        if manager is None:
            continue
        optimizer = chunkmem.SGD(model.parameters(), manager=manager, lr=0.1)
        images, target = CHAINS["cnn"].batch(0)
        F.cross_entropy(pipe(images), target).backward()
        out = pipe(images)
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(chunkmem.StateError, match="weights were written to between pipe"):
            out.sum().backward()
        model.zero_grad()


def test_outputs_that_cannot_be_joined() -> None:
    case = CHAINS["cnn"]
    with chunkmem.ChunkManager(Setup(case, 3).config(AMPLE_NBYTES)) as manager:
        with manager.init():
            model = case.build()
        images, _ = case.batch(0)

        class Mean(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x.mean()

        pipe = manager.pipeline(model.blocks, first=model.first, last=Mean(), loss_fn=case.loss, micro_batches=3)
        with pytest.raises(chunkmem.StateError, match=r"a micro-batch of \d samples returns \[\]; outputs are joined"):
            pipe(images)
        pipe = manager.pipeline(
            model.blocks,
            first=model.first,
            last=model.last,
            loss_fn=case.loss,
            micro_batches=3,
            deferred_batch_norm=True,
        )
        with pytest.raises(chunkmem.ConfigError, match="with gradients and deferred_batch_norm"):
            pipe(images)
