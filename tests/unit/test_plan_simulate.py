"""The simulator: one plan with its timeline drawn by hand, and every way to spoil it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from chunkmem.data.errors import CapacityError, PlanError
from chunkmem.data.trace import Kind, Mode, Moment, Trace
from chunkmem.data.types import ChunkId, Role, Tier
from chunkmem.plan.machine import Machine, host_links
from chunkmem.plan.model import Action, Alloc, Copy, Free, Lane, Placed, Plan, Update, Wait
from chunkmem.plan.simulate import peak_nbytes, simulate
from chunkmem.plan.timeline import Span

D, H = Tier.DEVICE, Tier.HOST
COMPUTE, H2D, D2H, HOST_UPDATE = Lane.COMPUTE, Lane.H2D, Lane.D2H, Lane.HOST_UPDATE
P0, P1, P2 = (ChunkId(Role.PARAM, group) for group in range(3))
G0, G1 = (ChunkId(Role.GRAD, group) for group in range(2))
A0 = ChunkId(Role("exp_avg"), 0)

MACHINE = Machine(device_nbytes=200, host_nbytes=400, links=host_links(h2d_Bps=100.0, d2h_Bps=50.0))
"""Two slabs on DEVICE, four on HOST; a chunk of 100 bytes takes 1 s to DEVICE and 2 s to HOST."""

MOMENTS = (
    Moment(Kind.HOLD, P0, "f0", 2.0),
    Moment(Kind.RELEASE, P0),
    Moment(Kind.HOLD, P1, "f1", 2.0),
    Moment(Kind.RELEASE, P1),
    Moment(Kind.HOLD, P1, "b1", 2.0),
    Moment(Kind.CREATE, G1, "g1", 1.0),
    Moment(Kind.RELEASE, P1),
    Moment(Kind.HOLD, P0, "b0", 2.0),
    Moment(Kind.CREATE, G0, "g0", 1.0),
    Moment(Kind.RELEASE, P0),
    Moment(Kind.UPDATE, P1, "u1", 1.0),
    Moment(Kind.CONSUME, G1),
    Moment(Kind.UPDATE, P0, "u0", 3.0),
    Moment(Kind.CONSUME, G0),
)
# P1 is fetched twice, updated on DEVICE and written back; G1 waits on HOST; P0 is updated on HOST and fetched again for
# the next iteration. No Wait is implied by the others.
ACTIONS: tuple[tuple[Action, ...], ...] = (
    (Wait(COMPUTE, H2D, 0), Alloc(P1, D), Wait(H2D, D2H, 0), Copy(P1, H, D)),
    (),
    (Wait(COMPUTE, H2D, 1),),
    (),
    (Free(P0, D),),
    (Alloc(G1, D),),
    (
        *(Free(P1, D), Alloc(P0, D), Wait(H2D, COMPUTE, 6), Copy(P0, H, D)),
        *(Alloc(G1, H), Wait(D2H, COMPUTE, 6), Copy(G1, D, H)),
    ),
    (Wait(COMPUTE, H2D, 2),),
    (Free(G1, D), Alloc(G0, D), Wait(COMPUTE, D2H, 1)),
    (
        *(Free(P0, D), Alloc(P1, D), Wait(H2D, COMPUTE, 9), Copy(P1, H, D)),
        *(Free(P1, H), Alloc(G0, H), Wait(D2H, H2D, 3), Copy(G0, D, H)),
        *(Free(G0, D), Alloc(G1, D), Wait(H2D, D2H, 2), Copy(G1, H, D)),
    ),
    (Wait(COMPUTE, H2D, 4), Update(1, D)),
    (),
    (Alloc(P1, H), Wait(D2H, COMPUTE, 11), Copy(P1, D, H), Wait(HOST_UPDATE, D2H, 2), Update(0, H)),
    (Free(G1, D), Alloc(P0, D), Wait(H2D, COMPUTE, 11), Wait(H2D, HOST_UPDATE, 1), Copy(P0, H, D), Free(P1, D)),
)
START = frozenset(Placed(chunk, tier, newest=True) for chunk, tier in ((P0, D), (P0, H), (P1, H), (A0, H)))
TRACE = Trace(Mode.TRAIN, "layout", dict.fromkeys((P0, P1, G0, G1, A0), 100), MOMENTS)
PLAN = Plan(TRACE.digest, MACHINE, START, ACTIONS, {0: H, 1: D})


def edited(moment: int, old: Action | None, *new: Action) -> Plan:
    """PLAN with `new` in the place of `old`, or after the moment's other actions."""
    actions = list(PLAN.actions[moment])
    at = len(actions) if old is None else actions.index(old)
    actions[at : at + (old is not None)] = new
    return replace(PLAN, actions=(*PLAN.actions[:moment], tuple(actions), *PLAN.actions[moment + 1 :]))


