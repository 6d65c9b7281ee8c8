"""What holds for plans of every trace and machine, over random ones; truths are derived here again, from traces alone.

`candidates` has each plan verified by `simulate`, so that it returns at all says that every candidate is valid.
"""

from __future__ import annotations

import hashlib
import random
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from chunkmem.data.errors import CapacityError, PlanError
from chunkmem.data.trace import Kind, Trace
from chunkmem.data.types import ChunkId, Role, Tier
from chunkmem.plan.candidate import Candidate, PlanOptions
from chunkmem.plan.candidates import candidates
from chunkmem.plan.choose import furthest_next_use, sweep, traffic_nbytes
from chunkmem.plan.gaps import Problem, find_gaps
from chunkmem.plan.intervals import find_stays, free_room, prefetch
from chunkmem.plan.machine import Machine, host_links
from chunkmem.plan.model import Alloc, Copy, Free, Plan, Wait
from chunkmem.plan.planner import make_plan
from chunkmem.plan.program import emit
from chunkmem.plan.resync import resync
from chunkmem.plan.semantics import Residency, residency_before
from chunkmem.plan.simulate import simulate, with_waits
from tests.helpers.traces import random_trace

DEVICE, HOST = Tier.DEVICE, Tier.HOST
OTHER = {DEVICE: HOST, HOST: DEVICE}
AMPLE = 2**40
BLOCKS = range(12)
BLOCK = 20
"""Cases in each block of a test."""


def drawn_trace(rng: random.Random, *, uniform: bool | None = None) -> Trace:
    return random_trace(
        rng,
        num_groups=rng.randint(1, 7),
        uniform=rng.random() < 0.5 if uniform is None else uniform,
        max_held=rng.randint(1, 3),
        micro_batches=rng.randint(1, 2),
        max_non_model_nbytes=rng.choice((0, 500, 3000)),
    )


def drawn_machine(rng: random.Random, trace: Trace, *, one_tier: bool = False) -> Machine:
    """A machine whose DEVICE has between just enough and more than all; its HOST is ample, or missing."""
    machine = Machine(
        device_nbytes=AMPLE,
        host_nbytes=0 if one_tier else AMPLE,
        # Chunks of 64 to 1536 bytes, moments of 1 ms: link-bound to compute-bound.
        links=host_links(
            h2d_Bps=10 ** rng.uniform(4, 8), d2h_Bps=10 ** rng.uniform(4, 8), latency_s=rng.choice((0.0, 1e-4))
        ),
        device_update_Bps=rng.choice((float("inf"), 1e7)),
        host_update_Bps=rng.choice((float("inf"), 1e6)),
        charges_non_model=rng.random() < 0.5,
        one_processor=rng.random() < 0.5,
    )
    smallest = smallest_cap(trace, machine)
    spare = rng.choice((0.0, rng.random(), 1.2)) * sum(trace.chunk_nbytes.values())
    return replace(machine, device_nbytes=smallest + int(spare))


def drawn_options(rng: random.Random, trace: Trace) -> PlanOptions:
    share = rng.choice((None, None, int(rng.random() * sum(trace.chunk_nbytes.values()))))
    return PlanOptions(rng.choice((0.0, 0.5, 0.8, 1.0)), share)


def drawn_case(seed: int) -> tuple[Trace, Machine, PlanOptions]:
    rng = random.Random(seed)
    trace = drawn_trace(rng)
    return trace, drawn_machine(rng, trace, one_tier=rng.random() < 0.2), drawn_options(rng, trace)


def seeds(block: int) -> range:
    return range(block * BLOCK, (block + 1) * BLOCK)


def living_gradients(trace: Trace) -> list[int]:
    """Bytes of gradients in each moment, from their CREATE to their CONSUME."""
    nbytes, found = 0, []
    for moment in trace.moments:
        own = trace.chunk_nbytes[moment.chunk]
        nbytes += own if moment.kind is Kind.CREATE else 0
        found.append(nbytes)
        nbytes -= own if moment.kind is Kind.CONSUME else 0
    return found


def lasting_nbytes(trace: Trace) -> int:
    """Bytes of everything but gradients: it has content all the time."""
    return sum(n for chunk, n in trace.chunk_nbytes.items() if chunk.role is not Role.GRAD)


