"""Which replicas leave a tier when room is needed. Pure: ids and numbers in, ids out.

A tier may hold thousands of small chunks, and each one that comes may need another to leave, so nobody looks at all of
them each time. `LeavingOrder` keeps a heap whose entries may be out of date, each telling when its replica leaves at
the earliest. That a replica leaves later than that, since it was used again, shows when its turn comes, and puts it
further back; that it leaves sooner, or may leave again, has to be announced.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from chunkmem.data.types import ChunkId


class Standing(enum.IntEnum):
    """How soon a replica may be wanted again where it is; lower leaves first."""

    DEAD = 0
    """A replica whose content is consumed, or replaced by a newer version elsewhere: dropping it costs nothing."""
    AWAITS_UPDATE = 1
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
    """Time of the last use, on any clock that only grows."""
    standing: Standing
    spill: bool
    """It is the only newest replica, so the other tier has to take its bytes first."""


def in_leaving_order(residents: Iterable[Resident]) -> list[Resident]:
    """Sort by standing, then least recently used; ties go to the lower id.

    With the next use unknown, least recently used is also the right order for a forward followed by a backward: at
    the turn it has kept the last chunks of the forward, which the backward reads first.
    """
    return sorted(residents, key=_leaving_key)


_Key = tuple[int, int, int, str]


def _leaving_key(resident: Resident) -> _Key:
    chunk, _, last_use, standing, _ = resident
    return standing, last_use, chunk.group, chunk.role


class LeavingOrder:
    """The replicas of one tier in leaving order, without looking at all of them."""

    def __init__(self, look: Callable[[ChunkId], Resident | None]) -> None:
        """Begin with none.

        Args:
            look: returns what is to be known of a chunk's replica now; None if it may not leave, or there is none.
        """
        self._look = look
        self._heap: list[tuple[_Key, int, ChunkId]] = []
        """Heap of (key, a number that tells equal keys apart, chunk)."""
        self._listed: dict[ChunkId, _Key] = {}
        """The key of each replica's entry that counts; others in the heap are left over."""
        self.announced: set[ChunkId] = set()
        """Replicas that may leave from now on, or sooner than they could before; whoever knows of one adds it."""
        self._num_entries = 0

    def first(self, nbytes: int) -> list[Resident]:
        """Return the first ones in leaving order that cover `nbytes`; all that were announced, if those do not."""
        self._enter_announced()
        found: list[Resident] = []
        while self._heap and nbytes > 0:
            key, _, chunk = heapq.heappop(self._heap)
            if self._listed.get(chunk) != key:
                continue
            del self._listed[chunk]
            resident = self._look(chunk)
            if resident is None:
                continue  # it is announced again once it may leave
            if (now := _leaving_key(resident)) != key:
                self._enter(chunk, now)
                continue
            found.append(resident)
            nbytes -= resident.nbytes
        for resident in found:
            self._enter(resident.chunk, _leaving_key(resident))
        return found

    def _enter_announced(self) -> None:
        for chunk in self.announced:
            resident = self._look(chunk)
            if resident is not None:
                key = _leaving_key(resident)
                # An earlier entry will do: its turn comes first. So there are few entries of one replica.
                if chunk not in self._listed or key < self._listed[chunk]:
                    self._enter(chunk, key)
        self.announced.clear()

    def _enter(self, chunk: ChunkId, key: _Key) -> None:
        self._listed[chunk] = key
        self._num_entries += 1
        heapq.heappush(self._heap, (key, self._num_entries, chunk))


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
