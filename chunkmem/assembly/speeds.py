"""The speeds that plans are made for."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from math import inf

from chunkmem.plan.machine import Machine
from chunkmem.runtime.measure import UpdatesByForm, cached_machine
from chunkmem.runtime.pager import Pager
from chunkmem.runtime.tiers import Tiers
from chunkmem.shard.exchange_speed import measure_exchanges
from chunkmem.shard.shards import ShardStore


class Links:
    """How fast chunks are copied between tiers and exchanged between ranks."""

    def __init__(
        self,
        shards: ShardStore | None,
        pager: Pager,
        tiers: Tiers,
        machine: Machine | None,
        by_form: UpdatesByForm,
        *,
        shadow_nbytes: int,
    ) -> None:
        """Take exchanges for as fast as can be until they are measured.

        Args:
            shards: of the ranks that exchange chunks; None: there is one rank.
            pager: of the chunks.
            tiers: what is copied between.
            machine: the user's speeds; None: they are measured, once on each machine.
            by_form: updates on HOST that are measured where there is an accelerator.
            shadow_nbytes: most bytes of HOST for speculative updates.
        """
        self._shards = shards
        self._pager = pager
        self._tiers = tiers
        self._machine = machine
        self._by_form = by_form
        self._shadow_nbytes = shadow_nbytes
        self.exchange_Bps = self.reduce_Bps = inf

    def measure(self, groups: tuple[int, ...]) -> None:
        """Measure exchanges, on all ranks, with groups that they gather at once."""
        assert self._shards is not None
        if groups:
            time_s = self._tiers.compute.time_s
            self.exchange_Bps, self.reduce_Bps = measure_exchanges(self._shards, self._pager, groups, time_s=time_s)

    def machine(self) -> Machine:
        """Return what plans are made for: the speeds are the user's, the caps are the configuration's."""
        tiers, machine = self._tiers, self._machine
        if machine is None:
            with tiers.meter.excluding() if tiers.meter is not None else contextlib.nullcontext():
                machine = cached_machine(tiers.compute, tiers.caps, by_form=self._by_form)
        own = replace(
            machine,
            shadow_nbytes=self._shadow_nbytes,
            exchange_Bps=self.exchange_Bps,
            reduce_Bps=self.reduce_Bps,
            links={**tiers.links, **machine.links},
        )
        return own.with_caps({ledger.tier: ledger.limit_nbytes for ledger in tiers.ledgers})