def smallest_cap(trace: Trace, machine: Machine) -> int:
    """The smallest DEVICE on which a plan is possible: all that is held or written there at once, with HOST updates.

    Without HOST, everything that has content at once.
    """
    held, smallest = 0, 0
    for moment, gradients in zip(trace.moments, living_gradients(trace), strict=True):
        own = trace.chunk_nbytes[moment.chunk]
        held += {Kind.HOLD: own, Kind.RELEASE: -own}.get(moment.kind, 0)
        here = held + (own if moment.kind in (Kind.CREATE, Kind.WRITE) else 0)
        if machine.host_nbytes == 0:
            here = lasting_nbytes(trace) + gradients
        smallest = max(smallest, here + (moment.non_model_peak_nbytes if machine.charges_non_model else 0))
    return smallest


def follow(plan: Plan, trace: Trace) -> tuple[dict[Tier, int], list[int], set[tuple[ChunkId, Tier]]]:
    """Count slabs: the peak of each tier, what is on DEVICE in each moment, and which replicas there are at the end."""
    now = {(placed.chunk, placed.tier) for placed in plan.start}
    used = {tier: sum(trace.chunk_nbytes[c] for c, at in now if at is tier) for tier in (DEVICE, HOST)}
    peak, on_device = dict(used), []
    for actions, moment in zip(plan.actions, trace.moments, strict=True):
        for action in actions:
            if isinstance(action, Alloc | Free):
                sign = 1 if isinstance(action, Alloc) else -1
                (now.add if sign > 0 else now.remove)((action.chunk, action.tier))
                used[action.tier] += sign * trace.chunk_nbytes[action.chunk]
                peak[action.tier] = max(peak[action.tier], used[action.tier])
                charge = moment.non_model_peak_nbytes if plan.machine.charges_non_model else 0
                assert used[DEVICE] + charge <= plan.machine.device_nbytes or sign < 0 or action.tier is HOST
        on_device.append(used[DEVICE])
        if moment.kind is Kind.CONSUME and (moment.chunk, HOST) in now:
            now.remove((moment.chunk, HOST))
            used[HOST] -= trace.chunk_nbytes[moment.chunk]
    return peak, on_device, now


def check_candidate(candidate: Candidate, trace: Trace, *, aside_nbytes: int = 0) -> None:
    plan, timeline, machine = candidate.plan, candidate.timeline, candidate.plan.machine
    peak, on_device, last = follow(plan, trace)
    peak[HOST] += aside_nbytes
    assert timeline.peak_nbytes == peak
    assert list(timeline.device_nbytes) == on_device
    assert peak[DEVICE] <= machine.device_nbytes
    assert peak[HOST] <= machine.host_nbytes
    for moment, nbytes in zip(trace.moments, on_device, strict=True):
        assert nbytes + (moment.non_model_peak_nbytes if machine.charges_non_model else 0) <= machine.device_nbytes
    assert last == {(placed.chunk, placed.tier) for placed in plan.start}
    assert residency_before(plan, trace, len(trace.moments)) == Residency.of(plan.start)
    moved = [trace.chunk_nbytes[a.chunk] for actions in plan.actions for a in actions if isinstance(a, Copy)]
    assert candidate.nbytes == sum(moved)


@pytest.mark.few(6)
@pytest.mark.parametrize("block", BLOCKS)
def test_candidates_keep_the_caps_and_end_as_they_begin(block: int) -> None:
    for seed in seeds(block):
        trace, machine, options = drawn_case(seed)
        found = list(candidates(trace, machine, options=options))
        assert found, f"seed {seed}: {machine}, {options}"
        for candidate in found:
            check_candidate(candidate, trace)
        # What happens first in a later iteration would show there.
        simulate(found[0].plan, trace, iterations=6)


@pytest.mark.few(4)
@pytest.mark.parametrize("block", BLOCKS)
def test_the_named_cap_is_the_smallest_that_works(block: int) -> None:
    for seed in seeds(block):
        trace, machine, options = drawn_case(seed)
        smallest = smallest_cap(trace, machine)
        short = replace(machine, device_nbytes=random.Random(seed).randrange(smallest))
        with pytest.raises(CapacityError) as caught:
            make_plan(trace, short, options=options)
        assert caught.value.needed_nbytes == smallest, f"seed {seed}: {caught.value}"
        assert caught.value.cap_nbytes == short.device_nbytes
        with pytest.raises(CapacityError):
            make_plan(trace, replace(machine, device_nbytes=smallest - 1), options=options)
        make_plan(trace, replace(machine, device_nbytes=smallest), options=options)


