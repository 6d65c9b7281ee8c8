"""What interrupts an ordinary training loop, or comes between its steps: the numbers stay those of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import chunkmem
from tests.helpers.spread import spread
from tests.helpers.training import (
    STEPS,
    VARIANTS,
    Chunked,
    Outcome,
    Plain,
    Trainer,
    Variant,
    assert_same,
    capped,
    footprint,
    train_chunked,
    train_plain,
)
from tests.helpers.zoo import WIDTH, ZOO, Batch, ZooModel

CASES = {case.name: case for case in ZOO}
VARIANT = {variant.name: variant for variant in VARIANTS}
PLAIN = VARIANT["plain"]
FAULT_AT = {"gpt": "blocks.1.mlp.0", "cnn": "blocks.1.bn1", "t5": "decoder.0.cross.q"}
"""A module in the middle of the model: something has been read before it, something is still to be read."""


def same_in_both(case: ZooModel, variant: Variant, scenario: Callable[[Trainer], Any], *, cap_nbytes: int) -> None:
    """Play a scenario in plain PyTorch and under a cap; compare all that is left."""
    plain = Trainer(case, variant, Plain())
    expected = scenario(plain)
    with chunkmem.ChunkManager(capped(case, cap_nbytes)) as manager:
        trainer = Trainer(case, variant, Chunked(manager))
        actual = scenario(trainer)
        assert_same(trainer.outcome(), plain.outcome())
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def smallest(case: ZooModel, variant: Variant) -> int:
    """The smallest cap of ordinary training."""
    return footprint(case, variant).required_nbytes


def smallest_for(case: ZooModel, variant: Variant, scenario: Callable[[Trainer], Any]) -> int:
    """The smallest cap of a scenario that needs more than ordinary training."""
    with chunkmem.ChunkManager(capped(case, 4 * footprint(case, variant).param_nbytes)) as manager:
        scenario(Trainer(case, variant, Chunked(manager)))
        return manager.memory().device.required_nbytes


class Fault:
    """Raises once, at a chosen moment of a step: when `module` has run, runs again, or receives its gradient."""

    def __init__(self, module: nn.Module, place: str, exception: type[BaseException]) -> None:
        self.place, self.exception = place, exception
        self.countdown: int | None = None
        module.register_forward_hook(self._on_forward)

    def arm(self, *, at_call: int) -> None:
        self.countdown = at_call

    def _on_forward(self, module: nn.Module, args: Any, output: Tensor) -> None:
        place = "forward" if torch._C._current_graph_task_id() == -1 else "recompute"
        if self.place == place:
            self._reached()
        if self.place == "backward" and place == "forward":
            output.register_hook(lambda grad: self._reached())

    def _reached(self) -> None:
        if self.countdown is None:
            return
        self.countdown -= 1
        if self.countdown == 0:
            self.countdown = None
            raise self.exception("injected")


PLACES = (
    ("plain", "forward"),
    ("plain", "backward"),
    ("micro_batches", "forward"),
    ("micro_batches", "backward"),
    ("checkpoint", "recompute"),
    ("checkpoint", "backward"),
    ("checkpoint_to_the_end", "recompute"),
)
"""Variants of training, and where in them."""


@pytest.mark.few(1)
@spread(name=FAULT_AT, where=PLACES, exception=(ValueError, KeyboardInterrupt))
def test_clean_step_after_an_exception(name: str, where: tuple[str, str], exception: type[BaseException]) -> None:
    """`zero_grad()` after it, and training goes on. Of micro-batches the third is hit: two gradients are pending."""
    variant, place = where

    def scenario(trainer: Trainer) -> None:
        fault = Fault(trainer.model.get_submodule(FAULT_AT[name]), place, exception)
        trainer.step()
        fault.arm(at_call=min(3, trainer.variant.micro_batches))
        with pytest.raises(exception, match="injected"):
            trainer.step()
        trainer.optimizer.zero_grad()
        trainer.step()
        trainer.step()

    case = CASES[name], VARIANT[variant]
    same_in_both(*case, scenario, cap_nbytes=smallest(*case))


@pytest.mark.few(4)
@spread(case=ZOO, share=(0.0, 0.6))
def test_inference_mode_before_and_between_steps(case: ZooModel, share: float) -> None:
    """Memory first used under `inference_mode` still trains; with the larger cap, some weights are newest on DEVICE."""

    def scenario(trainer: Trainer) -> None:
        for _ in range(2):
            trainer.evaluate(torch.inference_mode)
            trainer.step()

    sizes = footprint(case, PLAIN)
    cap_nbytes = max(sizes.required_nbytes, int(share * 4 * sizes.param_nbytes))
    same_in_both(case, PLAIN, scenario, cap_nbytes=cap_nbytes)


def test_two_managers_train_in_turn() -> None:
    """They share the process and torch's random numbers, nothing else."""
    cases = CASES["gpt"], CASES["moe"]

    def scenario(trainers: list[Trainer]) -> list[Outcome]:
        for _ in range(STEPS):
            for trainer in trainers:
                trainer.step()
        return [trainer.outcome() for trainer in trainers]

    expected = scenario([Trainer(case, PLAIN, Plain()) for case in cases])
    first, second = (chunkmem.ChunkManager(capped(case, smallest(case, PLAIN))) for case in cases)
    with first, second:
        actual = scenario([Trainer(cases[0], PLAIN, Chunked(first)), Trainer(cases[1], PLAIN, Chunked(second))])
    for left, right in zip(actual, expected, strict=True):
        assert_same(left, right)


