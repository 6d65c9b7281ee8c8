"""In which order groups are updated."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def in_order_of_update(groups: Collection[int], *, landing: Sequence[int]) -> list[int]:
    """Return `groups` in the order the next forward needs them, the first of which does not wait for its gradient.

    Backward ends where forward begins, so the group needed first is often the one whose gradient came last, and is
    still on its way to HOST when the updates begin. Another one first hides that copy.

    Args:
        groups: those to update.
        landing: groups in the order of the last gradient that landed in each.
    """
    order = sorted(groups)
    if len(order) > 1 and landing and order[0] == landing[-1]:
        order[0], order[1] = order[1], order[0]
    return order
