"""In which order groups of chunks are moved to other ranks, which pack the parameters in other groups.

A rank gives a group up when all of its parameters have been moved, and a new group takes its memory as a whole before
the first parameter arrives. So the order decides what ranks have at a time. It is one order for all ranks, a new group
after the other. Next comes the group after which the ranks have least beyond what they have at the beginning or at the
end, whichever is more: a rank that has given much up receives, from one that has received much, and what is half empty
is emptied.

    rank 0   A B C D        A C E G          new groups in this order: A C F H E B G D, and not A C E G B D F H,
    rank 1   E F G H   to   B D F H          with which rank 0 would have six groups at a time
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import islice

_MOST_CANDIDATES = 16
"""Of new groups that take from half empty ones, which are looked at for each next one."""


@dataclass(frozen=True)
class HeldGroup:
    """A group that a rank has, and is going to give up."""

    rank: int
    group: int
    """Number of the group within its rank."""
    params: tuple[int, ...]
    """Numbers that parameters have on all ranks."""
    nbytes: tuple[int, ...]
    """By phase: bytes of the group's chunks that are moved in it; phases follow each other."""


@dataclass(frozen=True)
class WantedGroup:
    """A group that a rank is going to have; the fields are those of `HeldGroup`."""

    rank: int
    group: int
    params: tuple[int, ...]
    nbytes: tuple[int, ...]


@dataclass(frozen=True)
class Moves:
    """What is moved, the same on all ranks."""

    order: tuple[WantedGroup, ...]
    sources: Mapping[tuple[int, int, int], HeldGroup]
    """By (rank, group, parameter) of a wanted group: the held group that has the values."""

    def of(self, wanted: WantedGroup) -> Iterator[tuple[int, HeldGroup]]:
        """Yield the parameters of a wanted group, each with the group that has its values."""
        return ((param, self.sources[wanted.rank, wanted.group, param]) for param in wanted.params)

    def num_moves(self) -> Counter[HeldGroup]:
        """Return how often a parameter is taken out of each group: then it is given up."""
        return Counter(self.sources.values())


def plan_moves(held: Sequence[HeldGroup], wanted: Sequence[WantedGroup]) -> Moves:
    """Decide from where each wanted group gets its parameters, and in which order.

    A rank that has a parameter itself takes it from there. What several ranks have, and the taker has not, comes from
    the first of them.

    Args:
        held: of all ranks.
        wanted: of all ranks, those of each in the order of their parameters.

    Raises:
        KeyError: no rank has a parameter.
    """
    holders: dict[int, dict[int, HeldGroup]] = defaultdict(dict)
    for group in held:
        for param in group.params:
            holders[param].setdefault(group.rank, group)
    sources = {
        (group.rank, group.group, param): holders[param].get(group.rank) or _first(holders[param], param)
        for group in wanted
        for param in group.params
    }
    return Moves(tuple(_Order(held, wanted, sources).groups()), sources)


def _first(holders: Mapping[int, HeldGroup], param: int) -> HeldGroup:
    if not holders:
        raise KeyError(f"no rank has parameter {param}")
    return next(iter(holders.values()))


