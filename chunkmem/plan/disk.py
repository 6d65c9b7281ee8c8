"""What of HOST goes to DISK, and when. Pure.

[Note: One pair lower] A program for DEVICE and HOST says when each chunk is needed on HOST: where a copy reads or
writes it there, and where its group is updated. Between those moments it may go to DISK, as between its uses on DEVICE
it may go to HOST: the same problem of gaps and stays, one pair of tiers lower. What the program has on HOST is then on
HOST or DISK. Several actions of a moment may each need another chunk, so each has a slot of time of its own.

    DEVICE   |fwd 0|fwd 1| ... |bwd 1|bwd 0|                              the program, as it is
    HOST        w0    w1          g1    g0   |upd 0: w g s|upd 1: w g s|  uses: a slot each
    DISK     --- states 0 ------------------>              <--- written   both ways at once, chunk by chunk
"""

from __future__ import annotations

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
from chunkmem.types import ChunkId, Tier

_LEAD = 1.5
"""Chunks are read this many times earlier than they would have to be, against jitter."""


@dataclass
class _Life:
    """Of one chunk on HOST, as a program has it."""

    uses: list[Use] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """Slots in which its content, which HOST alone has, is given up."""


def least_host_nbytes(trace: Trace, program: Program) -> int:
    """Return the smallest cap on HOST with which a program can be followed if all else goes to DISK, in bytes."""
    return max(_problem(trace, program, _slots(trace, program)).required, default=0)


def too_small(tier: Tier, least_nbytes: int, machine: Machine) -> CapacityError:
    """Return the error for HOST or DISK, of which every plan has at least so many bytes."""
    cap_nbytes = machine.cap_nbytes[tier]
    return CapacityError(
        f"a plan would have {format_nbytes(least_nbytes)} on {tier.name}, which may hold {format_nbytes(cap_nbytes)}; "
        f"raise {cap_key(tier)} to at least {format_nbytes(least_nbytes)} ({least_nbytes} bytes)",
        needed_nbytes=least_nbytes,
        cap_nbytes=cap_nbytes,
        tier=tier,
    )