def test_a_manager_lives_on_when_another_closes() -> None:
    case, other = CASES["gpt"], CASES["cnn"]
    with chunkmem.ChunkManager(capped(case, smallest(case, PLAIN))) as manager:
        trainer = Trainer(case, PLAIN, Chunked(manager))
        random_numbers = torch.get_rng_state()
        train_chunked(other, PLAIN, 1, capped(other, smallest(other, PLAIN)))
        torch.set_rng_state(random_numbers)
        assert_same(trainer.run(), train_plain(case, PLAIN))


@pytest.mark.few(1)
@pytest.mark.parametrize("variant", ["plain", "checkpoint"])
@pytest.mark.parametrize("name", ["gpt", "cnn", "sliced", "reused"])
def test_autograd_grad_between_steps(name: str, variant: str) -> None:
    """It returns the gradients and leaves none behind: the next step is what it would have been."""

    def scenario(trainer: Trainer) -> list[Tensor]:
        trainer.step()
        # For the last parameters alone first: backward then ends early, and most of what was read has no gradient.
        few = torch.autograd.grad(trainer.loss(), list(trainer.model.parameters())[-2:])
        every = torch.autograd.grad(trainer.loss(), list(trainer.model.parameters()))
        trainer.step()
        trainer.step()
        return [grad.cpu() for grad in (*few, *every)]

    # It accumulates nothing, so nothing tells that a parameter has been read for the last time: pins last to its end.
    case = CASES[name], VARIANT[variant]
    same_in_both(*case, scenario, cap_nbytes=smallest_for(*case, scenario))


@pytest.mark.parametrize("name", ["gpt", "cnn", "lstm", "reused"])
def test_the_same_graph_backward_twice(name: str) -> None:
    """`retain_graph=True`: the second pass needs everything again, and its gradients are added."""

    def scenario(trainer: Trainer) -> None:
        trainer.step()
        loss = trainer.loss()
        loss.backward(retain_graph=True)
        loss.backward()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        trainer.step()

    same_in_both(CASES[name], PLAIN, scenario, cap_nbytes=smallest(CASES[name], PLAIN))


def smooth() -> nn.Sequential:
    """Twice differentiable, of blocks: a ReLU has no second derivative worth testing."""
    hidden = [nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(4)]
    return nn.Sequential(nn.Linear(16, WIDTH), *hidden, nn.Softplus(), nn.Linear(WIDTH, 10))


def input_penalty(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy and the squared gradient of the outputs with respect to the inputs."""
    features, classes = batch
    features = features.requires_grad_()
    out = model(features)
    (slope,) = torch.autograd.grad(out.sum(), features, create_graph=True)
    return F.cross_entropy(out, classes) + 0.1 * slope.square().mean()


def weight_penalty(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy and the squared norm of its own gradient with respect to the weights."""
    loss = F.cross_entropy(model(batch[0]), batch[1])
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    grads = torch.autograd.grad(loss, weights, create_graph=True)
    return loss + 0.1 * torch.stack([grad.square().sum() for grad in grads]).sum()


PENALTIES = [
    ZooModel(loss.__name__, smooth, CASES["inplace"].batch, loss, 2048, has_blocks=False)
    for loss in (input_penalty, weight_penalty)
]


@pytest.mark.few(1)
@pytest.mark.parametrize("case", PENALTIES, ids=lambda case: case.name)
@pytest.mark.parametrize("name", ["plain", "micro_batches", "half_frozen"])
def test_double_backward(case: ZooModel, name: str) -> None:
    """With all model data resident, and under the smallest cap that holds the whole differentiated graph."""
    variant = VARIANT[name]
    sizes = footprint(case, variant)
    assert_same(sizes.outcome, train_plain(case, variant))
    assert_same(train_chunked(case, variant, STEPS, capped(case, sizes.required_nbytes)), train_plain(case, variant))
