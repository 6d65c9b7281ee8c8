"""The lower bounds of a step, worked out by hand: two groups of 100 parameters in fp32, one of them updated on HOST."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chunkmem.estimate.hardware import HARDWARE
from chunkmem.estimate.lower_bounds import lower_bounds_of
from chunkmem.plan.model import Plan
from chunkmem.trace.model import Kind, Mode, Moment, Trace
from chunkmem.types import ChunkId, Role, Tier

ROLES = (Role.PARAM, Role.GRAD, Role.EXP_AVG, Role.EXP_AVG_SQ)
PARAMS = [ChunkId(Role.PARAM, group) for group in (0, 1)]
EVENTS = [(kind, param, 2.0) for param in PARAMS for kind in (Kind.HOLD, Kind.RELEASE)]
EVENTS += [(Kind.UPDATE, param, 50.0) for param in PARAMS]
MOMENTS = tuple(
    Moment(kind, param, duration_s=duration_s, non_model_peak_nbytes=60) for kind, param, duration_s in EVENTS
)
TRACE = Trace(Mode.TRAIN, "by hand", {ChunkId(role, group): 400 for group in (0, 1) for role in ROLES}, MOMENTS)
SLOW = replace(HARDWARE["h100"], link_Bps=10.0, host_memory_Bps=20.0)


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