def small(
    moments: tuple[Moment, ...],
    start: dict[tuple[ChunkId, Tier], bool],
    *actions: tuple[Action, ...],
    nbytes: tuple[int, ...] = (100, 100, 100),
) -> tuple[Plan, Trace]:
    """A plan over P0, P1 and G0."""
    trace = Trace(Mode.TRAIN, "layout", dict(zip((P0, P1, G0), nbytes, strict=True)), moments)
    placed = frozenset(Placed(chunk, tier, newest) for (chunk, tier), newest in start.items())
    return Plan(trace.digest, replace(MACHINE, device_nbytes=300), placed, actions, {}), trace


def refused(plan: Plan, message: str, trace: Trace = TRACE) -> None:
    with pytest.raises(PlanError, match=f"^{re.escape(message)}"):
        simulate(plan, trace)


# Seconds   0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15  16  17  18  19  20
# COMPUTE   |...|  f0   |  f1   |  b1   |g1 |...|  b0   |g0 |.......|.......|u1 |    u0     |    . = stall
# H2D       |P0 |P1 |                       |P0 |           |P1 |       |G1 |               |P0 of the next iteration
# D2H                                       |  G1   |           |  G0   |       |  P1   |
def test_times_drawn_by_hand() -> None:
    timeline = simulate(PLAN, TRACE)
    assert timeline.step_s == 20.0
    assert timeline.spans == (
        Span(H2D, "param chunk 1", 1.0, 2.0, 0, P1, 100),
        Span(COMPUTE, "f0", 0.0, 1.0, 0, P0, is_stall=True),
        Span(COMPUTE, "f0", 1.0, 3.0, 0, P0),
        Span(COMPUTE, "f1", 3.0, 5.0, 2, P1),
        Span(COMPUTE, "b1", 5.0, 7.0, 4, P1),
        Span(COMPUTE, "g1", 7.0, 8.0, 5, G1),
        Span(H2D, "param chunk 0", 8.0, 9.0, 6, P0, 100),
        Span(D2H, "grad chunk 1", 8.0, 10.0, 6, G1, 100),
        Span(COMPUTE, "b0", 8.0, 9.0, 7, P0, is_stall=True),
        Span(COMPUTE, "b0", 9.0, 11.0, 7, P0),
        Span(COMPUTE, "g0", 11.0, 12.0, 8, G0),
        Span(H2D, "param chunk 1", 12.0, 13.0, 9, P1, 100),
        Span(D2H, "grad chunk 0", 13.0, 15.0, 9, G0, 100),
        Span(H2D, "grad chunk 1", 15.0, 16.0, 9, G1, 100),
        Span(COMPUTE, "u1", 12.0, 16.0, 10, P1, is_stall=True),
        Span(COMPUTE, "u1", 16.0, 17.0, 10, P1),
        Span(D2H, "param chunk 1", 17.0, 19.0, 12, P1, 100),
        Span(HOST_UPDATE, "u0", 17.0, 20.0, 12, P0),
        Span(H2D, "param chunk 0", 20.0, 21.0, 13, P0, 100),
    )
    assert (timeline.fetched, timeline.prefetched) == (5, 1)  # P1 for f1 alone is there in time
    assert timeline.stall_s == 6.0
    assert timeline.moved_nbytes == {H2D: 500, D2H: 300}


def test_python_runs_between_units() -> None:
    """After a module has released its weights, and after an update; not while computing is waited for."""
    took_s = {Kind.RELEASE: 0.5, Kind.CONSUME: 0.25}
    moments = tuple(replace(m, duration_s=took_s.get(m.kind, m.duration_s)) for m in MOMENTS)
    trace = replace(TRACE, moments=moments)
    timeline = simulate(replace(PLAN, trace_digest=trace.digest), trace)
    assert set(trace.between) == {1, 3, 6, 9, 11, 13}
    assert timeline.stall_s > 0
    assert timeline.python_s == 4 * 0.5 + 2 * 0.25
    assert timeline.python_by_layer == {"the model": 4 * 0.5, "updates": 2 * 0.25}
    assert "Python 2500 ms, " in str(timeline)
    unheard = replace(timeline, python_by_layer=None)
    assert unheard.python_s is None
    assert "Python not measured, " in str(unheard)
    nested = (Moment(Kind.HOLD, P0), Moment(Kind.HOLD, P1), Moment(Kind.RELEASE, P1), Moment(Kind.RELEASE, P0))
    assert Trace(Mode.EVAL, "", {P0: 100, P1: 100}, nested).between == {3: "the model"}


