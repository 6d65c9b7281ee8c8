"""What a rank needs at least, read off the traces of its steps: bytes on DEVICE, and on both tiers together; and time.

No schedule beats the time of the arithmetic, of the link, of the host's memory, the disk, the network.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from operator import itemgetter

from chunkmem.data.trace import Kind, Trace
from chunkmem.data.types import ChunkId, Role, Tier
from chunkmem.estimate.hardware import Hardware
from chunkmem.estimate.rank_stage import RankSteps
from chunkmem.optim.room import room_for
from chunkmem.plan.disk_bound import disk_bound
from chunkmem.plan.gaps import in_use_nbytes
from chunkmem.plan.model import Plan


@dataclass(frozen=True)
class DeviceNeed:
    """The smallest cap on DEVICE: the larger one of those of the first step and of planned ones."""

    nbytes: int
    """What DEVICE has to hold at least, if HOST takes everything that nobody uses."""
    moment: str
    """When it needs most."""
    first_nbytes: int
    """Of the first step, which gathers a module's weights at once and may reduce all gradients at its end."""
    planned_nbytes: int


def least_on_device(steps: RankSteps, *, charges_non_model: bool) -> DeviceNeed:
    """Return the smallest cap on DEVICE under which every step runs that is not a choice."""
    planned = _most_in_use(steps.later.trace, charges_non_model)
    first = planned if steps.first is steps.later else _most_in_use(steps.first.trace, charges_non_model)
    return DeviceNeed(*max(planned, first, key=itemgetter(0)), first[0], planned[0])


def _most_in_use(trace: Trace, charges_non_model: bool) -> tuple[int, str]:
    """Return the most bytes that a step uses at a time, and when."""
    sums = in_use_nbytes(trace, charges_non_model=charges_non_model)
    at = max(range(len(sums)), key=lambda i: (sums[i], -i))
    return sums[at], str(trace.moments[at])


def least_on_host(trace: Trace, *, device_nbytes: int, charges_non_model: bool) -> int:
    """Return the smallest cap on HOST, in bytes, under which a first step runs: whatever DEVICE has no room for.

    Args:
        trace: of the first step, in which the optimizer makes its states.
        device_nbytes: cap on DEVICE.
        charges_non_model: which covers activations and temporaries, too.
    """
    sizes = tuple(nbytes for chunk, nbytes in trace.chunk_nbytes.items() if not trace.is_remote(chunk))
    living = _living(trace)
    non_model = (moment.non_model_peak_nbytes if charges_non_model else 0 for moment in trace.moments)
    most_nbytes = max(chunks + others for chunks, others in zip(living, non_model, strict=True))
    host_nbytes = 0
    while True:
        need_nbytes, cap_nbytes = room_for(most_nbytes, sizes=sizes, limits=(device_nbytes, host_nbytes))
        if need_nbytes <= cap_nbytes:
            return host_nbytes
        host_nbytes += need_nbytes - cap_nbytes


def least_as_gateway(trace: Trace) -> int:
    """Return the smallest cap on HOST, in bytes, where a tier below takes all else: what one update touches."""
    return max(
        max(trace.chunk_nbytes.values(), default=0),
        max((trace.nbytes(trace.update(group).chunks) for group in trace.update_moments), default=0),
    )


def gradient_peak_nbytes(trace: Trace) -> int:
    """Return the most bytes of gradients that exist at one time."""
    now = most = 0
    for moment in trace.moments:
        if moment.chunk.role is Role.GRAD and moment.kind in (Kind.CREATE, Kind.CONSUME):
            now += trace.chunk_nbytes[moment.chunk] * (1 if moment.kind is Kind.CREATE else -1)
            most = max(most, now)
    return most


def _living(trace: Trace) -> Iterator[int]:
    """Yield by moment the bytes of chunks with content that is not to be had from elsewhere, or in use."""
    states = {chunk for chunk in trace.chunk_nbytes if chunk.role.is_state}
    here = {
        chunk
        for chunk in trace.chunk_nbytes
        if chunk.role in (Role.PARAM, Role.MASTER) and not trace.is_remote(chunk) and not trace.is_rounded(chunk)
    }
    now = trace.nbytes(here)
    for moment in trace.moments:
        begins: Iterable[ChunkId] = ()
        if moment.kind in (Kind.HOLD, Kind.CREATE):
            begins = (moment.chunk,)
        elif moment.kind is Kind.UPDATE:
            begins = (*states, moment.chunk)
            states = set()  # they are there from now on
        new = {chunk for chunk in begins if chunk not in here}
        here |= new
        now += trace.nbytes(new)
        yield now
        is_over = moment.kind in (Kind.RELEASE, Kind.UPDATE) and moment.chunk.role.kind.is_weights
        can_be_had = trace.is_remote(moment.chunk) or trace.is_rounded(moment.chunk)
        if (is_over and can_be_had) or moment.kind is Kind.CONSUME:
            here.discard(moment.chunk)
            now -= trace.chunk_nbytes[moment.chunk]


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
