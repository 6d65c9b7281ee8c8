"""A matrix of cases, of which an ordinary run has a few that together have each value of each axis."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def spread(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by all combinations of the values of its axes, and leave most of them to `--full`.

    An ordinary run has as many as the longest axis has values: the first value of each axis, then the second ones, and
    so on, where shorter axes begin again.
    """
    values = [list(axis) for axis in axes.values()]
    ordinary = {tuple(index % len(axis) for axis in values) for index in range(max(map(len, values)))}
    cases = []
    for places in itertools.product(*(range(len(axis)) for axis in values)):
        chosen = [axis[place] for axis, place in zip(values, places, strict=True)]
        marks = () if places in ordinary else pytest.mark.full
        cases.append(pytest.param(*chosen, marks=marks, id="-".join(map(_label, chosen))))
    return pytest.mark.parametrize(tuple(axes), cases)


def _label(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(_label, value))
    for attribute in ("name", "__name__"):
        if isinstance(label := getattr(value, attribute, None), str):
            return label
    return str(value)
