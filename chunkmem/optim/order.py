"""In which order groups are updated."""

from __future__ import annotations

from collections.abc import Collection, Sequence

_LATE = 2
"""So many gradients, the last to land, may still be on their way to HOST when the updates begin."""


def in_order_of_update(groups: Collection[int], *, landing: Sequence[int]) -> list[int]:
    """Return `groups` in the order the next forward needs them, but for the first ones, which wait for no gradient.

    Backward ends where forward begins, so the groups needed first are often those whose gradients came last, and are
    still on their way to HOST when the updates begin. As many others go before them, and hide those copies.

    Args:
        groups: those to update.
        landing: groups in the order of the last gradient that landed in each.
    """
    order = sorted(groups)
    late = set(landing[-_LATE:])
    first = [group for group in order if group not in late][:_LATE] if late.intersection(order[:_LATE]) else []
    return first + [group for group in order if group not in first]
