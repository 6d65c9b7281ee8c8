"""Speculative updates, before their moment: on HOST as soon as the gradients are there, overlapped with the rest of
backward. Pure.

[Note: Speculative updates] An Update on HOST may stand before the group's UPDATE moment. It reads what is on HOST then,
and writes the new values to slabs of the shadow buffers; nothing that anybody reads changes. At the UPDATE moment the
slabs change places: the new values are the chunks' from then on, and the slabs of the old ones are the log. Up to there
the update can be thrown away, as when the gradients turn out to be clipped, and made at its moment as if there had been
none.
"""

from __future__ import annotations

from collections.abc import Sequence

from chunkmem.data.trace import Kind, Moment, Trace
from chunkmem.data.types import Role, Tier
from chunkmem.plan.machine import Machine
from chunkmem.plan.model import Action, Copy, Free, Update

SHADOW = "shadow buffers"
"""Name of the shadow buffers in ledgers and reports, where other rows have a role."""


def log_nbytes(trace: Trace, group: int) -> int:
    """Return the bytes of the shadow buffers that a speculative update takes: those of all chunks it writes."""
    return trace.nbytes(trace.update(group).writes)


def updates_ahead(trace: Trace, actions: Sequence[Sequence[Action]]) -> dict[int, int]:
    """Return the groups whose Update stands before its moment, with the moment in whose list it stands."""
    found = {}
    for at, (moment, listed) in enumerate(zip(trace.moments, actions, strict=True)):
        for action in listed:
            if isinstance(action, Update) and (moment.kind is not Kind.UPDATE or moment.chunk.group != action.group):
                found[action.group] = at
    return found


def advance_updates(
    trace: Trace, actions: Sequence[Sequence[Action]], *, limit_nbytes: int
) -> tuple[tuple[Action, ...], ...]:
    """Return the program with as many updates on HOST as early as they can be; those that can be first take the log.

    Args:
        trace: what the program is for.
        actions: a list a moment, without waits.
        limit_nbytes: of the shadow buffers.
    """
    lists = [list(listed) for listed in actions]
    left_nbytes = limit_nbytes
    for since, at, update in sorted(_candidates(trace, actions), key=lambda found: found[:2]):
        nbytes = log_nbytes(trace, update.group)
        if nbytes <= left_nbytes:
            left_nbytes -= nbytes
            lists[at].remove(update)
            lists[since].append(update)
    return tuple(map(tuple, lists))


def update_s(trace: Trace, moment: Moment, machine: Machine) -> float:
    """Return how long HOST takes to update the group of a moment."""
    seconds = machine.host_update_s(trace.nbytes(trace.update(moment.chunk.group).chunks), trace.update_form)
    return moment.duration_s if seconds is None else seconds


def _candidates(trace: Trace, actions: Sequence[Sequence[Action]]) -> list[tuple[int, int, Update]]:
    """Return (the first list an Update could stand in, the one it stands in, the Update), for those that could move."""
    touched: dict[int, int] = {}
    """By group: the last list so far that puts something an update reads on HOST, or takes it from there."""
    found = []
    for at, (moment, listed) in enumerate(zip(trace.moments, actions, strict=True)):
        for action in listed:
            if isinstance(action, Update):
                since = touched.get(action.group, 0)
                if action.tier is Tier.HOST and since < at and len(trace.update_moments[action.group]) == 1:
                    found.append((since, at, action))
            elif isinstance(action, Copy | Free):
                tier, group = action.target if isinstance(action, Copy) else action.tier, action.chunk.group
                if tier is Tier.HOST and action.chunk in trace.update(group).reads:
                    touched[group] = at
        if moment.kind in (Kind.CREATE, Kind.WRITE) and moment.chunk.role is Role.GRAD:
            touched[moment.chunk.group] = at + 1
    return found
