"""What a user gets to see of memory: now, and at the peak. Plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from chunkmem.data.sizes import format_nbytes
from chunkmem.data.types import MEMORY, Tier

_COLUMNS = ("tier", "role", "now", "last step", "peak", "cap")


@dataclass(frozen=True)
class TierReport:
    """Bytes on one tier."""

    cap_nbytes: int
    now_nbytes: int
    peak_nbytes: int
    step_peak_nbytes: int
    """Highest bytes of chunks since the last step began."""
    required_nbytes: int
    """The smallest cap known to be needed: the largest sum of bytes that were in use at the same time.

    On an accelerator, activations count as its cap covers them: from the second step on, chunks and activations of
    the same moment; before that, and where no step can be recorded, the most of either.
    """
    by_role: Mapping[str, tuple[int, int]]
    """Role name, or "cache" for freed slabs kept for reuse, to (now, peak) in bytes."""
    kept_nbytes: int = 0
    """Bytes of HOST that are in no role now, and kept for the next step; at most what was there at the peak."""
    page_locked_nbytes: int | None = None
    """Bytes of HOST that CUDA has pinned: copies of others hold up the thread that issues them. None without CUDA."""


@dataclass(frozen=True)
class MovedReport:
    """Bytes copied between the tiers since the manager was made."""

    by_lane: Mapping[str, int]
    """By the value of the lane that they were copied on."""

    @property
    def h2d_nbytes(self) -> int:
        """From HOST to DEVICE."""
        return self.by_lane["h2d"]

    @property
    def d2h_nbytes(self) -> int:
        """From DEVICE to HOST."""
        return self.by_lane["d2h"]

    @property
    def read_nbytes(self) -> int:
        """From DISK."""
        return self.by_lane["disk-read"]

    @property
    def written_nbytes(self) -> int:
        """To DISK."""
        return self.by_lane["disk-write"]


@dataclass(frozen=True)
class MemoryReport:
    """Where the bytes are. `str()` is a table."""

    tiers: Mapping[Tier, TierReport]
    """Of all tiers that there are."""
    moved: MovedReport
    padding_nbytes: int
    """Bytes of PARAM chunks that hold no parameter."""
    non_model_nbytes: int
    """Bytes of non-model data: activations, buffers, the interpreter. On an accelerator, what torch allocated there."""
    exchange_nbytes: tuple[int, int] = (0, 0)
    """Of those, now and at the peak, what reductions over ranks take to receive in: no cap covers them."""
    left_nbytes: int = 0
    """Of those, bytes that were activations in chunks and are held by others now: by a user who got hold of them, or by
    autograd, whose graph outlives the step. On an accelerator the cap covers them, as other non-model data."""

    @property
    def device(self) -> TierReport:
        """Of DEVICE."""
        return self.tiers[Tier.DEVICE]

    @property
    def host(self) -> TierReport:
        """Of HOST."""
        return self.tiers[Tier.HOST]

    @property
    def disk(self) -> TierReport | None:
        """Of DISK; None: there is none."""
        return self.tiers.get(Tier.DISK)

    def __str__(self) -> str:
        rows = [_COLUMNS, *self._rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
        align = (str.ljust, str.ljust, *[str.rjust] * 4)
        lines = ["  ".join(a(cell, w) for a, cell, w in zip(align, row, widths, strict=True)) for row in rows]
        return "\n".join(line.rstrip() for line in (*lines, *self._remarks()))

    def __repr__(self) -> str:
        return str(self)

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for name, tier in ((tier.name, report) for tier, report in self.tiers.items()):
            total = (tier.now_nbytes, tier.step_peak_nbytes, tier.peak_nbytes, tier.cap_nbytes)
            yield (name, "all", *(format_nbytes(n) for n in total))
            for role, (now, peak) in tier.by_role.items():
                yield ("", role, format_nbytes(now), "", format_nbytes(peak), "")
            if tier.kept_nbytes:
                yield ("", "kept for reuse", format_nbytes(tier.kept_nbytes), "", "", "")

    def _remarks(self) -> Iterator[str]:
        yield (
            f"padding {format_nbytes(self.padding_nbytes)} per role, non-model data "
            f"{format_nbytes(self.non_model_nbytes)}, moved to DEVICE {format_nbytes(self.moved.h2d_nbytes)} and to "
            f"HOST {format_nbytes(self.moved.d2h_nbytes)}"
        )
        if self.host.page_locked_nbytes is not None:
            yield f"pinned for copies that overlap {format_nbytes(self.host.page_locked_nbytes)} of HOST"
        for tier in [*self.tiers][len(MEMORY) :]:
            read, written = (format_nbytes(self.moved.by_lane[f"{tier.value}-{way}"]) for way in ("read", "write"))
            yield f"read from {tier.name} {read}, written to it {written}"
        if self.exchange_nbytes[1]:
            received, at_peak = map(format_nbytes, self.exchange_nbytes)
            yield f"to receive from other ranks {received}, at the peak {at_peak}"
        if self.left_nbytes:
            yield f"activations held by others {format_nbytes(self.left_nbytes)}"


@dataclass(frozen=True)
class FreezeReport:
    """What `manager.freeze` or `manager.unfreeze` has done. `str()` is one line."""

    num_params: int
    """Elements whose parameters are frozen, or trained, from now on, and were not before."""
    freed_nbytes: int = 0
    """Given back on all tiers of this rank."""
    left_nbytes: int = 0
    """Of their optimizer states and master weights on this rank, in chunks that others still need: smaller chunks
    (`default_chunk_size`) give more back."""
    packed_nbytes: int = 0
    """Of what was given back: by packing chunks again of which less than half is trained."""
    not_packed: str = ""
    """Why that was not done, although it would have given memory back."""

    def __str__(self) -> str:
        packed = f", {format_nbytes(self.packed_nbytes)} of it by packing chunks again" if self.packed_nbytes else ""
        left = f", {format_nbytes(self.left_nbytes)} left in chunks that others need" if self.left_nbytes else ""
        why = f" ({self.not_packed})" if self.not_packed else ""
        return f"{self.num_params} parameters, {format_nbytes(self.freed_nbytes)} given back{packed}{left}{why}"
