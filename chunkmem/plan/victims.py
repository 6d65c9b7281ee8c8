"""Which replicas leave a tier when room is needed. Pure: ids and numbers in, ids out."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from chunkmem.types import ChunkId


class Standing(enum.IntEnum):
    """How soon a replica may be wanted again where it is; lower leaves first."""

    DEAD = 0
    """Its content is consumed or replaced by a newer version elsewhere: dropping it costs nothing."""
    SETTLED = 1
    """Complete, and wanted next on the other tier: a finished gradient whose update runs on HOST."""
    ACTIVE = 2
    """Read or written by forward and backward."""
    STATE = 3
    """An optimizer state whose group is updated here: moving it away moves the update too."""


class Resident(NamedTuple):
    """A replica that may leave: not pinned. A tuple, as one decision may look at thousands."""

    chunk: ChunkId
    nbytes: int
    last_use: int
    """When it was last used, on any clock that only grows."""
    standing: Standing
    spill: bool
    """It is the only newest replica, so the other tier has to take its bytes first."""


def in_leaving_order(residents: Iterable[Resident]) -> list[Resident]:
    """Sort by standing, then least recently used; ties go to the lower id.

    With the next use unknown, least recently used is also the right order for a forward followed by a backward: at
    the turn it has kept the last chunks of the forward, which the backward reads first.
    """
    return sorted(residents, key=lambda r: (r.standing, r.last_use, r.chunk.group, r.chunk.role.value))


def choose_victims(residents: Iterable[Resident], need_nbytes: int) -> tuple[Resident, ...] | None:
    """Pick the replicas that leave, in leaving order, until `need_nbytes` are covered.

    All or nothing: None if all of `residents` together are smaller than `need_nbytes`.
    """
    chosen = []
    covered = 0
    for resident in in_leaving_order(residents):
        if covered >= need_nbytes:
            break
        chosen.append(resident)
        covered += resident.nbytes
    return spare_needless(chosen, need_nbytes) if covered >= need_nbytes else None


def spare_needless(chosen: Sequence[Resident], need_nbytes: int) -> tuple[Resident, ...]:
    """Return `chosen` without those the others can do without: after small ones a large one may cover it all."""
    excess = sum(resident.nbytes for resident in chosen) - need_nbytes
    needed = []
    for resident in reversed(chosen):
        if resident.nbytes <= excess:
            excess -= resident.nbytes
        else:
            needed.append(resident)
    return tuple(reversed(needed))
