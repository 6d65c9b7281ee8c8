"""Read the ledgers for a user: a report of now, and a history of changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from chunkmem.memory import MemoryHistory, MemoryReport, MemorySample, MovedReport, TierReport
from chunkmem.runtime.executor import DemandExecutor
from chunkmem.runtime.tiers import Tiers
from chunkmem.types import Tier


def memory_report(tiers: Tiers, executor: DemandExecutor, *, padding_nbytes: int) -> MemoryReport:
    """Return the ledgers' state as plain data."""
    reports = {
        ledger.tier: TierReport(
            cap_nbytes=ledger.limit_nbytes,
            now_nbytes=ledger.total_nbytes,
            peak_nbytes=ledger.peak_nbytes,
            required_nbytes=executor.required_nbytes[ledger.tier],
            by_role={role: (now, ledger.peak[role]) for role, now in ledger.now.items()},
        )
        for ledger in (tiers.device, tiers.host)
    }
    moved = executor.store.moved
    return MemoryReport(
        device=reports[Tier.DEVICE],
        host=reports[Tier.HOST],
        moved=MovedReport(moved.h2d_nbytes, moved.d2h_nbytes),
        padding_nbytes=padding_nbytes,
        non_model_nbytes=tiers.non_model_nbytes(),
    )


@contextmanager
def recording(tiers: Tiers, *, label: Callable[[], str], moment: Callable[[], int | None]) -> Iterator[MemoryHistory]:
    """Sample both ledgers after every change of either, until the block ends.

    Args:
        tiers: whose ledgers are read.
        label: names the phase of the step at a sample.
        moment: tells the moment of the plan that is followed.
    """
    ledgers = (tiers.device, tiers.host)
    history = MemoryHistory({ledger.tier: ledger.limit_nbytes for ledger in ledgers})
    start = time.perf_counter()

    def sample() -> None:
        nbytes = {ledger.tier: dict(ledger.now) for ledger in ledgers}
        history.samples.append(MemorySample(time.perf_counter() - start, label(), nbytes, moment()))

    before = [ledger.on_change for ledger in ledgers]

    def sample_after(listener: Callable[[], None]) -> Callable[[], None]:
        def both() -> None:
            listener()
            sample()

        return both

    sample()
    for ledger, listener in zip(ledgers, before, strict=True):
        ledger.on_change = sample if listener is None else sample_after(listener)
    try:
        yield history
    finally:
        sample()
        for ledger, listener in zip(ledgers, before, strict=True):
            ledger.on_change = listener
