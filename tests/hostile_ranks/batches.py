"""Ranks with other numbers of batches, batches that are skipped, and evaluation."""

from __future__ import annotations

from tests.hostile_ranks.harness import ALIKE, DIVERGED, EQUAL_BUT_FOR_ORDER, Refused, User, script
from tests.hostile_ranks.models import Skipping


def train_with(user: User, counts: list[int]) -> None:
    """Steps with so many micro-batches each."""
    _ = user.opt
    for step, count in enumerate(counts):
        for micro in range(count):
            loss = user.loss(10 * step + micro)
            user.backward(loss)
            user.record(loss.item())
        user.update()


@script(expect=EQUAL_BUT_FOR_ORDER)
def several_micro_batches(user: User) -> None:
    train_with(user, [3, 3, 1, 2])


@script(expect=EQUAL_BUT_FOR_ORDER)
def more_micro_batches_on_the_first_rank(user: User) -> None:
    train_with(user, [3, 3, 3] if user.rank == 0 else [2, 2, 2])


@script(expect=EQUAL_BUT_FOR_ORDER)
def more_micro_batches_on_another_rank(user: User) -> None:
    train_with(user, [2, 4, 2] if user.rank == 1 else [2, 2, 2])


@script(expect=EQUAL_BUT_FOR_ORDER)
def fewer_micro_batches_in_the_last_step(user: User) -> None:
    """The data loaders do not have the same length."""
    train_with(user, [2, 2, 1] if user.rank == 0 else [2, 2, 2])


@script(expect=EQUAL_BUT_FOR_ORDER)
def fewer_micro_batches_than_declared(user: User) -> None:
    if user.manager is not None:
        user.manager.accumulate(3)
    train_with(user, [3, 3 - user.rank % 2, 3])


@script(expect=EQUAL_BUT_FOR_ORDER)
def each_rank_says_which_of_its_micro_batches_is_the_last(user: User) -> None:
    _ = user.opt
    for step, count in enumerate([2 + user.rank % 2, 2, 3 - user.rank % 2, 1 + user.rank, user.rank]):
        for micro in range(count):
            keys = {} if user.manager is None else {"last": micro == count - 1}
            user.backward(user.loss(10 * step + micro), **keys)
        user.update()


@script()
def no_batch_in_the_first_step(user: User) -> None:
    train_with(user, [0, 1, 1] if user.rank == 1 else [1, 1, 1])


@script()
def no_batch_later(user: User) -> None:
    train_with(user, [1, 1, 0, 1] if user.rank == 0 else [1, 1, 1, 1])


@script()
def no_batch_in_several_steps(user: User) -> None:
    train_with(user, [1, 0, 0, 1] if user.rank == 1 else [1, 1, 1, 1])


@script()
def ranks_without_a_batch_in_turn(user: User) -> None:
    train_with(user, [int(step % user.size != user.rank) for step in range(5)])


@script(model=Skipping)
def no_batch_where_the_others_take_another_way(user: User) -> None:
    """What the others do in that step is not what they did in the step before."""
    _ = user.opt
    for step in range(4):
        user.model.exit_after = 1 if step == 2 else 99
        if (step, user.rank) != (2, 1):
            user.backward(user.loss(step))
        user.update()


@script()
def no_batch_on_any_rank(user: User) -> None:
    train_with(user, [1, 0])


@script()
def no_batch_on_any_rank_in_the_first_step(user: User) -> None:
    train_with(user, [0, 1])


@script(expect=DIVERGED)
def one_step_more_on_the_first_rank(user: User) -> None:
    user.train(*range(3 if user.rank == 0 else 2))


@script()
def batches_of_other_sizes(user: User) -> None:
    _ = user.opt
    for step in range(3):
        loss = user.model(user.batch(step, 2 + user.rank + step, 16)).square().mean()
        user.backward(loss)
        user.update()
        user.record(loss.item())


# Batches that are skipped.


def skipping(user: User, bad: dict[int, set[int]], *, calls_step: bool) -> None:
    """`if not loss.isfinite()`: by step, the ranks whose loss is not; they go on, or go to `step()`."""
    _ = user.opt
    for step in range(4):
        factor = float("inf") if user.rank in bad.get(step, ()) else 1.0
        loss = user.loss(step) * factor
        if not loss.isfinite():
            if calls_step:
                user.update()
            continue
        user.backward(loss)
        user.update()
        user.record(loss.item())


@script()
def skipped_after_forward_on_all_ranks(user: User) -> None:
    skipping(user, {0: {0, 1, 2}, 2: {0, 1, 2}}, calls_step=False)


@script(expect=DIVERGED)
def skipped_after_forward_on_one_rank(user: User) -> None:
    skipping(user, {2: {1}}, calls_step=False)


@script(expect=DIVERGED)
def skipped_after_forward_on_one_rank_in_the_first_step(user: User) -> None:
    skipping(user, {0: {0}}, calls_step=False)


@script()
def backward_left_out_on_one_rank(user: User) -> None:
    skipping(user, {2: {1}}, calls_step=True)


@script()
def backward_left_out_on_one_rank_in_the_first_step(user: User) -> None:
    skipping(user, {0: {0}}, calls_step=True)


@script()
def skipped_after_backward_on_all_ranks(user: User) -> None:
    for step in range(4):
        loss = user.loss(step)
        user.backward(loss)
        if step == 1:
            user.opt.zero_grad()
            continue
        user.update()
        user.record(loss.item())


@script(expect=Refused("RankError", "gradients were given up since the last step on rank 1 and not on ranks? 0"))
def skipped_after_backward_on_one_rank(user: User) -> None:
    for step in range(4):
        user.backward(user.loss(step))
        if (step, user.rank) == (1, 1):
            user.opt.zero_grad()
            continue
        user.update()


# Evaluation.


@script()
def evaluation_on_all_ranks(user: User) -> None:
    for step in range(3):
        user.step(step)
        user.evaluate(10, 11)


@script(expect=DIVERGED)
def evaluation_on_the_first_rank_only(user: User) -> None:
    for step in range(3):
        user.step(step)
        if user.rank == 0:
            user.evaluate(10)


@script(expect=DIVERGED)
def evaluation_on_the_first_rank_at_the_end(user: User) -> None:
    user.train(0, 1)
    if user.rank == 0:
        user.evaluate(10)


@script(expect=DIVERGED)
def evaluation_of_more_batches_on_one_rank(user: User) -> None:
    user.train(0, 1)
    user.evaluate(*range(10, 12 + user.rank))
    user.train(2, 3)


@script(expect=DIVERGED)
def evaluation_of_more_batches_on_one_rank_at_the_end(user: User) -> None:
    user.train(0, 1)
    user.evaluate(*range(10, 12 + user.rank))


@script(expect=ALIKE, precision="fp16", fp16={"enabled": True, "initial_scale_power": 4})
def no_batch_on_one_rank_in_fp16(user: User) -> None:
    train_with(user, [1, 1 - user.rank % 2, 1])
