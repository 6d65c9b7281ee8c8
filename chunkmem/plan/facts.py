"""Facts about a finished plan, for its executor. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from chunkmem.plan.ahead import updates_ahead
from chunkmem.plan.model import Copy, Lane, Plan, Update, Wait
from chunkmem.plan.simulate import peak_nbytes
from chunkmem.trace.model import Kind, Trace
from chunkmem.types import ChunkId, Tier


@dataclass(frozen=True)
class PlanFacts:
    """Of a plan for a trace."""

    peak_nbytes: Mapping[Tier, int]
    """Of an iteration that follows the plan."""
    shadow_counts: Mapping[int, int]
    """How many slabs of which sizes the shadow buffers need."""
    copies_before: tuple[Mapping[Lane, int], ...]
    """By moment, and at the end: copies issued on each lane before it."""
    update_moments: Mapping[int, tuple[int, ...]]
    """By group: the moments in which it is updated."""
    untouched: frozenset[ChunkId]
    """Chunks that the plan leaves where they are."""

    @classmethod
    def of(cls, plan: Plan, trace: Trace, lanes: tuple[Lane, ...]) -> PlanFacts:
        """Read a plan whose copies are on `lanes`."""
        issued, copies_before = dict.fromkeys(lanes, 0), []
        updates: dict[int, list[int]] = {}
        for at, (moment, actions) in enumerate(zip(trace.moments, plan.actions, strict=True)):
            copies_before.append(dict(issued))
            for action in actions:
                if isinstance(action, Copy):
                    issued[action.lane] += 1
            if moment.kind is Kind.UPDATE:
                updates.setdefault(moment.chunk.group, []).append(at)
        return cls(
            peak_nbytes(plan, trace),
            Counter(
                trace.chunk_nbytes[chunk]
                for group in updates_ahead(trace, plan.actions)
                for chunk in trace.update(group).writes
            ),
            (*copies_before, issued),
            {group: tuple(moments) for group, moments in updates.items()},
            _untouched(plan, trace),
        )


def _untouched(plan: Plan, trace: Trace) -> frozenset[ChunkId]:
    touched = {moment.chunk for moment in trace.moments}
    touched |= {action.chunk for actions in plan.actions for action in actions if not isinstance(action, Wait | Update)}
    for moment in trace.moments:
        if moment.kind is Kind.UPDATE:
            touched.update(trace.update(moment.chunk.group).chunks)
    # Weights that can be rounded again would be dropped where nobody wants them.
    return frozenset(chunk for chunk in trace.chunk_nbytes if not trace.is_rounded(chunk)) - touched