def test_python_runs_after_layers() -> None:
    """Blocks are named, and not what is in them."""
    labels = ("head forward", "blocks.0.norm forward", "", "blocks.1 backward")
    moments = [each for label in labels for each in (Moment(Kind.HOLD, P0, label), Moment(Kind.RELEASE, P0))]
    between = Trace(Mode.EVAL, "", {P0: 100}, tuple(moments)).between
    assert between == {1: "head", 3: "blocks.0", 5: "blocks.0", 7: "blocks.1"}


def test_bytes_in_program_order() -> None:
    timeline = simulate(PLAN, TRACE)
    assert timeline.device_nbytes == (200, 200, 200, 200, 100, 200, 200, 200, 200, 200, 200, 200, 200, 100)
    assert timeline.peak_nbytes == {D: 200, H: 400}
    assert timeline.cap_nbytes == {D: 200, H: 400}
    roles = {(D, "param"): 200, (D, "grad"): 100, (H, "param"): 200, (H, "grad"): 200, (H, "exp_avg"): 100}
    assert timeline.role_peak_nbytes == roles


def test_peaks_alone_need_no_lanes() -> None:
    assert peak_nbytes(PLAN, TRACE) == simulate(PLAN, TRACE).peak_nbytes
    without_waits = tuple(tuple(a for a in actions if not isinstance(a, Wait)) for actions in ACTIONS)
    assert peak_nbytes(replace(PLAN, actions=without_waits), TRACE) == {D: 200, H: 400}
    with pytest.raises(PlanError, match="the plan was made from trace 0"):
        peak_nbytes(replace(PLAN, trace_digest="0"), TRACE)
    with pytest.raises(CapacityError, match="Alloc param chunk 1 on DEVICE: 200 bytes of chunks on DEVICE pass"):
        peak_nbytes(replace(PLAN, machine=replace(MACHINE, device_nbytes=199)), TRACE)


def test_a_processor_of_its_own_updates_beside_the_device() -> None:
    # The update on HOST needs only G0, there at 15; it ends at 18, one second after u1.
    timeline = simulate(PLAN, TRACE, machine=replace(MACHINE, one_processor=False))
    computed = {span.label: (span.start_s, span.end_s) for span in timeline.spans if not span.is_stall}
    assert (computed["u1"], computed["u0"], timeline.step_s) == ((16.0, 17.0), (15.0, 18.0), 18.0)


@pytest.mark.parametrize("one_processor", [True, False])
def test_one_processor_stalls_while_the_host_update_waits(one_processor: bool) -> None:
    # Seconds      0   1   2   3   4   5   6
    # COMPUTE      |g0 |.......|               stalled only if it is the processor that updates on HOST
    # D2H              |  G0   |
    # HOST_UPDATE              |    u0     |
    moments = (Moment(Kind.CREATE, G0, "g0", 1.0), Moment(Kind.UPDATE, P0, "u0", 3.0), Moment(Kind.CONSUME, G0))
    create = (Alloc(G0, D), Wait(COMPUTE, D2H, 0))
    move = (Alloc(G0, H), Wait(D2H, COMPUTE, 1), Wait(D2H, HOST_UPDATE, 0), Copy(G0, D, H), Free(G0, D))
    plan, trace = small(moments, {(P0, H): True}, create, (*move, Wait(HOST_UPDATE, D2H, 1), Update(0, H)), ())
    plan = replace(plan, update_tiers={0: H})
    timeline = simulate(plan, trace, machine=replace(plan.machine, one_processor=one_processor))
    assert timeline.step_s == 6.0
    stalls = [span for span in timeline.spans if span.is_stall]
    assert stalls == ([Span(COMPUTE, "u0", 1.0, 3.0, 1, P0, is_stall=True)] if one_processor else [])
    assert timeline.spans[-1] == Span(HOST_UPDATE, "u0", 3.0, 6.0, 1, P0)


