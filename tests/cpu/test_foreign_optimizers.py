"""Optimizers of other libraries over managed parameters: nine of them trained nothing, and said nothing."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

import chunkmem
from tests.helpers.twins import AMPLE_NBYTES, WIDTH, Blocks, Twin, assert_equal, config, features

TORCH = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adamax", "NAdam", "RAdam", "Adafactor", "ASGD", "LBFGS")


class Signs(torch.optim.Optimizer):
    """An optimizer that a user wrote."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad.sign(), alpha=group["lr"])


KINDS: dict[str, Callable[[Any], Any]] = {
    **{name: partial(getattr(torch.optim, name), lr=1e-2) for name in TORCH},
    "a user's": Signs,
}

SAYS = (
    r"step\(\): parameter inner\.weight is managed.*chunkmem\.Optimizer\(\w+, params, manager=manager\).*"
    r"chunkmem\.AdamW"
)


@pytest.fixture
def twin() -> Iterator[Twin]:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        yield Twin(manager, Blocks)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_gradients", [True, False])
def test_the_step_of_a_foreign_optimizer_is_refused(kind: str, with_gradients: bool, twin: Twin) -> None:
    """It found no gradient, updated nothing, and the loss stayed what it was, without a word."""
    twin.steps(0)
    foreign = KINDS[kind](twin.model.parameters())
    before = twin.left()
    if with_gradients:
        twin.loss(features(1)).backward()
    with pytest.raises(chunkmem.StateError, match=SAYS):
        foreign.step(*[lambda: twin.loss(features(1))] if kind == "LBFGS" else [])
    if with_gradients:
        twin.optimizer.zero_grad()
    assert_equal(twin.left(), before)


def test_one_managed_parameter_among_others_is_enough(twin: Twin) -> None:
    """Also where the others come first, in another group."""
    outside = nn.Linear(WIDTH, WIDTH)
    head = dict(twin.model.named_parameters())["head.bias"]
    foreign = torch.optim.SGD([{"params": list(outside.parameters())}, {"params": [outside.weight.new_ones(1), head]}])
    with pytest.raises(chunkmem.StateError, match=r"SGD\.step\(\): parameter head\.bias is managed"):
        foreign.step()


class WithAdapter(Blocks):
    """Some of it is excluded, for an optimizer of the user's."""

    def __init__(self, manager: chunkmem.ChunkManager | None) -> None:
        super().__init__(num_blocks=1)
        if manager is None:
            self.adapter = nn.Linear(WIDTH, WIDTH)
        else:
            with manager.exclude():
                self.adapter = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = super().forward(self.adapter(x))
        return result


def test_excluded_and_unmanaged_parameters_are_left_to_any_optimizer() -> None:
    """An adapter beside a managed model, inside it or outside, trains with SGD as it does in plain PyTorch."""

    def train(manager: chunkmem.ChunkManager | None) -> Any:
        twin = Twin(manager, lambda: WithAdapter(manager), params=lambda model: model.blocks.parameters())
        torch.manual_seed(3)
        outside = nn.Linear(WIDTH, WIDTH)
        foreign = torch.optim.SGD([*twin.model.adapter.parameters(), *outside.parameters()], lr=0.1, momentum=0.9)
        losses = []
        for seed in range(3):
            loss = twin.loss(outside(features(seed).cpu()).to(features(seed).device))
            loss.backward()
            foreign.step()
            foreign.zero_grad()
            twin.update()
            losses.append(loss.item())
        return [losses, twin.left(), list(outside.parameters())]

    plain = train(None)
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        assert_equal(train(manager), plain)


class Wrapper(torch.optim.Optimizer):
    """As libraries wrap optimizers: a real one of torch's, with the groups of the one that does the step."""

    def __init__(self, wrapped: torch.optim.Optimizer) -> None:
        super().__init__(wrapped.param_groups, {})
        self.wrapped = wrapped

    def step(self, closure: Any = None) -> Any:
        return self.wrapped.step(closure)


def test_a_wrapper_around_one_of_ours_passes(twin: Twin) -> None:
    plain = Twin(None, Blocks)
    losses = plain.steps(0, 1)
    twin.optimizer = Wrapper(twin.optimizer)
    assert [twin.step(features(seed)) for seed in (0, 1)] == losses
    assert_equal(twin.weights(), plain.weights())


def test_inside_gather_with_gradients_a_foreign_step_is_what_it_says(twin: Twin) -> None:
    """There the weights and their gradients are present, and what is written is kept."""
    plain = Twin(None, Blocks)
    for each in (plain, twin):
        foreign = torch.optim.SGD(each.model.parameters(), lr=0.1)
        each.loss(features(0)).backward()
        if each.manager is None:
            foreign.step()
            continue
        with each.manager.gather(), pytest.raises(chunkmem.StateError, match="is managed"):
            foreign.step()
        with each.manager.gather(grads=True):
            foreign.step()
            foreign.zero_grad()
    assert_equal(twin.weights(), plain.weights())


def test_optimizers_of_two_managers_pass_each_other(twin: Twin) -> None:
    plain = Twin(None, Blocks)
    losses = plain.steps(0, 1)
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as other:
        second = Twin(other, Blocks)
        assert [twin.steps(0, 1), second.steps(0, 1)] == [losses, losses]


def test_the_check_goes_with_its_manager() -> None:
    """At `close()`, or when another is made after a manager was forgotten without it."""
    chunkmem.ChunkManager(config(AMPLE_NBYTES)).close()
    gc.collect()
    before = set(_global_optimizer_pre_hooks)
    manager = chunkmem.ChunkManager(config(AMPLE_NBYTES))
    assert len(_global_optimizer_pre_hooks) == len(before) + 1
    manager.close()
    manager.close()
    assert set(_global_optimizer_pre_hooks) == before
    twin = Twin(chunkmem.ChunkManager(config(AMPLE_NBYTES)), Blocks)
    twin.steps(0)
    del twin
    gc.collect()
    chunkmem.ChunkManager(config(AMPLE_NBYTES)).close()
    assert set(_global_optimizer_pre_hooks) == before


def test_a_manager_that_is_collected_during_a_step_does_not_disturb_it() -> None:
    """Torch goes through its table of hooks meanwhile, which must not change under it."""
    abandoned: list[Any] = [Twin(chunkmem.ChunkManager(config(AMPLE_NBYTES)), Blocks)]

    def abandon(*_: Any) -> None:
        abandoned.clear()
        gc.collect()

    outside = nn.Linear(2, 2)
    outside(torch.ones(2)).sum().backward()
    calls: list[Any] = []
    hooks = [register_optimizer_step_pre_hook(hook) for hook in (abandon, lambda *_: calls.append("later"))]
    try:
        torch.optim.SGD(outside.parameters(), lr=0.1).step()
    finally:
        for hook in hooks:
            hook.remove()
    assert calls == ["later"]
