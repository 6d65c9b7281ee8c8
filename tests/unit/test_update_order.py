from __future__ import annotations

from chunkmem.optim.order import in_order_of_update


def test_groups_whose_gradients_land_last_let_others_go_first() -> None:
    assert in_order_of_update([0, 1, 2, 3, 4], landing=[4, 3, 2, 1, 0]) == [2, 3, 0, 1, 4]
    assert in_order_of_update([0, 1, 2], landing=[2, 1, 0]) == [2, 0, 1]


def test_otherwise_the_order_is_that_of_the_next_forward() -> None:
    assert in_order_of_update([2, 0, 1, 3, 4], landing=[0, 2, 1, 4, 3]) == [0, 1, 2, 3, 4]
    assert in_order_of_update([3, 1], landing=[]) == [1, 3]


def test_groups_that_are_all_late_are_in_order() -> None:
    assert in_order_of_update([5], landing=[7, 5]) == [5]
    assert in_order_of_update([6, 5], landing=[5, 6]) == [5, 6]