def named_host_nbytes(error: PlanError) -> int:
    found = re.search(r"raise memory\.host to at least .* \((\d+) bytes\)", str(error))
    assert found, f"not about HOST: {error}"
    return int(found[1])


@pytest.mark.few(2)
@pytest.mark.parametrize("block", BLOCKS[:6])
def test_a_small_host_is_refused_with_the_smallest_that_works(block: int) -> None:
    """Plans leave on HOST what DEVICE never writes. With that and all gradients, an update on HOST always fits."""
    refused = 0
    for seed in seeds(block):
        trace, machine, options = drawn_case(seed)
        enough = lasting_nbytes(trace) + max(living_gradients(trace))
        tight = replace(machine, host_nbytes=random.Random(seed).randint(1, enough))
        if smallest_cap(trace, tight) > machine.device_nbytes:
            continue
        assert make_plan(trace, replace(tight, host_nbytes=enough), options=options)
        found, error = tried(trace, tight, options)
        for candidate in found:
            check_candidate(candidate, trace)
        if error is not None:
            refused += 1
            named = re.search(r"raise memory\.host to at least .* \((\d+) bytes\)", str(error))
            assert named, f"seed {seed}: {error}"
            needed = int(named[1])
            assert tight.host_nbytes < needed <= enough, f"seed {seed}: {error}"
            assert tried(trace, replace(tight, host_nbytes=needed), options)[1] is None
            assert tried(trace, replace(tight, host_nbytes=needed - 1), options)[1] is not None
    assert refused >= 2


def tried(trace: Trace, machine: Machine, options: PlanOptions) -> tuple[list[Candidate], PlanError | None]:
    try:
        return list(candidates(trace, machine, options=options)), None
    except PlanError as error:
        return [], error


def plans_digest() -> str:
    """A digest of plans for some cases; sets are written in order, as they have none of their own."""
    found = hashlib.sha256()
    for seed in range(25):
        trace, machine, options = drawn_case(seed)
        for candidate in candidates(trace, machine, options=options):
            plan = candidate.plan
            found.update(repr((sorted(map(str, plan.start)), plan.actions, plan.update_tiers, plan.name)).encode())
        found.update(make_plan(trace, machine, options=options).name.encode())
    return found.hexdigest()


def test_every_process_makes_the_same_plans() -> None:
    """Members of enums hash by their place in memory, so in another process sets are walked in another order."""
    ours = plans_digest()
    assert plans_digest() == ours
    program = "from tests.unit.test_plan_properties import plans_digest; print(plans_digest())"
    root = Path(__file__).parents[2]
    theirs = subprocess.run([sys.executable, "-c", program], cwd=root, check=True, capture_output=True, text=True)
    assert theirs.stdout.strip() == ours


def test_no_wait_is_implied_by_others() -> None:
    removed = 0
    for seed in range(150):
        trace, machine, options = drawn_case(seed)
        plan = make_plan(trace, machine, options=options)
        waits = [(m, at) for m, actions in enumerate(plan.actions) for at, a in enumerate(actions) if type(a) is Wait]
        for moment, at in random.Random(seed).sample(waits, min(8, len(waits))):
            actions = list(plan.actions)
            actions[moment] = actions[moment][:at] + actions[moment][at + 1 :]
            with pytest.raises(PlanError):
                simulate(replace(plan, actions=tuple(actions)), trace)
                pytest.fail(f"seed {seed}: nothing needs {plan.actions[moment][at]} in moment {moment}")
            removed += 1
    assert removed >= 500


