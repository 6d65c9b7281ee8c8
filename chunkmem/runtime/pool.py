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
from dataclasses import dataclass
from typing import Literal, Protocol

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

    def rest(self, wait: Callable[[Event], object] | None = None) -> None:
        """Have `wait` wait until no copy is at work on it; without it, the calling thread does.

        Raises:
            TierIOError: the copy failed, and what it was to save may be here alone.
        """
        if self.busy is not None:
            if wait is None:
                self.busy.wait()
            else:
                wait(self.busy)
            self.busy = None

    def give_up(self, wait: Callable[[Event], object] | None = None) -> None:
        """Let its memory go back to the system, even if somebody keeps the slab. As `rest`, and raises what it does."""
        self.rest(wait)
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
    """Slabs of DEVICE: an allocation each, of which freed ones are kept, the last `capacity` unless a plan is followed.

    A kept slab serves a request of exactly its size and no other, the one freed last first; when room is needed, kept
    slabs go before anything else, the one freed first first. [Note: What a plan means] relies on that order.

    [Note: Room for kept slabs] A plan fills DEVICE with chunks and non-model data, moment by moment. Slabs that are
    free in between take what both leave: `room_nbytes` is the cap less the moment's non-model data, kept slabs are
    given up beyond that, and only then. So most slabs go from one chunk to the next without torch's allocator, and
    the bytes of all slabs and of non-model data never pass the cap together.

        cap       -----------------------------------------------
        non-model ..:::::....:::..       the plan sees to it that there is room for these two at any moment
        kept      oo      ooo   oo       `trim`, at the end of a moment's actions
        chunks    #################

    Giving up memory that a copy still uses waits for that copy. `wait` says how: on an accelerator, the stream that
    computes does, as torch's allocator hands memory on in the order of that stream, and not the thread that issues.
    """

    def __init__(self, ledger: Ledger, compute: ComputeDevice, *, capacity: int) -> None:
        self.ledger = ledger
        self.poison = False
        self._device = compute.device
        self.maps_slabs = False
        """On a CPU: have slabs mapped by themselves; [Note: Mapped slabs]."""
        self._capacity = capacity
        self.room_nbytes: int | None = None
        """While a plan is followed: bytes that slabs may take, given out or kept; [Note: Room for kept slabs]."""
        self.wait: Callable[[Event], object] | None = None
        """Has what is computed from now on come after an event. None: the calling thread waits."""
        self._kept: deque[Slab] = deque()

    def alloc(self, role: str, nbytes: int) -> Slab:
        for slab in reversed(self._kept):
            if slab.nbytes == nbytes:
                self._kept.remove(slab)
                self.ledger.release(CACHE, nbytes)
                self.ledger.charge(role, nbytes)
                return slab
        cap_nbytes = self.ledger.cap_nbytes
        room_nbytes = cap_nbytes if self.room_nbytes is None else min(cap_nbytes, self.room_nbytes)
        while self._kept and self.ledger.total_nbytes + nbytes > room_nbytes:
            self._discard(self._kept[0])
        with runtime_mode():
            slab = Slab(nbytes, self._allocate(nbytes))
        self.ledger.charge(role, nbytes)
        return slab

    def free(self, role: str, slab: Slab) -> None:
        if self.poison:
            slab.poison()
        self.ledger.release(role, slab.nbytes)
        if self.room_nbytes is None and self._capacity == 0:
            slab.give_up(self.wait)
            return
        self.ledger.charge(CACHE, slab.nbytes)
        self._kept.append(slab)
        if self.room_nbytes is None:
            self.trim()

    def trim(self) -> None:
        """Give up kept slabs until there are no more than there may be."""
        while self._kept and self._has_too_many():
            self._discard(self._kept[0])

    def _has_too_many(self) -> bool:
        if self.room_nbytes is None:
            return len(self._kept) > self._capacity
        return self.ledger.total_nbytes > self.room_nbytes

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
        slab.give_up(self.wait)
        self._kept.remove(slab)
        self.ledger.release(CACHE, slab.nbytes)


@dataclass(eq=False, slots=True)
class _Segment:
    """One mapping of the arena, and the runs of it that are free: start to length, in bytes."""

    region: mmap.mmap | Literal[b""]
    """Empty: given back."""
    bytes: torch.Tensor
    pinned: bool
    free: dict[int, int]
    slab_nbytes: int
    """Slabs of this size are cut from its start, others from its end: holes of one size lie side by side."""
    untouched: tuple[int, int]
    """From where to where nothing was ever cut, so that nothing was written to."""

    @property
    def touched_nbytes(self) -> int:
        start, stop = self.untouched
        return len(self.region) - max(0, stop - start)

    @property
    def is_free(self) -> bool:
        """No slab is given out or kept of it."""
        return self.free.get(0) == len(self.region)


