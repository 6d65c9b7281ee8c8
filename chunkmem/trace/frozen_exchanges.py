"""What ranks exchange in a step in which fewer parameters are trained, made from one in which more were. Pure.

[Note: Frozen exchanges] Gradients of frozen groups are not reduced, and backward ends when the last gradient has
landed: modules that it does not come to are not gathered for, also if that was begun before. What would have been
reduced when backward left them is reduced, all together, at its end.

    before   gather 3, land 3   gather 2, reduce 3, land 2   gather 1, reduce 2, land 1   reduce 1     (1 is frozen)
    after    gather 3, land 3   gather 2, reduce 3, land 2   reduce 2

Where reductions overlap computing, one arrives when the next one begins, or backward is over: that moves along.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from chunkmem.trace.model import Kind, Moment, Trace
from chunkmem.types import ChunkId, Role

Groups = tuple[int, ...]
Numbered = tuple[int, Moment]
"""A moment, and its place in the trace that is edited."""
_BEGIN = (Kind.CREATE, Kind.WRITE)


@dataclass(frozen=True)
class Exchanges:
    """The exchanges of a step, in their order."""

    schedule: tuple[tuple[str, Groups], ...]
    """ "gather" or "reduce", and which groups."""
    together: Callable[[Iterable[int]], list[list[int]]]
    """Returns groups as they are exchanged, list by list."""
    is_overlapped: bool
    """A reduction is waited for when the next one begins, or backward is over."""


@dataclass
class Step:
    """A step that is edited."""

    moments: list[Numbered]
    cut: int
    """Place behind the last gradient that lands; 0: none does."""


def is_landing(moment: Moment) -> bool:
    """Tell whether a gradient lands."""
    return moment.chunk.role is Role.GRAD and moment.kind in _BEGIN and moment.label.endswith(" gradient")


@dataclass
class _Reduced:
    """The moments in which the gradients of one group are reduced."""

    first: int
    found: dict[Kind, Moment] = field(default_factory=dict)


def with_exchanges(
    trace: Trace, step: Step, exchanges: Exchanges, *, gone: Collection[int]
) -> tuple[list[Numbered], Exchanges]:
    """Return what is left of a step over ranks; see [Note: Frozen exchanges].

    Args:
        trace: as it was.
        step: what is left of it so far.
        exchanges: as they were.
        gone: groups of which nothing is trained.
    """
    reduced, places = _reductions(trace)
    moments = _without_gathers(step, places)
    ops = {groups: [reduced[g].first for g in groups if g in reduced] for groups in _of(exchanges)}
    begins = {groups: min(found) for groups, found in ops.items() if found}
    left_of = {groups: tuple(g for g in groups if g in reduced and g not in gone) for groups in begins}
    early = {at: left_of[groups] for groups, at in begins.items() if at < step.cut}
    late = sorted({g for groups, at in begins.items() if at >= step.cut for g in left_of[groups]})
    after = replace(exchanges, schedule=_schedule(trace, exchanges, begins, left_of, cut=step.cut))
    rebuilt = _Rebuilt(exchanges, reduced, trace.remote_groups)
    left: list[Numbered] = []
    waiting = sorted(at for at, groups in early.items() if groups)
    for at, moment in (each for each in moments if each[0] < step.cut):
        while waiting and waiting[0] <= at:
            left += rebuilt.reduce(waiting[0], early[waiting.pop(0)])
        left.append((at, moment))
    for place in waiting:
        left += rebuilt.reduce(place, early[place])
    tail = [each for each in moments if each[0] >= step.cut]
    stop = next((n for n, (_, m) in enumerate(tail) if m.kind in (Kind.UPDATE, Kind.CONSUME) and _is_of_step(m)), None)
    backward, rest = (tail, []) if stop is None else (tail[:stop], tail[stop:])
    releases = [each for each in backward if each[1].chunk.role is Role.PARAM]
    left += sorted(releases, key=lambda each: each[1].chunk.group)
    place = max((at for at, _ in left), default=0)
    left += [*rebuilt.reduce(place, late), *rebuilt.settle(place)]
    left += [each for each in backward if each[1].chunk.role is not Role.PARAM]  # what the last region has saved
    return [*left, *rest], after


def _is_of_step(moment: Moment) -> bool:
    """Tell whether a moment is of the optimizer's step: an update, or a gradient that is given up."""
    return moment.kind is Kind.UPDATE or moment.chunk.role is Role.GRAD


def _of(exchanges: Exchanges) -> list[Groups]:
    return [groups for what, groups in exchanges.schedule if what == "reduce"]