def test_update_speeds_and_latency() -> None:
    # 200 bytes of group 1 and 300 of group 0, at 50 bytes a second each.
    machine = replace(MACHINE, device_update_Bps=50.0, host_update_Bps=50.0)
    assert simulate(PLAN, TRACE, machine=machine).step_s == 20.0 + (4 - 1) + (6 - 3)
    # Copies on the way of COMPUTE: P0, P0 again, then P1, G0 and G1 in a row.
    assert (
        simulate(
            PLAN, TRACE, machine=replace(MACHINE, links=host_links(h2d_Bps=100.0, d2h_Bps=50.0, latency_s=0.25))
        ).step_s
        == 20.0 + 5 * 0.25
    )


def test_a_lap_alone_starts_with_everything_arrived() -> None:
    # Without an iteration before it, nothing is under way when f0 begins.
    assert simulate(PLAN, TRACE, iterations=1).step_s == 19.0


# Every action counts


@pytest.mark.parametrize(
    ("moment", "index"), [(moment, index) for moment, actions in enumerate(ACTIONS) for index in range(len(actions))]
)
def test_no_action_can_be_left_out(moment: int, index: int) -> None:
    actions = (*ACTIONS[moment][:index], *ACTIONS[moment][index + 1 :])
    with pytest.raises(PlanError):
        simulate(replace(PLAN, actions=(*ACTIONS[:moment], actions, *ACTIONS[moment + 1 :])), TRACE)


RACES = {
    "wrapped prefetch not awaited": (
        (0, Wait(COMPUTE, H2D, 0)),
        "moment 0 (f0): computing the hold: it reads the slab of param chunk 0 on DEVICE, which an operation on H2D "
        "may still write; a Wait of COMPUTE on H2D, count 0 or more, is missing",
    ),
    "write-back not awaited in the next iteration": (
        (0, Wait(H2D, D2H, 0)),
        "moment 0 (f0): Copy param chunk 1 to DEVICE: it reads the slab of param chunk 1 on HOST, which an operation "
        "on D2H may still write; a Wait of H2D on D2H, count 0 or more, is missing",
    ),
    "an earlier write-back awaited": (
        (0, Wait(H2D, D2H, 0), Wait(H2D, D2H, -1)),
        "moment 0 (f0): Copy param chunk 1 to DEVICE: it reads the slab of param chunk 1 on HOST, which an operation "
        "on D2H may still write; a Wait of H2D on D2H, count 0 or more, is missing",
    ),
    "fetched into what is still computed with": (
        (6, Wait(H2D, COMPUTE, 6)),
        "moment 6 (release param chunk 1): Copy param chunk 0 to DEVICE: it writes the slab of param chunk 0 on "
        "DEVICE, which an operation on COMPUTE may still read; a Wait of H2D on COMPUTE, count 6 or more, is missing",
    ),
    "held until the moment before its release": (
        (6, Wait(H2D, COMPUTE, 6), Wait(H2D, COMPUTE, 5)),
        "moment 6 (release param chunk 1): Copy param chunk 0 to DEVICE: it writes the slab of param chunk 0 on "
        "DEVICE, which an operation on COMPUTE may still read; a Wait of H2D on COMPUTE, count 6 or more, is missing",
    ),
    "evicted before it is computed": (
        (6, Wait(D2H, COMPUTE, 6)),
        "moment 6 (release param chunk 1): Copy grad chunk 1 to HOST: it reads the slab of grad chunk 1 on DEVICE, "
        "which an operation on COMPUTE may still write; a Wait of D2H on COMPUTE, count 6 or more, is missing",
    ),
    "computed into what is still being evicted": (
        (8, Wait(COMPUTE, D2H, 1)),
        "moment 8 (g0): computing the create: it writes the slab of grad chunk 0 on DEVICE, which an operation on D2H "
        "may still read; a Wait of COMPUTE on D2H, count 1 or more, is missing",
    ),
    "evicted into a slab on HOST that is still read": (
        (9, Wait(D2H, H2D, 3), Wait(D2H, COMPUTE, 9)),
        "moment 9 (release param chunk 0): Copy grad chunk 0 to HOST: it writes the slab of grad chunk 0 on HOST, "
        "which an operation on H2D may still read; a Wait of D2H on H2D, count 3 or more, is missing",
    ),
    "fetched into what is still being evicted": (
        (9, Wait(H2D, D2H, 2), Wait(H2D, D2H, 1)),
        "moment 9 (release param chunk 0): Copy grad chunk 1 to DEVICE: it writes the slab of grad chunk 1 on DEVICE, "
        "which an operation on D2H may still read; a Wait of H2D on D2H, count 2 or more, is missing",
    ),
    "updated before its gradient arrives": (
        (12, Wait(HOST_UPDATE, D2H, 2)),
        "moment 12 (u0): Update group 0 on HOST: it reads the slab of grad chunk 0 on HOST, which an operation on D2H "
        "may still write; a Wait of HOST_UPDATE on D2H, count 2 or more, is missing",
    ),
    "fetched before it is updated": (
        (13, Wait(H2D, HOST_UPDATE, 1)),
        "moment 13 (consume grad chunk 0): Copy param chunk 0 to DEVICE: it reads the slab of param chunk 0 on HOST, "
        "which an operation on HOST_UPDATE may still write; a Wait of H2D on HOST_UPDATE, count 1 or more, is missing",
    ),
}


