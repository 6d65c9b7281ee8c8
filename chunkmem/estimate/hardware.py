"""What is assumed of a machine that is not at hand: capacities and speeds."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from types import MappingProxyType

import torch

from chunkmem.plan.machine import Machine, host_links

_UPDATE_MOVES_PER_BYTE = 28 / 16
"""An Adam update reads and writes 28 bytes a parameter; `Machine` counts the 16 of PARAM, GRAD and states."""
_LATENCY_S = 10e-6
_RANKS_A_MACHINE = 8


@dataclass(frozen=True)
class Hardware:
    """One accelerator, its host and what connects them. Speeds are those that programs reach."""

    device_nbytes: int
    """Memory of the accelerator."""
    flop_per_s: float
    """Of large matrix products in bf16 and fp16."""
    fp32_flop_per_s: float
    memory_Bps: float
    """Of the accelerator's memory."""
    link_Bps: float
    """Between host and accelerator, each way."""
    host_memory_Bps: float
    peer_Bps: float
    """Between ranks of one machine, for each of them."""
    network_Bps: float = 25e9
    """Between ranks of several machines, for each of them."""
    is_accelerator: bool = True
    """False: DEVICE is a part of RAM, whose cap covers chunks alone, and chunks are exchanged point to point."""

    def exchange_Bps(self, world: int) -> float:
        """Return the speed of exchanges between `world` ranks; up to 8 are taken to be in one machine."""
        return self.peer_Bps if world <= _RANKS_A_MACHINE else min(self.peer_Bps, self.network_Bps)

    def flop_rate(self, dtype: torch.dtype) -> float:
        """Return the operations a second in `dtype`."""
        return self.fp32_flop_per_s if dtype is torch.float32 else self.flop_per_s

    def machine(self, device_nbytes: int, host_nbytes: int, *, world: int = 1) -> Machine:
        """Return what plans of one of `world` ranks are made for, under these caps."""
        return Machine(
            device_nbytes=device_nbytes,
            host_nbytes=host_nbytes,
            links=host_links(h2d_Bps=self.link_Bps, d2h_Bps=self.link_Bps, latency_s=_LATENCY_S),
            device_update_Bps=self.memory_Bps / _UPDATE_MOVES_PER_BYTE,
            host_update_Bps=self.host_memory_Bps / _UPDATE_MOVES_PER_BYTE,
            charges_non_model=self.is_accelerator,
            one_processor=False,
            shadow_nbytes=host_nbytes if self.is_accelerator else 0,
            # Of a chunk, all but the part of its owner passes each rank.
            exchange_Bps=self.exchange_Bps(world) * world / (world - 1) if world > 1 else inf,
        )


def _of(
    gib: int,
    teraflops: float,
    fp32_teraflops: float,
    *,
    memory_GBps: float,
    link_GBps: float,
    host_GBps: float,
    peer_GBps: float,
) -> Hardware:
    # Data sheets name peaks; matrix products reach about 60 % of them, streams 80 %.
    return Hardware(
        gib << 30, 0.6e12 * teraflops, 0.6e12 * fp32_teraflops, 0.8e9 * memory_GBps, 1e9 * link_GBps, 1e9 * host_GBps,
        0.8e9 * peer_GBps,
    )  # fmt: skip


HARDWARE = MappingProxyType(
    {
        "v100": _of(32, 125, 15.7, memory_GBps=900, link_GBps=12, host_GBps=80, peer_GBps=150),
        "a100": _of(80, 312, 19.5, memory_GBps=2039, link_GBps=25, host_GBps=100, peer_GBps=300),
        "h100": _of(80, 989, 67, memory_GBps=3350, link_GBps=55, host_GBps=200, peer_GBps=450),
        "h200": _of(141, 989, 67, memory_GBps=4800, link_GBps=55, host_GBps=200, peer_GBps=450),
        "rtx4090": _of(24, 165, 82.6, memory_GBps=1008, link_GBps=25, host_GBps=60, peer_GBps=25),
    }
)
"""By name; peaks from NVIDIA's data sheets, links and host memory as such machines usually have them."""
