"""The least bytes that any plan has to move to and from DISK in a step. Pure.

Take one instant of a step that is repeated. All that lasts from step to step is somewhere then, and DEVICE and HOST
together hold no more than their caps: the rest is on DISK alone. Each part of it is used before the same instant of the
next step, so it is read once a step at least; and what a step changes has been written since the last change, so it is
written once a step. Updates may come earlier or later in a step than they were recorded, so what lasts for a part of
it, as gradients do, is not counted. Weights that are rounded from float32 need not last.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from chunkmem.data.trace import Trace
from chunkmem.data.types import ChunkId
from chunkmem.plan.gaps import budgets
from chunkmem.plan.machine import Machine


@dataclass(frozen=True, slots=True)
class DiskBound:
    """Bytes that no plan moves less of in a step; 0 without DISK, or where all fits the other tiers."""

    read_nbytes: int = 0
    write_nbytes: int = 0


def disk_bound(trace: Trace, machine: Machine) -> DiskBound:
    """Return the bound for every plan of a trace within the caps of a machine."""
    if not machine.disk_nbytes:
        return DiskBound()
    room_nbytes = sum(machine.cap_nbytes[tier] for tier in machine.tiers[1:-1]) + max(
        0, min(budgets(trace, machine), default=0)
    )
    used = {moment.chunk for moment in trace.moments if moment.chunk.role.kind.is_weights}
    changed: set[ChunkId] = set()
    for group in trace.update_moments:
        update = trace.update(group)
        used.update(update.reads)
        changed.update(update.writes)

    def least_nbytes(chunks: Iterable[ChunkId]) -> int:
        return max(0, trace.nbytes(chunk for chunk in chunks if _lasts(chunk, trace)) - room_nbytes)

    return DiskBound(least_nbytes(used), least_nbytes(changed))


def _lasts(chunk: ChunkId, trace: Trace) -> bool:
    return not (chunk.role.kind.is_of_step or trace.is_rounded(chunk) or trace.is_remote(chunk))
