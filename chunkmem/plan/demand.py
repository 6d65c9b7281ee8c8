"""Serve one access with no future known: what has to leave, and where to. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from chunkmem.data.types import ChunkId
from chunkmem.plan.victims import Resident, choose_victims, in_leaving_order, spare_needless


@dataclass(frozen=True, slots=True)
class TierRoom:
    """A tier as seen by one decision."""

    free_nbytes: int
    residents: Callable[[], Iterable[Resident]]
    """The replicas that may leave; asked for only if the free bytes do not suffice."""
    first: Callable[[int], Iterable[Resident]] | None = None
    """Returns those of them that leave first and cover so many bytes, without looking at all; None: nobody can."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """One replica leaves; with `spill` its bytes are copied to the tier below first."""

    chunk: ChunkId
    spill: bool


@dataclass(frozen=True, slots=True)
class RoomPlan:
    """What to do, in order: drop duplicates on the tier below, then evict here."""

    drops_below: tuple[ChunkId, ...] = ()
    evictions_here: tuple[Eviction, ...] = ()


@dataclass(frozen=True, slots=True)
class Shortage:
    """No room can be made; it could if this much more were free on one of the two tiers, the other staying as it is."""

    here_nbytes: int
    below_nbytes: int | None
    """Bytes that are short on the tier below; None: room there would not help, as all that may leave is too little."""


def make_room(need_nbytes: int, here: TierRoom, below: TierRoom) -> RoomPlan | Shortage:
    """Plan how `need_nbytes` become free on the tier `here`, spilling to `below` what has no other newest replica.

    `below` is where what leaves a tier goes: the next one of the chain or, from the last, the one above it.
    All or nothing: nothing is to be moved unless everything fits. The tier below makes room only by dropping
    replicas that are duplicates of a newest one, and never the duplicate an eviction here relies on. A `Shortage` is
    certain: no choice of evictions and drops under these rules would do.
    """
    need_nbytes -= here.free_nbytes
    if need_nbytes <= 0:
        return RoomPlan()
    first = here.residents() if here.first is None else here.first(need_nbytes)
    victims = choose_victims(first, need_nbytes)
    if victims is not None and _spilled_nbytes(victims) <= below.free_nbytes:
        return _room_plan(victims)
    residents = tuple(here.residents())
    droppable = tuple(r for r in below.residents() if not r.spill)
    within = _choose_within(residents, need_nbytes, below.free_nbytes, droppable)
    if isinstance(within, Shortage):
        return within
    relied_on = {v.chunk for v in within if not v.spill}
    drops = choose_victims(
        (r for r in droppable if r.chunk not in relied_on), _spilled_nbytes(within) - below.free_nbytes
    )
    assert drops is not None
    return _room_plan(within, drops)


def _choose_within(
    residents: tuple[Resident, ...], need_nbytes: int, free_below_nbytes: int, droppable: tuple[Resident, ...]
) -> tuple[Resident, ...] | Shortage:
    """Choose victims for which the tier below has room, from as short a beginning of the leaving order as possible.

    Suppose it drops all it may. Then a victim takes of that room if it is spilled, and also if it relies on its
    duplicate there, which then stays: what counts is the sum over both kinds. The others leave for nothing.
    """
    room = free_below_nbytes + sum(r.nbytes for r in droppable)
    duplicated = {r.chunk for r in droppable}
    costless: list[Resident] = []
    ways: dict[int, tuple[Resident, ...]] = {0: ()}  # by the room it takes, the first found choice of the costly ones
    still_needed = need_nbytes
    for resident in in_leaving_order(residents):
        if resident.spill or resident.chunk in duplicated:
            for taken, way in list(ways.items()):
                if taken < need_nbytes:
                    ways.setdefault(taken + resident.nbytes, (*way, resident))
        else:
            costless.append(resident)
            still_needed -= resident.nbytes
        fitting = [taken for taken in ways if still_needed <= taken <= room]
        if fitting:
            chosen = in_leaving_order([*costless, *ways[min(fitting)]])
            return spare_needless(chosen, need_nbytes)
    least = min((taken for taken in ways if taken >= still_needed), default=None)
    return Shortage(
        still_needed - max(taken for taken in ways if taken <= room),
        None if least is None else least - room,
    )


def _spilled_nbytes(victims: Iterable[Resident]) -> int:
    return sum(v.nbytes for v in victims if v.spill)


def _room_plan(victims: Iterable[Resident], drops: Iterable[Resident] = ()) -> RoomPlan:
    return RoomPlan(tuple(d.chunk for d in drops), tuple(Eviction(v.chunk, v.spill) for v in victims))
