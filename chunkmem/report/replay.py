"""Residency at each moment, if a plan is followed; the semantics are [Note: What a plan means]."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from chunkmem.plan.model import Action, Alloc, Copy, Free, Plan, Update
from chunkmem.plan.semantics import ABSENT, TIERS, ReplicaState
from chunkmem.plan.verify import Reader
from chunkmem.trace.model import Kind, Trace
from chunkmem.types import ChunkId, Role, Tier

ROLES = tuple(Role)
"""In the order of rows, and of the stack from the bottom."""


@dataclass
class Stays:
    """One chunk over an iteration."""

    changes: list[tuple[int, int]] = field(default_factory=list)
    """(moment, state from it on), the first at moment 0. A state is three times the one on DEVICE plus that on HOST,
    as numbers of `ReplicaState`."""
    held: list[tuple[int, int]] = field(default_factory=list)
    """(first moment, one past the last) in which it is in use."""


def row_order(trace: Trace) -> list[ChunkId]:
    """Return the trace's chunks by role, and in each role by group."""
    return sorted(trace.chunk_nbytes, key=lambda chunk: (ROLES.index(chunk.role), chunk.group))


def replay(plan: Plan, trace: Trace) -> dict[ChunkId, Stays]:
    """Return where each chunk is, moment by moment: after the moment's actions, while it runs.

    The reader that verifies plans tells it: there is one meaning of a plan.

    Raises:
        PlanError: the plan cannot be followed.
    """
    found = {chunk: Stays() for chunk in row_order(trace)}
    reader = Reader(plan, trace, plan.machine)
    state = reader.state
    # What a moment itself changes, such as CONSUME, is seen from the next one on.
    touched: set[ChunkId] = set(found)

    def note(index: int) -> None:
        moment = trace.moments[index]
        touched.update(chunk for action in plan.actions[index] for chunk in _chunks_of(action, trace))
        touched.add(moment.chunk)
        if moment.kind is Kind.UPDATE:
            touched.update(trace.update_chunks(moment.chunk.group))
        for chunk in touched:
            device, host = (state.on(chunk, tier) for tier in TIERS)
            _note(found[chunk].changes, index, len(ReplicaState) * device + host)
        touched.clear()
        touched.add(moment.chunk)

    reader.read(watch=note)
    for chunk, begin, end in _uses(trace):
        found[chunk].held.append((begin, end))
    return found


def role_nbytes(stays: Mapping[ChunkId, Stays], trace: Trace, tier: Tier) -> dict[Role, list[int]]:
    """Return the bytes of each role on a tier in each moment; roles that are never there are left out."""
    num_moments = len(trace.moments)
    deltas: dict[Role, list[int]] = {}
    for chunk, stay in stays.items():
        was_there = False
        for moment, state in stay.changes:
            is_there = _on(state, tier) != ABSENT
            if is_there != was_there:
                role = deltas.setdefault(chunk.role, [0] * num_moments)
                role[moment] += trace.chunk_nbytes[chunk] if is_there else -trace.chunk_nbytes[chunk]
            was_there = is_there
    return {role: _running(deltas[role]) for role in ROLES if role in deltas}


def _chunks_of(action: Action, trace: Trace) -> tuple[ChunkId, ...]:
    """Return the chunks that an action may change."""
    if isinstance(action, Update):
        return trace.update_chunks(action.group)
    return (action.chunk,) if isinstance(action, Alloc | Free | Copy) else ()


def _note(changes: list[tuple[int, int]], moment: int, state: int) -> None:
    if not changes or changes[-1][1] != state:
        changes.append((moment, state))


def _uses(trace: Trace) -> Iterable[tuple[ChunkId, int, int]]:
    since: dict[ChunkId, int] = {}
    for index, moment in enumerate(trace.moments):
        if moment.kind is Kind.HOLD:
            since[moment.chunk] = index
        elif moment.kind is Kind.RELEASE:
            yield moment.chunk, since.pop(moment.chunk), index
        elif moment.kind is Kind.UPDATE:
            for chunk in trace.update_chunks(moment.chunk.group):
                yield chunk, index, index + 1
        elif moment.kind is not Kind.CONSUME:
            yield moment.chunk, index, index + 1


def _on(state: int, tier: Tier) -> int:
    return state // len(ReplicaState) if tier is TIERS[0] else state % len(ReplicaState)


def _running(deltas: Iterable[int]) -> list[int]:
    total, sums = 0, []
    for delta in deltas:
        total += delta
        sums.append(total)
    return sums
