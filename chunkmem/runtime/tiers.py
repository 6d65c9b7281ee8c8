"""The tiers of a process: how large they are, and the memory behind them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from chunkmem.config import Config, DiskConfig, MemTracerConfig, OptsConfig
from chunkmem.data.types import Link, Tier
from chunkmem.plan.machine import LinkSpeed, links_below
from chunkmem.runtime.arena import HostArena
from chunkmem.runtime.device import ComputeDevice, ram_nbytes
from chunkmem.runtime.disk_file import SYSTEM_CALLS, SystemCalls
from chunkmem.runtime.disk_pool import BLOCK_NBYTES, DEPTH, DiskPool
from chunkmem.runtime.disk_speed import DiskSpeed, cached_disk_speed
from chunkmem.runtime.kept import reclaimable_on
from chunkmem.runtime.ledger import Ledger
from chunkmem.runtime.meter import NonModelMeter
from chunkmem.runtime.pool import DevicePool, SlabPool
from chunkmem.runtime.queues import Lanes

_UNKNOWN_SPEED = DiskSpeed(1e9, 1e9, 1e-4, BLOCK_NBYTES, DEPTH)
"""Assumed bytes per second of a disk that cannot be measured."""


@dataclass(frozen=True)
class TierCaps:
    """Bytes of memory that all roles together may take on each tier."""

    device_nbytes: int
    host_nbytes: int
    shared: bool
    """Both are one piece of RAM: everything stays on DEVICE and nothing is copied twice."""


def tier_caps(config: Config, compute: ComputeDevice, *, num_local: int = 1) -> TierCaps:
    """Work out the caps: explicit ones as they are, real capacities times their ratio.

    `num_local` ranks share the RAM of this machine, and with `use_fake_dist` everything.
    """
    tracer, host, device = config.client.mem_tracer, config.memory.host, config.memory.device
    num_sharing = num_local if tracer.use_fake_dist else 1
    own_host = int(ram_nbytes() * tracer.overall_cpu_mem_ratio) // num_local if host is None else host // num_sharing
    if device is None and not compute.is_accelerator:
        return TierCaps(own_host if host is not None else own_host // num_sharing, 0, shared=True)
    if device is None:
        device = int(compute.capacity_nbytes() * tracer.overall_gpu_mem_ratio)
    return TierCaps(device // num_sharing, own_host, shared=False)


def shadow_nbytes(opts: OptsConfig, compute: ComputeDevice, caps: TierCaps) -> int:
    """Return the most bytes of HOST for updates that run overlapped with backward; 0: they wait for the step."""
    wanted = compute.is_accelerator if opts.overlap_optimizer is None else opts.overlap_optimizer
    if wanted and caps.shared:
        warnings.warn(
            "client.opts.overlap_optimizer: with memory.device null both tiers are one piece of RAM and nothing is "
            "updated overlapped with backward; set memory.device, or leave overlap_optimizer out",
            stacklevel=2,
        )
        return 0
    share = 1.0 if opts.undo_log_ratio is None else opts.undo_log_ratio
    return int(caps.host_nbytes * share) if wanted else 0


EXPANDABLE_SEGMENTS = (
    "set PYTORCH_ALLOC_CONF=expandable_segments:True (its older name is PYTORCH_CUDA_ALLOC_CONF) before Python starts: "
    "chunks and activations then share all memory, where else they split each other's blocks, and run out of memory "
    "below the cap"
)
"""Advice for allocators without expandable segments."""
_LARGE_SHARE = 0.85
"""Share of an accelerator's memory beyond which a cap leaves too little for fragmentation."""


def warn_of_fragmentation(compute: ComputeDevice, caps: TierCaps) -> None:
    """Warn if `caps` take most of an accelerator whose allocator loses memory between blocks; see ADR 26."""
    if compute.has_expandable_segments():
        return
    if caps.device_nbytes > _LARGE_SHARE * compute.capacity_nbytes():
        warnings.warn(f"memory.device is most of {compute.name()}: {EXPANDABLE_SEGMENTS}", stacklevel=2)


def warn_of_shares(compute: ComputeDevice, tracer: MemTracerConfig) -> None:
    """Warn if a share of DEVICE is asked for where activations take none of it: chunks may have all."""
    default = MemTracerConfig()
    for name in ("warmup_gpu_chunk_mem_ratio", "with_static_partition"):
        if not compute.is_accelerator and getattr(tracer, name) != getattr(default, name):
            warnings.warn(
                f"client.mem_tracer.{name} has no effect without an accelerator: no activations are in DEVICE, and "
                "chunks may take all of memory.device; leave it out here",
                stacklevel=2,
            )


def _open_disk(disk: DiskConfig, above: Tier, calls: SystemCalls | None) -> tuple[DiskPool, dict[Link, LinkSpeed]]:
    """Return DISK, and how fast it is: measured once, but where the calls are not the system's."""
    speed = _UNKNOWN_SPEED
    if calls is None:
        speed = cached_disk_speed(disk.path, capacity_nbytes=disk.capacity)
    pool = DiskPool(
        Ledger(Tier.DISK, disk.capacity, disk.capacity),
        disk.path,
        block_nbytes=speed.block_nbytes,
        depth=speed.depth,
        checks=disk.verify,
        calls=SYSTEM_CALLS if calls is None else calls,
    )
    return pool, links_below(
        above, Tier.DISK, read_Bps=speed.read_Bps, write_Bps=speed.write_Bps, latency_s=speed.latency_s
    )


