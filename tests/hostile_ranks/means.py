"""What ranks put into the mean of a gradient, and take back: it may have been formed in a backward, before the step."""

from __future__ import annotations

from collections.abc import Callable

from tests.hostile.models import Net
from tests.hostile_ranks.batches import train_with
from tests.hostile_ranks.harness import EQUAL_BUT_FOR_ORDER, Refused, User, script
from tests.hostile_ranks.models import RoutedInside

TAKEN_BACK = Refused("RankError", "gradients were given up since the last step on rank 1 and not on ranks? 0")
"""What one rank has put into a mean cannot be taken out of it again, unless no rank keeps a part."""
LARGE = {"default_chunk_size": 5000}
"""All layers in one chunk, or in few: one rank owns what others have alone."""


class Head(Net):
    """Only the last layer is trained: a rank owns it, the others own nothing that is."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.head.requires_grad_(True)


# Experts that one rank alone uses, when a step has more backwards than the one before.


@script(model=RoutedInside, expect=EQUAL_BUT_FOR_ORDER)
def experts_of_one_rank_in_other_numbers_of_micro_batches(user: User) -> None:
    train_with(user, [4, 4, 3, 4])


@script(model=RoutedInside, expect=EQUAL_BUT_FOR_ORDER, **LARGE)
def experts_of_one_rank_in_shared_chunks(user: User) -> None:
    train_with(user, [1, 2, 1, 3])


@script(model=RoutedInside, expect=EQUAL_BUT_FOR_ORDER)
def experts_of_one_rank_while_another_has_no_batch(user: User) -> None:
    train_with(user, [1, 0, 1, 0] if user.rank == 0 else [1, 2, 1, 3])


@script(model=RoutedInside, expect=EQUAL_BUT_FOR_ORDER)
def experts_of_one_rank_after_two_means_in_one_step(user: User) -> None:
    _ = user.opt
    for step in range(3):
        for micro in range(4):
            keys = {} if user.manager is None else {"last": micro % 2 == 1}
            user.backward(user.loss(10 * step + micro), **keys)
        user.update()


# Gradients that are discarded after their mean was formed.


def discarding(user: User, discard: Callable[[], object]) -> None:
    """The second step begins with a batch that is dropped after backward, and has two more."""
    train_with(user, [1])
    user.backward(user.loss(50))
    discard()
    for seed in (51, 52):
        user.backward(user.loss(seed))
    user.update()
    train_with(user, [1, 2])


@script(model=RoutedInside, expect=EQUAL_BUT_FOR_ORDER)
def dropped_by_the_optimizer(user: User) -> None:
    discarding(user, lambda: user.opt.zero_grad())


@script(model=RoutedInside, expect=EQUAL_BUT_FOR_ORDER, **LARGE)
def dropped_by_the_model(user: User) -> None:
    discarding(user, lambda: user.model.zero_grad())


@script(model=RoutedInside, expect=EQUAL_BUT_FOR_ORDER)
def dropped_by_the_model_before_a_declared_last(user: User) -> None:
    """No mean was formed of what is dropped; the next backward forms one, of which that is no part."""
    _ = user.opt
    for step in range(3):
        for seed, last in ((10 * step, False), (10 * step + 1, True)):
            user.backward(user.loss(seed), **({} if user.manager is None else {"last": last}))
            if not last:
                user.model.zero_grad()
        user.update()


@script(model=RoutedInside, expect=EQUAL_BUT_FOR_ORDER)
def dropped_by_zeros(user: User) -> None:
    """In plain PyTorch, what has no gradient stays without one; what had one is updated with zeros."""
    discarding(user, lambda: user.opt.zero_grad(set_to_none=False))


@script(model=RoutedInside, expect=EQUAL_BUT_FOR_ORDER, **LARGE)
def dropped_in_part(user: User) -> None:
    def discard() -> None:
        for param in user.params[::3]:
            param.grad = None

    discarding(user, discard)


@script(model=RoutedInside, expect=EQUAL_BUT_FOR_ORDER, **LARGE)
def dropped_in_part_at_the_end(user: User) -> None:
    """What is discarded has no part in the step, and what other ranks have in the same chunk has."""
    train_with(user, [1])
    for step in range(4):
        user.backward(user.loss(50 + step))
        for param in user.params[step::2]:
            param.grad = None
        user.update()


@script(model=RoutedInside, expect=EQUAL_BUT_FOR_ORDER)
def replaced_by_zeros(user: User) -> None:
    def discard() -> None:
        for param in user.params[::2]:
            if param.grad is not None:
                param.grad = param.new_zeros(param.shape)

    discarding(user, discard)


@script(model=Head, expect=EQUAL_BUT_FOR_ORDER)
def dropped_where_a_rank_owns_nothing(user: User) -> None:
    for step in range(4):
        user.backward(user.loss(step))
        if step % 2:
            user.opt.zero_grad()
        else:
            user.update()


@script(model=Head)
def dropped_for_its_norm_where_a_rank_owns_nothing(user: User) -> None:
    _ = user.opt
    for step in range(4):
        user.backward(user.loss(step))
        user.record(user.clip(1e9))
        if step % 2:
            user.opt.zero_grad()
        else:
            user.update()


@script(model=Head, expect=TAKEN_BACK)
def dropped_on_a_rank_that_owns_nothing(user: User) -> None:
    train_with(user, [1])
    user.backward(user.loss(1))
    if user.rank == 1:
        user.model.zero_grad()
    user.update()


@script(expect=TAKEN_BACK)
def each_rank_drops_another(user: User) -> None:
    train_with(user, [1])
    user.backward(user.loss(1))
    for param in user.params[user.rank :: user.size]:
        param.grad = None
    user.update()


@script(model=Head, expect=TAKEN_BACK)
def zeroed_on_a_rank_that_owns_nothing(user: User) -> None:
    train_with(user, [1])
    user.backward(user.loss(1))
    if user.rank == 1:
        user.opt.zero_grad(set_to_none=False)
    user.update()
