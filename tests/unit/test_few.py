"""Of a long test, an ordinary run has a few cases, as different as can be."""

from __future__ import annotations

import itertools

from tests.helpers.few import choose


def matrix(**axes: str) -> list[dict[str, str]]:
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def test_as_many_values_as_there_can_be() -> None:
    cases = matrix(size="123", kind="ab", late="ny")
    for count, num_values in ((1, 3), (2, 6), (3, 7)):
        chosen = choose(cases, count)
        assert len(chosen) == count
        assert len({item for place in chosen for item in cases[place].items()}) == num_values


def test_of_equals_the_first_and_then_far_ones() -> None:
    assert choose([{"name": str(place)} for place in range(12)], 3) == [0, 4, 8]
    assert choose([{}, {}, {}], 1) == [0]


def test_not_more_than_there_are() -> None:
    assert choose([{"name": "a"}, {"name": "b"}], 5) == [0, 1]
    assert choose([], 2) == []
