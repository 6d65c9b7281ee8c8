"""What a step consists of differs between ranks."""

from __future__ import annotations

import random

import torch
from torch.utils.checkpoint import checkpoint

from tests.hostile.models import Net, Tower
from tests.hostile_ranks.harness import ALIKE, DIVERGED, EQUAL_BUT_FOR_ORDER, PARTED, Either, User, script
from tests.hostile_ranks.models import Routed, RoutedInside, Skipping, UsedBySome


@script(model=Routed, expect=DIVERGED)
def experts_chosen_by_values(user: User) -> None:
    """The first step is alike, the second one is not."""
    for step in range(3):
        user.model.choice = (step * user.rank) % 3
        user.step(step)


@script(model=Routed)
def experts_chosen_alike(user: User) -> None:
    for step in range(4):
        user.model.choice = step % 3
        user.step(step)


@script(model=RoutedInside)
def experts_inside_of_units(user: User) -> None:
    user.train(0, 1, 2, 3)


@script(model=UsedBySome)
def units_of_which_one_rank_reads_nothing(user: User) -> None:
    """Backward comes to them there, too: in the order of the units, also where several return what they were given."""
    for step in range(6):
        for index, layer in enumerate(user.model.layers):
            layer.is_used = (step >> index & 1) == 0 or user.rank == index % 2
        user.step(step)


def _first_units_unread(user: User, *, needs_gradient: bool) -> None:
    for step in range(4):
        for layer in user.model.layers[:2]:
            layer.is_used = user.rank == 0
        user.backward(user.model(user.batch(step).requires_grad_(needs_gradient)).square().mean())
        user.update()


@script(model=lambda: UsedBySome(has_stem=False), expect=EQUAL_BUT_FOR_ORDER)
def first_units_of_which_one_rank_reads_nothing(user: User) -> None:
    """Backward comes to them by what they return, which needs a gradient if what they are given does."""
    _first_units_unread(user, needs_gradient=True)


@script(model=lambda: UsedBySome(has_stem=False), expect=DIVERGED)
def first_units_that_no_gradient_comes_back_to(user: User) -> None:
    _first_units_unread(user, needs_gradient=False)


@script(model=None)
def experts_inside_of_a_marked_unit(user: User) -> None:
    def build() -> torch.nn.Module:
        model = Routed()
        user.unit(model.experts)
        user.unit(model)
        return model

    user.build(build)
    for step in range(4):
        user.model.choice = (step + user.rank) % 3
        user.step(step)


@script(model=Skipping, expect=DIVERGED)
def layers_dropped_with_other_seeds(user: User) -> None:
    draw = random.Random(user.rank)
    for step in range(6):
        user.model.skipped = {index for index in range(3) if draw.random() < 0.5}
        user.step(step)


@script(model=Skipping)
def layers_dropped_with_the_same_seed(user: User) -> None:
    draw = random.Random(3)
    for step in range(6):
        user.model.skipped = {index for index in range(3) if draw.random() < 0.4}
        user.step(step)


@script(model=Skipping, expect=DIVERGED)
def early_exit_on_one_rank(user: User) -> None:
    for step in range(3):
        user.model.exit_after = 1 if (step, user.rank) == (2, 1) else 99
        user.step(step)


@script(model=Skipping)
def early_exit_on_all_ranks(user: User) -> None:
    for step in range(4):
        user.model.exit_after = 1 if step == 2 else 99
        user.step(step)


@script(model=Skipping, expect=DIVERGED)
def one_block_more_on_the_first_rank(user: User) -> None:
    user.model.exit_after = 3 if user.rank == 0 else 2
    user.train(0, 1)


@script(expect=DIVERGED)
def one_block_called_again_on_one_rank(user: User) -> None:
    user.train(0)
    out = user.model.blocks[0](user.model.stem(user.batch(1)))
    if user.rank == 1:
        out = user.model.blocks[1](out)
    out = user.model.blocks[2](out)
    user.backward(out.square().mean())
    user.update()


@script(expect=DIVERGED)
def blocks_in_another_order_on_one_rank(user: User) -> None:
    user.train(0)
    order = (2, 1, 0) if user.rank == 1 else (0, 1, 2)
    out = user.model.stem(user.batch(1))
    for index in order:
        out = user.model.blocks[index](out)
    user.backward(user.model.head(out).square().mean())
    user.update()


@script(expect=DIVERGED)
def a_loss_of_an_inner_output_on_one_rank(user: User) -> None:
    """All blocks run on every rank; on one of them backward leaves out the last ones."""
    user.train(0)
    inner = user.model.blocks[0](user.model.stem(user.batch(1)))
    out = user.model.head(user.model.blocks[2](user.model.blocks[1](inner)))
    user.backward((inner if user.rank == 1 else out).square().mean())
    user.update()


@script(expect=DIVERGED)
def two_models_in_another_order_on_one_rank(user: User) -> None:
    user.build(Tower)
    opt = user.adamw([*user.params, *user.models[1].parameters()])
    for step in range(2):
        first, second = user.models if user.rank == 0 or step == 0 else reversed(user.models)
        user.backward(user.loss(step, first) + user.loss(step, second))
        opt.step()
        opt.zero_grad()


@script()
def two_models_in_one_order(user: User) -> None:
    user.build(Tower)
    opt = user.adamw([*user.params, *user.models[1].parameters()])
    for step in range(3):
        user.backward(user.loss(step, user.models[0]) + user.loss(step, user.models[1]))
        opt.step()
        opt.zero_grad()


@script(expect=Either("RankError", PARTED))
def recomputed_on_one_rank_only(user: User) -> None:
    for step in range(3):
        x = user.model.stem(user.batch(step))
        for block in user.model.blocks:
            x = checkpoint(block, x, use_reentrant=False) if user.rank == 0 else block(x)
        user.backward(user.model.head(x).square().mean())
        user.update()


@script(expect=Either("RankError", PARTED))
def without_gradients_in_a_part_on_one_rank(user: User) -> None:
    for step in range(3):
        with torch.set_grad_enabled(not (step == 1 and user.rank == 1)):
            x = user.model.blocks[0](user.model.stem(user.batch(step)))
        x = user.model.blocks[2](user.model.blocks[1](x))
        user.backward(user.model.head(x).square().mean())
        user.update()


@script(model=lambda: torch.nn.Sequential(Net(), torch.nn.Dropout(0.5), torch.nn.Linear(4, 2)))
def dropout_with_other_seeds(user: User) -> None:
    torch.manual_seed(user.rank)
    user.train(0, 1, 2)


@script(expect=ALIKE, precision="fp16", fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1})
def an_overflow_on_one_rank(user: User) -> None:
    for step in range(3):
        user.backward(user.loss(step) * (float("inf") if (step, user.rank) == (1, 1) else 1.0))
        user.update()
    user.check(user.manager is None or user.manager.num_skipped_steps == 1, "one step is skipped on all ranks")
