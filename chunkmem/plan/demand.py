"""Serve one access with no future known: what has to leave, and where to. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from chunkmem.plan.victims import Resident, choose_victims
from chunkmem.types import ChunkId


@dataclass(frozen=True, slots=True)
class TierRoom:
    """A tier as seen by one decision."""

    free_nbytes: int
    residents: Callable[[], Iterable[Resident]]
    """The replicas that may leave; asked for only if the free bytes do not suffice."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """One replica leaves; with `spill` its bytes are copied to the other tier first."""

    chunk: ChunkId
    spill: bool


@dataclass(frozen=True, slots=True)
class RoomPlan:
    """What to do, in order: drop duplicates on the other tier, then evict here."""

    drops_there: tuple[ChunkId, ...] = ()
    evictions_here: tuple[Eviction, ...] = ()


@dataclass(frozen=True, slots=True)
class Shortage:
    """No room can be made: `evictable_nbytes` could leave, `spill_short_nbytes` of that lack room on the other tier."""

    evictable_nbytes: int
    spill_short_nbytes: int


def make_room(need_nbytes: int, here: TierRoom, there: TierRoom) -> RoomPlan | Shortage:
    """Plan how `need_nbytes` become free on the tier `here`, spilling to `there` what has no other newest replica.

    All or nothing: nothing is to be moved unless everything fits. The other tier makes room only by dropping
    replicas that are duplicates of a newest one, and never the duplicate an eviction here relies on.
    """
    if need_nbytes <= here.free_nbytes:
        return RoomPlan()
    residents = tuple(here.residents())
    victims = choose_victims(residents, need_nbytes - here.free_nbytes)
    if victims is None:
        return Shortage(sum(r.nbytes for r in residents), 0)
    evictions = tuple(Eviction(v.chunk, v.spill) for v in victims)
    short = sum(v.nbytes for v in victims if v.spill) - there.free_nbytes
    if short <= 0:
        return RoomPlan((), evictions)
    leaving = {v.chunk for v in victims}
    drops = choose_victims((r for r in there.residents() if not r.spill and r.chunk not in leaving), short)
    if drops is not None:
        return RoomPlan(tuple(d.chunk for d in drops), evictions)
    return _without_spills(need_nbytes, here, residents, short)


def _without_spills(
    need_nbytes: int, here: TierRoom, residents: tuple[Resident, ...], short: int
) -> RoomPlan | Shortage:
    """The other tier is full: try with replicas that can leave without it."""
    clean = tuple(r for r in residents if not r.spill)
    victims = choose_victims(clean, need_nbytes - here.free_nbytes)
    if victims is None:
        return Shortage(sum(r.nbytes for r in residents), short)
    return RoomPlan((), tuple(Eviction(v.chunk, False) for v in victims))
