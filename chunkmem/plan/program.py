"""From stays to a program: lists of actions, and the residency when an iteration begins. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from chunkmem.plan.gaps import Problem
from chunkmem.plan.intervals import Stays
from chunkmem.plan.model import Action, Alloc, Copy, Free, Placed, Round, Update
from chunkmem.trace.model import Kind
from chunkmem.types import ChunkId, Tier, neighbor

BELOW = neighbor(Tier.DEVICE)
"""Tier of chunks that are not on DEVICE."""

_CHANGING = frozenset({Kind.CREATE, Kind.WRITE, Kind.UPDATE, Kind.CONSUME})
"""Kinds of moments that change the content of the tier below."""


@dataclass(frozen=True)
class Program:
    """A plan without its waits."""

    start: frozenset[Placed]
    actions: tuple[tuple[Action, ...], ...]
    peak_nbytes: Mapping[Tier, int]
    """By tier below DEVICE that holds chunks: peak bytes."""


def emit(problem: Problem, stays: Stays, *, home_residents: bool, rounds: bool = False) -> Program:
    """Write the actions down.

    Chunks that DEVICE never writes have their home on the tier below: a copy that is always there, so leaving DEVICE is
    free. With `home_residents`, also those that never leave; it costs room there, and spares copies when another plan
    takes turns with this one. Weights that an update there rounds again are there from then to their last fetch only:
    the gradient takes their place. With `rounds` they are there while they are fetched only, and are rounded again each
    time.
    """
    return _Emitter(problem, stays, home_residents=home_residents, rounds=rounds).run()


class _Emitter:
    def __init__(self, problem: Problem, stays: Stays, *, home_residents: bool, rounds: bool) -> None:
        self.problem = problem
        self.stays = stays
        n = self.n = len(problem.trace.moments)
        self.index = {chunk: at for at, chunk in enumerate(problem.chunks)}
        self.leaving, self.ending, self.fetching = stays.by_moment(n)
        self.creating = {stay.start: stay for stay in stays.passing if stay.source is None}
        self.homes = {
            chunk
            for chunk, chain in enumerate(problem.uses)
            if not any(use.writes for use in chain) and (home_residents or chunk not in stays.resident or not chain)
        }
        self.rounding, self.last_fetches = self._rounded_below()
        self.homes -= set(self.rounding.values())
        self.rounded = set(self.rounding.values()) if rounds else set[int]()
        """Chunks that are rounded for each fetch."""
        self.dropping = {(at + 1) % n: chunk for at, chunk in self.rounding.items() if chunk in self.rounded}
        """By moment: the chunk that is freed below DEVICE in the moment's list, after its update."""
        self.below = set(self.homes)
        self.below_nbytes = sum(problem.nbytes[chunk] for chunk in self.homes)
        self.below_peak_nbytes = self.below_nbytes

    def _rounded_below(self) -> tuple[dict[int, int], dict[int, list[int]]]:
        """Return which chunk an update below begins again, by moment, and which ones are fetched for the last time."""
        problem, n = self.problem, self.n
        fetches: dict[int, list[int]] = defaultdict(list)
        for at, stays in self.fetching.items():
            for stay in stays:
                fetches[stay.chunk].append(at)
        rounding: dict[int, int] = {}
        last_fetches: dict[int, list[int]] = defaultdict(list)
        for at, moment in enumerate(problem.trace.moments):
            chunk = self.index[moment.chunk]
            is_below = moment.kind is Kind.UPDATE and problem.update_tiers[moment.chunk.group] is BELOW
            if is_below and problem.trace.is_rounded(moment.chunk) and chunk in fetches:
                rounding[at] = chunk
                last_fetches[max(fetches[chunk], key=lambda fetch: (fetch - at - 1) % n)].append(chunk)
        return rounding, last_fetches

    def run(self) -> Program:
        busy = self._busy()
        for at in busy:  # a first iteration only to see what is below when the next one begins
            self._list(at)
        start = frozenset(self._placed_on_device()) | {Placed(self.problem.chunks[c], BELOW, True) for c in self.below}
        self.below_peak_nbytes = self.below_nbytes
        actions: list[tuple[Action, ...]] = [()] * self.n
        for at in busy:
            actions[at] = tuple(self._list(at))
        return Program(start, tuple(actions), {BELOW: self.below_peak_nbytes})

    def _busy(self) -> list[int]:
        """Return the moments that may have actions: in the others a chunk is held or released, and stays."""
        by_stays = (
            self.dropping.keys()
            | self.leaving.keys()
            | self.ending.keys()
            | self.creating.keys()
            | self.fetching.keys()
        )
        moments = self.problem.trace.moments
        return sorted(by_stays.union(at for at, moment in enumerate(moments) if moment.kind in _CHANGING))

    def _placed_on_device(self) -> set[Placed]:
        chunks = set(self.stays.resident)
        chunks |= {stay.chunk for stay in self.stays.passing if stay.freed >= self.n or stay.issued < 0}
        dead = self._dead_at_start()
        return {Placed(self.problem.chunks[c], Tier.DEVICE, self.problem.chunks[c] not in dead) for c in chunks}

    def _dead_at_start(self) -> set[ChunkId]:
        """Chunks without content when an iteration begins: the iteration has consumed it."""
        dead: set[ChunkId] = set()
        for moment in self.problem.trace.moments:
            if moment.kind is Kind.CONSUME:
                dead.add(moment.chunk)
            elif moment.kind in (Kind.CREATE, Kind.WRITE):
                dead.discard(moment.chunk)
        return dead

    def _list(self, at: int) -> list[Action]:
        chunks = self.problem.chunks
        moment = self.problem.trace.moments[at]
        actions: list[Action] = []
        if self.dropping.get(at) in self.below:
            self._leave(self.dropping[at])
            actions.append(Free(chunks[self.dropping[at]], BELOW))
        for stay in self.leaving.get(at, ()):
            if stay.chunk not in self.below:
                self._enter(stay.chunk)
                actions.append(Alloc(chunks[stay.chunk], BELOW))
            actions.append(Copy(chunks[stay.chunk], Tier.DEVICE, BELOW))
        for stay in self.ending.get(at, ()):
            actions.append(Free(chunks[stay.chunk], Tier.DEVICE))
        if at in self.creating:
            actions.append(Alloc(moment.chunk, Tier.DEVICE))
        for stay in self.fetching.get(at, ()):
            if stay.chunk in self.rounded:
                self._enter(stay.chunk)
                actions += (Alloc(chunks[stay.chunk], BELOW), Round(chunks[stay.chunk]))
            actions += (Alloc(chunks[stay.chunk], Tier.DEVICE), Copy(chunks[stay.chunk], BELOW, Tier.DEVICE))
            if stay.chunk in self.rounded:
                self._leave(stay.chunk)
                actions.append(Free(chunks[stay.chunk], BELOW))
        for last in self.last_fetches.get(at, ()):
            if (
                last in self.below and last not in self.rounded
            ):  # not so in the first iteration that is only followed to see
                self._leave(last)
                actions.append(Free(chunks[last], BELOW))
        # After the fetches: what this moment writes may only now have come from below.
        for own in self._written_on_device(at):
            if own in self.below:
                self._leave(own)
                actions.append(Free(chunks[own], BELOW))
        if at in self.rounding and self.rounding[at] not in self.below:
            self._enter(self.rounding[at])
            actions.append(Alloc(moment.chunk, BELOW))
        if moment.kind is Kind.UPDATE:
            actions.append(Update(moment.chunk.group, self.problem.update_tiers[moment.chunk.group]))
        elif moment.kind is Kind.CONSUME and self.index[moment.chunk] in self.below:
            self._leave(self.index[moment.chunk])
        return actions

    def _written_on_device(self, at: int) -> list[int]:
        moment = self.problem.trace.moments[at]
        if moment.kind in (Kind.CREATE, Kind.WRITE):
            return [self.index[moment.chunk]]
        group = moment.chunk.group
        if moment.kind is Kind.UPDATE and self.problem.update_tiers[group] is Tier.DEVICE:
            return [self.index[chunk] for chunk in self.problem.trace.update(group).writes]
        return []

    def _enter(self, chunk: int) -> None:
        self.below.add(chunk)
        self.below_nbytes += self.problem.nbytes[chunk]
        self.below_peak_nbytes = max(self.below_peak_nbytes, self.below_nbytes)

    def _leave(self, chunk: int) -> None:
        self.below.remove(chunk)
        self.below_nbytes -= self.problem.nbytes[chunk]
