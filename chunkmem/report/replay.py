"""What is where at each moment, if a plan is followed; the semantics are [Note: What a plan means]."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from chunkmem.plan.model import Action, Alloc, Copy, Free, Plan
from chunkmem.trace.model import Kind, Trace
from chunkmem.types import ChunkId, Role, Tier

ABSENT, EMPTY, FILLED = range(3)
"""A replica: no slab; a slab that does not hold the newest version; the newest version."""
TIERS = (Tier.DEVICE, Tier.HOST)
ROLES = tuple(Role)
"""In the order of rows, and of the stack from the bottom."""


@dataclass
class Stays:
    """One chunk over a lap."""

    changes: list[tuple[int, int]] = field(default_factory=list)
    """(moment, state from it on), the first at moment 0. A state is three times the one on DEVICE plus that on HOST."""
    held: list[tuple[int, int]] = field(default_factory=list)
    """(first moment, one past the last) in which it is in use."""


def row_order(trace: Trace) -> list[ChunkId]:
    """Return the trace's chunks by role, and in each role by group."""
    return sorted(trace.chunk_nbytes, key=lambda chunk: (ROLES.index(chunk.role), chunk.group))


def replay(plan: Plan, trace: Trace) -> dict[ChunkId, Stays]:
    """Return where each chunk is, moment by moment: after the moment's actions, while it runs."""
    states = {chunk: [ABSENT, ABSENT] for chunk in trace.chunk_nbytes}
    for placed in plan.start:
        states[placed.chunk][TIERS.index(placed.tier)] = FILLED if placed.newest else EMPTY
    found = {chunk: Stays() for chunk in row_order(trace)}
    # What a moment itself changes, such as CONSUME, is seen from the next one on.
    touched: set[ChunkId] = set(found)
    for index, (actions, moment) in enumerate(zip(plan.actions, trace.moments, strict=True)):
        touched.update(chunk for action in actions if (chunk := _act(action, states)))
        for chunk in touched:
            _note(found[chunk].changes, index, 3 * states[chunk][0] + states[chunk][1])
        touched.clear()
        if moment.kind is Kind.CREATE:
            # Its slab is being filled: from here on it counts as holding something.
            states[moment.chunk][0] = FILLED
            _note(found[moment.chunk].changes, index, 3 * FILLED + states[moment.chunk][1])
        elif moment.kind is Kind.CONSUME:
            device = states[moment.chunk][0]
            states[moment.chunk] = [ABSENT if device == ABSENT else EMPTY, ABSENT]
            touched.add(moment.chunk)
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


def _act(action: Action, states: Mapping[ChunkId, list[int]]) -> ChunkId | None:
    """Follow one action; return the chunk it changed."""
    if isinstance(action, Alloc):
        states[action.chunk][TIERS.index(action.tier)] = EMPTY
    elif isinstance(action, Free):
        states[action.chunk][TIERS.index(action.tier)] = ABSENT
    elif isinstance(action, Copy):
        states[action.chunk][TIERS.index(action.target)] = FILLED
    else:
        return None
    return action.chunk


def _note(changes: list[tuple[int, int]], moment: int, state: int) -> None:
    if changes and changes[-1][1] == state:
        return
    if changes and changes[-1][0] == moment:
        changes.pop()
        _note(changes, moment, state)
        return
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
    return state // 3 if tier is Tier.DEVICE else state % 3


def _running(deltas: Iterable[int]) -> list[int]:
    total, sums = 0, []
    for delta in deltas:
        total += delta
        sums.append(total)
    return sums
