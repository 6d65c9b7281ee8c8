"""What is assumed of a machine that is not at hand: capacities and speeds.

Peaks are of data sheets. What whole steps of eager PyTorch reach of them is fitted to published
figures, of which docs/estimates.md has a table: 0.45 of the dense peak on H100, 0.55 on V100. HOST's bandwidth is that
of rented machines with 16 or so cores for each accelerator; DISK is one NVMe drive of a data center (PCIe 4), after its
cache is full. `SLOWER` and `FASTER` are how far other machines are off. For other cards the share is a guess between
those two. On GH200 and GB200 the link is NVLink-C2C, of which copies reach two thirds, and HOST is Grace's LPDDR5X; the
two accelerators of a GB200 share both.

[Note: Two levels of network]
NCCL's rings over all ranks enter and leave each machine once, and there are enough of them to use all of its NICs. So
an all-gather or reduce-scatter of S bytes over W ranks takes

    t = S (W - 1) / (W B),    B = min(rank to rank within a machine, _NIC_SHARE x NICs x line rate, ranks x PCIe link)

where B is the bus bandwidth, `busbw` of nccl-tests, and the last two are of a machine, where there are several. Latency
is left out. From replica to replica, all ranks of a machine sum their parts at a time, and share its NICs.

Sources: NVIDIA/nccl-tests, doc/PERFORMANCE.md (t and B); its issue 290, where maintainers expect 46 to 48 GB/s of a NIC
of 400 Gb/s; its issue 232, where one H100 with four such NICs reaches 50 GB/s, as much as its own link.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from chunkmem.data.types import Tier, UpdateForm
from chunkmem.estimate.mesh import ALONE, RankMesh
from chunkmem.plan.machine import Machine, host_links, links_below

if TYPE_CHECKING:
    import torch

_UPDATE_MOVES_PER_BYTE = 28 / 16
"""An Adam update reads and writes 28 bytes a parameter; `Machine` counts the 16 of PARAM, GRAD and states."""


@dataclass(frozen=True)
class _Update:
    """What Adam's update of one parameter takes on HOST."""

    held_nbytes: float
    """Of weights, gradient, states."""
    moved_nbytes: float
    """Read and written of those."""
    core_s: float
    """Of one core, for the arithmetic alone: what is updated is in its caches."""


# Seconds: measured on one core with AVX-512.
_UPDATES = MappingProxyType(
    {
        UpdateForm.FP32: _Update(16, 28, 0.8e-9),
        UpdateForm.MASTER: _Update(16, 28, 0.95e-9),
        UpdateForm.CODES: _Update(10, 16, 1.15e-9),
        UpdateForm.CODES_ALONE: _Update(6, 10, 1.3e-9),
    }
)
_LATENCY_S = 10e-6
_DISK_LATENCY_S = 1e-4
_NIC_SHARE = 0.92
"""Of the line rate of a NIC: what rings reach."""
_MATMUL_SHARE = 0.6
"""Of the dense peak: what large matrix products reach."""
_CONTEXT_NBYTES, _GAPS_SHARE = 1 << 29, 0.05
"""CUDA's context, and the share of the rest that is lost between the blocks of torch's allocator."""
BUILD_Bps, PIN_Bps = 0.5e9, 3e9
"""Before the first step: random initial values, which one thread draws; first touch and registration of HOST's pinned
memory."""


