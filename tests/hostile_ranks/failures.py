"""Errors of the user's own code, on one rank and on all, that end the training or are caught."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.hostile.models import Block, Net
from tests.hostile_ranks.harness import DIVERGED, PARTED, Either, Leaves, Refused, User, script


class BatchError(Exception):
    """What a user's own code raises."""


def raising(user: User, where: str, *, when: bool, error: type[BaseException] = BatchError) -> Tensor:
    """A loss; if `when`, forward raises in the second block, or backward of the loss does between the first two."""

    def fail(*_: Any) -> None:
        raise error("bad sample")

    def fail_in_backward(_module: nn.Module, _args: Any, out: Tensor) -> None:
        out.register_hook(fail)

    if not when:
        return user.loss(1)
    hooked = user.model.blocks[1] if where == "forward" else user.model.blocks[0]
    handle = hooked.register_forward_hook(fail if where == "forward" else fail_in_backward)
    try:
        return user.loss(1)
    finally:
        handle.remove()


def end_in(where: str, error: type[BaseException]) -> Callable[[User], None]:
    """A script that ends in an error on rank 1, in its second step."""

    def run(user: User) -> None:
        user.train(0)
        user.backward(raising(user, where, when=user.rank == 1, error=error))
        user.update()
        user.train(2)

    return run


for _where in ("forward", "backward"):
    for _error in (BatchError, KeyboardInterrupt, SystemExit):
        _run = end_in(_where, _error)
        _run.__name__ = f"{_error.__name__}_in_{_where}_ends_one_rank"
        script(expect=Leaves(1, _error.__name__))(_run)


@script(expect=Leaves(0, "BatchError"))
def no_more_data_on_the_first_rank(user: User) -> None:
    user.train(0)
    if user.rank == 0:
        raise BatchError
    user.train(1)


@script(expect=Leaves(1, "BatchError"))
def an_error_before_the_first_step(user: User) -> None:
    _ = user.opt
    if user.rank == 1:
        raise BatchError
    user.train(0)


@script(expect=Leaves(1, "BatchError"))
def an_error_while_the_others_save(user: User) -> None:
    user.train(0)
    if user.rank == 1:
        raise BatchError
    user.state_dict()


@script(expect=Leaves(1, "BatchError"))
def an_error_inside_of_gather(user: User) -> None:
    user.train(0)
    with user.gathered():
        if user.rank == 1:
            raise BatchError
    user.train(1)


@script(expect=Leaves(1, "BatchError"), model=None)
def an_error_while_the_model_is_built(user: User) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
        if user.rank == 1:
            raise BatchError
        return model

    user.build(build)
    user.train(0)


@script(expect=Leaves(1, "BatchError"))
def an_error_in_a_closure(user: User) -> None:
    def closure() -> Tensor:
        user.opt.zero_grad()
        loss = user.loss(1)
        user.backward(loss)
        if user.rank == 1:
            raise BatchError
        return loss

    user.train(0)
    user.opt.step(closure)


@script(expect=Leaves(1, "StateError"))
def a_call_in_the_wrong_place_on_one_rank(user: User) -> None:
    """chunkmem's own error, on one rank."""
    user.train(0)
    if user.rank == 1 and user.manager is not None:
        user.manager.accumulate(0)
    user.train(1)


