"""What no schedule can beat: the time of the arithmetic, of the link, of the host's memory, the disk, the network."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from chunkmem.estimate.hardware import Hardware
from chunkmem.plan.disk_bound import disk_bound
from chunkmem.plan.model import Plan
from chunkmem.trace.model import Kind, Trace
from chunkmem.types import ChunkId, Role, Tier


@dataclass(frozen=True)
class LowerBounds:
    """Lower bounds of a step's time, in seconds; whatever overlaps perfectly takes the largest of them."""

    compute_s: float
    link_s: float
    host_memory_s: float
    network_s: float
    disk_s: float = 0.0

    @property
    def step_s(self) -> float:
        return max(self.seconds.values())

    @property
    def binding(self) -> str:
        """Name the largest."""
        return max(self.seconds, key=self.seconds.__getitem__)

    @property
    def seconds(self) -> dict[str, float]:
        """By what takes them: ``"host memory"``."""
        return {name.removesuffix("_s").replace("_", " "): seconds for name, seconds in asdict(self).items()}


def lower_bounds_of(
    plan: Plan, trace: Trace, hardware: Hardware, *, exchange_s: float = 0.0, stalled_s: float = 0.0
) -> LowerBounds:
    """Return the lower bounds of a step whose groups are updated where `plan` has them.

    Every weight that HOST updates crosses the link once a step, and again for backward unless DEVICE kept it since
    forward; every gradient that HOST uses crosses it once. What crosses the link is read or written on HOST. Computing
    takes at least what operators take one by one; `trace` has the times of an eager step. `exchange_s` is what ranks
    exchange, at full speed, apart from `stalled_s`, which computing waits for. The disk reads and writes at once what
    `disk_bound` says.
    """
    on_host = {group for group, tier in plan.update_tiers.items() if tier is Tier.HOST}
    to_device = _nbytes(trace, on_host, Role.PARAM) + _fetched_again_nbytes(plan, trace) if on_host else 0
    to_host = _nbytes(trace, on_host, Role.GRAD)
    host_nbytes = sum(trace.touched_nbytes(group) for group in on_host) + to_device + to_host
    eager_s = sum(m.duration_s for m in trace.moments if m.kind is not Kind.UPDATE)
    disk = disk_bound(trace, plan.machine)
    return LowerBounds(
        compute_s=hardware.eager_share * (eager_s - stalled_s),
        link_s=max(max(to_device, to_host) / hardware.link_Bps, (to_device + to_host) / hardware.duplex_Bps),
        host_memory_s=host_nbytes / hardware.host_memory_Bps,
        network_s=exchange_s + stalled_s,
        disk_s=max(disk.read_nbytes / hardware.disk_read_Bps, disk.write_nbytes / hardware.disk_write_Bps),
    )


def _fetched_again_nbytes(plan: Plan, trace: Trace) -> int:
    """Return the bytes of weights used in forward and in backward that DEVICE has no room for in between."""
    backward = next((at for at, m in enumerate(trace.moments) if m.kind is Kind.CREATE), None)
    before, after = (
        {moment.chunk for moment in moments if moment.kind is Kind.HOLD}
        for moments in (trace.moments[:backward], trace.moments[backward:])
    )
    room = plan.machine.device_nbytes
    if plan.machine.charges_non_model:
        room -= min((m.non_model_peak_nbytes for m in trace.moments), default=0)
    return max(0, trace.nbytes(before & after) - room)


def _nbytes(trace: Trace, groups: set[int], role: Role) -> int:
    return sum(trace.chunk_nbytes.get(ChunkId(role, group), 0) for group in groups)
