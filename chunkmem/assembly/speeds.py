"""The speeds that plans are made for."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from math import inf

from chunkmem.plan.machine import Machine
from chunkmem.ranks.exchange_speed import measure_exchanges
from chunkmem.ranks.shards import ShardStore
from chunkmem.runtime.measure import UpdatesByForm, cached_machine
from chunkmem.runtime.pager import Pager
from chunkmem.runtime.tiers import Tiers


@dataclass
class Links:
    """How fast chunks are copied between tiers and exchanged between ranks."""

    shards: ShardStore | None
    """Of the ranks that exchange chunks; None: there is one rank."""
    pager: Pager
    tiers: Tiers
    given: Machine | None
    """The user's speeds; None: they are measured, once on each machine."""
    by_form: UpdatesByForm
    """Updates on HOST that are measured where there is an accelerator."""
    shadow_nbytes: int
    """Most bytes of HOST for speculative updates."""
    exchange_Bps: float = inf
    reduce_Bps: float = inf
    """As fast as can be until they are measured."""

    def measure(self, groups: tuple[int, ...]) -> None:
        """Measure exchanges, on all ranks, with groups that they gather at once."""
        assert self.shards is not None
        if groups:
            time_s = self.tiers.compute.time_s
            self.exchange_Bps, self.reduce_Bps = measure_exchanges(self.shards, self.pager, groups, time_s=time_s)

    def machine(self) -> Machine:
        """Return what plans are made for: the speeds are the user's, the caps are the configuration's."""
        tiers, machine = self.tiers, self.given
        if machine is None:
            with tiers.meter.excluding() if tiers.meter is not None else contextlib.nullcontext():
                machine = cached_machine(tiers.compute, tiers.caps, by_form=self.by_form)
        own = replace(
            machine,
            shadow_nbytes=self.shadow_nbytes,
            exchange_Bps=self.exchange_Bps,
            reduce_Bps=self.reduce_Bps,
            links={**tiers.links, **machine.links},
        )
        return own.with_caps({ledger.tier: ledger.limit_nbytes for ledger in tiers.ledgers})