def test_more_room_never_moves_more() -> None:
    """Of chunks of one size, as those of a layout are. Belady's rule does not know sizes."""
    compared = 0
    for seed in range(60):
        rng = random.Random(seed)
        trace = drawn_trace(rng, uniform=True)
        machine = drawn_machine(rng, trace)
        smallest, total = smallest_cap(trace, machine), sum(trace.chunk_nbytes.values())
        caps = sorted(smallest + int(share * total) for share in (0, *(rng.random() for _ in range(4)), 2))
        options = PlanOptions(rng.choice((0.0, 0.8, 1.0)))
        moved = []
        for cap in caps:
            found = candidates(trace, replace(machine, device_nbytes=cap), options=options)
            moved.append(min(candidate.nbytes for candidate in found))
        assert moved == sorted(moved, reverse=True), f"seed {seed}: {list(zip(caps, moved, strict=True))}"
        compared += moved[0] != moved[-1]
    assert compared >= 40


# Traffic.


def drawn_problem(rng: random.Random) -> tuple[Problem, list[int]]:
    """A problem of at most 8 chunks on DEVICE and few enough gaps, and the room of each moment."""
    while True:
        trace = random_trace(
            rng,
            num_groups=rng.randint(2, 4),
            uniform=rng.random() < 0.5,
            num_uses=rng.randint(2, 6),
            max_held=rng.randint(1, 2),
            micro_batches=rng.choice((1, 1, 2)),
            frozen_share=rng.choice((0.0, 0.25)),
        )
        updates = [moment.chunk.group for moment in trace.moments if moment.kind is Kind.UPDATE]
        tiers = rng.choice(((DEVICE, HOST), (DEVICE,)))
        problem = find_gaps(trace, {group: rng.choice(tiers) for group in updates})
        if sum(map(bool, problem.uses)) <= 8 and 3 <= len(problem.free_to_choose) <= 13:
            break
    everything = sum(n for n, chain in zip(problem.nbytes, problem.uses, strict=True) if chain)
    cap = rng.randint(max(problem.required), everything)
    taken = [rng.choice((0, 0, rng.randint(0, cap))) if rng.random() < 0.5 else 0 for _ in problem.required]
    return problem, [max(0, cap - need - beside) for need, beside in zip(problem.required, taken, strict=True)]


def test_the_traffic_of_kept_gaps_is_what_the_plan_moves() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        problem, room = drawn_problem(rng)
        trace, budget = problem.trace, [a + b for a, b in zip(room, problem.required, strict=True)]
        machine = Machine(max(budget), AMPLE, links=host_links(h2d_Bps=10 ** rng.uniform(4, 8), d2h_Bps=1e6))
        kept = sweep(problem, room, rng.choice((furthest_next_use, lambda *gap: gap)))
        kept = frozenset(at for at in sorted(kept) if rng.random() < 0.8)
        stays = find_stays(problem, kept)
        prefetch(problem, stays, free_room(problem, stays, budget), machine, lead=rng.choice((0.0, 1.0, 4.0)))
        program = emit(problem, stays, home_residents=rng.random() < 0.5)
        plan, _ = with_waits(Plan(trace.digest, machine, program.start, program.actions, problem.update_tiers), trace)
        timeline = simulate(plan, trace)
        assert tuple(timeline.moved_nbytes.values()) == traffic_nbytes(problem, kept), f"seed {seed}"
        assert all(taken <= have for taken, have in zip(timeline.device_nbytes, budget, strict=True)), f"seed {seed}"


# The way from anywhere to where a plan is.

Replicas = Mapping[tuple[ChunkId, Tier], bool]


def used_nbytes(trace: Trace, replicas: Iterable[tuple[ChunkId, Tier]], tier: Tier) -> int:
    return sum(trace.chunk_nbytes[chunk] for chunk, at in replicas if at is tier)


def drawn_residency(rng: random.Random, trace: Trace, wanted: Residency, caps: Mapping[Tier, int]) -> Residency:
    """Chunks with content anywhere, and some slabs without; where the plan has them, if the dice leave no room."""
    now: dict[tuple[ChunkId, Tier], bool] = {}
    for chunk in rng.sample(list(trace.chunk_nbytes), len(trace.chunk_nbytes)):
        tiers = [
            tier for tier in (DEVICE, HOST) if used_nbytes(trace, now, tier) + trace.chunk_nbytes[chunk] <= caps[tier]
        ]
        if wanted.has_content(chunk):
            if not tiers:
                return Residency({key: True for key, newest in wanted.newest.items() if newest})
            first = rng.choice(tiers)
            now[chunk, first] = True
            if OTHER[first] in tiers and rng.random() < 0.5:
                now[chunk, OTHER[first]] = rng.random() < 0.7
        elif DEVICE in tiers and rng.random() < 0.3:
            now[chunk, DEVICE] = False
    return Residency(now)