class _Order:
    """Simulates what each rank has."""

    def __init__(
        self,
        held: Sequence[HeldGroup],
        wanted: Sequence[WantedGroup],
        sources: Mapping[tuple[int, int, int], HeldGroup],
    ) -> None:
        self._takes = [Counter(sources[w.rank, w.group, param] for param in w.params) for w in wanted]
        """By wanted group: the number of parameters that come from each held group."""
        self._takers: dict[HeldGroup, list[int]] = defaultdict(list)
        for index, takes in enumerate(self._takes):
            for group in takes:
                self._takers[group].append(index)
        self._wanted = wanted
        self._left = Counter(sources.values())
        self._now = Counter[int]()
        self._most = Counter[int]()
        for group in held:
            self._most[group.rank] += sum(group.nbytes)
            self._now[group.rank] += sum(group.nbytes) if self._left[group] else 0
        final = Counter[int]()
        for each in wanted:
            final[each.rank] += sum(each.nbytes)
        for rank, nbytes in final.items():
            self._most[rank] = max(self._most[rank], nbytes)
        self._opened: dict[HeldGroup, None] = {}
        """Held groups that have given away some of their parameters, in order."""
        self._queues: dict[tuple[int, int], deque[int]] = defaultdict(deque)
        """By (taker, giver of most of its parameters), as ranks: indices of wanted groups."""
        for index, takes in enumerate(self._takes):
            givers = Counter[int]()
            for group, num in takes.items():
                givers[group.rank] += num
            giver = max(givers, key=lambda rank: givers[rank], default=wanted[index].rank)
            self._queues[wanted[index].rank, giver].append(index)

    def groups(self) -> Iterator[WantedGroup]:
        """Yield the wanted groups in order."""
        waiting = set(range(len(self._wanted)))
        while waiting:
            best = min(self._candidates(waiting), key=self._cost)
            waiting.remove(best)
            self._move(best)
            yield self._wanted[best]

    def _candidates(self, waiting: AbstractSet[int]) -> dict[int, None]:
        """Return groups for the rank that has most room, of the rank that has least, and of half empty groups."""
        firsts: dict[tuple[int, int], int] = {}
        for pair, queue in tuple(self._queues.items()):
            while queue and queue[0] not in waiting:
                queue.popleft()
            if queue:
                firsts[pair] = queue[0]
            else:
                del self._queues[pair]
        emptiest = min((taker for taker, _ in firsts), key=self._excess)
        fullest = max((giver for _, giver in firsts), key=self._excess)
        found = {index: None for (taker, giver), index in firsts.items() if taker == emptiest or giver == fullest}
        others = (index for group in self._opened for index in self._takers[group] if index in waiting)
        found.update(dict.fromkeys(islice(others, _MOST_CANDIDATES)))
        return found

    def _excess(self, rank: int) -> int:
        """Return by how much a rank has more than it has at the beginning or at the end."""
        return self._now[rank] - self._most[rank]

    def _cost(self, index: int) -> tuple[int, int, int]:
        """Return by how much moving a group brings ranks beyond their bounds, afterwards and meanwhile."""
        wanted = self._wanted[index]
        change = Counter({wanted.rank: sum(wanted.nbytes)})
        for group, num in self._takes[index].items():
            if self._left[group] == num:
                change[group.rank] -= sum(group.nbytes)
        worse = sum(max(0, e + change[rank]) ** 2 - max(0, e) ** 2 for rank in change for e in (self._excess(rank),))
        return worse, self._excess(wanted.rank) + sum(wanted.nbytes), index

    def _move(self, index: int) -> None:
        wanted = self._wanted[index]
        self._now[wanted.rank] += sum(wanted.nbytes)
        for group, num in self._takes[index].items():
            self._left[group] -= num
            self._opened[group] = None
            if not self._left[group]:
                del self._opened[group]
                self._now[group.rank] -= sum(group.nbytes)


def extra_nbytes(held: Sequence[HeldGroup], moves: Moves, *, rank: int) -> int:
    """Return by how many bytes at most a rank has more than at the beginning, while all phases are moved."""
    num_phases = max((len(group.nbytes) for group in held), default=0)
    left, now, most = moves.num_moves(), 0, 0
    now -= sum(sum(group.nbytes) for group in held if group.rank == rank and not left[group])
    for phase in range(num_phases):
        left = moves.num_moves()
        for wanted in moves.order:
            now += wanted.nbytes[phase] if wanted.rank == rank else 0
            most = max(most, now)
            for _, source in moves.of(wanted):
                left[source] -= 1
                now -= source.nbytes[phase] if source.rank == rank and not left[source] else 0
    return most
