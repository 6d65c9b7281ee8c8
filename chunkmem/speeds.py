"""The speeds that plans are made for."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from math import inf

from chunkmem.plan.machine import Machine
from chunkmem.runtime.device import ComputeDevice
from chunkmem.runtime.measure import cached_machine
from chunkmem.runtime.tiers import Tiers
from chunkmem.shard.shards import ShardStore


class Links:
    """How fast chunks are exchanged between ranks."""

    def __init__(self, shards: ShardStore | None, compute: ComputeDevice) -> None:
        """Take them for as fast as can be until they are measured."""
        self._shards = shards
        self._compute = compute
        self.exchange_Bps = inf

    def measure(self, groups: tuple[int, ...]) -> None:
        """Measure, on all ranks, with groups that they gather together."""
        assert self._shards is not None
        if groups:
            self.exchange_Bps = self._shards.measure(groups, time_s=self._compute.time_s)


def machine_for(tiers: Tiers, links: Links, machine: Machine | None, *, shadow_nbytes: int) -> Machine:
    """Return what plans are made for: the speeds are the user's, the caps are the configuration's."""
    if machine is None:
        with tiers.meter.excluding() if tiers.meter is not None else contextlib.nullcontext():
            machine = cached_machine(tiers.compute, tiers.caps)
    return replace(
        machine,
        device_nbytes=tiers.caps.device_nbytes,
        host_nbytes=tiers.caps.host_nbytes,
        shadow_nbytes=shadow_nbytes,
        exchange_Bps=links.exchange_Bps,
        disk_nbytes=tiers.caps.disk_nbytes,
        links=machine.links if tiers.disk_links is None else {**tiers.disk_links, **machine.links},
    )
