"""Operations that share bandwidth: their rates in each interval, worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from chunkmem.data.errors import PlanError
from chunkmem.plan.candidate import PlanOptions
from chunkmem.plan.candidates import candidates
from chunkmem.plan.lane_times import Bandwidth, Queue, end_times
from chunkmem.plan.machine import Machine, host_links
from chunkmem.plan.model import Lane
from chunkmem.plan.simulate import simulate
from tests.helpers.traces import training_trace

COMPUTE, H2D, D2H, HOST_UPDATE = map(list(Lane).index, (Lane.COMPUTE, Lane.H2D, Lane.D2H, Lane.HOST_UPDATE))
MACHINE = Machine(4096, 1 << 30, host_links(h2d_Bps=1e6, d2h_Bps=1e6), host_update_Bps=2e6, one_processor=False)


def ends(bandwidth: Bandwidth, *operations: tuple[int, float, int, list[tuple[int, int]]]) -> dict[int, list[float]]:
    """The ends of operations, each given by lane, seconds, bytes on HOST, and what it starts after."""
    queues = [Queue() for _ in Lane]
    for lane, duration_s, host_nbytes, after in operations:
        if after:
            queues[lane].after[len(queues[lane].durations_s)] = after
        queues[lane].add(duration_s, host_nbytes, bandwidth)
    return {lane: found[1:] for lane, found in enumerate(end_times(queues, bandwidth)) if len(found) > 1}


def test_an_update_takes_what_copies_leave() -> None:
    # HOST_UPDATE  |== 100 B/s ==|===== 60 B/s =====|== 100 B/s ==|
    # H2D                        |===== 40 B/s =====|
    # s            0             4                  9             11
    found = ends(Bandwidth(100.0), (HOST_UPDATE, 9.0, 900, []), (COMPUTE, 4.0, 0, []), (H2D, 5.0, 200, [(COMPUTE, 1)]))
    assert found == {COMPUTE: [4.0], H2D: [9.0], HOST_UPDATE: [pytest.approx(11.0)]}


def test_nobody_is_starved() -> None:
    # Both ask for 90 of 100 B/s, so each gets 50 as long as the other is there; then the rest at 90.
    found = ends(Bandwidth(100.0), (HOST_UPDATE, 2.0, 180, []), (H2D, 1.0, 90, []))
    assert found == {H2D: [pytest.approx(1.8)], HOST_UPDATE: [pytest.approx(1.8 + 90 / 90)]}


def test_copies_in_both_directions_share_the_link() -> None:
    # 55 B/s each way alone, 88 together: both at 0.8 of their speed until the shorter one ends.
    found = ends(Bandwidth(duplex_Bps=88.0), (H2D, 2.0, 110, []), (D2H, 1.0, 55, []))
    assert found == {D2H: [pytest.approx(1.25)], H2D: [pytest.approx(2.25)]}


def test_one_direction_has_the_link_for_itself() -> None:
    assert ends(Bandwidth(duplex_Bps=88.0), (H2D, 2.0, 110, []), (H2D, 1.0, 55, [])) == {H2D: [2.0, 3.0]}


def test_an_operation_that_takes_no_time_still_reads_its_bytes() -> None:
    assert ends(Bandwidth(100.0), (HOST_UPDATE, 0.0, 300, [])) == {HOST_UPDATE: [3.0]}
    assert ends(Bandwidth(), (HOST_UPDATE, 0.0, 300, [])) == {HOST_UPDATE: [0.0]}


@pytest.mark.parametrize("iterations", [1, 2, 3, 5])
def test_bandwidth_to_spare_changes_nothing(iterations: int) -> None:
    trace = training_trace(6, 1024)
    ample = replace(MACHINE, host_memory_Bps=1e12, duplex_Bps=1e12)
    for candidate in candidates(trace, MACHINE, options=PlanOptions()):
        alone = simulate(candidate.plan, trace, iterations=iterations)
        assert simulate(candidate.plan, trace, machine=ample, iterations=iterations) == alone


def test_less_bandwidth_takes_longer() -> None:
    trace = training_trace(6, 1024)
    (*_, candidate) = candidates(trace, MACHINE, options=PlanOptions())
    steps_s = [
        simulate(candidate.plan, trace, machine=replace(MACHINE, host_memory_Bps=Bps)).step_s
        for Bps in (inf, 4e6, 2e6, 1e6)
    ]
    assert steps_s == sorted(steps_s)
    assert steps_s[-1] > 1.5 * steps_s[0]


def test_files_of_machines_that_share_nothing_are_as_they_were() -> None:
    shared = replace(MACHINE, host_memory_Bps=1e11, duplex_Bps=8e10)
    assert shared.to_dict().keys() - MACHINE.to_dict().keys() == {"host_memory_Bps", "duplex_Bps"}
    for machine in (MACHINE, shared, replace(MACHINE, duplex_Bps=8e10)):
        assert Machine.from_dict(machine.to_dict()) == machine
    with pytest.raises(PlanError, match="host_memory_Bps is 0"):
        replace(MACHINE, host_memory_Bps=0.0)
