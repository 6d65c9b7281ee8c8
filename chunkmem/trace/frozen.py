"""The trace of a step in which fewer parameters are trained, made from one in which more were. Pure.

[Note: Frozen parameters] Nothing of forward changes. In backward no gradient of a frozen parameter lands, and after the
last one that does, nothing is left to do: modules further to the front are not entered. Groups of which all parameters
are frozen are not updated, and have neither gradients, nor master weights, nor states.

    before   hold 3, land 3, release   hold 2, land 2, release   hold 1, land 1, release   update 1, 2, 3
    after    hold 3, land 3, release                                                       update 3

What a step leaves out of its plan does no harm, so what cannot be told for certain stays: with several micro-batches,
the backwards of all but the last one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from chunkmem.trace.model import Kind, Moment, Trace
from chunkmem.types import ChunkId, Role

_LANDINGS = (Kind.CREATE, Kind.WRITE)


def without_training(trace: Trace, *, params: Collection[str], groups: Collection[int]) -> Trace:
    """Return the trace of the same step if some parameters were frozen; see [Note: Frozen parameters].

    Args:
        trace: of the step, without regions: whether frozen blocks save activations cannot be told from it.
        params: names of the parameters that are frozen.
        groups: those of which all parameters are.
    """
    labels = {f"{name} gradient" for name in params}
    gone = {ChunkId(Role.GRAD, group) for group in groups}

    def is_left(moment: Moment) -> bool:
        if moment.chunk in gone:
            return False
        if moment.kind is Kind.UPDATE:
            return moment.chunk.group not in groups
        return moment.chunk.role is not Role.GRAD or moment.kind not in _LANDINGS or moment.label not in labels

    left = [moment for moment in trace.moments if is_left(moment)]
    left = _without_tail(left)
    sizes = {
        key: nbytes
        for key, nbytes in trace.chunk_nbytes.items()
        if key.group not in groups or not (key.role in (Role.GRAD, Role.MASTER) or key.role.is_state)
    }
    return replace(trace, moments=tuple(_begun(left)), chunk_nbytes=sizes)


def _without_tail(moments: list[Moment]) -> list[Moment]:
    """Leave out the modules that are entered after the last gradient has landed, until the first update."""
    landed = [at for at, moment in enumerate(moments) if moment.chunk.role is Role.GRAD and moment.kind in _LANDINGS]
    if not landed:
        return moments
    after = landed[-1] + 1
    stop = next((at for at in range(after, len(moments)) if moments[at].kind is Kind.UPDATE), len(moments))
    kept, entered = moments[:after], set[ChunkId]()
    for moment in moments[after:stop]:
        if moment.kind is Kind.HOLD:
            entered.add(moment.chunk)
        elif moment.chunk not in entered:
            kept.append(moment)
        elif moment.kind is Kind.RELEASE:
            entered.remove(moment.chunk)
    return [*kept, *moments[stop:]]


def _begun(moments: list[Moment]) -> list[Moment]:
    """Have the first landing that is left in a chunk begin its content."""
    found, begun = [], set[ChunkId]()
    for moment in moments:
        if moment.kind is Kind.CONSUME:
            begun.discard(moment.chunk)
        elif moment.kind is Kind.CREATE:
            begun.add(moment.chunk)
        elif moment.kind is Kind.WRITE and moment.chunk.role is Role.GRAD and moment.chunk not in begun:
            moment = replace(moment, kind=Kind.CREATE)
            begun.add(moment.chunk)
        found.append(moment)
    return found
