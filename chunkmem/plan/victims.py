"""Which replicas leave a tier when room is needed. Pure: ids and numbers in, ids out."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Resident:
    """A replica that may leave: not pinned."""

    chunk: ChunkId
    nbytes: int
    last_use: int
    """When it was last used, on any clock that only grows."""
    standing: Standing
    spill: bool
    """It is the only newest replica, so the other tier has to take its bytes first."""


def choose_victims(residents: Iterable[Resident], need_nbytes: int) -> tuple[Resident, ...] | None:
    """Pick the replicas that leave until `need_nbytes` are covered: by standing, then least recently used.

    With the next use unknown, least recently used is also the right order for a forward followed by a backward: at
    the turn it has kept the last chunks of the forward, which the backward reads first. Ties go to the lower id. All
    or nothing: None if all of `residents` together are smaller than `need_nbytes`.
    """
    order = sorted(residents, key=lambda r: (r.standing, r.last_use, r.chunk.group, r.chunk.role.value))
    chosen = []
    covered = 0
    for resident in order:
        if covered >= need_nbytes:
            break
        chosen.append(resident)
        covered += resident.nbytes
    return tuple(chosen) if covered >= need_nbytes else None
