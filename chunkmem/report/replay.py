"""The residency of each chunk at each moment, if a plan is followed; the semantics are [Note: What a plan means]."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from chunkmem.data.trace import Kind, Trace
from chunkmem.data.types import PLACE, ChunkId, Role, Tier
from chunkmem.plan.model import Action, Alloc, Copy, Free, Plan, Round, Update
from chunkmem.plan.semantics import ABSENT, ReplicaState
from chunkmem.plan.verify import Reader

States = tuple[ReplicaState, ...]
"""What a chunk has on each tier that there is, in the order of `TIERS`."""


@dataclass
class ChunkHistory:
    """One chunk over a step."""

    changes: list[tuple[int, States]] = field(default_factory=list)
    """(moment, states from it on), the first at moment 0."""
    held: list[tuple[int, int]] = field(default_factory=list)
    """(first moment, one past the last) in which it is in use."""


def row_order(trace: Trace) -> list[ChunkId]:
    """Return the trace's chunks by role, and in each role by group."""
    return sorted(trace.chunk_nbytes, key=lambda chunk: (chunk.role.order, chunk.group))


def replay(plan: Plan, trace: Trace) -> dict[ChunkId, ChunkHistory]:
    """Return the residency of each chunk, moment by moment: after the moment's actions, while it runs.

    The reader that verifies plans tells it: there is one meaning of a plan.

    Raises:
        PlanError: the plan cannot be followed.
    """
    found = {chunk: ChunkHistory() for chunk in row_order(trace)}
    reader = Reader(plan, trace, plan.machine)
    state = reader.state
    # What a moment itself changes, such as CONSUME, is seen from the next one on.
    touched: set[ChunkId] = set(found)

    def note(index: int) -> None:
        moment = trace.moments[index]
        touched.update(chunk for action in plan.actions[index] for chunk in _chunks_of(action, trace))
        touched.add(moment.chunk)
        if moment.kind is Kind.UPDATE:
            touched.update(trace.update(moment.chunk.group).chunks)
        for chunk in touched:
            states, changes = tuple(state.on(chunk, tier) for tier in plan.machine.tiers), found[chunk].changes
            if not changes or changes[-1][1] != states:
                changes.append((index, states))
        touched.clear()
        touched.add(moment.chunk)

    reader.read(watch=note)
    for chunk, begin, end in _uses(trace):
        found[chunk].held.append((begin, end))
    return found


def role_nbytes(histories: Mapping[ChunkId, ChunkHistory], trace: Trace, tier: Tier) -> dict[Role, list[int]]:
    """Return the bytes of each role on a tier in each moment; roles that are never there are left out."""
    num_moments = len(trace.moments)
    deltas: dict[Role, list[int]] = {}
    for chunk, history in histories.items():
        was_there = False
        for moment, states in history.changes:
            is_there = states[PLACE[tier]] != ABSENT
            if is_there != was_there:
                role = deltas.setdefault(chunk.role, [0] * num_moments)
                role[moment] += trace.chunk_nbytes[chunk] if is_there else -trace.chunk_nbytes[chunk]
            was_there = is_there
    return {role: list(accumulate(deltas[role])) for role in sorted(deltas, key=lambda role: role.order)}


def _chunks_of(action: Action, trace: Trace) -> tuple[ChunkId, ...]:
    """Return the chunks that an action may change."""
    if isinstance(action, Update):
        return trace.update(action.group).chunks
    return (action.chunk,) if isinstance(action, Alloc | Free | Copy | Round) else ()


def _uses(trace: Trace) -> Iterable[tuple[ChunkId, int, int]]:
    since: dict[ChunkId, int] = {}
    for index, moment in enumerate(trace.moments):
        if moment.kind is Kind.HOLD:
            since[moment.chunk] = index
        elif moment.kind is Kind.RELEASE:
            yield moment.chunk, since.pop(moment.chunk), index
        elif moment.kind is Kind.UPDATE:
            for chunk in trace.update(moment.chunk.group).chunks:
                yield chunk, index, index + 1
        elif moment.kind is not Kind.CONSUME:
            yield moment.chunk, index, index + 1