def check_way(
    trace: Trace, now: Residency, wanted: Residency, caps: Mapping[Tier, int], *, keep: bool, to: Plan
) -> bool:
    """Ask for the way and walk it by hand: is every step allowed, and where does it end? False if there is no way."""
    peak, _, _ = follow(to, trace)
    replicas = dict(now.newest)
    held = {key for key in replicas if key[1] is DEVICE and replicas[key] and wanted.newest.get(key)}
    held = set(sorted(held, key=str)[: len(held) // 2])
    free = {tier: caps[tier] - used_nbytes(trace, replicas, tier) for tier in caps}
    try:
        way = resync(
            now, wanted, held=frozenset(held), chunk_nbytes=trace.chunk_nbytes, free_nbytes=free, peak_nbytes=peak,
            keep_duplicates=keep,
        )  # fmt: skip
    except PlanError:
        return False
    finally:
        assert now.newest == replicas, "it changed what it was given"
    contents = {chunk for chunk, _ in replicas if now.has_content(chunk)}
    for action in way:
        walk(action, replicas)
        assert held <= replicas.keys(), action
        assert all(used_nbytes(trace, replicas, tier) <= caps[tier] for tier in caps), action
        assert {chunk for (chunk, _), newest in replicas.items() if newest} == contents, action
    for key, newest in wanted.newest.items():
        if key[0] in contents or key[1] is DEVICE:
            assert replicas[key] == (newest and key[0] in contents), key
    more = {key for key in replicas if key not in wanted.newest}
    # Bystanders, and copies on HOST that another plan has a use for, may stay: then the plan has room beside them.
    assert all(key[0] in contents and (keep or not wanted.has_content(key[0])) for key in more)
    if more:
        assert used_nbytes(trace, more, HOST) + peak[HOST] <= caps[HOST]
    return True


def walk(action: object, replicas: dict[tuple[ChunkId, Tier], bool]) -> None:
    if isinstance(action, Alloc):
        assert (action.chunk, action.tier) not in replicas, action
        replicas[action.chunk, action.tier] = False
    elif isinstance(action, Free):
        newest = replicas.pop((action.chunk, action.tier))
        assert not newest or replicas.get((action.chunk, OTHER[action.tier])), action
    else:
        assert isinstance(action, Copy), action
        assert replicas[action.chunk, action.source], action
        assert (action.chunk, action.target) in replicas, action
        replicas[action.chunk, action.target] = True


@pytest.mark.few(2)
@pytest.mark.parametrize("block", BLOCKS)
def test_there_is_a_way_into_a_plan_from_everywhere(block: int) -> None:
    """With room for everything on HOST there always is one; with less, what is returned has to be right."""
    for seed in seeds(block):
        rng = random.Random(seed)
        trace = drawn_trace(rng)
        total = sum(trace.chunk_nbytes.values())
        machine = replace(drawn_machine(rng, trace), host_nbytes=total)
        plan = make_plan(trace, machine)
        other = make_plan(trace, machine, options=PlanOptions(0.0))
        wanted = residency_before(plan, trace, rng.randrange(len(trace.moments)))
        contents = [chunk for chunk in trace.chunk_nbytes if wanted.has_content(chunk)]
        starts = [Residency({(chunk, HOST): True for chunk in contents})]
        if all(wanted.has_content(placed.chunk) for placed in other.start if placed.newest):
            starts.append(Residency.of(other.start))
        peak = follow(plan, trace)[0]
        for host_nbytes in (total, sum(trace.chunk_nbytes[chunk] for chunk in contents), peak[HOST]):
            caps = {DEVICE: machine.device_nbytes, HOST: host_nbytes}
            for now in (*starts, drawn_residency(rng, trace, wanted, caps)):
                if all(used_nbytes(trace, now.newest, tier) <= caps[tier] for tier in caps):
                    there = check_way(trace, now, wanted, caps, keep=rng.random() < 0.5, to=plan)
                    assert there or (host_nbytes < total and now is not starts[0]), f"seed {seed}"