class HostArena:
    """Slabs of HOST, cut first-fit from a few mappings of exact size.

    A freed slab stays as it was cut and serves a request of exactly its size, the one freed last first; it is joined
    to its neighbours when another size finds no room. Sizes lie apart, as weights leave for DEVICE and what is wanted
    in their place is twice as large: of bf16 weights in turn with fp32 masters every hole would be too small. What is
    free all the same, and nothing fits, is RAM beyond the cap; whole segments of it are given back.

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

    def _reserve(self, nbytes: int, *, slab_nbytes: int) -> None:
        region = mmap.mmap(-1, nbytes)
        if hasattr(mmap, "MADV_DONTFORK"):
            region.madvise(mmap.MADV_DONTFORK)
        with runtime_mode():
            view = torch.frombuffer(region, dtype=torch.uint8)
        prefer_large_pages(view.data_ptr(), nbytes)
        pinned = self._compute.pin(region, view.data_ptr())
        self._open.add(len(self._segments))
        self._segments.append(_Segment(region, view, pinned, {0: nbytes}, slab_nbytes, (0, nbytes)))
        self._expected_nbytes = max(0, self._expected_nbytes - nbytes)

    def alloc(self, role: str, nbytes: int) -> Slab:
        if self._idle[nbytes]:
            self.ledger.charge(role, nbytes)
            return self._idle[nbytes].pop()
        # What was announced may go to DEVICE in part: no more than the cap is mapped ahead.
        ahead_nbytes = min(self._expected_nbytes, self.ledger.cap_nbytes - self.reserved_nbytes)
        slab = self._cut(nbytes)
        if slab is None and self._join_idle():
            slab = self._cut(nbytes)
        if slab is None and ahead_nbytes < nbytes:
            slab = self._cut(nbytes, from_any=True)
        if slab is None:
            if self.reserved_nbytes + nbytes > self.ledger.cap_nbytes:
                self._give_free_segments_back()
            self._reserve(max(nbytes, min(ahead_nbytes, _SEGMENT_NBYTES) // nbytes * nbytes), slab_nbytes=nbytes)
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

    def _give_free_segments_back(self) -> None:
        for index in [index for index in self._open if self._segments[index].is_free]:
            self._give_back(self._segments[index])
            self._open.discard(index)

    def _give_back(self, segment: _Segment) -> None:
        if segment.pinned:
            self._compute.unpin(segment.bytes.data_ptr())
        # The mapping goes with the last tensor over it: closing it under a live view would crash its reader.
        with runtime_mode():
            segment.region, segment.bytes = b"", torch.empty(0, dtype=torch.uint8)
        segment.pinned, segment.free, segment.untouched = False, {}, (0, 0)

    def close(self) -> None:
        for segment in self._segments:
            self._give_back(segment)
        self._segments.clear()
        self._open.clear()
        self._idle.clear()

    def _cut(self, nbytes: int, *, from_any: bool = False) -> Slab | None:
        """Return a slab from a segment for slabs of its size, or `from_any`; None if none has room."""
        for index in sorted(self._open):
            segment = self._segments[index]
            if segment.is_free:
                segment.slab_nbytes = nbytes
            is_own = segment.slab_nbytes == nbytes
            fitting = [start for start, length in segment.free.items() if length >= nbytes]
            if fitting and (is_own or from_any):
                start = min(fitting) if is_own else max(fitting)
                return self._cut_from(index, start, nbytes, at_end=not is_own)
        return None

    def _cut_from(self, index: int, start: int, nbytes: int, *, at_end: bool) -> Slab:
        segment = self._segments[index]
        rest_nbytes = segment.free.pop(start) - nbytes
        if at_end:
            start, rest = start + rest_nbytes, start
        else:
            rest = start + nbytes
        if rest_nbytes:
            segment.free[rest] = rest_nbytes
        if not segment.free:
            self._open.discard(index)
        first, last = segment.untouched
        segment.untouched = (first, min(last, start)) if at_end else (max(first, start + nbytes), last)
        with runtime_mode():
            return Slab(nbytes, segment.bytes[start : start + nbytes], start, index)