@dataclass(frozen=True)
class Hardware:
    """One accelerator, its host and what connects them. Speeds are those that programs reach."""

    device_nbytes: int
    """Memory of the accelerator: torch's `total_memory`."""
    flop_per_s: float
    """Of large matrix products in bf16 and fp16, by themselves."""
    fp32_flop_per_s: float
    memory_Bps: float
    """Of the accelerator's memory."""
    link_Bps: float
    """Between host and accelerator, each way."""
    duplex_Bps: float
    """Between them, both ways at once."""
    host_memory_Bps: float
    peer_Bps: float
    """Between ranks of one machine, for each of them."""
    nic_Bps: float
    """Line rate of one network card."""
    num_cores: int = 14
    """That update on HOST, for each accelerator."""
    eager_share: float = 0.75
    """Of the speed of its operators one by one: what an eager step reaches, with launches, casts, small operators."""
    workspace_nbytes: int = 8 << 20
    """What cuBLAS takes of the accelerator's memory."""
    ranks_a_machine: int = 8
    """Those that reach each other at `peer_Bps`."""
    nics: float = 8
    """Of a machine, for traffic between accelerators alone."""
    disk_read_Bps: float = 6e9
    """Of a rank's own file on an NVMe drive."""
    disk_write_Bps: float = 4e9
    is_accelerator: bool = True
    """False: DEVICE is a part of RAM, whose cap covers chunks alone, and chunks are exchanged point to point."""

    @property
    def below(self) -> dict[Tier, dict[str, float]]:
        """Speeds of the tiers below HOST, for `links_below`."""
        disk = {"read_Bps": self.disk_read_Bps, "write_Bps": self.disk_write_Bps, "latency_s": _DISK_LATENCY_S}
        return {Tier.DISK: disk}

    def divided(self, tp: int) -> Hardware:
        """Return the hardware as ranks see it that have the same of `tp` parts: the others share machines and NICs."""
        num_apart = min(tp, self.ranks_a_machine)
        return replace(self, ranks_a_machine=self.ranks_a_machine // num_apart, nics=self.nics / num_apart)

    def exchange_Bps(self, world: int) -> float:
        """Return the bus bandwidth of exchanges between `world` ranks: see [Note: Two levels of network]."""
        if world <= self.ranks_a_machine:
            return self.peer_Bps
        return min(self.peer_Bps, _NIC_SHARE * self.nics * self.nic_Bps, self.ranks_a_machine * self.link_Bps)

    def send_Bps(self, world: int) -> float:
        """Return the speed of a rank that sends to the next one of `world`: out of a machine, by one NIC."""
        return replace(self, nics=1).exchange_Bps(world)

    def across_Bps(self, world: int) -> float:
        """Return the speed at which each of `world` ranks sends to a peer in another replica, all at a time."""
        if world <= self.ranks_a_machine:
            return self.peer_Bps
        return min(self.peer_Bps, _NIC_SHARE * self.nics * self.nic_Bps / self.ranks_a_machine, self.link_Bps)

    def _reduce_Bps(self, mesh: RankMesh, sent_share: float) -> float:
        """Return the bytes of gradients a second that are summed by the library and by replicas."""
        if mesh.replicate == 1 and not self.is_accelerator:
            return inf
        within_s = (mesh.shard - 1) / mesh.shard / self.exchange_Bps(mesh.shard)
        return 1 / sent_share / (within_s + mesh.across_share / self.across_Bps(mesh.world))

    def flop_rate(self, dtype: torch.dtype) -> float:
        """Return the operations a second in `dtype`."""
        return self.fp32_flop_per_s if dtype.itemsize == 4 else self.flop_per_s

    def peak_flop_per_s(self, dtype: torch.dtype) -> float:
        """Return the dense peak in `dtype`, of the data sheet."""
        return self.flop_rate(dtype) / _MATMUL_SHARE

    @property
    def usable_nbytes(self) -> int:
        """The largest cap on DEVICE: what CUDA's context, cuBLAS's workspace and the allocator's gaps leave."""
        return int((1 - _GAPS_SHARE) * (self.device_nbytes - _CONTEXT_NBYTES - self.workspace_nbytes))

    def scaled(self, *, eager: float, host: float, link: float, disk: float) -> Hardware:
        """Return hardware that is so many times as fast; operators one by one stay as fast."""
        return replace(
            self,
            eager_share=min(1.0, eager * self.eager_share),
            host_memory_Bps=host * self.host_memory_Bps,
            link_Bps=link * self.link_Bps,
            duplex_Bps=link * self.duplex_Bps,
            disk_read_Bps=disk * self.disk_read_Bps,
            disk_write_Bps=disk * self.disk_write_Bps,
        )

    def _host_update_Bps(self, form: UpdateForm) -> float:
        """Return the bytes a second that updates on HOST pass over: its memory binds, or the cores' arithmetic."""
        update = _UPDATES[form]
        return update.held_nbytes / max(update.moved_nbytes / self.host_memory_Bps, update.core_s / self.num_cores)

    def machine(
        self,
        device_nbytes: int,
        host_nbytes: int,
        *,
        below_nbytes: Mapping[Tier, int] = MappingProxyType({}),
        mesh: RankMesh = ALONE,
        sent_share: float = 1.0,
    ) -> Machine:
        """Return what plans of one rank of a mesh are made for, under these caps; `sent_share`: see `Setting`."""
        shards = mesh.shard
        links = host_links(h2d_Bps=self.link_Bps, d2h_Bps=self.link_Bps, latency_s=_LATENCY_S)
        for upper, lower in pairwise((Tier.HOST, *below_nbytes)):
            links |= links_below(upper, lower, **self.below[lower])
        machine = Machine(
            device_nbytes=device_nbytes,
            host_nbytes=host_nbytes,
            links=links,
            device_update_Bps=self.memory_Bps / _UPDATE_MOVES_PER_BYTE,
            host_update_Bps=self._host_update_Bps(UpdateForm.FP32),
            host_form_Bps=tuple((form, self._host_update_Bps(form)) for form in _UPDATES),
            charges_non_model=self.is_accelerator,
            one_processor=False,
            shadow_nbytes=host_nbytes if self.is_accelerator else 0,
            # Of a chunk, all but the part of its owner passes each rank.
            exchange_Bps=self.exchange_Bps(shards) * shards / (shards - 1) if shards > 1 else inf,
            reduce_Bps=self._reduce_Bps(mesh, sent_share) if shards > 1 else inf,
            host_memory_Bps=self.host_memory_Bps,
            duplex_Bps=self.duplex_Bps,
        )
        return machine.with_caps({**machine.cap_nbytes, **below_nbytes})


def _of(
    gib: float,
    teraflops: float,
    fp32_teraflops: float,
    *,
    memory_GBps: float,
    link_GBps: float,
    host_GBps: float,
    peer_GBps: float,
    eager: float,
    nic_Gbps: float = 400,
    workspace_mib: int = 8,
    **more: Any,
) -> Hardware:
    # Data sheets name peaks; matrix products reach about 60 % of them, streams 80 %. `eager` is of the peak, too.
    return Hardware(
        device_nbytes=int(gib * 2**30),
        flop_per_s=_MATMUL_SHARE * 1e12 * teraflops,
        fp32_flop_per_s=_MATMUL_SHARE * 1e12 * fp32_teraflops,
        memory_Bps=0.8e9 * memory_GBps,
        link_Bps=1e9 * link_GBps,
        duplex_Bps=1.6e9 * link_GBps,
        host_memory_Bps=1e9 * host_GBps,
        peer_Bps=0.8e9 * peer_GBps,
        eager_share=eager / _MATMUL_SHARE,
        nic_Bps=125e6 * nic_Gbps,
        workspace_nbytes=workspace_mib << 20,
        **more,
    )


HARDWARE = MappingProxyType(
    {
        # Machines: DGX-1, DGX A100, AWS p4d, DGX H100 and DGX H200.
        "v100": _of(31.7, 125, 15.7, memory_GBps=900, link_GBps=12, host_GBps=80, peer_GBps=150, eager=0.55,
                    nics=4, nic_Gbps=100),
        "a100": _of(79.2, 312, 19.5, memory_GBps=2039, link_GBps=25, host_GBps=100, peer_GBps=300, eager=0.5,
                    nic_Gbps=200),
        "a100-40": _of(39.4, 312, 19.5, memory_GBps=1555, link_GBps=25, host_GBps=100, peer_GBps=300, eager=0.5,
                       nics=4, nic_Gbps=100),
        "h100": _of(79.2, 989, 67, memory_GBps=3350, link_GBps=55, host_GBps=130, peer_GBps=450, eager=0.45,
                    workspace_mib=32),
        "h200": _of(139.8, 989, 67, memory_GBps=4800, link_GBps=55, host_GBps=130, peer_GBps=450, eager=0.45,
                    workspace_mib=32),
        # GH200 Grace Hopper Superchip data sheet (96 GB, 480 GB of LPDDR5X); nodes of Alps (CSCS): 4 with a NIC each.
        "gh200": _of(94.5, 989, 67, memory_GBps=4000, link_GBps=300, host_GBps=300, peer_GBps=450, eager=0.45,
                     nics=4, nic_Gbps=200, ranks_a_machine=4, workspace_mib=32, num_cores=70),
        # GB200 NVL72 data sheet, of which each GPU has a 72nd; NVLink and a NIC for each of them, too.
        "gb200": _of(184, 2500, 80, memory_GBps=8000, link_GBps=150, host_GBps=190, peer_GBps=900, eager=0.4,
                     nics=72, ranks_a_machine=72, workspace_mib=32, num_cores=34),
        # Ampere GA102, Ada and RTX Blackwell architecture white papers: bf16 with sums in fp32. Machines differ: one
        # NIC of 25 Gb/s is what a server has at least.
        "rtx3090": _of(23.6, 71, 35.6, memory_GBps=936, link_GBps=25, host_GBps=60, peer_GBps=25, eager=0.5,
                       nics=1, nic_Gbps=25),
        "rtx4090": _of(23.6, 165, 82.6, memory_GBps=1008, link_GBps=25, host_GBps=60, peer_GBps=25, eager=0.5,
                       nics=1, nic_Gbps=25),
        "rtx5090": _of(31.4, 209.5, 104.8, memory_GBps=1792, link_GBps=50, host_GBps=60, peer_GBps=50, eager=0.5,
                       nics=1, nic_Gbps=25),
        # L40S data sheet; AWS g6e.48xlarge: 400 Gb/s for 8 of them.
        "l40s": _of(44.4, 362, 91.6, memory_GBps=864, link_GBps=25, host_GBps=100, peer_GBps=25, eager=0.4,
                    nics=1),
        # AMD Instinct MI300X data sheet: bf16 of its matrix cores, fp32 of its vectors, 7 links of Infinity Fabric;
        # Azure ND MI300X v5: a NIC for each of 8.
        "mi300x": _of(191.6, 1307, 163.4, memory_GBps=5300, link_GBps=50, host_GBps=130, peer_GBps=448, eager=0.33,
                      workspace_mib=32),
    }
)  # fmt: skip
"""By name. Peaks from data sheets, without sparsity (V100, A100, H100 and H200: NVIDIA's of that
card); memory as torch's messages name it."""

SLOWER: Mapping[str, float] = MappingProxyType({"eager": 0.8, "host": 0.77, "link": 0.9, "disk": 0.7})
FASTER: Mapping[str, float] = MappingProxyType({"eager": 1.2, "host": 1.23, "link": 1.1, "disk": 1.15})
"""Factors for `Hardware.scaled` between which most machines of a name are: 100 to 160 GB/s for 130 of HOST's memory."""
