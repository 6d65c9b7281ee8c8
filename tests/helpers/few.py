"""The cases of a long test that an ordinary run has: as different ones as so few can be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def choose(cases: Sequence[Mapping[str, str]], count: int) -> list[int]:
    """Return the places of `count` cases, in their order: those that together have most values of most parameters.

    Of cases that are alike in this, the first one is taken, then those that are far from each other: next to each other
    stand cases that are similar.

    Args:
        cases: the value of each parameter, by its name.
        count: how many; all, if there are not more.
    """
    stride = -(-len(cases) // count)
    left = [place for start in range(stride) for place in range(start, len(cases), stride)]
    chosen, seen = list[int](), set[tuple[str, str]]()
    while left and len(chosen) < count:
        best = max(left, key=lambda place: len(set(cases[place].items()) - seen))  # the first of equals
        left.remove(best)
        chosen.append(best)
        seen |= set(cases[best].items())
    return sorted(chosen)
