"""Where each group is updated, and which groups never leave DEVICE. Pure.

DEVICE is full where some groups have all that they are made of there, always, and all others only pass through: of
those DEVICE needs a few chunks at a time, however many there are, and HOST has the rest.

    DEVICE   | 0 | 1 | 2 | 3 |  few chunks of 4 to 9  |     0 to 3: the resident groups, updated on DEVICE
    HOST     | 4 | 5 | 6 | 7 | 8 | 9 |                      4 to 9: the passing ones, updated on HOST

The resident groups are the first ones: backward ends with them, so their gradients come too late for an update on HOST
to be overlapped, and the next forward begins with them.

Decided in ADR 27.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import mode

from chunkmem.data.trace import Trace
from chunkmem.data.types import ChunkId, Role, Tier
from chunkmem.plan.gaps import find_gaps, held_nbytes

_PASSING_CHUNKS = 3
"""Of the usual size that resident groups leave room for on DEVICE, so that those which pass are fetched ahead."""
_STRIDES = 32
"""Between the most and the fewest resident groups that are tried."""
_MOST_TRIED = 10
"""Numbers of resident groups."""


@dataclass(frozen=True)
class Placement:
    """Where the groups of a trace are updated."""

    update_tiers: Mapping[int, Tier]
    resident_groups: frozenset[int] = frozenset()
    """Groups whose content never leaves DEVICE."""


def has_idle_states(trace: Trace) -> bool:
    """Tell whether there are optimizer states that this step does not update: steps of another kind do."""
    return any(chunk.role.is_state and chunk.group not in trace.update_moments for chunk in trace.chunk_nbytes)


class FullPlacements:
    """Which groups may be resident: prefixes of a trace's groups, by their number."""

    def __init__(self, trace: Trace, budget: Sequence[int], *, host_nbytes: int, margin_use_ratio: float) -> None:
        """Find the most and the fewest.

        Args:
            trace: of the step.
            budget: bytes that chunks may take on DEVICE, by moment.
            host_nbytes: cap on HOST.
            margin_use_ratio: see `most_resident`.
        """
        self._trace = trace
        self._budget = budget
        self._updated = list(trace.update_moments)
        own = {c.group for c in trace.chunk_nbytes if not c.role.kind.is_of_call} - trace.remote_groups
        # Weights that nothing updates only pass, unless HOST is too small for them: keeping them spares least.
        self._order = [*self._updated, *sorted(own - set(self._updated))]
        self._known_left: dict[int, int] = {}
        self._limit = self._allowed(margin_use_ratio)
        self.most = self._most()
        """Largest number of resident groups that fit DEVICE next to the chunks that pass through."""
        self.fewest = min(self._limit, self._fewest(host_nbytes))
        """Without these the others do not fit HOST."""

    def placement(self, count: int) -> Placement:
        """Return the one in which the first `count` groups are resident."""
        return Placement(tiers_of_updates(self._trace, count), frozenset(self._order[:count]))

    def next_count(self, step_s: Mapping[int, float]) -> int | None:
        """Return how many resident groups to try next, if steps take so long by number; None: no other is worth it.

        With fewer, HOST has more to update; with more, less is left for those that pass. In between lies the best.
        """
        if self.most not in step_s:
            return self.most
        if self.fewest >= self.most:
            return self.fewest if self.fewest not in step_s else None
        stride = max(1, (self.most - self.fewest) // _STRIDES)
        best = min(step_s, key=lambda count: (step_s[count], -count))
        lower = max((count for count in step_s if count < best), default=None)
        upper = min((count for count in step_s if count > best), default=best)
        if lower is None:
            following = max(self.fewest, best - max(stride, 2 * (upper - best)))
            return following if following < best else None
        wider = max((lower, best), (best, upper), key=lambda ends: ends[1] - ends[0])
        is_narrow = wider[1] - wider[0] <= max(1, stride // 2)
        return None if is_narrow or len(step_s) >= _MOST_TRIED else sum(wider) // 2

    def close_to_most(self) -> list[int]:
        """Return the numbers close to the most: with one of them HOST needs least, whatever it has."""
        return sorted(range(self._limit + 1), key=lambda count: abs(count - self.most))[:_MOST_TRIED]

    def _fewest(self, host_nbytes: int) -> int:
        left = host_nbytes
        for count in range(len(self._order), 0, -1):
            left -= self._passing_nbytes(self._order[count - 1])
            if left < 0:
                return count
        return 0

    def _allowed(self, margin_use_ratio: float) -> int:
        if self._left(len(self._updated)) >= 0:
            return len(self._order)  # everything fits
        states = [_states_nbytes(self._trace, group) for group in self._updated]
        count = most_resident(states, left_nbytes=self._left(0), margin_use_ratio=margin_use_ratio)
        return count if count < len(self._updated) else len(self._order)

    def _most(self) -> int:
        every = len(self._updated)
        if self._left(every) >= 0:
            return every
        passing_nbytes = _passing_nbytes([n for c, n in self._trace.chunk_nbytes.items() if c.role.kind.is_weights])
        counts = range(min(every, self._limit))
        return bisect_right(counts, False, key=lambda at: self._left(at + 1) < passing_nbytes)

    def _left(self, count: int) -> int:
        """Return the bytes that chunks in use leave in the moment with least room, if so many groups are resident."""
        if count not in self._known_left:
            placement = self.placement(count)
            problem = find_gaps(self._trace, placement.update_tiers, resident_groups=placement.resident_groups)
            left = (have - need for have, need in zip(self._budget, problem.required, strict=True))
            self._known_left[count] = min(left, default=0)
        return self._known_left[count]

    def _passing_nbytes(self, group: int) -> int:
        """Return the most bytes that a group which passes through DEVICE takes on HOST at a time."""
        sizes = {chunk.role: self._trace.chunk_nbytes[chunk] for chunk in self._trace.update(group).chunks}
        weights, gradients = sizes.get(Role.PARAM, 0), sizes.get(Role.GRAD, 0)
        # Gradients take the place of weights that can be rounded again.
        twice = min(weights, gradients) if self._trace.is_rounded(ChunkId(Role.PARAM, group)) else 0
        return sum(sizes.values()) - twice


def tiers_of_updates(trace: Trace, count: int) -> dict[int, Tier]:
    """Return the tier of each group's update if the first `count` are on DEVICE."""
    return {group: Tier.DEVICE if at < count else Tier.HOST for at, group in enumerate(trace.update_moments)}


@dataclass(frozen=True, slots=True)
class GroupNeed:
    """What one group takes of DEVICE, in bytes."""

    resident_nbytes: int
    """Largest bytes of the group on DEVICE if it is resident."""
    weights_nbytes: int
    """While it passes through forward."""
    states_nbytes: int
    """Bytes of the group's optimizer states, without master weights."""


def first_residents(needs: Sequence[GroupNeed], *, cap_nbytes: int, margin_use_ratio: float) -> int:
    """Return how many groups, the first ones, are resident before a step has been traced.

    Args:
        needs: of each group.
        cap_nbytes: what chunks may take on DEVICE.
        margin_use_ratio: see `most_resident`.
    """
    if margin_use_ratio > 0 and sum(need.resident_nbytes for need in needs) <= cap_nbytes:
        return len(needs)
    left_nbytes = cap_nbytes - _passing_nbytes([need.weights_nbytes for need in needs])
    states = [need.states_nbytes for need in needs]
    allowed = most_resident(states, left_nbytes=left_nbytes, margin_use_ratio=margin_use_ratio)
    return bisect_right(list(accumulate(need.resident_nbytes for need in needs[:allowed])), left_nbytes)


def most_resident(states_nbytes: Sequence[int], *, left_nbytes: int, margin_use_ratio: float) -> int:
    """Return how many groups, the first ones, may be resident, if their states may take so much of DEVICE.

    Args:
        states_nbytes: of each group's optimizer states, master weights not included.
        left_nbytes: of DEVICE, by activations and chunks in use at the traced peak.
        margin_use_ratio: the share of it that states may take; 0 keeps all of them, and so all updates, on HOST.
    """
    if margin_use_ratio == 0.0:
        return 0
    return bisect_right(list(accumulate(states_nbytes)), margin_use_ratio * left_nbytes)


def _passing_nbytes(sizes: Sequence[int]) -> int:
    return _PASSING_CHUNKS * mode(sizes) if sizes else 0


def num_updated_on_device(trace: Trace, budget: Sequence[int], margin_use_ratio: float) -> int:
    """Return how many groups, the first ones, have their states on DEVICE if no group is resident.

    All of them if everything fits. Otherwise states share `margin_use_ratio` of what all other chunks leave of the
    moment with least room. A ratio of 0 keeps every state on HOST.
    """
    states = [
        trace.nbytes(chunk for chunk in trace.update(group).chunks if chunk.role.kind.is_of_update)
        for group in trace.update_moments
    ]
    others_nbytes = trace.nbytes(chunk for chunk in trace.chunk_nbytes if not trace.is_remote(chunk)) - sum(states)
    remote_nbytes = max(held_nbytes(trace)) if trace.remote_groups else 0
    left_nbytes = min(budget, default=0) - others_nbytes - remote_nbytes
    if 0 < sum(states) <= left_nbytes and margin_use_ratio > 0:
        return len(states)
    return most_resident(states, left_nbytes=left_nbytes, margin_use_ratio=margin_use_ratio)


def _states_nbytes(trace: Trace, group: int) -> int:
    return trace.nbytes(chunk for chunk in trace.update(group).chunks if chunk.role.is_state)
