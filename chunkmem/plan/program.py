"""From stays to a program: lists of actions, and the residency when an iteration begins. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chunkmem.data.trace import Kind, Trace
from chunkmem.data.types import ChunkId, Tier
from chunkmem.plan.gaps import Problem
from chunkmem.plan.intervals import Stays
from chunkmem.plan.model import Action, Alloc, Copy, Free, Placed, Round, Update
from chunkmem.plan.semantics import arrives

_WRITING = frozenset({Kind.CREATE, Kind.WRITE})
_CHANGING = _WRITING | {Kind.CONSUME}
"""Kinds of moments that change the content of the tier below."""


@dataclass(frozen=True)
class Program:
    """A plan without its waits."""

    start: frozenset[Placed]
    actions: tuple[tuple[Action, ...], ...]
    peak_nbytes: Mapping[Tier, int]
    """By tier that holds chunks: peak bytes of a program for it and the one below."""


def emit(problem: Problem, stays: Stays, *, home_residents: bool, rounds: bool = False) -> Program:
    """Write down what is done on DEVICE and the tier below.

    Chunks that DEVICE never writes have their home on the tier below: a copy that is always there, so leaving DEVICE is
    free. With `home_residents`, also those that never leave; it costs room there, and spares copies when another plan
    takes turns with this one. Weights that an update there rounds again are there from then to their last fetch only:
    the gradient takes their place. With `rounds` they are there while they are fetched only, and are rounded again each
    time.
    """
    moments = problem.trace.moments
    updates = tuple(
        (Update(moment.chunk.group, problem.update_tiers[moment.chunk.group]),) if moment.kind is Kind.UPDATE else ()
        for moment in moments
    )
    everything = frozenset(Placed(chunk, problem.tier, True) for chunk in problem.chunks)
    slots = [range(at, at + 1) for at in range(len(moments))]
    emitter = Emitter(problem, stays, Program(everything, updates, {}), slots, home_residents=home_residents)
    emitter.round_below(always=rounds)
    return emitter.run()


def needs(action: Action, tier: Tier) -> bool:
    """Tell whether an action reads or writes chunks on a tier."""
    if isinstance(action, Copy):
        return tier in (action.source, action.target)
    return isinstance(action, Update) and action.tier is tier


class Emitter:
    """Puts what passes between a tier and the one below it into a program for the tiers above it."""

    def __init__(
        self, problem: Problem, stays: Stays, above: Program, slots: Sequence[range], *, home_residents: bool = False
    ) -> None:
        """Begin.

        Args:
            problem: of the tier.
            stays: of chunks there.
            above: the program, in which all is on this tier that is not above it.
            slots: by moment of the trace, those of `problem`: one at least, and one for each action that needs chunks
                on the tier.
            home_residents: see `emit`.
        """
        self.problem, self.trace, self.above, self.slots = problem, problem.trace, above, slots
        self.upper, self.lower = problem.tier, problem.below
        n = len(problem.durations_s)
        self.creating, self.leaving, self.ending, self.fetching = stays.by_moment(n)
        self.rounding: dict[int, ChunkId] = {}
        """By moment whose update rounds weights below that are fetched: their chunk."""
        self.last_fetches: dict[int, list[ChunkId]] = defaultdict(list)
        """By slot: such weights that are fetched for the last time."""
        self.rounded: frozenset[ChunkId] = frozenset()
        """Those that are rounded for each fetch."""
        there = {placed.chunk for placed in above.start if placed.tier is self.upper}
        crossing = {stay.chunk for stay in stays.passing if stay.freed >= n or stay.issued < 0}
        staying = there & {problem.chunks[at] for at in stays.resident | crossing}
        homes = {
            problem.chunks[at]
            for at, chain in enumerate(problem.uses)
            if (home_residents or at not in stays.resident) and not any(use.writes for use in chain)
        }
        self.dead = _dead_at_start(self.trace)
        self.on = {self.upper: staying, self.lower: (there - staying - self.dead) | (there & homes)}
        self._count()

    def round_below(self, *, always: bool) -> None:
        """Have weights that an update below rounds there no longer than they are fetched; see `emit`."""
        fetches: dict[ChunkId, list[int]] = defaultdict(list)
        for at, stays in self.fetching.items():
            for stay in stays:
                fetches[self.problem.chunks[stay.chunk]].append(at)
        for group, moments in self.trace.update_moments.items():
            for at in moments:
                chunk = self.trace.moments[at].chunk
                is_below = self.problem.update_tiers[group] is self.lower
                if is_below and self.trace.is_rounded(chunk) and chunk in fetches:
                    self.rounding[at] = chunk
                    last = max(fetches[chunk], key=lambda fetch: (fetch - at - 1) % len(self.slots))
                    self.last_fetches[last].append(chunk)
        self.on[self.lower] -= set(self.rounding.values())
        self.rounded = frozenset(self.rounding.values() if always else ())
        self._count()

    def run(self) -> Program:
        """Return the program."""
        events = self.creating.keys() | self.leaving.keys() | self.ending.keys() | self.fetching.keys()
        events |= {(at + 1) % len(self.slots) for at in self.rounding}
        rows = enumerate(zip(self.trace.moments, self.above.actions, self.slots, strict=True))
        busy = [
            at for at, (moment, own, slots) in rows if own or moment.kind in _CHANGING or events.intersection(slots)
        ]
        for at in busy:  # a first iteration only to see what is where when the next one begins
            self._list(at)
        others = (placed for placed in self.above.start if placed.tier is not self.upper)
        here = (Placed(chunk, tier, chunk not in self.dead) for tier, chunks in self.on.items() for chunk in chunks)
        start = frozenset({*others, *here})
        self._count()
        actions: list[tuple[Action, ...]] = [()] * len(self.slots)
        for at in busy:
            actions[at] = tuple(self._list(at))
        return Program(start, tuple(actions), {**self.above.peak_nbytes, **self.peaks})

    def _list(self, at: int) -> list[Action]:
        """Return the actions of a moment."""
        out = list[Action]()
        moment = self.trace.moments[at]
        before = self.rounding.get((at - 1) % len(self.slots))
        if before is not None and before in self.rounded:
            self._leave(before, self.lower, out)
        first, *later = self.slots[at]
        self._begin(first, out)
        if self.upper is Tier.DEVICE and moment.kind in _WRITING:  # the tier below has it no more
            self._leave(moment.chunk, self.lower, out)
        for action in self.above.actions[at]:
            self._act(action, out)
            if later and needs(action, self.upper):
                self._begin(later.pop(0), out)
        if moment.kind is Kind.CONSUME:
            for tier in self.on:
                if tier is not Tier.DEVICE:
                    self._leave(moment.chunk, tier, [])
        return out

    def _begin(self, slot: int, out: list[Action]) -> None:
        chunks = self.problem.chunks
        for stay in self.leaving.get(slot, ()):
            chunk = chunks[stay.chunk]
            if chunk in self.on[self.upper]:
                self._enter(chunk, self.lower, out)
                out.append(Copy(chunk, self.upper, self.lower))
        for stay in self.ending.get(slot, ()):
            self._leave(chunks[stay.chunk], self.upper, out)
        for stay in self.creating.get(slot, ()) if self.upper is Tier.DEVICE else ():
            self._enter(chunks[stay.chunk], self.upper, out)
        for stay in self.fetching.get(slot, ()):
            chunk = chunks[stay.chunk]
            if chunk in self.rounded:
                self._enter(chunk, self.lower, out)
                out.append(Round(chunk))
            if chunk in self.on[self.lower] and chunk not in self.on[self.upper]:
                self._enter(chunk, self.upper, out)
                out.append(Copy(chunk, self.lower, self.upper))
            if chunk in self.rounded:
                self._leave(chunk, self.lower, out)
        for chunk in self.last_fetches.get(slot, ()):
            self._leave(chunk, self.lower, out)

    def _act(self, action: Action, out: list[Action]) -> None:
        if isinstance(action, Alloc) and action.tier is self.upper:
            self._enter(action.chunk, self.upper, out)
            return
        if isinstance(action, Free) and action.tier is self.upper:
            self._leave(action.chunk, self.upper, out)
            self._leave(action.chunk, self.lower, out)
            return
        if isinstance(action, Copy) and action.target is self.upper:
            self._enter(action.chunk, self.upper, out)
            self._leave(action.chunk, self.lower, out)
        elif isinstance(action, Update) and action.tier in self.on:
            update = self.trace.update(action.group)
            for chunk in update.chunks:
                self._enter(chunk, action.tier, out)
            for chunk in update.writes if action.tier is self.upper else ():
                self._leave(chunk, self.lower, out)
        out.append(action)

    def _count(self) -> None:
        self.nbytes = {tier: self.trace.nbytes(on) for tier, on in self.on.items()}
        self.peaks = dict(self.nbytes)

    def _enter(self, chunk: ChunkId, tier: Tier, out: list[Action]) -> None:
        if chunk not in self.on[tier]:
            self.on[tier].add(chunk)
            self.nbytes[tier] += self.trace.chunk_nbytes[chunk]
            self.peaks[tier] = max(self.peaks[tier], self.nbytes[tier])
            out.append(Alloc(chunk, tier))

    def _leave(self, chunk: ChunkId, tier: Tier, out: list[Action]) -> None:
        if chunk in self.on[tier]:
            self.on[tier].remove(chunk)
            self.nbytes[tier] -= self.trace.chunk_nbytes[chunk]
            out.append(Free(chunk, tier))


def _dead_at_start(trace: Trace) -> set[ChunkId]:
    """Return the chunks without content when an iteration begins: it has consumed it, or each exchange brings it."""
    dead = {chunk for chunk in trace.chunk_nbytes if arrives(chunk, trace)}
    for moment in trace.moments:
        if moment.kind is Kind.CONSUME:
            dead.add(moment.chunk)
        elif moment.kind in _WRITING:
            dead.discard(moment.chunk)
    return dead