@pytest.mark.parametrize(("edit", "message"), RACES.values(), ids=RACES)
def test_races_are_told(edit: tuple[int, Action], message: str) -> None:
    refused(edited(*edit), message)


def test_the_slab_freed_last_is_taken_first() -> None:
    # With P1 freed last, P0 gets its slab, which the write-back still reads; freed before G1 it is safe.
    free_g1, take, *others, free_p1 = ACTIONS[13]
    last, first = (free_g1, free_p1, take, *others), (free_p1, free_g1, take, *others)
    message = "moment 13 (consume grad chunk 0): Copy param chunk 0 to DEVICE: it writes the slab of param chunk 0 on "
    refused(replace(PLAN, actions=(*ACTIONS[:13], last)), message + "DEVICE, which an operation on D2H may still read;")
    assert simulate(replace(PLAN, actions=(*ACTIONS[:13], first)), TRACE).step_s == 20.0


STREAM = tuple(Moment(kind, chunk) for chunk in (P0, P1) for kind in (Kind.HOLD, Kind.RELEASE))


def streamed(sizes: tuple[int, int], count: int) -> tuple[Plan, Trace]:
    """P0, then P1 through DEVICE; the first copy waits for operation `count` on COMPUTE, the second for none."""
    first = (Alloc(P0, D), Wait(H2D, COMPUTE, count), Copy(P0, H, D), Wait(COMPUTE, H2D, 1))
    second = (Alloc(P1, D), Copy(P1, H, D), Wait(COMPUTE, H2D, 2))
    start = {(P0, H): True, (P1, H): True}
    return small(STREAM, start, first, (Free(P0, D),), second, (Free(P1, D),), nbytes=(*sizes, 1))


def test_a_slab_of_another_size_is_not_taken() -> None:
    assert simulate(*streamed((100, 200), -1)).step_s == 3.0
    plan, trace = streamed((100, 100), -1)
    refused(
        plan,
        "moment 2 (hold param chunk 1): Copy param chunk 1 to DEVICE: it writes the slab of param chunk 1 on DEVICE, "
        "which an operation on COMPUTE may still read; a Wait of H2D on COMPUTE, count 1 or more, is missing",
        trace,
    )


def test_counts_reach_one_lap_back() -> None:
    plan, trace = streamed((100, 200), -4)
    refused(
        plan,
        "moment 0 (hold param chunk 0): Wait of H2D on COMPUTE, count -4: counts reach one iteration back, in which "
        "COMPUTE has 4 operations",
        trace,
    )


# Caps


def test_a_cap_one_byte_lower_is_too_low() -> None:
    with pytest.raises(
        CapacityError, match="Alloc param chunk 1 on DEVICE: 200 bytes of chunks on DEVICE pass"
    ) as device:
        simulate(PLAN, TRACE, machine=replace(MACHINE, device_nbytes=199))
    assert (device.value.needed_nbytes, device.value.cap_nbytes) == (200, 199)
    with pytest.raises(
        CapacityError, match=r"moment 6 .*Alloc grad chunk 1 on HOST: 400 bytes of chunks on HOST"
    ) as host:
        simulate(PLAN, TRACE, machine=replace(MACHINE, host_nbytes=399))
    assert (host.value.needed_nbytes, host.value.cap_nbytes) == (400, 399)
    with pytest.raises(CapacityError, match=r"^the plan's start: "):
        simulate(PLAN, TRACE, machine=replace(MACHINE, host_nbytes=299))


