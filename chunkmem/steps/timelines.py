"""What happened in the last steps, made when they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from chunkmem.data.trace import Trace
from chunkmem.data.types import Tier
from chunkmem.plan.timeline import StepFigures, Timeline
from chunkmem.runtime.step_log import StepLog
from chunkmem.runtime.store import ChunkStore
from chunkmem.runtime.tiers import Tiers


class LastTimelines:
    """The timelines of the last iteration and of the last training step that are over, made when they are asked for."""

    def __init__(self, tiers: Tiers, store: ChunkStore) -> None:
        """Begin before the first step; `tiers` tell the peaks, and `store` what of them no plan knows of."""
        self._ledgers = tiers.ledgers
        self._store = store
        self._last: Callable[[], Timeline] | None = None
        self._last_training: Callable[[], Timeline] | None = None
        self._figures: Callable[[], StepFigures | None] = lambda: None

    def take_over(self, before: LastTimelines) -> None:
        """Have those of other chunks until the next iteration is over."""
        self._last, self._last_training, self._figures = before._last, before._last_training, before._figures

    def begin(self) -> None:
        """An iteration begins: peaks are those from now on."""
        for ledger in self._ledgers:
            ledger.restart_peak()

    def keep(self, step_log: StepLog | None, trace: Trace | None, *, is_training: bool, is_hooked: bool) -> None:
        """Keep what a timeline is made of: the step log, and peaks that the next iteration begins again.

        One whose moments nobody has heard of is not the last training step that can be recorded.
        """
        if is_training:
            self._figures = lambda: None
        if step_log is None:
            return
        kept = step_log
        caps = {ledger.tier: ledger.limit_nbytes for ledger in self._ledgers}
        if is_training:
            self._figures = lambda: kept.figures(caps)
        peaks = {ledger.tier: (ledger.chunk_peak_nbytes, dict(ledger.role_peak)) for ledger in self._ledgers}
        for tier, (peak_nbytes, by_role) in list(peaks.items()):
            for_good = self._store.kept_nbytes(tier)
            by_role |= {role: by_role[role] - nbytes for role, nbytes in for_good.items()}
            peaks[tier] = peak_nbytes - for_good.total(), by_role
        on_device_nbytes = self._store.kept_nbytes(Tier.DEVICE).total()

        def timeline() -> Timeline:
            found = kept.timeline(trace, peaks, caps)
            by_moment = tuple(nbytes - on_device_nbytes for nbytes in found.device_nbytes)
            return replace(found, device_nbytes=by_moment) if on_device_nbytes else found

        self._last = timeline
        if is_training and is_hooked:
            self._last_training = self._last

    def last(self) -> Timeline | None:
        """Return what happened in the last iteration that is over; None before the first."""
        return None if self._last is None else self._last()

    def last_training(self) -> Timeline | None:
        """Return what happened in the last training step, whatever has been evaluated since; None before the first."""
        return None if self._last_training is None else self._last_training()

    def figures(self) -> StepFigures | None:
        """Return what the last training step comes to; None if it was neither recorded nor planned."""
        return self._figures()
