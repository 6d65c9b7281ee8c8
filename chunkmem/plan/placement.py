"""Where each group is updated: its optimizer states live there. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupBytes:
    """One group's bytes: `model` is what forward and backward touch (PARAM + GRAD), `states` what the update adds."""

    group: int
    model_nbytes: int
    states_nbytes: int


def place_states(groups: Sequence[GroupBytes], *, cap_nbytes: int, margin_use_ratio: float) -> frozenset[int]:
    """Return the groups whose states live on DEVICE; the others are updated on HOST.

    All of them if everything fits. Otherwise the states share `margin_use_ratio` of what PARAM and GRAD of all groups
    leave of the cap, in group order. A ratio of 0 keeps every state on HOST.
    """
    if margin_use_ratio == 0.0:
        return frozenset()
    left = cap_nbytes - sum(g.model_nbytes for g in groups)
    if left >= sum(g.states_nbytes for g in groups):
        return frozenset(g.group for g in groups)
    budget = int(left * margin_use_ratio)
    chosen = set()
    for g in groups:
        if g.states_nbytes <= budget:
            budget -= g.states_nbytes
            chosen.add(g.group)
    return frozenset(chosen)
