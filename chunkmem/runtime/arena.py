"""Slabs of HOST: cut from a few large mappings, which are pinned where there is an accelerator."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from chunkmem.data.errors import CapacityError
from chunkmem.data.sizes import format_nbytes
from chunkmem.plan.machine import cap_key
from chunkmem.runtime.device import ComputeDevice, prefer_large_pages, runtime_mode
from chunkmem.runtime.free_room import Extent, FreeRoom
from chunkmem.runtime.ledger import Ledger
from chunkmem.runtime.pool import CutPool, Slab

_SEGMENT_NBYTES = 256 << 20
"""Largest piece of host memory mapped ahead of need; where it is pinned, more, by a share of the cap."""
_PINNED_SEGMENT_SHARE = 1 / 32
_PINNED_SEGMENT_NBYTES = 4 << 30
"""Largest pinned piece, in bytes: all cores touch a piece, and one call pins it."""


_ADMITTED = -1
"""The segment of slabs that are not of the arena."""


class _Region(mmap.mmap):
    """A mapping that is unpinned before it goes, also where nobody has closed its arena.

    CUDA keeps the addresses registered otherwise: it refuses to pin the next mapping there, and copies from and to one
    that lies there in part fail.
    """

    undo: Callable[[], object] | None = None
    """Unpins it; None: it is not pinned."""

    def unpin(self) -> None:
        """Unpin it, once."""
        undo, self.undo = self.undo, None
        if undo is not None:
            undo()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.unpin()


@dataclass(eq=False, slots=True)
class _Segment:
    """One mapping of the arena, and what of it is free."""

    region: _Region | Literal[b""]
    """Empty: given back."""
    bytes: torch.Tensor
    pinned: bool
    free: FreeRoom
    slab_nbytes: int
    """Slabs of this size are cut from its start, others from its end: holes of one size lie side by side."""
    untouched: tuple[int, int]
    """Start and stop offset, in bytes, of the part that was never allocated, and so never written to."""

    @property
    def touched_nbytes(self) -> int:
        start, stop = self.untouched
        return len(self.region) - max(0, stop - start)

    @property
    def is_free(self) -> bool:
        """No slab is given out or kept of it."""
        return self.free.nbytes == len(self.region)


class HostArena(CutPool):
    """Slabs of HOST, cut first-fit from a few mappings of exact size.

    Sizes lie apart, as weights leave for DEVICE and what is wanted
    in their place is twice as large: of bf16 weights in turn with fp32 masters every hole would be too small. What is
    free all the same, and nothing fits, is RAM beyond the cap; whole segments of it are given back.

    torch's pinned allocator rounds each request up to a power of two; a mapping registered as a whole costs what it
    holds. The mappings stay out of forked children: a data loader's workers neither copy their page tables nor touch
    them.
    """

    def __init__(self, ledger: Ledger, compute: ComputeDevice) -> None:
        super().__init__(ledger)
        self._compute = compute
        self._segments: list[_Segment] = []
        self._open: set[int] = set()
        """Segments with free runs: where each slab is a segment of its own, there are thousands of full ones."""
        self._expected_nbytes = 0
        self._admitted_nbytes = 0

    @property
    def reserved_nbytes(self) -> int:
        """Bytes mapped, given out or not, and those that were admitted."""
        return sum(len(segment.region) for segment in self._segments) + self._admitted_nbytes

    @property
    def kept_nbytes(self) -> int:
        """Bytes that were given out and taken back, and are kept for reuse: RAM that no role of the ledger counts."""
        touched_nbytes = sum(segment.touched_nbytes for segment in self._segments)
        return max(0, touched_nbytes + self._admitted_nbytes - self.ledger.total_nbytes)

    @property
    def page_locked_nbytes(self) -> int | None:
        """Bytes that CUDA has pinned; None where there is no CUDA."""
        if not self._compute.is_cuda:
            return None
        return sum(len(segment.region) for segment in self._segments if segment.pinned)

    def expect(self, nbytes: int) -> None:
        """Announce that `nbytes` more will be asked for, so that they are mapped in few pieces and no more than that.

        A piece is mapped when it is first needed: packing a model holds the model and one piece at a time.
        """
        self._expected_nbytes += nbytes

    def _reserve(self, nbytes: int, *, slab_nbytes: int) -> None:
        try:
            # Private: a system that has large pages for such memory mostly has none for shared memory.
            region = _Region(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise self._no_room_error(nbytes) from error
        if hasattr(mmap, "MADV_DONTFORK"):
            region.madvise(mmap.MADV_DONTFORK)
        with runtime_mode():
            view = torch.frombuffer(region, dtype=torch.uint8)
        prefer_large_pages(region)
        pinned = self._compute.pin(region, view.data_ptr())
        if pinned:
            region.undo = partial(_unpin_here, self._compute, view.data_ptr(), os.getpid())
        self._open.add(len(self._segments))
        self._segments.append(_Segment(region, view, pinned, FreeRoom(Extent(0, nbytes)), slab_nbytes, (0, nbytes)))
        self._expected_nbytes = max(0, self._expected_nbytes - nbytes)

    def _no_room_error(self, nbytes: int) -> CapacityError:
        has_nbytes, cap_nbytes, tier = self.reserved_nbytes, self.ledger.cap_nbytes, self.ledger.tier
        return CapacityError(
            f"{tier.name}: the system has no {format_nbytes(nbytes)} of RAM left for this process, which has "
            f"{format_nbytes(has_nbytes)} of {format_nbytes(cap_nbytes)}; lower {cap_key(tier)} to what it may use",
            needed_nbytes=has_nbytes + nbytes,
            cap_nbytes=cap_nbytes,
            tier=tier,
        )

    def _cut(self, nbytes: int, num: int) -> Slab:
        # What was announced may go to DEVICE in part: no more than the cap is mapped ahead.
        room_nbytes = self.ledger.cap_nbytes - self.reserved_nbytes
        slab = self._cut_from_own(nbytes)
        if slab is None and self._join_idle():
            slab = self._cut_from_own(nbytes)
        if slab is None and min(self._expected_nbytes, room_nbytes) < nbytes:
            slab = self._cut_from_own(nbytes, or_any=True)
        if slab is None:
            if self.reserved_nbytes + nbytes > self.ledger.cap_nbytes:
                for index in [index for index in self._open if self._segments[index].is_free]:
                    self._give_back(self._segments[index])
                    self._open.discard(index)
            share_nbytes = int(self.ledger.cap_nbytes * _PINNED_SEGMENT_SHARE) * self._compute.is_cuda
            most_nbytes = max(_SEGMENT_NBYTES, min(share_nbytes, _PINNED_SEGMENT_NBYTES))
            piece_nbytes = min(max(self._expected_nbytes, num * nbytes), room_nbytes, most_nbytes)
            self._reserve(max(nbytes, piece_nbytes // nbytes * nbytes), slab_nbytes=nbytes)
            slab = self._cut_from_own(nbytes)
        assert slab is not None
        return slab

    def admit(self, role: str, memory: torch.Tensor) -> Slab:
        """Count memory that is not the arena's, as what other processes have, too; `free` counts it no more."""
        self.ledger.charge(role, memory.nbytes)
        self._admitted_nbytes += memory.nbytes
        return Slab(memory.nbytes, memory, segment=_ADMITTED)

    def free(self, role: str, slab: Slab) -> None:
        if slab.segment == _ADMITTED:
            self.ledger.release(role, slab.nbytes)
            self._admitted_nbytes -= slab.nbytes
            return
        super().free(role, slab)

    def _join(self, slab: Slab) -> None:
        self._segments[slab.segment].free.give(Extent(slab.start, slab.nbytes))
        self._open.add(slab.segment)

    def _give_back(self, segment: _Segment) -> None:
        if segment.region:
            segment.region.unpin()
        # The mapping goes with the last tensor over it: closing it under a live view would crash its reader.
        with runtime_mode():
            segment.region, segment.bytes = b"", torch.empty(0, dtype=torch.uint8)
        segment.pinned, segment.free, segment.untouched = False, FreeRoom(), (0, 0)

    def close(self) -> None:
        for segment in self._segments:
            self._give_back(segment)
        self._segments.clear()
        self._open.clear()
        self._idle.clear()

    def _cut_from_own(self, nbytes: int, *, or_any: bool = False) -> Slab | None:
        """Return a slab from a segment for slabs of its size, `or_any`; None if none has room."""
        for index in sorted(self._open):
            segment = self._segments[index]
            if segment.is_free:
                segment.slab_nbytes = nbytes
            at_end = segment.slab_nbytes != nbytes
            if at_end and not or_any:
                continue
            extent = segment.free.cut(nbytes, from_end=at_end)
            if extent is not None:
                return self._slab_of(index, extent, at_end=at_end)
        return None

    def _slab_of(self, index: int, extent: Extent, *, at_end: bool) -> Slab:
        segment, (first, last) = self._segments[index], self._segments[index].untouched
        if not segment.free.nbytes:
            self._open.discard(index)
        if extent.start < last and extent.end > first:
            segment.untouched = (first, extent.start) if at_end else (extent.end, last)
        with runtime_mode():
            return Slab(extent.nbytes, segment.bytes[extent.start : extent.end], extent.start, index)


def _unpin_here(compute: ComputeDevice, address: int, pid: int) -> None:
    """Undo a `pin` of this process; a fork of it has neither the mapping nor a driver that could be asked."""
    if os.getpid() == pid:
        compute.unpin(address)
