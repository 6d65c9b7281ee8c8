from __future__ import annotations

from chunkmem.optim.order import in_order_of_update


def test_the_group_whose_gradient_lands_last_is_not_the_first() -> None:
    assert in_order_of_update([0, 1, 2, 3], landing=[3, 2, 1, 0]) == [1, 0, 2, 3]


def test_otherwise_the_order_is_that_of_the_next_forward() -> None:
    assert in_order_of_update([2, 0, 1], landing=[0, 2, 1]) == [0, 1, 2]
    assert in_order_of_update([3, 1], landing=[]) == [1, 3]


def test_a_group_alone_is_not_kept_waiting_for_another() -> None:
    assert in_order_of_update([5], landing=[7, 5]) == [5]
