"""Errors and interrupts in hooks, closures, backward and `step()`, after which training continues."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

from tests.hostile.harness import User, script


class StopError(Exception):
    """What a user's own code raises."""


class Once:
    """Raises at one of its calls."""

    def __init__(self, at: int, error: type[BaseException] = StopError) -> None:
        self.left, self.error = at, error

    def __call__(self, *_: Any, **__: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error


@script()
def error_before_the_update(user: User) -> None:
    """A hook of the optimizer raises; the gradients are there, and the step is made again."""
    user.train(0)
    handle = user.opt.register_step_pre_hook(Once(1))
    user.backward(user.loss(1))
    with contextlib.suppress(StopError):
        user.opt.step()
    user.record([p.grad.norm() for p in user.params], [p.norm() for p in user.params])
    user.update()
    handle.remove()
    user.train(2)


@script()
def error_after_the_update(user: User) -> None:
    user.train(0)
    handle = user.opt.register_step_post_hook(Once(1))
    user.backward(user.loss(1))
    with contextlib.suppress(StopError):
        user.opt.step()
    user.opt.zero_grad()
    user.record([p.norm() for p in user.params])
    handle.remove()
    user.train(2, 3)


@script()
def gradients_after_an_error_are_dropped(user: User) -> None:
    user.train(0)
    handle = user.opt.register_step_pre_hook(Once(1, KeyboardInterrupt))
    user.backward(user.loss(1))
    with contextlib.suppress(KeyboardInterrupt):
        user.opt.step()
    user.opt.zero_grad()
    handle.remove()
    user.train(2, 3)


@script()
def keyboard_interrupt_in_a_hook_of_a_gradient(user: User) -> None:
    hook = Once(7, KeyboardInterrupt)
    for p in user.params:
        p.register_hook(hook)
    for seed in range(3):
        try:
            user.step(seed)
        except KeyboardInterrupt:
            user.opt.zero_grad()


@script()
def error_in_a_hook_after_accumulation(user: User) -> None:
    hook = Once(9)
    for p in user.params:
        p.register_post_accumulate_grad_hook(hook)
    for seed in range(3):
        try:
            user.step(seed)
        except StopError:
            user.opt.zero_grad()


@script()
def gradients_of_half_a_backward_are_added_to(user: User) -> None:
    """Nobody drops the gradients that a failed backward has left."""
    user.train(0)
    out = user.model.blocks[0](user.model.stem(user.batch(1)))
    out.register_hook(Once(1))
    with contextlib.suppress(StopError):
        user.backward(user.model.head(user.model.blocks[1](out)).square().mean())
    user.record([p.grad is None for p in user.params])
    user.train(2, 3)


@script()
def gradients_of_half_a_backward_are_stepped_with(user: User) -> None:
    user.train(0)
    out = user.model.blocks[0](user.model.stem(user.batch(1)))
    out.register_hook(Once(1))
    with contextlib.suppress(StopError):
        user.backward(user.model.head(user.model.blocks[1](out)).square().mean())
    user.update()
    user.train(2, 3)


@script()
def error_in_the_second_micro_batch(user: User) -> None:
    for seed in range(3):
        user.backward(user.loss(seed))
        hook = Once(1) if seed == 1 else None
        out = user.model.blocks[0](user.model.stem(user.batch(seed + 10)))
        if hook is not None:
            out.register_hook(hook)
        with contextlib.suppress(StopError):
            user.backward(user.model.head(user.model.blocks[1](out)).square().mean())
        if seed == 1:
            user.opt.zero_grad()
        else:
            user.update()


@script()
def closure_that_raises(user: User) -> None:
    user.train(0)

    def closure() -> Tensor:
        user.opt.zero_grad()
        user.backward(user.loss(1))
        raise StopError

    with contextlib.suppress(StopError):
        user.opt.step(closure)
    user.update()
    user.train(2)


@script()
def schedule_that_raises(user: User) -> None:
    once = Once(3)

    def rate(step: int) -> float:
        once()
        return 1.0 / (1 + step)

    scheduler = lr_scheduler.LambdaLR(user.opt, rate)
    for seed in range(4):
        user.step(seed)
        with contextlib.suppress(StopError):
            scheduler.step()
        user.record(scheduler.get_last_lr())


@script()
def error_in_state_dict_hook(user: User) -> None:
    user.train(0)
    handle = user.model.head.register_state_dict_pre_hook(Once(1))
    with contextlib.suppress(StopError):
        user.state_dict()
    handle.remove()
    user.train(1)
    user.record(user.state_dict())


@script()
def error_under_no_grad(user: User) -> None:
    user.train(0)
    handle = user.model.blocks[1].register_forward_hook(Once(1))
    with contextlib.suppress(StopError), torch.no_grad():
        user.loss(1)
    handle.remove()
    user.train(2, 3)


@script()
def generator_of_losses_closed(user: User) -> None:
    """A forward inside a generator that is never finished."""

    def losses() -> Any:
        for seed in range(5):
            yield user.loss(seed)

    made = losses()
    for _ in range(2):
        user.backward(next(made))
        user.update()
    made.close()
    user.train(7)


@script()
def error_in_a_recomputed_block(user: User) -> None:
    """A hook is called in each forward and in each recomputation."""
    block = user.model.blocks[0]
    handle = block.up.register_forward_hook(Once(4))
    for seed in range(4):
        x = checkpoint(block, user.model.stem(user.batch(seed)), use_reentrant=False)
        try:
            user.backward(user.model.head(x).square().mean())
        except StopError:
            user.opt.zero_grad()
            continue
        user.update()
    handle.remove()
