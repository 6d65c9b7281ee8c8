"""Mutants of valid plans by named operators, over a thousand: `simulate` has to refuse every one.

That a mutant is wrong is derived here from [Note: What a plan means] alone, without the planner and the simulator:
from what an action or a moment touches. Two neighbours clash if their order matters to one of them:

* both touch a replica, and one of them writes it, or gives or takes its slab;
* one frees a replica that the other's write would make stale;
* one is an operation, the other a Wait that holds it back, or that waits for it;
* one frees what the other needs as room, by the cap;
* one belongs to the other's moment: a RELEASE lets go of what is freed, an UPDATE is what an Update does.

An Update on DEVICE is the moment's own operation, so where it stands in its moment's list means nothing. Nor does the
order of two Waits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import pytest

from chunkmem.data.errors import PlanError
from chunkmem.data.trace import Kind, Moment, Trace
from chunkmem.data.types import ChunkId, Role, Tier
from chunkmem.plan.choose import furthest_next_use, sweep
from chunkmem.plan.gaps import budgets, find_gaps
from chunkmem.plan.intervals import find_stays, free_room, prefetch
from chunkmem.plan.machine import Machine, host_links
from chunkmem.plan.model import Action, Alloc, Copy, Free, Lane, Plan, Update, Wait
from chunkmem.plan.program import emit
from chunkmem.plan.simulate import simulate, with_waits
from tests.helpers.traces import random_trace

DEVICE, HOST = Tier.DEVICE, Tier.HOST
OTHER = {DEVICE: HOST, HOST: DEVICE}
SEED = 20240229
NUM_PLANS = 60
NUM_MUTANTS = 70
"""By each operator."""

Replica = tuple[ChunkId, Tier]
Mutant = tuple[str, Plan]


# The pool.


@dataclass(frozen=True)
class Subject:
    plan: Plan
    trace: Trace


@cache
def pool() -> tuple[Subject, ...]:
    """Plans under caps that make chunks move, with updates on either tier, on both kinds of machine."""
    rng = random.Random(SEED)
    found: list[Subject] = []
    while len(found) < NUM_PLANS:
        trace = random_trace(
            rng,
            num_groups=rng.randint(2, 5),
            uniform=rng.random() < 0.7,
            max_held=rng.randint(1, 2),
            micro_batches=rng.randint(1, 2),
            max_non_model_nbytes=rng.choice((0, 500)),
        )
        subject = Subject(make_subject(rng, trace), trace)
        if sum(isinstance(action, Copy) for actions in subject.plan.actions for action in actions) >= 4:
            found.append(subject)
    return tuple(found)


def make_subject(rng: random.Random, trace: Trace) -> Plan:
    """A plan whose updates are wherever the dice say: `make_plan` would leave few on DEVICE under such caps."""
    tiers = rng.choice(((DEVICE,), (HOST,), (DEVICE, HOST)))
    updates = [moment.chunk.group for moment in trace.moments if moment.kind is Kind.UPDATE]
    problem = find_gaps(trace, {group: rng.choice(tiers) for group in updates})
    charges = rng.random() < 0.5
    beside = [moment.non_model_peak_nbytes * charges for moment in trace.moments]
    smallest = max(need + peak for need, peak in zip(problem.required, beside, strict=True))
    machine = Machine(
        device_nbytes=smallest + int(rng.choice((0.0, 0.2, 0.4)) * sum(problem.nbytes)),
        host_nbytes=2 * sum(problem.nbytes),
        links=host_links(h2d_Bps=10 ** rng.uniform(4, 7), d2h_Bps=10 ** rng.uniform(4, 7)),
        charges_non_model=charges,
        one_processor=rng.random() < 0.5,
    )
    budget = budgets(trace, machine)
    room = [have - need for have, need in zip(budget, problem.required, strict=True)]
    stays = find_stays(problem, sweep(problem, room, furthest_next_use))
    prefetch(problem, stays, free_room(problem, stays, budget), machine, lead=2.0)
    program = emit(problem, stays, home_residents=rng.random() < 0.5)
    plan = Plan(trace.digest, machine, program.start, program.actions, problem.update_tiers)
    return with_waits(plan, trace)[0]


def with_lists(plan: Plan, lists: dict[int, list[Action]]) -> Plan:
    """The plan with other lists at some moments."""
    return replace(plan, actions=tuple(tuple(lists.get(m, actions)) for m, actions in enumerate(plan.actions)))


# What is touched.


@dataclass(frozen=True)
class Touch:
    """What an action or a moment does to replicas."""

    slabs: frozenset[Replica] = frozenset()
    """Given or taken."""
    reads: frozenset[Replica] = frozenset()
    writes: frozenset[Replica] = frozenset()


def touch_of_update(subject: Subject, group: int, tier: Tier) -> Touch:
    chunks = subject.trace.update(group).chunks
    return Touch(
        reads=frozenset((c, tier) for c in chunks if c.role is Role.GRAD),
        writes=frozenset((c, tier) for c in chunks if c.role is not Role.GRAD),
    )


def touch_of_moment(subject: Subject, moment: Moment) -> Touch:
    here = frozenset({(moment.chunk, DEVICE)})
    if moment.kind is Kind.HOLD:
        return Touch(reads=here)
    if moment.kind in (Kind.CREATE, Kind.WRITE):
        return Touch(writes=here)
    if moment.kind is Kind.CONSUME:
        return Touch(writes=here, slabs=frozenset({(moment.chunk, HOST)}))
    if moment.kind is Kind.UPDATE and subject.plan.update_tiers[moment.chunk.group] is DEVICE:
        return touch_of_update(subject, moment.chunk.group, DEVICE)
    return Touch()


def touch_of_action(subject: Subject, action: Action) -> Touch:
    if isinstance(action, Alloc | Free):
        return Touch(slabs=frozenset({(action.chunk, action.tier)}))
    if isinstance(action, Copy):
        source, target = (action.chunk, action.source), (action.chunk, action.target)
        return Touch(reads=frozenset({source}), writes=frozenset({target}))
    if isinstance(action, Update) and action.tier is HOST:
        return touch_of_update(subject, action.group, HOST)
    return Touch()


def touches_clash(one: Touch, other: Touch) -> bool:
    for a, b in ((one, other), (other, one)):
        if a.slabs & (b.slabs | b.reads | b.writes) or a.writes & (b.reads | b.writes):
            return True
    return False


def makes_stale(freed: Action, touch: Touch) -> bool:
    return isinstance(freed, Free) and (freed.chunk, OTHER[freed.tier]) in touch.writes


def lane_of(action: Action) -> Lane | None:
    """The lane an action runs on, if it is an operation of its own."""
    if isinstance(action, Copy) or (isinstance(action, Update) and action.tier is HOST):
        return action.lane
    return None


# What is where, and how much.


@dataclass(frozen=True)
class Point:
    """Just before an action, or (`at` past the last one) before its moment."""

    moment: int
    at: int
    newest: frozenset[Replica]
    held: frozenset[ChunkId]
    used_nbytes: dict[Tier, int]
    num_issued: dict[Lane, int]


def walk(subject: Subject) -> Iterator[Point]:
    plan, trace = subject.plan, subject.trace
    newest = {(placed.chunk, placed.tier) for placed in plan.start if placed.newest}
    held: set[ChunkId] = set()
    slabs = {(placed.chunk, placed.tier) for placed in plan.start}
    num_issued = dict.fromkeys(Lane, 0)

    def point(at: int) -> Point:
        used = {tier: sum(trace.chunk_nbytes[c] for c, t in slabs if t is tier) for tier in (DEVICE, HOST)}
        return Point(index, at, frozenset(newest), frozenset(held), used, dict(num_issued))

    for index, moment in enumerate(trace.moments):
        if moment.kind is Kind.RELEASE:
            held.remove(moment.chunk)
        for at, action in enumerate(plan.actions[index]):
            yield point(at)
            if isinstance(action, Alloc):
                slabs.add((action.chunk, action.tier))
            elif isinstance(action, Free):
                slabs.remove((action.chunk, action.tier))
                newest.discard((action.chunk, action.tier))
            elif isinstance(action, Copy):
                newest.add((action.chunk, action.target))
            if (lane := lane_of(action)) is not None:
                num_issued[lane] += 1
        yield point(len(plan.actions[index]))
        num_issued[Lane.COMPUTE] += 1
        if moment.kind is Kind.HOLD:
            held.add(moment.chunk)
        elif moment.kind is Kind.CREATE:
            newest.add((moment.chunk, DEVICE))
        elif moment.kind is Kind.CONSUME:
            newest -= {(moment.chunk, DEVICE), (moment.chunk, HOST)}
            slabs.discard((moment.chunk, HOST))


@cache
def points(number: int) -> tuple[Point, ...]:
    """Those of the plan of this number in the pool."""
    return tuple(walk(pool()[number]))


# Clashes of neighbours.


def actions_clash(subject: Subject, before: Point, first: Action, second: Action) -> bool:
    """Tell whether two actions of one list, of which `before` is the point before the first, may not change places."""
    if isinstance(first, Wait) and isinstance(second, Wait):
        return False
    one, other = touch_of_action(subject, first), touch_of_action(subject, second)
    if touches_clash(one, other) or makes_stale(first, other):
        return True
    if isinstance(first, Wait):
        return lane_of(second) is first.lane
    if isinstance(second, Wait):
        lane = lane_of(first)
        return lane is second.on and second.count == before.num_issued[second.on] + 1
    if isinstance(first, Free) and isinstance(second, Alloc) and first.tier is second.tier:
        moment = subject.trace.moments[before.moment]
        machine = subject.plan.machine
        nbytes = before.used_nbytes[second.tier] + subject.trace.chunk_nbytes[second.chunk]
        if second.tier is HOST:
            return nbytes > machine.host_nbytes
        return nbytes + machine.charges_non_model * moment.non_model_peak_nbytes > machine.device_nbytes
    return False


def moment_needs(subject: Subject, action: Action, index: int) -> bool:
    """Tell whether an action of the list of moment `index` may not come after that moment."""
    if isinstance(action, Update):
        return True
    if isinstance(action, Wait):
        return action.lane is Lane.COMPUTE
    touch = touch_of_moment(subject, subject.trace.moments[index])
    return touches_clash(touch_of_action(subject, action), touch) or makes_stale(action, touch)


def needs_moment(subject: Subject, action: Action, before: Point) -> bool:
    """Tell whether an action of the list after a moment may not come before it; `before` is the point just before."""
    moment, following = subject.trace.moments[before.moment : before.moment + 2]
    if isinstance(action, Update):
        return True
    if isinstance(action, Wait):
        return action.on is Lane.COMPUTE and action.count == before.moment + 1
    if following.kind is Kind.RELEASE and action == Free(following.chunk, DEVICE):
        return True
    if moment.kind is Kind.CONSUME and action == Free(moment.chunk, DEVICE) and (moment.chunk, HOST) in before.newest:
        return False  # the content that is about to be used up is on HOST too
    return touches_clash(touch_of_action(subject, action), touch_of_moment(subject, moment))


# The operators: each yields all its mutants of one plan.


def delete(kind: type[Action]) -> Callable[[int], Iterator[Mutant]]:
    def operator(number: int) -> Iterator[Mutant]:
        plan = pool()[number].plan
        for m, actions in enumerate(plan.actions):
            for at, action in enumerate(actions):
                if isinstance(action, kind):
                    yield f"moment {m}: {action}", with_lists(plan, {m: [*actions[:at], *actions[at + 1 :]]})

    return operator


def swap_within_a_moment(number: int) -> Iterator[Mutant]:
    subject = pool()[number]
    for point in points(number):
        actions = subject.plan.actions[point.moment]
        if point.at + 1 < len(actions):
            first, second = actions[point.at : point.at + 2]
            if actions_clash(subject, point, first, second):
                swapped = [*actions[: point.at], second, first, *actions[point.at + 2 :]]
                text = f"moment {point.moment}: {first} and {second}"
                yield text, with_lists(subject.plan, {point.moment: swapped})


def borders(number: int) -> Iterator[tuple[Point, tuple[Action, ...], tuple[Action, ...]]]:
    """Each moment but the last: the point just before it, its actions, and those of the next."""
    lists = pool()[number].plan.actions
    for point in points(number):
        if point.at == len(lists[point.moment]) and point.moment + 1 < len(lists):
            yield point, lists[point.moment], lists[point.moment + 1]


def swap_with_a_moment(number: int) -> Iterator[Mutant]:
    subject = pool()[number]
    for point, here, there in borders(number):
        m = point.moment
        if here and moment_needs(subject, here[-1], m):
            yield f"{here[-1]} after moment {m}", with_lists(subject.plan, {m: [*here[:-1]], m + 1: [here[-1], *there]})
        if there and needs_moment(subject, there[0], point):
            yield f"{there[0]} before moment {m}", with_lists(subject.plan, {m: [*here, there[0]], m + 1: [*there[1:]]})


def swap_across_a_moment(number: int) -> Iterator[Mutant]:
    """The last action before a moment and the first after it."""
    subject = pool()[number]
    for point, here, there in borders(number):
        m = point.moment
        if not here or not there or (isinstance(here[-1], Wait) and isinstance(there[0], Wait)):
            continue  # of two Waits, the second may wait for all that the first does
        if moment_needs(subject, here[-1], m) or needs_moment(subject, there[0], point):
            swapped = {m: [*here[:-1], there[0]], m + 1: [here[-1], *there[1:]]}
            yield f"moment {m}: {here[-1]} and {there[0]}", with_lists(subject.plan, swapped)


def lower_the_cap(tier: Tier) -> Callable[[int], Iterator[Mutant]]:
    def operator(number: int) -> Iterator[Mutant]:
        plan, trace = pool()[number].plan, pool()[number].trace
        machine, peak = plan.machine, 0
        for point in points(number):
            actions = plan.actions[point.moment]
            # What the moment before has left may still be there when a list begins: activations come beside what is
            # allocated, and beside what is there when the moment runs.
            allocated = point.at > 0 and isinstance(last := actions[point.at - 1], Alloc) and last.tier is tier
            if allocated or point.at == len(actions):
                charged = tier is DEVICE and machine.charges_non_model
                charge = trace.moments[point.moment].non_model_peak_nbytes if charged else 0
                peak = max(peak, point.used_nbytes[tier] + charge)
        for nbytes in {n for n in trace.chunk_nbytes.values() if n <= peak}:
            low = {"device_nbytes": peak - nbytes} if tier is DEVICE else {"host_nbytes": peak - nbytes}
            yield f"{nbytes} bytes below {peak}", replace(plan, machine=replace(machine, **low))

    return operator


def free_the_only_newest(number: int) -> Iterator[Mutant]:
    plan = pool()[number].plan
    for point in points(number):
        for chunk, tier in sorted(point.newest, key=str):
            if (chunk, OTHER[tier]) not in point.newest and not (tier is DEVICE and chunk in point.held):
                yield insert(plan, point, Free(chunk, tier))


def free_a_held(number: int) -> Iterator[Mutant]:
    plan = pool()[number].plan
    for point in points(number):
        for chunk in sorted(point.held, key=str):
            yield insert(plan, point, Free(chunk, DEVICE))


def insert(plan: Plan, point: Point, action: Action) -> Mutant:
    actions = plan.actions[point.moment]
    text = f"{action} before action {point.at} of moment {point.moment}"
    return text, with_lists(plan, {point.moment: [*actions[: point.at], action, *actions[point.at :]]})


def copy_too_early(number: int) -> Iterator[Mutant]:
    """A Copy, with its Alloc, before the write whose outcome it should carry; only that is wrong, nothing races."""
    subject = pool()[number]
    plan, trace = subject.plan, subject.trace
    for m, actions in enumerate(plan.actions):
        for copy in actions:
            if not isinstance(copy, Copy):
                continue
            source = copy.chunk, copy.source
            written = [w for w in range(m) if source in written_at(subject, trace.moments[w])]
            if written:
                lists = {m: list(actions), written[-1]: list(plan.actions[written[-1]])}
                lists[m].remove(copy)
                moved: list[Action] = [copy]
                if (alloc := Alloc(copy.chunk, copy.target)) in lists[m]:
                    lists[m].remove(alloc)
                    moved.insert(0, alloc)
                updates = [at for at, a in enumerate(lists[written[-1]]) if isinstance(a, Update)]
                before = updates[0] if updates else len(lists[written[-1]])
                lists[written[-1]][before:before] = moved
                yield f"{copy} of moment {m} in moment {written[-1]}", in_turn(with_lists(plan, lists))


def in_turn(plan: Plan) -> Plan:
    """The plan with every operation waiting for all before it, and no other Waits."""
    lanes = {Lane.COMPUTE, *(lane for actions in plan.actions for a in actions if (lane := lane_of(a)) is not None)}
    num_issued = {lane: 0 for lane in Lane if lane in lanes}
    lists = []

    def issue(lane: Lane) -> list[Action]:
        waits: list[Action] = [Wait(lane, on, count) for on, count in num_issued.items() if on is not lane]
        num_issued[lane] += 1
        return waits

    for actions in plan.actions:
        waiting: list[Action] = []
        for action in actions:
            lane = lane_of(action)
            if lane is not None:
                waiting += issue(lane)
            if not isinstance(action, Wait):
                waiting.append(action)
        lists.append((*waiting, *issue(Lane.COMPUTE)))
    return replace(plan, actions=tuple(lists))


def wait_too_early(number: int) -> Iterator[Mutant]:
    """A Wait before the operation that it waits for."""
    plan = pool()[number].plan
    issued: dict[tuple[Lane, int], tuple[int, int]] = {}
    """Where an operation of this iteration stands, by lane and number: (moment, index)."""
    for point in points(number):
        actions = plan.actions[point.moment]
        lane = lane_of(actions[point.at]) if point.at < len(actions) else Lane.COMPUTE
        if lane is not None:
            issued[lane, point.num_issued[lane] + 1] = point.moment, point.at
    for m, actions in enumerate(plan.actions):
        for at, wait in enumerate(actions):
            if isinstance(wait, Wait) and wait.count > 0:
                lists = {m: [*actions[:at], *actions[at + 1 :]]}
                to, before = issued[wait.on, wait.count]
                lists.setdefault(to, list(plan.actions[to])).insert(before, wait)
                yield f"{wait} of moment {m} in moment {to}", with_lists(plan, lists)


def written_at(subject: Subject, moment: Moment) -> frozenset[Replica]:
    if moment.kind is Kind.UPDATE:
        group = moment.chunk.group
        return touch_of_update(subject, group, subject.plan.update_tiers[group]).writes
    return touch_of_moment(subject, moment).writes if moment.kind is not Kind.CONSUME else frozenset()


def copy_backward(number: int) -> Iterator[Mutant]:
    plan = pool()[number].plan
    for m, actions in enumerate(plan.actions):
        for at, copy in enumerate(actions):
            if isinstance(copy, Copy):
                wrong = Copy(copy.chunk, copy.target, copy.source)
                yield f"moment {m}: {copy}", with_lists(plan, {m: [*actions[:at], wrong, *actions[at + 1 :]]})


def copy_another(number: int) -> Iterator[Mutant]:
    """Another chunk in the place of the one that is copied; one that is there to be copied, where there is one."""
    subject = pool()[number]
    plan, sizes = subject.plan, subject.trace.chunk_nbytes
    for point in points(number):
        actions = plan.actions[point.moment]
        copy = actions[point.at] if point.at < len(actions) else None
        if isinstance(copy, Copy):
            others = [chunk for chunk in sorted(sizes, key=str) if chunk != copy.chunk]
            ready = [chunk for chunk in others if (chunk, copy.source) in point.newest]
            for chunk in (ready or others)[:2]:
                wrong = [*actions[: point.at], Copy(chunk, copy.source, copy.target), *actions[point.at + 1 :]]
                yield f"moment {point.moment}: {copy}, but of {chunk}", with_lists(plan, {point.moment: wrong})


OPERATORS: dict[str, Callable[[int], Iterator[Mutant]]] = {
    "delete an Alloc": delete(Alloc),
    "delete a Free": delete(Free),
    "delete a Copy": delete(Copy),
    "delete an Update": delete(Update),
    "delete a Wait": delete(Wait),
    "swap within a moment": swap_within_a_moment,
    "swap with a moment": swap_with_a_moment,
    "swap across a moment": swap_across_a_moment,
    "lower the cap of DEVICE": lower_the_cap(DEVICE),
    "lower the cap of HOST": lower_the_cap(HOST),
    "free the only newest": free_the_only_newest,
    "free a held": free_a_held,
    "copy too early": copy_too_early,
    "wait too early": wait_too_early,
    "copy backward": copy_backward,
    "copy another": copy_another,
}


def test_there_are_a_thousand_mutants() -> None:
    assert len(OPERATORS) * NUM_MUTANTS >= 1000
    assert NUM_MUTANTS >= 50


def test_the_pool_has_every_kind_of_plan() -> None:
    tiers = [set(subject.plan.update_tiers.values()) for subject in pool()]
    for kind in ({DEVICE}, {HOST}, {DEVICE, HOST}):
        assert tiers.count(kind) >= 3, kind
    for subject in pool():
        simulate(subject.plan, subject.trace)
        simulate(in_turn(subject.plan), subject.trace)


@pytest.mark.parametrize("name", OPERATORS)
def test_every_mutant_is_refused(name: str) -> None:
    rng = random.Random(f"{SEED} {name}")
    offered = [(number, mutant) for number in range(NUM_PLANS) for mutant in OPERATORS[name](number)]
    assert len(offered) >= NUM_MUTANTS, f"{name}: only {len(offered)}"
    survivors = []
    for number, (text, mutant) in rng.sample(offered, NUM_MUTANTS):
        try:
            simulate(mutant, pool()[number].trace)
        except PlanError:
            continue
        survivors.append(f"{name}, plan {number}: {text}")
    assert not survivors, f"{len(survivors)} of {NUM_MUTANTS} were accepted: {survivors}"
