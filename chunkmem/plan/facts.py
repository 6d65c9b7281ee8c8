"""Facts about a finished plan, for its executor. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from chunkmem.data.trace import Kind, Trace
from chunkmem.data.types import ChunkId, Tier
from chunkmem.plan.ahead import updates_ahead
from chunkmem.plan.model import Copy, Lane, Plan, Round, Update, Wait
from chunkmem.plan.simulate import peak_nbytes


@dataclass(frozen=True)
class PlanFacts:
    """Of a plan for a trace."""

    peak_nbytes: Mapping[Tier, int]
    """By tier: peak bytes of an iteration that follows the plan."""
    shadow_slabs: tuple[tuple[int, ...], ...]
    """By speculative update, in order: bytes of each slab in its shadow buffer."""
    copies_before: tuple[Mapping[Lane, int], ...]
    """By moment, and at the end: copies, and updates on HOST, issued on each lane before it."""
    untouched: frozenset[ChunkId]
    """Chunks that the plan leaves where they are."""

    @property
    def shadow_nbytes(self) -> int:
        return sum(map(sum, self.shadow_slabs))

    def shadow_counts(self, limit_nbytes: int) -> Mapping[int, int]:
        """Return how many slabs of which sizes the shadow buffers need, those for the first updates within a limit."""
        counts: Counter[int] = Counter()
        for slabs in self.shadow_slabs:
            limit_nbytes -= sum(slabs)
            if limit_nbytes < 0:
                break
            counts.update(slabs)
        return counts

    @classmethod
    def of(cls, plan: Plan, trace: Trace, lanes: tuple[Lane, ...]) -> PlanFacts:
        """Read a plan whose copies are on `lanes`."""
        issued, copies_before = dict.fromkeys((*lanes, Lane.HOST_UPDATE), 0), []
        ahead = updates_ahead(trace, plan.actions)
        num_ahead = Counter(ahead.values())
        for at, (moment, actions) in enumerate(zip(trace.moments, plan.actions, strict=True)):
            copies_before.append(dict(issued))
            for action in actions:
                if isinstance(action, Copy | Round):
                    issued[action.lane] += 1
            issued[Lane.HOST_UPDATE] += num_ahead[at]
            if moment.kind is Kind.UPDATE:
                issued[Lane.HOST_UPDATE] += plan.update_tiers[moment.chunk.group] is Tier.HOST
        return cls(
            peak_nbytes(plan, trace),
            tuple(tuple(trace.chunk_nbytes[chunk] for chunk in trace.update(group).writes) for group in ahead),
            (*copies_before, issued),
            _untouched(plan, trace),
        )


def _untouched(plan: Plan, trace: Trace) -> frozenset[ChunkId]:
    touched = {moment.chunk for moment in trace.moments}
    touched |= {action.chunk for actions in plan.actions for action in actions if not isinstance(action, Wait | Update)}
    for group in trace.update_moments:
        touched.update(trace.update(group).chunks)
    # Weights that can be rounded again would be dropped where nobody wants them.
    return frozenset(chunk for chunk in trace.chunk_nbytes if not trace.is_rounded(chunk)) - touched