def _reductions(trace: Trace) -> tuple[dict[int, _Reduced], set[int]]:
    """Return how each group is reduced, and the places of all these moments; a group that is reduced twice is left."""
    reduced: dict[int, _Reduced] = {}
    places: dict[int, set[int]] = {}
    updated: set[int] = set()
    twice: set[int] = set()
    for at, moment in enumerate(trace.moments):
        group = moment.chunk.group
        if moment.kind is Kind.UPDATE:
            updated.add(group)
        if moment.chunk.role is not Role.GRAD or is_landing(moment) or group in updated:
            continue
        if moment.kind is Kind.CONSUME and group not in trace.remote_groups:
            continue
        each = reduced.setdefault(group, _Reduced(at))
        kind = Kind.WRITE if moment.kind is Kind.CREATE else moment.kind
        if kind in each.found:
            twice.add(group)
        each.found[kind] = moment
        places.setdefault(group, set()).add(at)
    for group in twice:
        del reduced[group]
    return reduced, {at for group, found in places.items() if group not in twice for at in found}


def _without_gathers(step: Step, places: Collection[int]) -> list[Numbered]:
    """Leave out reductions, and what is gathered before the last gradient has landed and used only after that."""
    begun: dict[ChunkId, list[int]] = {}
    left_out = set(places)
    for at, moment in step.moments:
        if moment.chunk.role is not Role.PARAM:
            continue
        if moment.kind is Kind.HOLD:
            begun[moment.chunk] = []
        begun.setdefault(moment.chunk, []).append(at)
        if moment.kind is Kind.ARRIVE and at >= step.cut:
            begun[moment.chunk].append(-1)
        if moment.kind is Kind.RELEASE and -1 in (found := begun.pop(moment.chunk)):
            left_out.update(found)
    return [(at, moment) for at, moment in step.moments if at not in left_out]


class _Rebuilt:
    """Reductions as they follow each other."""

    def __init__(self, exchanges: Exchanges, reduced: dict[int, _Reduced], remote: Collection[int]) -> None:
        self._exchanges, self._reduced, self._remote = exchanges, reduced, remote
        self._under_way: list[list[int]] = []

    def reduce(self, place: int, groups: Sequence[int]) -> list[Numbered]:
        """Return the moments in which groups are reduced, at a place."""
        if not groups:
            return []
        found = self.settle(place)
        for together in self._exchanges.together(groups):
            for group in together:
                found += self._of(group, (Kind.WRITE, Kind.HOLD), place)
            for group in together:
                found += self._of(group, (Kind.EXCHANGE,), place)
            self._under_way.append(together)
            if not self._exchanges.is_overlapped:
                found += self.settle(place)
        return found

    def settle(self, place: int) -> list[Numbered]:
        """Return the moments in which what is under way arrives."""
        found: list[Numbered] = []
        for together in self._under_way:
            for kind in (Kind.ARRIVE, Kind.RELEASE):
                for group in together:
                    found += self._of(group, (kind,), place)
            for group in together:
                if group in self._remote:
                    found += self._of(group, (Kind.CONSUME,), place)
        self._under_way = []
        return found

    def _of(self, group: int, kinds: Iterable[Kind], place: int) -> list[Numbered]:
        found = self._reduced[group].found
        return [(place, found[kind]) for kind in kinds if kind in found]


def _schedule(
    trace: Trace, exchanges: Exchanges, begins: Mapping[Groups, int], left_of: Mapping[Groups, Groups], *, cut: int
) -> tuple[tuple[str, Groups], ...]:
    """Return what is exchanged: until the last gradient lands as before, and then what is left to reduce."""
    arrived = _arrivals(trace)
    found: list[tuple[str, Groups]] = []
    for what, groups in exchanges.schedule:
        if what == "reduce":
            at = begins.get(groups, 0)
            if left := left_of.get(groups, ()) if at < cut else ():
                found.append((what, left))
        else:
            at = arrived.pop(0)[0] if arrived and arrived[0][1] <= set(groups) else 0
            found.append((what, groups))
        if at >= cut:
            found = found if what == "reduce" else found[:-1]
            break
    late = sorted({group for groups, at in begins.items() if at >= cut for group in left_of[groups]})
    return (*found, ("reduce", tuple(late))) if late else tuple(found)


def _arrivals(trace: Trace) -> list[tuple[int, set[int]]]:
    """Return where weights arrive, and of which groups together."""
    arrived: list[tuple[int, set[int]]] = []
    label = None
    for at, moment in enumerate(trace.moments):
        if moment.chunk.role is Role.PARAM and moment.kind is Kind.ARRIVE:
            if moment.label != label:
                arrived.append((at, set()))
            arrived[-1][1].add(moment.chunk.group)
            label = moment.label
    return arrived
