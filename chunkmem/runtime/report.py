"""Read the ledgers for a user."""

from __future__ import annotations

from collections.abc import Iterable

from chunkmem.data.memory import MemoryReport, MovedReport, TierReport
from chunkmem.data.trace import Trace
from chunkmem.data.types import Tier
from chunkmem.plan.gaps import in_use_nbytes
from chunkmem.runtime.pager import Pager
from chunkmem.runtime.tiers import Tiers


def memory_report(
    tiers: Tiers,
    pager: Pager,
    *,
    traces: Iterable[Trace],
    padding_nbytes: int,
    exchange_nbytes: tuple[int, int],
    left_nbytes: int,
) -> MemoryReport:
    """Return the ledgers' state as plain data; `traces` are of the kinds of steps that are known."""
    required = dict(pager.required_nbytes)
    if tiers.meter is not None:
        # Activations count. While nothing has been recorded, the most of them and of chunks may be of two moments.
        needs = [max(in_use_nbytes(trace, charges_non_model=True), default=0) for trace in traces]
        required[Tier.DEVICE] += 0 if needs else tiers.meter.highest_nbytes
        required[Tier.DEVICE] = max(required[Tier.DEVICE], *needs, 0)
    reports = {
        ledger.tier: TierReport(
            cap_nbytes=ledger.limit_nbytes,
            now_nbytes=ledger.total_nbytes,
            peak_nbytes=ledger.peak_nbytes,
            step_peak_nbytes=ledger.chunk_peak_nbytes,
            required_nbytes=required[ledger.tier],
            by_role={role: (now, ledger.peak[role]) for role, now in ledger.now.items()},
            kept_nbytes=tiers.host_pool.kept_nbytes if ledger.tier is Tier.HOST else 0,
            page_locked_nbytes=tiers.host_pool.page_locked_nbytes if ledger.tier is Tier.HOST else None,
        )
        for ledger in tiers.ledgers
    }
    return MemoryReport(
        reports,
        MovedReport({lane.value: nbytes for lane, nbytes in pager.store.moved.items()}),
        padding_nbytes=padding_nbytes,
        non_model_nbytes=tiers.non_model_nbytes(),
        exchange_nbytes=exchange_nbytes,
        left_nbytes=left_nbytes,
    )