def test_what_is_beside_the_chunks_is_charged_in_its_moment() -> None:
    # Moment 1 has no actions: the room shrinks under what is there.
    moments = (MOMENTS[0], replace(MOMENTS[1], non_model_peak_nbytes=51), *MOMENTS[2:])
    trace = replace(TRACE, moments=moments)
    machine = replace(MACHINE, device_nbytes=250)
    assert simulate(PLAN, trace, machine=machine).step_s == 20.0
    charging = replace(machine, charges_non_model=True)
    with pytest.raises(
        CapacityError, match=r"^moment 1 .*: 200 bytes of chunks and 51 bytes of non-model data on"
    ) as error:
        simulate(PLAN, trace, machine=charging)
    assert (error.value.needed_nbytes, error.value.cap_nbytes) == (251, 250)
    assert simulate(PLAN, trace, machine=replace(charging, device_nbytes=251)).step_s == 20.0


# Book-keeping

WRONG = {
    "alloc twice": (0, None, Alloc(P1, D), "Alloc param chunk 1 on DEVICE: the chunk has a slab there already"),
    "free nothing": (4, None, Free(G0, D), "Free grad chunk 0 on DEVICE: the chunk has no slab there"),
    "free held": (5, None, Free(P1, D), "Free param chunk 1 on DEVICE: the chunk is held"),
    "free only newest": (1, None, Free(A0, H), "Free exp_avg chunk 0 on HOST: it is the only replica of the newest"),
    "free what begins": (8, None, Free(G0, D), "CREATE grad chunk 0: the chunk has no slab on DEVICE; an Alloc is"),
    "copy nothing": (1, None, Copy(G0, H, D), "Copy grad chunk 0 to DEVICE: grad chunk 0 has no content: it was never"),
    "copy used up": (12, None, Copy(G1, D, H), "Copy grad chunk 1 to HOST: grad chunk 1 has no content: it was never"),
    "copy from nowhere": (
        7,
        None,
        Copy(P1, D, H),
        "Copy param chunk 1 to HOST: param chunk 1 on DEVICE is absent; a Copy",
    ),
    "copy again": (3, None, Copy(P1, H, D), "Copy param chunk 1 to DEVICE: DEVICE holds the newest version already"),
    "copy to no slab": (3, None, Copy(A0, H, D), "Copy exp_avg chunk 0 to DEVICE: the chunk has no slab on DEVICE; an"),
    "too early a wait": (
        2,
        None,
        Wait(H2D, COMPUTE, 3),
        "Wait of H2D on COMPUTE, count 3: COMPUTE has only been issued 2",
    ),
    "wait for itself": (2, None, Wait(H2D, H2D, 1), "Wait of H2D on H2D, count 1: a lane is in order by itself"),
    "no such lane": (2, None, Wait(Lane.COLLECTIVE, H2D, 1), "Wait of COLLECTIVE on H2D, count 1: no plan issues"),
    "no such link": (
        2,
        None,
        Copy(P1, Tier.HOST, Tier.HOST),
        "Copy param chunk 1 to HOST: no link leads from HOST to HOST",
    ),
    "unknown chunk": (2, None, Alloc(P2, D), "Alloc param chunk 2 on DEVICE: the trace does not know param chunk 2"),
    "update elsewhere": (11, None, Update(0, H), "Update group 0 on HOST: 200 bytes pass the shadow buffers of 0"),
    "update another": (12, None, Update(1, D), "Update group 1 on DEVICE: this moment updates group 0"),
    "update twice": (12, None, Update(0, H), "Update group 0 on HOST: the group is updated twice"),
    "update on another tier": (10, Update(1, D), Update(1, H), "Update group 1 on HOST: update_tiers says DEVICE"),
    "no update": (10, Update(1, D), None, "UPDATE param chunk 1: an Update of group 1 is missing"),
    "update without gradient": (
        10,
        None,
        Free(G1, D),
        "UPDATE param chunk 1: grad chunk 1 on DEVICE is absent; a Copy",
    ),
    "hold what is absent": (4, None, Free(P1, D), "HOLD param chunk 1: param chunk 1 on DEVICE is absent; a Copy"),
}