def offload_to_disk(
    trace: Trace, program: Program, machine: Machine, *, reserve_nbytes: int, states_first: bool = False
) -> Program | None:
    """Return a program in which HOST stays within its cap, as what it need not have at a time is on DISK.

    Args:
        trace: of the step.
        program: for DEVICE and HOST; what HOST has by it is more than its cap.
        machine: with a DISK.
        reserve_nbytes: of HOST, that nothing stays in over a gap: room to read ahead and to write behind.
        states_first: weights and gradients stay for as long as there are states that can go in their place; see
            [Note: States first].

    Returns:
        What it has on DISK may be more than its cap. None: a moment needs more of HOST than there is.
    """
    slots = _slots(trace, program)
    problem = _problem(trace, program, slots)
    budget = [machine.host_nbytes] * len(problem.durations_s)
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

    [Note: States first] A group's update needs its states, weights and gradients at one time, so by their next use
    alone all chunks of some groups leave. Their gradients are written while backward runs, which waits for that, and
    the other groups' states are written later. With states first, what is written follows what is read, both ways at
    once. Bytes are about the same; which is faster, the simulator says.
    """

    def order(start: int, stop: int, chunk: int) -> tuple[int, ...]:
        return (not problem.chunks[chunk].role.is_state, *furthest_next_use(start, stop, chunk))

    return order


def _slots(trace: Trace, program: Program) -> list[range]:
    """Return the slots of each moment: one for each action that needs chunks on HOST, or one."""
    slots, first = [], 0
    for actions in program.actions:
        num = max(1, sum(map(_needs_host, actions)))
        slots.append(range(first, first + num))
        first += num
    return slots


def _needs_host(action: Action) -> bool:
    return isinstance(action, Copy) or (isinstance(action, Update) and action.tier is Tier.HOST)


def _problem(trace: Trace, program: Program, slots: Sequence[range]) -> Problem:
    lives = _lives(trace, program, slots)
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
        trace, tiers, chunks, nbytes, uses, tuple(gaps), tuple(first_gap), required, tuple(durations_s), tier=Tier.HOST
    )


def _lives(trace: Trace, program: Program, slots: Sequence[range]) -> dict[ChunkId, _Life]:
    """Read off a program when it needs which chunk on HOST."""
    lives: dict[ChunkId, _Life] = {}
    on_device = {placed.chunk for placed in program.start if placed.tier is Tier.DEVICE and placed.newest}
    on_host = {placed.chunk for placed in program.start if placed.tier is Tier.HOST}
    for chunk in on_host:
        lives[chunk] = _Life()

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
            at += _needs_host(action)
            if isinstance(action, Copy):
                is_save = action.target is Tier.HOST
                use(action.chunk, at, creates=is_save, writes=is_save)
                (on_host if is_save else on_device).add(action.chunk)
            elif isinstance(action, Free):
                (on_host if action.tier is Tier.HOST else on_device).discard(action.chunk)
            elif isinstance(action, Update) and action.tier is Tier.HOST:
                update = trace.update(action.group)
                for chunk in update.chunks:
                    is_rounded = trace.is_rounded(chunk)
                    use(chunk, at, creates=is_rounded, writes=chunk in update.writes)
                    on_host.add(chunk)
        chunk = moment.chunk
        if moment.kind is Kind.CONSUME:
            if chunk in on_host and chunk not in on_device:
                life = lives[chunk]
                if life.uses and life.uses[-1].start >= before:
                    life.uses[-1].stop = own[-1] + 1  # an update has read it: nothing is written to be used up
                else:
                    life.ends.append(own[-1])
            on_host.discard(chunk)
            on_device.discard(chunk)
        elif moment.kind is Kind.CREATE or _is_updated_on_device(moment, actions):
            on_device.add(chunk)
        before = own[0]
    return lives


def _is_updated_on_device(moment: Moment, actions: Sequence[Action]) -> bool:
    return moment.kind is Kind.UPDATE and Update(moment.chunk.group, Tier.DEVICE) in actions


class _Rewriter:
    """Puts what DISK does into a program's actions."""

    def __init__(self, problem: Problem, stays: Stays, program: Program, slots: Sequence[range]) -> None:
        self.problem = problem
        self.trace = problem.trace
        self.program = program
        self.slots = slots
        n = len(problem.durations_s)
        self.leaving, self.ending, self.fetching = stays.by_moment(n)
        there = {placed.chunk for placed in program.start if placed.tier is Tier.HOST}
        crossing = {stay.chunk for stay in stays.passing if stay.freed >= n or stay.issued < 0}
        staying = {problem.chunks[at] for at in stays.resident | crossing}
        self.on_host = staying & there
        self.on_disk = there - self.on_host
        self.on_disk |= {chunk for chunk in there - staying | self._homes(stays) if chunk in there}
        self.nbytes = {Tier.HOST: 0, Tier.DISK: 0}
        self.peaks = dict(self.nbytes)

    def _homes(self, stays: Stays) -> set[ChunkId]:
        """Return the chunks that nothing writes, and that do not stay on HOST: DISK has a copy all the time."""
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
        start = frozenset(
            {placed for placed in self.program.start if placed.tier is not Tier.HOST}
            | {Placed(chunk, Tier.HOST, True) for chunk in self.on_host}
            | {Placed(chunk, Tier.DISK, True) for chunk in self.on_disk}
        )
        for tier, chunks in ((Tier.HOST, self.on_host), (Tier.DISK, self.on_disk)):
            self.nbytes[tier] = sum(self.trace.chunk_nbytes[chunk] for chunk in chunks)
        self.peaks = dict(self.nbytes)
        actions = tuple(tuple(self._list(at)) for at in range(len(self.slots)))
        return Program(start, actions, self.peaks[Tier.HOST], self.peaks[Tier.DISK])

    def _list(self, at: int) -> list[Action]:
        """Return the actions of a moment."""
        out = list[Action]()
        first, *later = self.slots[at]
        self._begin(first, out)
        for action in self.program.actions[at]:
            self._act(action, out)
            if _needs_host(action) and later:
                self._begin(later.pop(0), out)
        moment = self.trace.moments[at]
        if moment.kind is Kind.CONSUME:
            for tier in (Tier.HOST, Tier.DISK):
                self._leave(moment.chunk, tier, [])
        return out

    def _begin(self, slot: int, out: list[Action]) -> None:
        chunks = self.problem.chunks
        for stay in self.leaving.get(slot, ()):
            chunk = chunks[stay.chunk]
            if chunk in self.on_host:
                self._enter(chunk, Tier.DISK, out)
                out.append(Copy(chunk, Tier.HOST, Tier.DISK))
        for stay in self.ending.get(slot, ()):
            self._leave(chunks[stay.chunk], Tier.HOST, out)
        for stay in self.fetching.get(slot, ()):
            chunk = chunks[stay.chunk]
            if chunk in self.on_disk and chunk not in self.on_host:
                self._enter(chunk, Tier.HOST, out)
                out.append(Copy(chunk, Tier.DISK, Tier.HOST))

    def _act(self, action: Action, out: list[Action]) -> None:
        if isinstance(action, Alloc) and action.tier is Tier.HOST:
            self._enter(action.chunk, Tier.HOST, out)
            return
        if isinstance(action, Free) and action.tier is Tier.HOST:
            self._leave(action.chunk, Tier.HOST, out)
            self._leave(action.chunk, Tier.DISK, out)
            return
        if isinstance(action, Copy) and action.target is Tier.HOST:
            self._enter(action.chunk, Tier.HOST, out)
            self._leave(action.chunk, Tier.DISK, out)
        elif isinstance(action, Update) and action.tier is Tier.HOST:
            update = self.trace.update(action.group)
            for chunk in update.chunks:
                self._enter(chunk, Tier.HOST, out)
            for chunk in update.writes:
                self._leave(chunk, Tier.DISK, out)
        out.append(action)

    def _on(self, tier: Tier) -> set[ChunkId]:
        return self.on_host if tier is Tier.HOST else self.on_disk

    def _enter(self, chunk: ChunkId, tier: Tier, out: list[Action]) -> None:
        if chunk not in self._on(tier):
            self._on(tier).add(chunk)
            self.nbytes[tier] += self.trace.chunk_nbytes[chunk]
            self.peaks[tier] = max(self.peaks[tier], self.nbytes[tier])
            out.append(Alloc(chunk, tier))

    def _leave(self, chunk: ChunkId, tier: Tier, out: list[Action]) -> None:
        if chunk in self._on(tier):
            self._on(tier).remove(chunk)
            self.nbytes[tier] -= self.trace.chunk_nbytes[chunk]
            out.append(Free(chunk, tier))