class Tiers:
    """Ledgers and pools of all tiers."""

    def __init__(
        self,
        config: Config,
        compute: ComputeDevice,
        lanes: Lanes,
        *,
        num_local: int = 1,
        calls: SystemCalls | None = None,
        maps_slabs: bool = False,
    ) -> None:
        """Make them.

        Args:
            config: has their caps.
            compute: what DEVICE is.
            lanes: on which chunks are copied between them.
            num_local: ranks that share this machine.
            calls: that DISK is read and written by; None: those of the system.
            maps_slabs: on a CPU, slabs of DEVICE are mapped by themselves.

        Raises:
            ConfigError, TierIOError: the folder for DISK cannot be used.
        """
        self.compute = compute
        self.lanes = lanes
        self.caps = tier_caps(config, compute, num_local=num_local)
        opts = config.client.opts
        device = self.caps.device_nbytes
        # On an accelerator the cap covers activations too. Until a step has shown how much they take, chunks get the
        # warm-up share, or what the largest moment needs if that is more.
        share = config.client.mem_tracer.warmup_gpu_chunk_mem_ratio if compute.is_accelerator else 1.0
        warm_up = int(device * share)
        self.device = Ledger(Tier.DEVICE, warm_up, device)
        self.host = Ledger(Tier.HOST, self.caps.host_nbytes, self.caps.host_nbytes)
        self.device_pool = DevicePool(
            self.device,
            compute,
            capacity=opts.mem_cache_capacity if opts.with_mem_cache else 0,
            maps_slabs=maps_slabs,
            wait=lanes.compute_waits,
        )
        if opts.with_mem_cache:
            self.device_pool.reclaimable = reclaimable_on(compute)
        self.host_pool = HostArena(self.host, compute)
        self.links: dict[Link, LinkSpeed] = {}
        """Speeds of the links below HOST, if there are any."""
        self.pools: dict[Tier, SlabPool] = {Tier.DEVICE: self.device_pool, Tier.HOST: self.host_pool}
        if config.memory.disk is not None:
            self.pools[Tier.DISK], self.links = _open_disk(config.memory.disk, Tier.HOST, calls)
        self.meter = NonModelMeter(compute, self.device) if compute.is_accelerator else None
        """Measures what else is on an accelerator; None on a CPU, where the cap does not cover that."""
        if self.meter is not None:
            self.device_pool.changing = self.meter.excluding

    @property
    def ledgers(self) -> list[Ledger]:
        """Of all tiers that there are."""
        return [pool.ledger for pool in self.pools.values()]

    def leave_room_for_activations(self, known_nbytes: int = 0) -> None:
        """No plan is followed: on an accelerator, give chunks what activations have left of the cap so far.

        Args:
            known_nbytes: what activations take by the plan that was followed.
        """
        if self.meter is not None:
            self.meter.resume()
            self.device_pool.room_nbytes = None
            left_nbytes = self.device.limit_nbytes - max(known_nbytes, self.meter.highest_nbytes)
            self.device_pool.trim(left_nbytes)
            self.device.cap_nbytes = max(self.device.total_nbytes, left_nbytes)

    def excess_nbytes(self) -> int:
        """Return the bytes of DEVICE that chunks take of what activations have needed so far; no plan is followed."""
        if self.meter is None:
            return 0
        return max(0, self.device.total_nbytes + self.meter.highest_nbytes - self.device.limit_nbytes)

    def plan_decides(self, non_model_nbytes: int) -> None:
        """A plan is followed: all slabs together may take what its non-model data leaves of the cap at present."""
        self.device.cap_nbytes = self.device.limit_nbytes
        self.device_pool.room_nbytes = self.device.limit_nbytes - non_model_nbytes
        if self.meter is not None:
            self.meter.pause(non_model_nbytes)

    def plan_is_left(self) -> None:
        """No plan is followed, if one was until now."""
        if self.device_pool.room_nbytes is not None:
            self.leave_room_for_activations()

    def leave_device_to_others(self) -> None:
        """Chunks have left DEVICE: keep nothing of it, and do not count what others take meanwhile."""
        self.device_pool.trim(0)
        self.compute.give_back_freed()
        if self.meter is not None:
            self.meter.leave_to_others()

    def overshoot_nbytes(self) -> int:
        """Return the bytes by which chunks and activations together passed the cap since the last call; or 0."""
        return 0 if self.meter is None else max(0, self.meter.take_total_peak_nbytes() - self.device.limit_nbytes)

    def non_model_nbytes(self) -> int:
        """Return the bytes of non-model data: allocated on an accelerator, or resident in this process."""
        chunks = self.device.total_nbytes
        if not self.compute.is_accelerator:
            chunks += self.host.total_nbytes + self.host_pool.kept_nbytes
        return max(0, self.compute.used_nbytes() - chunks)
