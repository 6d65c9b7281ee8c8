"""Bytes on one tier, by role, against its cap."""

from __future__ import annotations

from dataclasses import dataclass, field

from chunkmem.data.types import Tier
from chunkmem.plan.ahead import SHADOW

CACHE = "cache"
"""The role of slabs that are free but kept for reuse."""


@dataclass
class Ledger:
    """Counts every byte taken and given back on a tier. The sum over roles never passes `cap_nbytes`."""

    tier: Tier
    cap_nbytes: int
    """Chunks may take this much now."""
    limit_nbytes: int
    """`cap_nbytes` never passes this: what the user allows."""
    now: dict[str, int] = field(default_factory=dict)
    """Bytes by role name."""
    peak: dict[str, int] = field(default_factory=dict)
    """Each role's own highest `now`."""
    total_nbytes: int = 0
    chunk_nbytes: int = 0
    """Bytes of all roles but the cache."""
    peak_nbytes: int = 0
    chunk_peak_nbytes: int = 0
    """Highest sum over all roles but the cache since `restart_peak`."""
    role_peak: dict[str, int] = field(default_factory=dict)
    """Each role's own highest since then."""

    @property
    def free_nbytes(self) -> int:
        return self.cap_nbytes - self.total_nbytes

    @property
    def spare_nbytes(self) -> int:
        """Bytes that are free, or that slabs kept for reuse and shadow buffers give back when a chunk needs them."""
        return self.free_nbytes + self.now.get(CACHE, 0) + self.now.get(SHADOW, 0)

    def restart_peak(self) -> None:
        """Begin `chunk_peak_nbytes` and `role_peak` again from what is there."""
        self.chunk_peak_nbytes = self.chunk_nbytes
        self.role_peak = {role: nbytes for role, nbytes in self.now.items() if role != CACHE and nbytes}

    def charge(self, role: str, nbytes: int) -> None:
        """Count `nbytes` more for `role`."""
        assert self.total_nbytes + nbytes <= self.cap_nbytes, f"{self.tier.value} over its cap"
        self._count(role, nbytes)
        self.peak_nbytes = max(self.peak_nbytes, self.total_nbytes)
        self.peak[role] = max(self.peak.get(role, 0), self.now[role])
        if role != CACHE:
            self.role_peak[role] = max(self.role_peak.get(role, 0), self.now[role])
            self.chunk_peak_nbytes = max(self.chunk_peak_nbytes, self.chunk_nbytes)

    def release(self, role: str, nbytes: int) -> None:
        """Count `nbytes` fewer for `role`."""
        assert self.now.get(role, 0) >= nbytes, f"{role} gives back more than it took on {self.tier.value}"
        self._count(role, -nbytes)

    def _count(self, role: str, nbytes: int) -> None:
        self.total_nbytes += nbytes
        self.now[role] = self.now.get(role, 0) + nbytes
        if role != CACHE:
            self.chunk_nbytes += nbytes
