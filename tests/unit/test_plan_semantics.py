"""What actions and moments do to replicas, by hand."""

from __future__ import annotations

import pytest

from chunkmem.data.trace import Kind, Mode, Moment, Trace
from chunkmem.data.types import LINKS, MEMORY, TIERS, ChunkId, Role, Tier, links_of, neighbor
from chunkmem.plan.model import LANE_LINKS, LINK_LANES, Alloc, Copy, Free, Placed, Plan, Update
from chunkmem.plan.semantics import ABSENT, EMPTY, NEWEST, Residency, State, residency_before
from tests.helpers.runs import machine_of
from tests.helpers.traces import grad, param

DEVICE, HOST = Tier.DEVICE, Tier.HOST
W, G, MASTER = param(0), grad(0), ChunkId(Role.MASTER, 0)


def test_a_chain_has_the_tiers_that_there_are() -> None:
    assert [neighbor(tier) for tier in TIERS] == [Tier.HOST, Tier.DISK, Tier.HOST]
    assert neighbor(Tier.HOST, MEMORY) is Tier.DEVICE
    assert neighbor(Tier.DEVICE, {Tier.DEVICE, Tier.DISK}) is Tier.DISK
    assert neighbor(Tier.DEVICE, TIERS, end=Tier.DISK) is neighbor(Tier.DISK, TIERS, end=Tier.DEVICE) is Tier.HOST
    assert neighbor(Tier.DISK, {Tier.DEVICE, Tier.DISK}, end=Tier.DEVICE) is Tier.DEVICE
    assert tuple(links_of(TIERS)) == LINKS  # with tiers that may not be there, also those past them
    assert {*LANE_LINKS.items()} == {(lane, link) for link, lane in LINK_LANES.items()}


def test_actions() -> None:
    #              DEVICE   HOST
    # at first              W
    # Alloc        empty    W
    # Copy         W        W
    # Free HOST    W
    state = State.of(Residency({(W, HOST): True}), {W: 3, G: 5})
    assert (state.on(W, DEVICE), state.on(W, HOST)) == (ABSENT, NEWEST)
    state.act(Alloc(W, DEVICE))
    assert state.on(W, DEVICE) == EMPTY
    assert state.used_nbytes == [3, 3, 0]
    state.act(Copy(W, HOST, DEVICE))
    assert state.on(W, DEVICE) == NEWEST
    state.act(Free(W, HOST))
    assert state.used_nbytes == [3, 0, 0]
    assert state.snapshot() == Residency({(W, DEVICE): True})
    assert state.has_content(W)
    assert not state.has_content(G)
    assert list(state.present()) == [(W, DEVICE)]


def test_an_unknown_chunk_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        State({W: 1}).replica(G, HOST)


def updated_on_host() -> Trace:
    """A step of an update of weights that are rounded from master weights, and of its gradients' end."""
    return Trace(Mode.TRAIN, "", {W: 2, G: 2, MASTER: 4}, (Moment(Kind.UPDATE, W), Moment(Kind.CONSUME, G)))


def plan_of(trace: Trace, *first: Alloc | Copy | Free | Update, start: tuple[Placed, ...]) -> Plan:
    return Plan(trace.digest, machine_of(9, nbytes=1), frozenset(start), (first, ()), {0: HOST})


START = (Placed(G, HOST, True), Placed(MASTER, HOST, True))


def test_an_update_makes_the_weights_that_are_rounded_by_it() -> None:
    trace = updated_on_host()
    plan = plan_of(trace, Alloc(W, HOST), Update(0, HOST), start=START)
    assert residency_before(plan, trace, 1) == Residency({(G, HOST): True, (MASTER, HOST): True, (W, HOST): True})
    assert residency_before(plan, trace, 2) == Residency({(MASTER, HOST): True, (W, HOST): True})


def test_weights_that_leave_host_in_the_moment_of_their_update_do_not_come_back() -> None:
    # They did: what an update on HOST makes was taken to be there at the moment's end, whatever came after the update.
    trace = updated_on_host()
    onward = (Alloc(W, HOST), Update(0, HOST), Alloc(W, DEVICE), Copy(W, HOST, DEVICE), Free(W, HOST))
    plan = plan_of(trace, *onward, start=START)
    assert residency_before(plan, trace, 1) == Residency({(G, HOST): True, (MASTER, HOST): True, (W, DEVICE): True})


def test_what_was_updated_ahead_is_there_when_its_moment_is_over() -> None:
    trace = updated_on_host()
    plan = plan_of(trace, Alloc(W, HOST), start=START)
    assert residency_before(plan, trace, 1).newest[W, HOST]


def test_a_gradient_that_is_used_up_leaves_a_slab_on_device_only() -> None:
    trace = updated_on_host()
    plan = plan_of(trace, start=(Placed(G, HOST, True), Placed(G, DEVICE, True), Placed(W, HOST, False)))
    assert residency_before(plan, trace, 2) == Residency({(G, DEVICE): False, (W, HOST): True})
