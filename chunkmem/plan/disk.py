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
from collections.abc import Sequence

from chunkmem.data.errors import CapacityError
from chunkmem.data.sizes import format_nbytes
from chunkmem.data.trace import Kind, Moment, Trace
from chunkmem.data.types import PLACE, TIERS, ChunkId, Tier, neighbor
from chunkmem.plan.choose import Order, furthest_next_use, sweep
from chunkmem.plan.gaps import Life, Problem, Use, problem_of
from chunkmem.plan.intervals import find_stays, free_room, linger, prefetch
from chunkmem.plan.machine import Machine, cap_key
from chunkmem.plan.model import Action, Copy, Free, Update
from chunkmem.plan.program import Emitter, Program, needs

_READ_LEAD = 1.5
"""Each read of DISK is planned to take this many times its own duration, as slack against jitter."""


def least_nbytes(trace: Trace, program: Program, *, tier: Tier = Tier.HOST) -> int:
    """Return the smallest cap on a tier with which a program can be followed if all else goes below it, in bytes."""
    return max(_problem(trace, program, _slots(program, tier), tier, tier).required, default=0)


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
    problem = _problem(trace, program, slots, tier, neighbor(tier, machine.tiers))
    budget = [machine.cap_nbytes[tier]] * len(problem.durations_s)
    left = [have - need for have, need in zip(budget, problem.required, strict=True)]
    if min(left, default=0) < 0:
        return None
    order = _states_first(problem) if states_first else furthest_next_use
    kept = sweep(problem, [max(0, nbytes - reserve_nbytes) for nbytes in left], order)
    stays = find_stays(problem, kept)
    free = free_room(problem, stays, budget)
    prefetch(problem, stays, free, machine, lead=_READ_LEAD)
    linger(problem, stays, free, machine)
    return Emitter(problem, stays, program, slots).run()


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
        num = max(1, sum(needs(action, tier) for action in actions))
        slots.append(range(first, first + num))
        first += num
    return slots


def _problem(trace: Trace, program: Program, slots: Sequence[range], tier: Tier, below: Tier) -> Problem:
    # A moment's actions are issued, and then it runs.
    durations_s = [0.0] * slots[-1].stop if slots else []
    for moment, own in zip(trace.moments, slots, strict=True):
        durations_s[own[-1]] = moment.duration_s
    lives = _lives(trace, program, slots, tier)
    return problem_of(trace, {}, lives, tuple(durations_s), tier=tier, below=below)


def _lives(trace: Trace, program: Program, slots: Sequence[range], tier: Tier) -> dict[ChunkId, Life]:
    """Read off a program when it needs which chunk on a tier."""
    lives: dict[ChunkId, Life] = {}
    where = defaultdict[ChunkId, set[Tier]](set)
    """The tiers that have the content of a chunk, by the program."""
    for placed in program.start:
        if placed.tier is tier:
            lives[placed.chunk] = Life()
        if placed.newest:
            where[placed.chunk].add(placed.tier)

    def use(chunk: ChunkId, at: int, *, creates: bool = False, writes: bool = False) -> None:
        uses = lives.setdefault(chunk, Life()).uses
        if uses and uses[-1].start == at:
            uses[-1].writes |= writes
        else:
            uses.append(Use(at, at + 1, creates=creates, writes=writes))

    before = 0
    """The first slot of the moment before."""
    for moment, actions, own in zip(trace.moments, program.actions, slots, strict=True):
        at = own[0] - 1
        for action in actions:
            at += needs(action, tier)
            if isinstance(action, Copy):
                is_save = action.target is tier
                if needs(action, tier):
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
