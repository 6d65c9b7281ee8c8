"""The lower bounds of a step: worked out by hand for two groups of 100 parameters in fp32, and against random plans."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from chunkmem.data.errors import PlanError
from chunkmem.data.trace import Kind, Mode, Moment, Trace
from chunkmem.data.types import ChunkId, Role, Tier
from chunkmem.estimate.hardware import HARDWARE, Hardware
from chunkmem.estimate.needs import lower_bounds_of
from chunkmem.plan.candidate import PlanOptions
from chunkmem.plan.candidates import candidates
from chunkmem.plan.model import Plan
from tests.unit.test_plan_properties import AMPLE, drawn_trace, smallest_cap

ROLES = (Role.PARAM, Role.GRAD, Role("exp_avg"), Role("exp_avg_sq"))
PARAMS = [ChunkId(Role.PARAM, group) for group in (0, 1)]
EVENTS = [(kind, param, 2.0) for param in PARAMS for kind in (Kind.HOLD, Kind.RELEASE)]
EVENTS += [(Kind.UPDATE, param, 50.0) for param in PARAMS]
MOMENTS = tuple(
    Moment(kind, param, duration_s=duration_s, non_model_peak_nbytes=60) for kind, param, duration_s in EVENTS
)
TRACE = Trace(Mode.TRAIN, "by hand", {ChunkId(role, group): 400 for group in (0, 1) for role in ROLES}, MOMENTS)
SLOW = replace(HARDWARE["h100"], link_Bps=10.0, duplex_Bps=20.0, host_memory_Bps=20.0, eager_share=1.0)


def plan(device_nbytes: int, *tiers: Tier) -> Plan:
    return Plan(TRACE.digest, SLOW.machine(device_nbytes, 10_000), frozenset(), (), dict(enumerate(tiers)))


@pytest.mark.parametrize(
    ("device_nbytes", "to_device"),
    [
        (10_060, 400),  # what HOST updated comes once; all weights stay from forward to backward
        (560, 400 + 300),  # 500 of 800 bytes stay, and 300 come again
    ],
)
def test_a_group_updated_on_host(device_nbytes: int, to_device: int) -> None:
    lower_bounds = lower_bounds_of(plan(device_nbytes, Tier.HOST, Tier.DEVICE), TRACE, SLOW, exchange_s=7.0)
    assert lower_bounds.compute_s == 8.0
    assert lower_bounds.link_s == to_device / 10
    # 28 bytes a parameter for the update, and what the link reads and writes.
    assert lower_bounds.host_memory_s == (100 * 28 + to_device + 400) / 20
    assert lower_bounds.network_s == 7.0
    assert (lower_bounds.step_s, lower_bounds.binding) == (lower_bounds.host_memory_s, "host memory")


def test_nothing_on_host_costs_nothing_there() -> None:
    lower_bounds = lower_bounds_of(plan(10_000, Tier.DEVICE, Tier.DEVICE), TRACE, SLOW)
    assert (lower_bounds.link_s, lower_bounds.host_memory_s, lower_bounds.network_s) == (0.0, 0.0, 0.0)
    assert (lower_bounds.step_s, lower_bounds.binding) == (8.0, "compute")


def test_copies_in_both_directions_share_the_link() -> None:
    found = lower_bounds_of(plan(10_060, Tier.HOST, Tier.DEVICE), TRACE, replace(SLOW, duplex_Bps=16.0))
    assert found.link_s == (400 + 400) / 16


def drawn_hardware(rng: random.Random) -> Hardware:
    """Chunks of 64 to 1536 bytes and moments of about 1 ms: bound by anything."""
    link_Bps = 10 ** rng.uniform(4, 7)
    return replace(
        HARDWARE["h100"],
        link_Bps=link_Bps,
        duplex_Bps=rng.uniform(1, 2) * link_Bps,
        host_memory_Bps=10 ** rng.uniform(4.5, 7),
        memory_Bps=10 ** rng.uniform(6, 8),
        is_accelerator=rng.random() < 0.5,
    )


@pytest.mark.few(3)
@pytest.mark.parametrize("block", range(6))
def test_no_simulated_step_is_below_them(block: int) -> None:
    # With all of host memory's bandwidth for each of H2D, D2H and updates, one of six was.
    for seed in range(20 * block, 20 * (block + 1)):
        rng = random.Random(seed)
        trace, hardware = drawn_trace(rng), drawn_hardware(rng)
        smallest = smallest_cap(trace, hardware.machine(AMPLE, AMPLE))
        spare = rng.choice((0.0, rng.random(), 1.2)) * sum(trace.chunk_nbytes.values())
        machine = hardware.machine(smallest + int(spare), AMPLE)
        try:
            found = list(candidates(trace, machine, options=PlanOptions(rng.choice((0.0, 0.5, 1.0)))))
        except PlanError:
            continue
        for candidate in found:
            bounds = lower_bounds_of(candidate.plan, trace, hardware)
            assert candidate.timeline.step_s >= (1 - 1e-9) * bounds.step_s, (seed, candidate.plan.name, bounds)
