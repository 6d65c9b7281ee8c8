"""Of a matrix, an ordinary run has each value of each axis, and a full one all combinations, once each."""

from __future__ import annotations

from typing import Any

from tests.helpers.spread import spread


def split(decorator: Any) -> tuple[list[Any], list[Any]]:
    """The ordinary cases and the others."""
    names, cases = decorator.args
    assert all(len(case.values) == len(names) for case in cases)
    return [case.values for case in cases if not case.marks], [case.values for case in cases if case.marks]


def test_each_value_of_each_axis_is_ordinary() -> None:
    ordinary, others = split(spread(size=(2, 3, 4), model=("gpt", "cnn"), late=(False, True)))
    assert ordinary == [(2, "gpt", False), (3, "cnn", True), (4, "gpt", False)]
    assert len(others) == 3 * 2 * 2 - 3
    assert not set(ordinary) & set(others)
    assert len(set(others)) == len(others)


def test_one_axis_is_all_ordinary() -> None:
    assert split(spread(size=(2, 3))) == ([(2,), (3,)], [])


def test_values_have_labels() -> None:
    _, cases = spread(function=(split,), number=(1.5, None), word=(("a", "b"),)).args
    assert [case.id for case in cases] == ["split-1.5-a b", "split-None-a b"]