class KeepingBlock(Block):
    """What it keeps of its weights is on DEVICE for as long."""

    kept: list[Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is not None:
            self.kept += [param.detach() for param in self.parameters()]
        return super().forward(x)


class Keeping(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(KeepingBlock() for _ in range(3))

    def keep(self) -> None:
        for block in self.blocks:
            block.kept = []


TIGHT: dict[str, Any] = {"memory": {"device": 12 << 10, "host": 8 << 20}}
"""Enough to train, and not enough for all weights at a time."""


@script(model=Keeping, **TIGHT)
def enough_room_to_train(user: User) -> None:
    user.train(0, 1, 2, 3)


@script(model=Keeping, expect=Leaves(1, "CapacityError"), **TIGHT)
def too_little_room_on_one_rank(user: User) -> None:
    user.train(0)
    if user.rank == 1:
        user.model.keep()
    user.train(1, 2, 3)


@script(model=Keeping, expect=Refused("CapacityError", "DEVICE"), **TIGHT)
def too_little_room_on_all_ranks(user: User) -> None:
    user.train(0)
    user.model.keep()
    user.train(1, 2, 3)


@script(expect=Refused("CapacityError", "DEVICE"), **TIGHT)
def too_little_room_to_gather_all(user: User) -> None:
    user.train(0)
    with user.gathered():
        pass


@script(expect=Refused("CapacityError", "DEVICE"), model=None, memory={"device": 4 << 10, "host": 8 << 20})
def a_unit_that_fits_no_rank(user: User) -> None:
    user.build(lambda: nn.Sequential(*(nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 4))))
    user.train(0)


# Caught.


@script()
def caught_in_forward_on_all_ranks(user: User) -> None:
    user.train(0)
    with contextlib.suppress(BatchError):
        raising(user, "forward", when=True)
    user.train(1, 2)


@script()
def caught_in_backward_on_all_ranks(user: User) -> None:
    user.train(0)
    loss = raising(user, "backward", when=True)
    with contextlib.suppress(BatchError):
        user.backward(loss)
    user.opt.zero_grad()
    user.train(1, 2)


@script()
def caught_inside_of_gather_on_all_ranks(user: User) -> None:
    user.train(0)
    with contextlib.suppress(BatchError), user.gathered():
        raise BatchError
    user.train(1)


@script()
def caught_in_the_data_on_one_rank_which_then_steps(user: User) -> None:
    _ = user.opt
    for step in range(4):
        with contextlib.suppress(BatchError):
            if (step, user.rank) == (1, 1):
                raise BatchError
            user.backward(user.loss(step))
        user.update()


@script()
def caught_in_forward_on_one_rank_which_then_steps(user: User) -> None:
    user.train(0)
    with contextlib.suppress(BatchError):
        user.backward(raising(user, "forward", when=user.rank == 1))
    user.update()
    user.train(2)


@script()
def caught_in_the_first_forward_on_one_rank_which_then_steps(user: User) -> None:
    _ = user.opt
    with contextlib.suppress(BatchError):
        user.backward(raising(user, "forward", when=user.rank == 0))
    user.update()
    user.train(2)


@script(expect=DIVERGED)
def caught_in_forward_on_one_rank_which_goes_on(user: User) -> None:
    user.train(0)
    try:
        user.backward(raising(user, "forward", when=user.rank == 1))
        user.update()
    except BatchError:
        user.opt.zero_grad()
    user.train(2, 3)


@script(expect=Either("RankError", f"{PARTED}|on rank 1 and not on ranks? 0"))
def caught_in_backward_on_one_rank_which_then_steps(user: User) -> None:
    user.train(0)
    try:
        user.backward(raising(user, "backward", when=user.rank == 1))
    except BatchError:
        user.opt.zero_grad()
    user.update()
    user.train(2)


@script(expect=DIVERGED)
def caught_in_backward_on_one_rank_which_goes_on(user: User) -> None:
    user.train(0)
    try:
        user.backward(raising(user, "backward", when=user.rank == 1))
        user.update()
    except BatchError:
        user.opt.zero_grad()
    user.train(2, 3)


@script()
def out_of_memory_caught_on_one_rank_and_tried_again(user: User) -> None:
    """Forward again from the beginning, alone: until the second one begins, the ranks are in the same place."""
    user.train(0)
    for attempt in range(2):
        with contextlib.suppress(torch.OutOfMemoryError):
            if attempt == 0 and user.rank == 1:
                raise torch.OutOfMemoryError
            if attempt == 0 or user.rank == 1:
                user.backward(user.loss(1))
    user.update()
    user.train(2)


@script(expect=Refused("RankError", PARTED))
def going_on_after_the_ranks_have_parted(user: User) -> None:
    """The error is caught, and comes again."""
    user.train(0)
    with contextlib.suppress(Exception):
        if user.rank == 0:
            user.state_dict()
        user.train(1)
    user.train(2)


@script()
def an_interrupt_caught_on_all_ranks(user: User) -> None:
    user.train(0)
    with contextlib.suppress(KeyboardInterrupt):
        user.backward(raising(user, "forward", when=True, error=KeyboardInterrupt))
    user.train(1, 2)


@script(model=None)
def built_again_after_an_error_on_all_ranks(user: User) -> None:
    def build(fails: bool) -> nn.Module:
        model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
        if fails:
            raise BatchError
        return model

    with contextlib.suppress(BatchError):
        user.build(lambda: build(True))
    user.build(lambda: build(False))
    user.train(0, 1)