@pytest.mark.parametrize(("moment", "old", "new", "message"), WRONG.values(), ids=WRONG)
def test_what_program_order_forbids(moment: int, old: Action | None, new: Action | None, message: str) -> None:
    plan = edited(moment, old, *(() if new is None else (new,)))
    with pytest.raises(PlanError, match=rf"^moment {moment} \(.*\): " + re.escape(message)):
        simulate(plan, TRACE)


WRITE = (Moment(Kind.WRITE, G0),)
KEEP_DEVICE, KEEP_BOTH = {(G0, D): True}, {(G0, D): True, (G0, H): True}


def test_a_writer_wants_the_newest_version_and_to_be_alone() -> None:
    assert simulate(*small(WRITE, KEEP_DEVICE, ())).device_nbytes == (100,)
    plan, trace = small(WRITE, KEEP_BOTH, ())
    refused(
        plan, "moment 0 (write grad chunk 0): WRITE grad chunk 0: grad chunk 0 would be stale on HOST; a Free", trace
    )
    plan, trace = small(WRITE, {(G0, D): False}, ())
    refused(plan, "moment 0 (write grad chunk 0): WRITE grad chunk 0: grad chunk 0 has no content: it was never", trace)
    plan, trace = small((Moment(Kind.CREATE, G0),), KEEP_BOTH, ())
    refused(plan, "moment 0 (create grad chunk 0): CREATE grad chunk 0: grad chunk 0 would be stale on HOST;", trace)


def test_an_update_leaves_no_stale_replica() -> None:
    plan, trace = small((Moment(Kind.UPDATE, P0),), {(P0, D): True, (P0, H): True, (G0, D): True}, (Update(0, D),))
    plan = replace(plan, update_tiers={0: D})
    refused(plan, "moment 0 (update param chunk 0): UPDATE param chunk 0: param chunk 0 would be stale on HOST;", trace)
    # GRAD is only read, and may be anywhere else besides.
    start = {(P0, D): True, (G0, D): True, (G0, H): True}
    plan, trace = small((Moment(Kind.UPDATE, P0),), start, (Update(0, D),))
    assert simulate(replace(plan, update_tiers={0: D}), trace).peak_nbytes == {D: 200, H: 100}
    refused(plan, "moment 0 (update param chunk 0): Update group 0 on DEVICE: update_tiers says nothing of", trace)


def test_an_evicted_writer_waits_for_its_last_copy() -> None:
    copied = (Alloc(G0, H), Wait(D2H, COMPUTE, 0), Copy(G0, D, H), Free(G0, H))
    plan, trace = small(WRITE, KEEP_DEVICE, (*copied, Wait(COMPUTE, D2H, 1)))
    assert simulate(plan, trace).moved_nbytes[D2H] == 100
    plan, trace = small(WRITE, KEEP_DEVICE, copied)
    refused(
        plan,
        "moment 0 (write grad chunk 0): computing the write: it writes the slab of grad chunk 0 on DEVICE, which an "
        "operation on D2H may still read; a Wait of COMPUTE on D2H, count 1 or more, is missing",
        trace,
    )


def test_a_slab_is_not_the_version() -> None:
    plan, trace = small(STREAM[:2], {(P0, D): False, (P0, H): True}, (), ())
    message = "HOLD param chunk 0: param chunk 0 on DEVICE is without the newest version; a Copy to it is missing"
    refused(plan, f"moment 0 (hold param chunk 0): {message}", trace)


def test_a_lap_ends_as_it_begins() -> None:
    plan = edited(13, Free(P1, D))
    refused(plan, "after the last moment: param chunk 1 on DEVICE is ")
    plan, trace = small((Moment(Kind.CONSUME, G0),), KEEP_DEVICE, ())
    refused(plan, "after the last moment: grad chunk 0 on DEVICE is ", trace)
    assert simulate(*small((Moment(Kind.CONSUME, G0),), {(G0, D): False}, ())).device_nbytes == (100,)


def test_a_plan_belongs_to_its_trace() -> None:
    refused(replace(PLAN, trace_digest="0"), f"the plan was made from trace 0, this one is {TRACE.digest}; plan again")
    refused(replace(PLAN, actions=ACTIONS[:-1]), "the plan has actions for 13 moments, the trace has 14; plan again")
    refused(
        replace(PLAN, start=START | {Placed(P0, H, newest=False)}), "the plan's start: param chunk 0 is on HOST twice"
    )
    with pytest.raises(PlanError, match=r"^0 iterations cannot be simulated"):
        simulate(PLAN, TRACE, iterations=0)
