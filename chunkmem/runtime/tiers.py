"""The two tiers of a process: how large they are, and the memory behind them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

from chunkmem.config import Config, OptsConfig
from chunkmem.runtime.device import ComputeDevice, ram_nbytes
from chunkmem.runtime.ledger import Ledger
from chunkmem.runtime.pool import DevicePool, HostArena
from chunkmem.types import Tier


@dataclass(frozen=True)
class TierCaps:
    """Bytes that all roles together may take on each tier."""

    device_nbytes: int
    host_nbytes: int
    shared: bool
    """Both are one piece of RAM: everything stays on DEVICE and nothing is copied twice."""


def tier_caps(config: Config, compute: ComputeDevice, *, num_local: int = 1) -> TierCaps:
    """Work out the caps: explicit ones as they are, real capacities times their ratio.

    `num_local` ranks share the RAM of this machine, and with `use_fake_dist` everything.
    """
    caps = _caps_of_one(config, compute, num_local=num_local)
    if not config.client.mem_tracer.use_fake_dist:
        return caps
    host = caps.host_nbytes if config.memory.host is None else caps.host_nbytes // num_local
    return replace(caps, device_nbytes=caps.device_nbytes // num_local, host_nbytes=host)


def _caps_of_one(config: Config, compute: ComputeDevice, *, num_local: int) -> TierCaps:
    tracer = config.client.mem_tracer
    host = config.memory.host
    if host is None:
        host = int(ram_nbytes() * tracer.overall_cpu_mem_ratio) // num_local
    device = config.memory.device
    if device is None:
        if not compute.is_accelerator:
            return TierCaps(host, 0, shared=True)
        device = int(compute.capacity_nbytes() * tracer.overall_gpu_mem_ratio)
    return TierCaps(device, host, shared=False)


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


class Tiers:
    """Ledgers and pools of DEVICE and HOST."""

    def __init__(self, config: Config, compute: ComputeDevice, *, num_local: int = 1) -> None:
        """Make them; `num_local` ranks share this machine."""
        self.compute = compute
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
            self.device, compute, capacity=opts.mem_cache_capacity if opts.with_mem_cache else 0
        )
        self.host_pool = HostArena(self.host, compute)
        self._non_model_peak_nbytes = 0

    def leave_room_for_activations(self) -> None:
        """On an accelerator, give chunks what the activations of the steps so far have left of the cap."""
        if not self.compute.is_accelerator:
            return
        peak = self.compute.take_peak_nbytes() - self.device.low_nbytes
        self.device.low_nbytes = self.device.total_nbytes
        self._non_model_peak_nbytes = max(self._non_model_peak_nbytes, peak)
        self.device.cap_nbytes = max(self.device.total_nbytes, self.device.limit_nbytes - self._non_model_peak_nbytes)

    def plan_decides(self) -> None:
        """A plan is followed: it leaves room for activations by itself, moment by moment, up to the whole cap."""
        self.device.cap_nbytes = self.device.limit_nbytes
        self.device_pool.keeps_all = not self.compute.is_accelerator

    def overshoot_nbytes(self) -> int:
        """Return the bytes by which chunks and activations together passed the cap since the last call; or 0."""
        if not self.compute.is_accelerator:
            return 0
        return max(0, self.compute.take_peak_nbytes() - self.device.limit_nbytes)

    def non_model_nbytes(self) -> int:
        """Return the bytes of non-model data: allocated on an accelerator, or resident in this process."""
        chunks = self.device.total_nbytes
        if not self.compute.is_accelerator:
            chunks += self.host.total_nbytes + self.host_pool.kept_nbytes
        return max(0, self.compute.used_nbytes() - chunks)
