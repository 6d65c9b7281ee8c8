"""What of HOST goes to DISK, and when; of any tier, to the one below it. Pure.

A program for DEVICE and HOST says when each chunk is needed on HOST: where a copy reads or writes it there, and where
its group is updated. Between those moments it may go to DISK, as between its uses on DEVICE it may go to HOST: the same
problem of gaps and stays, one pair of tiers lower. What the program has on HOST is then on HOST or DISK. Several
actions of a moment may each need another chunk, so each has a slot of time of its own.

    DEVICE   |fwd 0|fwd 1| ... |bwd 1|bwd 0|                              the program, as it is
    HOST        w0    w1          g1    g0   |upd 0: w g s|upd 1: w g s|  uses: a slot each
    DISK     --- states 0 ------------------>              <--- written   both ways at once, chunk by chunk

Decided in ADR 40.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from chunkmem.errors import CapacityError
from chunkmem.plan.choose import Order, furthest_next_use, sweep
from chunkmem.plan.gaps import Gap, Problem, Use, gaps_of, required_nbytes
from chunkmem.plan.intervals import Stays, find_stays, free_room, linger, prefetch
from chunkmem.plan.machine import Machine, cap_key
from chunkmem.plan.model import Action, Alloc, Copy, Free, Placed, Update
from chunkmem.plan.program import Program
from chunkmem.sizes import format_nbytes
from chunkmem.trace.model import Kind, Moment, Trace
from chunkmem.types import PLACE, TIERS, ChunkId, Tier

_LEAD = 1.5
"""Chunks are read this many times earlier than they would have to be, against jitter."""


@dataclass
class _Life:
    """Of one chunk on a tier, as a program has it."""

    uses: list[Use] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """Slots in which its content, which no tier above has, is given up."""


def least_nbytes(trace: Trace, program: Program, *, tier: Tier = Tier.HOST) -> int:
    """Return the smallest cap on a tier with which a program can be followed if all else goes below it, in bytes."""
    return max(_problem(trace, program, _slots(program, tier), tier).required, default=0)


def too_small(tier: Tier, nbytes: int, machine: Machine) -> CapacityError:
    """Return the error for a tier, of which every plan has at least so many bytes."""
    cap_nbytes = machine.cap_nbytes[tier]
    return CapacityError(
        f"a plan would have {format_nbytes(nbytes)} on {tier.name}, which may hold {format_nbytes(cap_nbytes)}; "
        f"raise {cap_key(tier)} to at least {format_nbytes(nbytes)} ({nbytes} bytes)",
        needed_nbytes=nbytes,
        cap_nbytes=cap_nbytes,
        tier=tier,
    )


def offload(
    trace: Trace,
    program: Program,
    machine: Machine,
    *,
    tier: Tier = Tier.HOST,
    reserve_nbytes: int,
    states_first: bool = False,
) -> Program | None:
    """Return a program in which a tier stays within its cap, as what it need not have at a time is on the one below.

    Args:
        trace: of the step.
        program: for this tier and those above; what it has here is more than the cap.
        machine: with a tier below.
        tier: which one.
        reserve_nbytes: of it, that nothing stays in over a gap: room to read ahead and to write behind.
        states_first: weights and gradients stay for as long as there are states that can go in their place; see
            `_states_first`.

    Returns:
        What it has below may be more than the cap there. None: a moment needs more of `tier` than there is.
    """
    slots = _slots(program, tier)
    problem = _problem(trace, program, slots, tier)
    budget = [machine.cap_nbytes[tier]] * len(problem.durations_s)
    left = [have - need for have, need in zip(budget, problem.required, strict=True)]
    if min(left, default=0) < 0:
        return None
    order = _states_first(problem) if states_first else furthest_next_use
    kept = sweep(problem, [max(0, nbytes - reserve_nbytes) for nbytes in left], order)
    stays = find_stays(problem, kept)
    free = free_room(problem, stays, budget)
    prefetch(problem, stays, free, machine, lead=_LEAD)
    linger(problem, stays, free, machine)
    return _Rewriter(problem, stays, program, slots).run()


def _states_first(problem: Problem) -> Order:
    """Return the order in which states leave before all else, and of either what is needed last.

    A group's update needs its states, weights and gradients at one time, so by their next use
    alone all chunks of some groups leave. Their gradients are written while backward runs, which waits for that, and
    the other groups' states are written later. With states first, what is written follows what is read, both ways at
    once. Bytes are about the same; which is faster, the simulator says.
    """

    def order(start: int, stop: int, chunk: int) -> tuple[int, ...]:
        return (not problem.chunks[chunk].role.is_state, *furthest_next_use(start, stop, chunk))

    return order


def _slots(program: Program, tier: Tier) -> list[range]:
    """Return the slots of each moment: one for each action that needs chunks on a tier, or one."""
    slots, first = [], 0
    for actions in program.actions:
        num = max(1, sum(_needs(action, tier) for action in actions))
        slots.append(range(first, first + num))
        first += num
    return slots


def _needs(action: Action, tier: Tier) -> bool:
    if isinstance(action, Copy):
        return tier in (action.source, action.target)
    return isinstance(action, Update) and action.tier is tier


def _problem(trace: Trace, program: Program, slots: Sequence[range], tier: Tier) -> Problem:
    lives = _lives(trace, program, slots, tier)
    chunks = tuple(sorted(lives, key=lambda chunk: (chunk.group, chunk.role)))
    nbytes = tuple(trace.chunk_nbytes[chunk] for chunk in chunks)
    # A moment's actions are issued, and then it runs.
    durations_s = [0.0] * slots[-1].stop if slots else []
    for moment, own in zip(trace.moments, slots, strict=True):
        durations_s[own[-1]] = moment.duration_s
    n = len(durations_s)
    gaps: list[Gap] = []
    first_gap = []
    for at, chunk in enumerate(chunks):
        first_gap.append(len(gaps))
        life = lives[chunk]
        gaps += gaps_of(at, life.uses, (), life.ends, n) if life.uses else ()
    uses = tuple(tuple(lives[chunk].uses) for chunk in chunks)
    tiers: Mapping[int, Tier] = {}
    required = required_nbytes(n, nbytes, uses, ())
    return Problem(
        trace, tiers, chunks, nbytes, uses, tuple(gaps), tuple(first_gap), required, tuple(durations_s), tier=tier
    )


def _lives(trace: Trace, program: Program, slots: Sequence[range], tier: Tier) -> dict[ChunkId, _Life]:
    """Read off a program when it needs which chunk on a tier."""
    lives: dict[ChunkId, _Life] = {}
    where = defaultdict[ChunkId, set[Tier]](set)
    """The tiers that have the content of a chunk, by the program."""
    for placed in program.start:
        if placed.tier is tier:
            lives[placed.chunk] = _Life()
        if placed.newest:
            where[placed.chunk].add(placed.tier)

    def use(chunk: ChunkId, at: int, *, creates: bool = False, writes: bool = False) -> None:
        uses = lives.setdefault(chunk, _Life()).uses
        if uses and uses[-1].start == at:
            uses[-1].writes |= writes
        else:
            uses.append(Use(at, at + 1, creates=creates, writes=writes))

    before = 0
    """The first slot of the moment before."""
    for moment, actions, own in zip(trace.moments, program.actions, slots, strict=True):
        at = own[0] - 1
        for action in actions:
            at += _needs(action, tier)
            if isinstance(action, Copy):
                is_save = action.target is tier
                if _needs(action, tier):
                    use(action.chunk, at, creates=is_save, writes=is_save)
                where[action.chunk].add(action.target)
            elif isinstance(action, Free):
                where[action.chunk].discard(action.tier)
            elif isinstance(action, Update) and action.tier is tier:
                update = trace.update(action.group)
                for chunk in update.chunks:
                    is_rounded = trace.is_rounded(chunk)
                    use(chunk, at, creates=is_rounded, writes=chunk in update.writes)
                    where[chunk].add(tier)
        chunk = moment.chunk
        if moment.kind is Kind.CONSUME:
            tiers = where.pop(chunk, set())
            if tier in tiers and tiers.isdisjoint(TIERS[: PLACE[tier]]):
                life = lives[chunk]
                if life.uses and life.uses[-1].start >= before:
                    life.uses[-1].stop = own[-1] + 1  # an update has read it: nothing is written to be used up
                else:
                    life.ends.append(own[-1])
        elif moment.kind is Kind.CREATE or _is_updated_on_device(moment, actions):
            where[chunk].add(Tier.DEVICE)
        before = own[0]
    return lives


def _is_updated_on_device(moment: Moment, actions: Sequence[Action]) -> bool:
    return moment.kind is Kind.UPDATE and Update(moment.chunk.group, Tier.DEVICE) in actions


class _Rewriter:
    """Puts what the lower tier does into a program's actions."""

    def __init__(self, problem: Problem, stays: Stays, program: Program, slots: Sequence[range]) -> None:
        self.problem = problem
        self.upper, self.lower = problem.tier, problem.below
        self.trace = problem.trace
        self.program = program
        self.slots = slots
        n = len(problem.durations_s)
        self.leaving, self.ending, self.fetching = stays.by_moment(n)
        there = {placed.chunk for placed in program.start if placed.tier is self.upper}
        crossing = {stay.chunk for stay in stays.passing if stay.freed >= n or stay.issued < 0}
        staying = {problem.chunks[at] for at in stays.resident | crossing}
        self.on = {self.upper: there & staying, self.lower: (there - staying) | (there & self._homes(stays))}
        self._count()

    def _homes(self, stays: Stays) -> set[ChunkId]:
        """Return the chunks that nothing writes, and that do not stay: the lower tier has a copy all the time."""
        problem = self.problem
        return {
            problem.chunks[at]
            for at, chain in enumerate(problem.uses)
            if at not in stays.resident and not any(use.writes for use in chain)
        }

    def run(self) -> Program:
        """Return the program."""
        for at in range(len(self.slots)):  # a first iteration only to see what is where when the next one begins
            self._list(at)
        others = (placed for placed in self.program.start if placed.tier is not self.upper)
        start = {*others, *(Placed(chunk, tier, True) for tier, chunks in self.on.items() for chunk in chunks)}
        self._count()
        actions = tuple(tuple(self._list(at)) for at in range(len(self.slots)))
        return Program(frozenset(start), actions, {**self.program.peak_nbytes, **self.peaks})

    def _list(self, at: int) -> list[Action]:
        """Return the actions of a moment."""
        out = list[Action]()
        first, *later = self.slots[at]
        self._begin(first, out)
        for action in self.program.actions[at]:
            self._act(action, out)
            if _needs(action, self.upper) and later:
                self._begin(later.pop(0), out)
        moment = self.trace.moments[at]
        if moment.kind is Kind.CONSUME:
            for tier in self.on:
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
        for stay in self.fetching.get(slot, ()):
            chunk = chunks[stay.chunk]
            if chunk in self.on[self.lower] and chunk not in self.on[self.upper]:
                self._enter(chunk, self.upper, out)
                out.append(Copy(chunk, self.lower, self.upper))

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
        elif isinstance(action, Update) and action.tier is self.upper:
            update = self.trace.update(action.group)
            for chunk in update.chunks:
                self._enter(chunk, self.upper, out)
            for chunk in update.writes:
                self._leave(chunk, self.lower, out)
        out.append(action)

    def _count(self) -> None:
        self.nbytes = {tier: sum(self.trace.chunk_nbytes[chunk] for chunk in on) for tier, on in self.on.items()}
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
