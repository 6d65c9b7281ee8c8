"""From stays to a program: lists of actions, and the residency when an iteration begins. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from chunkmem.plan.gaps import Problem
from chunkmem.plan.intervals import Stay, Stays
from chunkmem.plan.model import Action, Alloc, Copy, Free, Placed, Update
from chunkmem.trace.model import Kind
from chunkmem.types import ChunkId, Role, Tier


@dataclass(frozen=True)
class Program:
    """A plan without its waits."""

    start: frozenset[Placed]
    actions: tuple[tuple[Action, ...], ...]
    host_peak_nbytes: int


def emit(problem: Problem, stays: Stays, *, home_residents: bool) -> Program:
    """Write the actions down.

    Chunks that DEVICE never writes have their home on HOST: a copy that is always there, so leaving DEVICE is free.
    With `home_residents`, also those that never leave; it costs room on HOST, and spares copies when another plan
    takes turns with this one. Weights that an update on HOST rounds again are there from then to their last fetch only:
    the gradient takes their place.
    """
    return _Emitter(problem, stays, home_residents=home_residents).run()


class _Emitter:
    def __init__(self, problem: Problem, stays: Stays, *, home_residents: bool) -> None:
        self.problem = problem
        self.stays = stays
        n = self.n = len(problem.trace.moments)
        self.index = {chunk: at for at, chunk in enumerate(problem.chunks)}
        self.leaving: dict[int, list[Stay]] = defaultdict(list)
        self.ending: dict[int, list[Stay]] = defaultdict(list)
        self.creating: dict[int, Stay] = {}
        self.fetching: dict[int, list[Stay]] = defaultdict(list)
        for stay in stays.passing:
            if stay.to_host:
                self.leaving[stay.stop % n].append(stay)
            self.ending[stay.freed % n].append(stay)
            if stay.fetched:
                self.fetching[stay.issued % n].append(stay)
            else:
                self.creating[stay.start] = stay
        self.homes = {
            chunk
            for chunk, chain in enumerate(problem.uses)
            if not any(use.writes for use in chain) and (home_residents or chunk not in stays.resident or not chain)
        }
        self.rounding, self.last_fetches = self._rounded_on_host()
        self.homes -= set(self.rounding.values())
        self.on_host = set(self.homes)
        self.host_nbytes = sum(problem.nbytes[chunk] for chunk in self.homes)
        self.host_peak_nbytes = self.host_nbytes

    def _rounded_on_host(self) -> tuple[dict[int, int], dict[int, list[int]]]:
        """Return which chunk an update on HOST begins again, by moment, and which ones are fetched for the last
        time."""
        problem, n = self.problem, self.n
        fetches: dict[int, list[int]] = defaultdict(list)
        for at, stays in self.fetching.items():
            for stay in stays:
                fetches[stay.chunk].append(at)
        rounding: dict[int, int] = {}
        last_fetches: dict[int, list[int]] = defaultdict(list)
        for at, moment in enumerate(problem.trace.moments):
            chunk = self.index[moment.chunk]
            on_host = moment.kind is Kind.UPDATE and problem.update_tiers[moment.chunk.group] is Tier.HOST
            if on_host and problem.trace.is_rounded(moment.chunk) and chunk in fetches:
                rounding[at] = chunk
                last_fetches[max(fetches[chunk], key=lambda fetch: (fetch - at - 1) % n)].append(chunk)
        return rounding, last_fetches

    def run(self) -> Program:
        for moment in range(self.n):  # a first iteration only to see what is on HOST when the next one begins
            self._list(moment)
        start = frozenset(self._placed_on_device()) | {
            Placed(self.problem.chunks[c], Tier.HOST, True) for c in self.on_host
        }
        self.host_peak_nbytes = self.host_nbytes
        actions = tuple(tuple(self._list(moment)) for moment in range(self.n))
        return Program(start, actions, self.host_peak_nbytes)

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
        for stay in self.leaving.get(at, ()):
            if stay.chunk not in self.on_host:
                self._host(stay.chunk)
                actions.append(Alloc(chunks[stay.chunk], Tier.HOST))
            actions.append(Copy(chunks[stay.chunk], Tier.DEVICE, Tier.HOST))
        for stay in self.ending.get(at, ()):
            actions.append(Free(chunks[stay.chunk], Tier.DEVICE))
        if at in self.creating:
            actions.append(Alloc(moment.chunk, Tier.DEVICE))
        for stay in self.fetching.get(at, ()):
            actions += (Alloc(chunks[stay.chunk], Tier.DEVICE), Copy(chunks[stay.chunk], Tier.HOST, Tier.DEVICE))
        for last in self.last_fetches.get(at, ()):
            if last in self.on_host:  # not so in the first iteration that is only followed to see
                self._unhost(last)
                actions.append(Free(chunks[last], Tier.HOST))
        # After the fetches: what this moment writes may only now have come from HOST.
        for own in self._written_on_device(at):
            if own in self.on_host:
                self._unhost(own)
                actions.append(Free(chunks[own], Tier.HOST))
        if at in self.rounding and self.rounding[at] not in self.on_host:
            self._host(self.rounding[at])
            actions.append(Alloc(moment.chunk, Tier.HOST))
        if moment.kind is Kind.UPDATE:
            actions.append(Update(moment.chunk.group, self.problem.update_tiers[moment.chunk.group]))
        elif moment.kind is Kind.CONSUME and self.index[moment.chunk] in self.on_host:
            self._unhost(self.index[moment.chunk])
        return actions

    def _written_on_device(self, at: int) -> list[int]:
        moment = self.problem.trace.moments[at]
        if moment.kind in (Kind.CREATE, Kind.WRITE):
            return [self.index[moment.chunk]]
        group = moment.chunk.group
        if moment.kind is Kind.UPDATE and self.problem.update_tiers[group] is Tier.DEVICE:
            return [self.index[c] for c in self.problem.trace.update_chunks(group) if c.role is not Role.GRAD]
        return []

    def _host(self, chunk: int) -> None:
        self.on_host.add(chunk)
        self.host_nbytes += self.problem.nbytes[chunk]
        self.host_peak_nbytes = max(self.host_peak_nbytes, self.host_nbytes)

    def _unhost(self, chunk: int) -> None:
        self.on_host.remove(chunk)
        self.host_nbytes -= self.problem.nbytes[chunk]
