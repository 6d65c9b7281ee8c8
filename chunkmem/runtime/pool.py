"""Slabs: pieces of a tier, given out, taken back, and a few of them kept for reuse.

[Note: Mapped slabs] Once a program has freed a large block, glibc takes blocks of that size from its heap, where what
torch allocates meanwhile lies between them: freed slabs then stay with the process, uncounted, a quarter to half more
than the ledgers say. A slab that is a mapping of its own goes back to the system when it is given up. torch cannot
resize such memory, so this needs a back end of `runtime.storage` that exchanges pointers.
"""

from __future__ import annotations

import contextlib
import mmap
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from chunkmem.errors import TierIOError
from chunkmem.runtime.device import ComputeDevice, prefer_large_pages, runtime_mode
from chunkmem.runtime.events import Event
from chunkmem.runtime.ledger import CACHE, Ledger

_SEGMENT_NBYTES = 256 << 20
"""Largest piece of host memory mapped ahead of need."""
_MAPPED_NBYTES = 128 << 10
"""Smaller slabs are left to the C library: a mapping is made of whole pages."""
_POISON = 0xFF
"""Repeated, this byte is NaN in every floating dtype."""


@dataclass(eq=False, slots=True)
class Slab:
    """A piece of a tier: `nbytes` bytes, one slab or several consecutive ones."""

    nbytes: int
    bytes: torch.Tensor
    """1-D uint8. On DEVICE it owns its storage, which is what a chunk's storage exchanges memory with."""
    start: int = 0
    """Offset in the arena it was cut from; 0 where each slab is an allocation of its own."""
    segment: int = 0
    busy: Event | None = None
    """The last copy that reads or writes it; it may be given back before that is over, but not to the system."""

    def rest(self) -> None:
        """Wait until no copy is at work on it.

        Raises:
            TierIOError: the copy failed, and what it was to save may be here alone.
        """
        if self.busy is not None:
            self.busy.wait()
            self.busy = None

    def give_up(self) -> None:
        """Let its memory go back to the system, even if somebody keeps the slab. Raises what `rest` does."""
        self.rest()
        with runtime_mode():
            self.bytes = torch.empty(0, dtype=torch.uint8)

    def poison(self) -> None:
        """Fill it with NaN, unless a copy still reads it, or failed to."""
        if self.busy is None or (self.busy.done() and self.busy.failure is None):
            with runtime_mode():
                self.bytes.fill_(_POISON)

    def flat(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the slab as 1-D elements of `dtype`."""
        return self.bytes.view(dtype)


class SlabPool(Protocol):
    """Gives out and takes back slabs of one tier; the ledger is charged in the name of the role that asks."""

    ledger: Ledger
    poison: bool
    """Fill every slab with NaN when it is freed, so that a use after that shows."""

    def alloc(self, role: str, nbytes: int) -> Slab:
        """Give out a slab of exactly `nbytes`, contents undefined. The caller has made room for it."""
        ...

    def free(self, role: str, slab: Slab) -> None:
        """Take a slab back."""
        ...

    def expect(self, nbytes: int) -> None:
        """Hear that `nbytes` more are about to be asked for."""
        ...

    def close(self) -> None:
        """Give everything back to the system."""
        ...


class DevicePool:
    """Slabs of DEVICE: an allocation each, of which the last few freed are kept, `capacity` at most.

    A kept slab serves a request of exactly its size and no other, the one freed last first; when room is needed, kept
    slabs go before anything else. [Note: What a plan means] relies on that order.
    """

    def __init__(self, ledger: Ledger, compute: ComputeDevice, *, capacity: int) -> None:
        self.ledger = ledger
        self.poison = False
        self._device = compute.device
        self.maps_slabs = False
        """On a CPU: have slabs mapped by themselves; [Note: Mapped slabs]."""
        self._capacity = capacity
        self.keeps_all = False
        """Keep every freed slab as long as the cap allows: a plan is followed, and takes each of them again."""
        self._kept: deque[Slab] = deque()
        self.changing: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
        """Surrounds what may take memory from the allocator or give it back, with the entries in the ledger."""

    def alloc(self, role: str, nbytes: int) -> Slab:
        for slab in reversed(self._kept):
            if slab.nbytes == nbytes:
                self._kept.remove(slab)
                self.ledger.release(CACHE, nbytes)
                self.ledger.charge(role, nbytes)
                return slab
        with self.changing():
            while self._kept and self.ledger.free_nbytes < nbytes:
                self._discard(self._kept[0])
            with runtime_mode():
                slab = Slab(nbytes, self._allocate(nbytes))
            self.ledger.charge(role, nbytes)
        return slab

    def free(self, role: str, slab: Slab) -> None:
        if self.poison:
            slab.poison()
        with self.changing():
            self.ledger.release(role, slab.nbytes)
            if not self.keeps_all:
                if self._capacity == 0:
                    slab.give_up()
                    return
                while len(self._kept) >= self._capacity:
                    self._discard(self._kept[0])
            self.ledger.charge(CACHE, slab.nbytes)
            self._kept.append(slab)

    def expect(self, nbytes: int) -> None:
        """Nothing is taken ahead of need."""

    def close(self) -> None:
        for slab in tuple(self._kept):
            with contextlib.suppress(TierIOError):
                slab.rest()
            slab.busy = None
            self._discard(slab)

    def _allocate(self, nbytes: int) -> torch.Tensor:
        if self._device.type == "cpu" and self.maps_slabs and nbytes >= _MAPPED_NBYTES:
            # Private, as the C library's memory is: a forked child has its own copy of what it writes.
            region = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory = torch.frombuffer(region, dtype=torch.uint8)
        else:
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        if self._device.type == "cpu":
            prefer_large_pages(memory.data_ptr(), nbytes)
        return memory

    def _discard(self, slab: Slab) -> None:
        slab.give_up()
        self._kept.remove(slab)
        self.ledger.release(CACHE, slab.nbytes)


@dataclass(eq=False, slots=True)
class _Segment:
    """One mapping of the arena, and the runs of it that are free: start to length, in bytes."""

    region: mmap.mmap
    bytes: torch.Tensor
    pinned: bool
    free: dict[int, int]
    touched_nbytes: int = 0
    """From the start to the end of the last slab that was ever cut; the rest was never written to."""


class HostArena:
    """Slabs of HOST, cut first-fit from a few mappings of exact size.

    A freed slab stays as it was cut and serves a request of exactly its size, the one freed last first; it is joined
    to its neighbours when another size finds no room.

    torch's pinned allocator rounds each request up to a power of two; a mapping registered as a whole costs what it
    holds. The mappings stay out of forked children: a data loader's workers neither copy their page tables nor touch
    them.
    """

    def __init__(self, ledger: Ledger, compute: ComputeDevice) -> None:
        self.ledger = ledger
        self.poison = False
        self._compute = compute
        self._segments: list[_Segment] = []
        self._open: set[int] = set()
        """Segments with free runs: where each slab is a segment of its own, there are thousands of full ones."""
        self._idle: dict[int, list[Slab]] = defaultdict(list)
        """Freed slabs by size, the last one last."""
        self._expected_nbytes = 0

    @property
    def reserved_nbytes(self) -> int:
        """Bytes mapped, given out or not."""
        return sum(len(segment.region) for segment in self._segments)

    @property
    def kept_nbytes(self) -> int:
        """Bytes that were given out and taken back, and are kept for reuse: RAM that no role of the ledger counts."""
        return max(0, sum(segment.touched_nbytes for segment in self._segments) - self.ledger.total_nbytes)

    def expect(self, nbytes: int) -> None:
        """Announce that `nbytes` more will be asked for, so that they are mapped in few pieces and no more than that.

        A piece is mapped when it is first needed: packing a model holds the model and one piece at a time.
        """
        self._expected_nbytes += nbytes

    def _reserve(self, nbytes: int) -> None:
        region = mmap.mmap(-1, nbytes)
        if hasattr(mmap, "MADV_DONTFORK"):
            region.madvise(mmap.MADV_DONTFORK)
        with runtime_mode():
            view = torch.frombuffer(region, dtype=torch.uint8)
        prefer_large_pages(view.data_ptr(), nbytes)
        pinned = self._compute.pin(region, view.data_ptr())
        self._open.add(len(self._segments))
        self._segments.append(_Segment(region, view, pinned, {0: nbytes}))
        self._expected_nbytes = max(0, self._expected_nbytes - nbytes)

    def alloc(self, role: str, nbytes: int) -> Slab:
        if self._idle[nbytes]:
            self.ledger.charge(role, nbytes)
            return self._idle[nbytes].pop()
        slab = self._cut(nbytes)
        if slab is None and self._join_idle():
            slab = self._cut(nbytes)
        if slab is None:
            # What was announced may go to DEVICE in part: no more than the cap is mapped ahead.
            ahead = min(self._expected_nbytes, self.ledger.cap_nbytes - self.reserved_nbytes)
            self._reserve(max(nbytes, min(ahead, _SEGMENT_NBYTES // nbytes * nbytes)))
            slab = self._cut(nbytes)
        assert slab is not None
        self.ledger.charge(role, nbytes)
        return slab

    def free(self, role: str, slab: Slab) -> None:
        if self.poison:
            slab.poison()
        self._idle[slab.nbytes].append(slab)
        self.ledger.release(role, slab.nbytes)

    def _join_idle(self) -> bool:
        """Make runs of the freed slabs; tell whether there were any."""
        idle = [slab for slabs in self._idle.values() for slab in slabs]
        for slab in idle:
            slab.rest()
        self._idle.clear()
        for slab in idle:
            self._join(slab)
        return bool(idle)

    def _join(self, slab: Slab) -> None:
        free = self._segments[slab.segment].free
        start, length = slab.start, slab.nbytes
        if start + length in free:
            length += free.pop(start + length)
        before = next((s for s, n in free.items() if s + n == start), None)
        if before is not None:
            length += free.pop(before)
            start = before
        free[start] = length
        self._open.add(slab.segment)

    def close(self) -> None:
        for segment in self._segments:
            if segment.pinned:
                self._compute.unpin(segment.bytes.data_ptr())
        # The mappings go with the last tensor over them: closing them under a live view would crash its reader.
        self._segments.clear()
        self._open.clear()
        self._idle.clear()

    def _cut(self, nbytes: int) -> Slab | None:
        for index in sorted(self._open):
            segment = self._segments[index]
            start = min((start for start, length in segment.free.items() if length >= nbytes), default=None)
            if start is not None:
                length = segment.free.pop(start)
                if length > nbytes:
                    segment.free[start + nbytes] = length - nbytes
                if not segment.free:
                    self._open.discard(index)
                segment.touched_nbytes = max(segment.touched_nbytes, start + nbytes)
                with runtime_mode():
                    return Slab(nbytes, segment.bytes[start : start + nbytes], start, index)
        return None
