"""Parameters that are not trained, on all ranks or on some."""

from __future__ import annotations

import torch

from tests.hostile.models import Net
from tests.hostile_ranks.harness import Refused, User, script

NOT_ALIKE = Refused("RankError|StateError", r"(blocks\.1|stem|head)\S*(weight|bias|norm)")
"""The error names a parameter that is frozen on some ranks only."""


class FrozenStem(Net):
    def __init__(self) -> None:
        super().__init__()
        for param in self.stem.parameters():
            param.requires_grad = False
        self.blocks[1].requires_grad_(False)


@script(model=FrozenStem)
def frozen_in_the_constructor(user: User) -> None:
    user.train(0, 1, 2)


@script()
def frozen_before_training(user: User) -> None:
    user.model.stem.requires_grad_(False)
    user.model.blocks[1].up.weight.requires_grad_(False)
    user.train(0, 1, 2)


@script()
def all_but_the_head_frozen(user: User) -> None:
    user.model.requires_grad_(False)
    user.model.head.requires_grad_(True)
    user.train(0, 1, 2)


@script()
def frozen_during_training(user: User) -> None:
    user.train(0, 1)
    user.model.blocks[0].requires_grad_(False)
    user.train(2, 3)


@script()
def thawed_during_training(user: User) -> None:
    """One block more after each step, from the top."""
    user.model.blocks.requires_grad_(False)
    user.train(0)
    for index in (2, 1, 0):
        user.model.blocks[index].requires_grad_(True)
        user.train(index + 1)


@script()
def frozen_and_thawed_in_turn(user: User) -> None:
    for step in range(4):
        user.model.blocks[1].requires_grad_(step % 2 == 0)
        user.step(step)


@script()
def norms_frozen(user: User) -> None:
    for block in user.model.blocks:
        block.norm.requires_grad_(False)
    user.train(0, 1, 2)


@script(expect=NOT_ALIKE)
def frozen_on_one_rank(user: User) -> None:
    if user.rank == 1:
        user.model.blocks[1].requires_grad_(False)
    user.train(0, 1)


@script(expect=NOT_ALIKE)
def one_bias_frozen_on_one_rank(user: User) -> None:
    if user.rank == 1:
        user.model.blocks[1].up.bias.requires_grad_(False)
    user.train(0, 1)


@script(expect=NOT_ALIKE)
def frozen_on_one_rank_during_training(user: User) -> None:
    user.train(0, 1)
    if user.rank == 0:
        user.model.stem.requires_grad_(False)
    user.train(2, 3)


@script(expect=NOT_ALIKE)
def others_frozen_on_each_rank(user: User) -> None:
    user.train(0)
    (user.model.head if user.rank == 0 else user.model.stem).requires_grad_(False)
    user.train(1)


@script()
def gradients_of_nothing(user: User) -> None:
    """All is frozen on all ranks after the optimizer was made; backward itself has nothing to do."""
    user.train(0)
    user.opt.zero_grad()
    user.opt.step()


@script()
def an_input_that_asks_for_gradients(user: User) -> None:
    user.model.requires_grad_(False)
    user.model.head.requires_grad_(True)
    _ = user.opt
    for step in range(2):
        x = user.batch(step).requires_grad_()
        user.backward(user.model(x).square().mean())
        user.record(x.grad)
        user.update()
    with torch.no_grad():
        user.record(user.loss(9))
