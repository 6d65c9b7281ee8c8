"""Where each group is updated: its optimizer states live there. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from chunkmem.plan.machine import Machine
from chunkmem.trace.model import Kind, Trace
from chunkmem.types import ChunkId, Role, Tier


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


def placements(
    trace: Trace, machine: Machine, budget: Sequence[int], margin_use_ratio: float, *, with_half: bool
) -> Iterator[dict[int, Tier]]:
    """Yield tiers for the updates: as many on DEVICE as allowed, half of them if that is asked for, none."""
    groups = sorted({moment.chunk.group for moment in trace.moments if moment.kind is Kind.UPDATE})
    if machine.host_nbytes == 0:
        yield dict.fromkeys(groups, Tier.DEVICE)
        return
    sizes = [_group_bytes(trace, group) for group in groups]
    own = {chunk: n for chunk, n in trace.chunk_nbytes.items() if not trace.is_remote(chunk)}
    updated = set(groups)
    others = sum(n for chunk, n in own.items() if chunk.group not in updated) + _remote_nbytes(trace)
    allowed = place_states(sizes, cap_nbytes=min(budget, default=0) - others, margin_use_ratio=margin_use_ratio)
    tried = []
    for count in (len(allowed), len(allowed) // 2, 0) if with_half else (len(allowed), 0):
        on_device = set(sorted(allowed)[:count])
        if on_device not in tried:
            tried.append(on_device)
            yield {group: Tier.DEVICE if group in on_device else Tier.HOST for group in groups}


def _remote_nbytes(trace: Trace) -> int:
    """Return the most bytes that chunks of other ranks take on DEVICE at a time."""
    now = peak = 0
    there: set[ChunkId] = set()
    for moment in trace.moments if trace.remote_groups else ():
        chunk = moment.chunk
        if trace.is_remote(chunk) and moment.kind in (Kind.HOLD, Kind.CREATE) and chunk not in there:
            there.add(chunk)
            now += trace.chunk_nbytes[chunk]
        elif chunk in there and moment.kind is (Kind.RELEASE if chunk.role is Role.PARAM else Kind.CONSUME):
            there.remove(chunk)
            now -= trace.chunk_nbytes[chunk]
        peak = max(peak, now)
    return peak


def _group_bytes(trace: Trace, group: int) -> GroupBytes:
    chunks = trace.update(group).chunks
    model = sum(trace.chunk_nbytes[c] for c in chunks if c.role in (Role.PARAM, Role.GRAD))
    return GroupBytes(group, model, sum(trace.chunk_nbytes[c] for c in chunks) - model)
