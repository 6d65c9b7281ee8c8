"""What no schedule can beat: the time of the arithmetic, of the link, of the host's memory, of the network."""

from __future__ import annotations

from dataclasses import dataclass

from chunkmem.estimate.hardware import Hardware
from chunkmem.plan.model import Plan
from chunkmem.trace.model import Kind, Trace
from chunkmem.types import ChunkId, Role, Tier

_UPDATE_NBYTES = 28
"""An Adam update reads and writes so much for each parameter; 4 of its bytes are one state."""


@dataclass(frozen=True)
class LowerBounds:
    """Lower bounds of a step's time, in seconds; whatever overlaps perfectly takes the largest of them."""

    compute_s: float
    link_s: float
    host_memory_s: float
    network_s: float

    @property
    def step_s(self) -> float:
        return max(self.compute_s, self.link_s, self.host_memory_s, self.network_s)

    @property
    def binding(self) -> str:
        """Name the largest."""
        named = {"compute": self.compute_s, "link": self.link_s, "host memory": self.host_memory_s,
                 "network": self.network_s}  # fmt: skip
        return max(named, key=lambda name: named[name])


def lower_bounds_of(plan: Plan, trace: Trace, hardware: Hardware, *, exchange_s: float = 0.0) -> LowerBounds:
    """Return the lower bounds of a step whose groups are updated where `plan` has them.

    Every weight that HOST updates crosses the link once a step, and again for backward unless DEVICE kept it since
    forward; every gradient that HOST uses crosses it once. `exchange_s` is what ranks exchange, at full speed.
    """
    on_host = {group for group, tier in plan.update_tiers.items() if tier is Tier.HOST}
    updated = _nbytes(trace, on_host, Role.PARAM)
    held = {moment.chunk for moment in trace.moments if moment.kind is Kind.HOLD}
    weights = sum(trace.chunk_nbytes[chunk] for chunk in held)
    room = plan.machine.device_nbytes - min((m.non_model_peak_nbytes for m in trace.moments), default=0)
    to_device = updated + max(0, weights - room) if on_host else 0
    to_host = _nbytes(trace, on_host, Role.GRAD)
    host_nbytes = _nbytes(trace, on_host, Role.EXP_AVG) / 4 * _UPDATE_NBYTES + to_device + to_host
    return LowerBounds(
        compute_s=sum(m.duration_s for m in trace.moments if m.kind is not Kind.UPDATE),
        link_s=max(to_device / hardware.link_Bps, to_host / hardware.link_Bps),
        host_memory_s=host_nbytes / hardware.host_memory_Bps,
        network_s=exchange_s,
    )


def _nbytes(trace: Trace, groups: set[int], role: Role) -> int:
    return sum(trace.chunk_nbytes.get(ChunkId(role, group), 0) for group in groups)
