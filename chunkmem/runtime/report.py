"""Read the ledgers for a user."""

from __future__ import annotations

from chunkmem.memory import MemoryReport, MovedReport, TierReport
from chunkmem.runtime.pager import Pager
from chunkmem.runtime.tiers import Tiers
from chunkmem.types import Tier


def memory_report(tiers: Tiers, pager: Pager, *, padding_nbytes: int, exchange_nbytes: tuple[int, int]) -> MemoryReport:
    """Return the ledgers' state as plain data."""
    reports = {
        ledger.tier: TierReport(
            cap_nbytes=ledger.limit_nbytes,
            now_nbytes=ledger.total_nbytes,
            peak_nbytes=ledger.peak_nbytes,
            step_peak_nbytes=ledger.chunk_peak_nbytes,
            required_nbytes=pager.required_nbytes[ledger.tier],
            by_role={role: (now, ledger.peak[role]) for role, now in ledger.now.items()},
            kept_nbytes=tiers.host_pool.kept_nbytes if ledger.tier is Tier.HOST else 0,
        )
        for ledger in (tiers.device, tiers.host)
    }
    moved = pager.store.moved
    return MemoryReport(
        device=reports[Tier.DEVICE],
        host=reports[Tier.HOST],
        moved=MovedReport(moved.h2d_nbytes, moved.d2h_nbytes),
        padding_nbytes=padding_nbytes,
        non_model_nbytes=tiers.non_model_nbytes(),
        exchange_nbytes=exchange_nbytes,
    )
