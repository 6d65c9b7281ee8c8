"""Errors and interrupts, after which training goes on, and mistakes that plain PyTorch refuses too."""

from __future__ import annotations

import contextlib

import torch

from tests.hostile.harness import Raises, Refused, User, script


class BatchError(Exception):
    """What a user's own code raises."""


@script()
def error_in_forward(user: User) -> None:
    def fail(*_: object) -> None:
        raise BatchError

    for seed in range(4):
        if seed == 1:
            handle = user.model.blocks[1].register_forward_hook(fail)
            with contextlib.suppress(BatchError):
                user.loss(seed)
            handle.remove()
            continue
        user.step(seed)


@script()
def error_in_backward(user: User) -> None:
    def fail(grad: torch.Tensor) -> None:
        raise BatchError

    for seed in range(4):
        if seed == 1:
            out = user.model.blocks[0](user.model.stem(user.batch(seed)))
            out.register_hook(fail)
            loss = user.model.head(user.model.blocks[1](out)).square().mean()
            with contextlib.suppress(BatchError):
                user.backward(loss)
            user.opt.zero_grad()
            continue
        user.step(seed)


@script()
def keyboard_interrupt_in_forward(user: User) -> None:
    calls = []

    def interrupt(*_: object) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    user.model.blocks[2].register_forward_pre_hook(interrupt)
    for seed in range(4):
        try:
            user.step(seed)
        except KeyboardInterrupt:
            user.opt.zero_grad()


@script()
def wrong_shape_then_right(user: User) -> None:
    user.train(0)
    try:
        user.model(torch.randn(2, 7))
    except RuntimeError:
        user.record("refused by linear")
    user.train(1)


@script(expect=Raises("RuntimeError"))
def wrong_shape(user: User) -> None:
    user.train(0)
    user.model(torch.randn(2, 7))


@script(expect=Raises("RuntimeError"))
def backward_twice(user: User) -> None:
    loss = user.loss()
    loss.backward()
    loss.backward()


@script(expect=Raises("RuntimeError"))
def backward_under_no_grad(user: User) -> None:
    with torch.no_grad():
        loss = user.loss()
    loss.backward()


@script(expect=Raises("RuntimeError"))
def leaf_written_with_grad(user: User) -> None:
    """In place on a leaf that requires grad, without `no_grad`."""
    user.train(0)
    user.model.head.weight.mul_(0.5)


@script(expect=Raises("RuntimeError"))
def saved_weight_modified_before_backward(user: User) -> None:
    """Autograd notices by the version counter."""
    loss = user.loss()
    with torch.no_grad():
        user.model.blocks[2].up.weight.mul_(2)
    loss.backward()


@script(expect=Refused("RuntimeError", "modified by an inplace operation"))
def step_before_backward(user: User) -> None:
    """The step comes between a forward and its backward: autograd's own error, as with torch's optimizers.

    Only torch's fused kernels do not count as a modification: with them plain PyTorch gives wrong gradients here.
    """
    first, second = user.loss(0), user.loss(1)
    user.backward(first)
    user.opt.step()
    user.backward(second)


@script(expect=Raises("KeyError"))
def unknown_module(user: User) -> None:
    user.train(0)
    _ = user.model._modules["missing"].weight


@script(expect=Raises("AttributeError"))
def parameter_deleted(user: User) -> None:
    user.train(0)
    del user.model.head.bias
    user.train(1)


@script(expect=Refused("StateError", "closed"))
def closed_then_forward(user: User) -> None:
    user.train(0)
    user.close()
    user.model(user.batch())


@script(expect=Refused("StateError", "closed"))
def closed_then_read(user: User) -> None:
    user.train(0)
    user.close()
    user.record(user.model.head.weight.sum().item())


@script(expect=Refused("StateError", "closed"))
def closed_then_written(user: User) -> None:
    user.train(0)
    user.close()
    with torch.no_grad():
        user.model.head.weight.zero_()
    user.record(user.model.head.weight)


@script(expect=Refused("StateError", "closed"))
def closed_then_stepped(user: User) -> None:
    user.train(0)
    user.backward(user.loss(1))
    user.close()
    user.opt.step()


@script(expect=Refused("StateError", "closed"))
def closed_then_state_dict(user: User) -> None:
    user.train(0)
    user.close()
    user.record(user.model.state_dict())


@script()
def closed_after_saving(user: User) -> None:
    user.train(0, 1)
    user.record(user.state_dict())
    user.close()
