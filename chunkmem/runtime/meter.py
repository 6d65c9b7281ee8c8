"""Bytes of non-model data on an accelerator: what its allocator counts in addition to slabs.

The allocator counts slabs like everything else, and its peak does not say how much of it they were. So the peak is
read, and the allocator's counter restarted, wherever slabs are taken from the allocator or given back to it. In the
intervals between, the bytes of slabs are constant, and the peak less those bytes is exact:

    read ── slab ── restart ─────── read ── slab ── restart ─────── read
    peak - slabs            peak - slabs            peak - slabs           the highest of these is the peak

Slabs are what the ledger of DEVICE counts, those kept for reuse included: the allocator has not got them back. What it
adds when it rounds a slab up is non-model data. A meter is the only part of a manager that restarts the counter.

Decided in ADR 30.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from chunkmem.runtime.device import ComputeDevice
from chunkmem.runtime.ledger import Ledger


class NonModelMeter:
    """Measures the peak of non-model data on one accelerator."""

    def __init__(self, compute: ComputeDevice, ledger: Ledger) -> None:
        """Begin to measure; `ledger` is that of DEVICE."""
        self._compute = compute
        self._ledger = ledger
        self.is_paused = False
        """A plan is followed, and nothing is read when slabs change."""
        self.highest_nbytes = 0
        """Highest non-model data known so far."""
        self._peak_nbytes = 0
        self._total_peak_nbytes = 0
        self._is_of_others = False
        """What this interval takes does not count."""
        self._restart()

    @property
    def now_nbytes(self) -> int:
        """Bytes of non-model data now."""
        return max(0, self._compute.used_nbytes() - self._ledger.total_nbytes)

    @contextmanager
    def excluding(self) -> Iterator[None]:
        """Leave out what is allocated and freed in the block: slabs, with the ledger's entries, or a measurement."""
        if self.is_paused:
            yield
            return
        self._read()
        try:
            yield
        finally:
            self._restart()

    def take_peak_nbytes(self) -> int:
        """Return the highest bytes of non-model data since the last call; a new interval begins at the present level.

        While a plan is followed, slabs change within the interval, and its peak is not known: 0.
        """
        self._read()
        peak, self._peak_nbytes = self._peak_nbytes, 0
        return peak

    def take_total_peak_nbytes(self) -> int:
        """Return the highest bytes of slabs and non-model data together since the last call, or `pause`."""
        self._read()
        peak, self._total_peak_nbytes = self._total_peak_nbytes, 0
        return peak

    def pause(self, known_nbytes: int) -> None:
        """A plan is followed: slabs change at no cost. By it, non-model data takes `known_nbytes` now."""
        self.highest_nbytes = max(self.highest_nbytes, known_nbytes)
        if not self.is_paused:
            self._read()
            self.is_paused = True
            self._total_peak_nbytes = 0

    def leave_to_others(self) -> None:
        """DEVICE is given to others: what is allocated until memory is next read does not count."""
        self._read()
        self._is_of_others = True

    def resume(self) -> None:
        """The plan is left: measure again, from the present level. May be called when nothing is paused."""
        self._read()
        self.is_paused = False

    def _read(self) -> None:
        """End an interval; the next one begins."""
        total = self._compute.take_peak_nbytes()
        if self._is_of_others:
            self._is_of_others = False
            return
        self._total_peak_nbytes = max(self._total_peak_nbytes, total)
        if not self.is_paused:
            self._peak_nbytes = max(self._peak_nbytes, total - self._ledger.total_nbytes)
            self.highest_nbytes = max(self.highest_nbytes, self._peak_nbytes)

    def _restart(self) -> None:
        """Begin an interval at the present level."""
        self._compute.take_peak_nbytes()
