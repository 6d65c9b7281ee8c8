"""Slabs: pieces of a tier, given out, taken back, and a few of them kept for reuse.

Once a program has freed a large block, glibc takes blocks of that size from its heap, where what torch allocates
meanwhile lies between them: freed slabs then stay with the process, uncounted, a quarter to half more than the ledgers
say. A slab that is a mapping of its own goes back to the system when it is given up. torch cannot resize such memory,
so this needs a back end of `runtime.storage` that exchanges pointers.
"""

from __future__ import annotations

import contextlib
import mmap
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch

from chunkmem.data.errors import TierIOError
from chunkmem.runtime.device import ComputeDevice, prefer_large_pages, runtime_mode
from chunkmem.runtime.events import Event
from chunkmem.runtime.kept import NativeReclaimable
from chunkmem.runtime.ledger import CACHE, Ledger

T = TypeVar("T")
_MAPPED_NBYTES = 128 << 10
"""Smaller slabs are left to the C library: a mapping is made of whole pages."""
POISON = 0xFF
"""Repeated, this byte is NaN in every floating dtype."""


@dataclass(eq=False, slots=True)
class Slab:
    """A piece of a tier: `nbytes` bytes, one slab or several consecutive ones."""

    is_memory: ClassVar[bool] = True
    """Its bytes are computed with; those of a tier below memory are read and written."""
    nbytes: int
    bytes: torch.Tensor
    """1-D uint8. On DEVICE it owns its storage, which is what a chunk's storage exchanges memory with."""
    start: int = 0
    """Offset in the arena it was cut from; 0 where each slab is an allocation of its own."""
    segment: int = 0
    events: tuple[Event, ...] = ()
    """Copies that read or write it, the last of each lane; it may be given back before they are over, but not to the
    system."""

    @property
    def uses(self) -> tuple[Event, ...]:
        """The copies that read or write it and are not over, or have failed."""
        return tuple(event for event in self.events if not event.done() or event.failure is not None)

    def used_by(self, event: Event) -> None:
        """A copy, or an update, reads or writes it from now on."""
        self.events = (*self.uses, event)

    def rest(self, wait: Callable[[Event], object] | None = None) -> None:
        """Have `wait` wait until no copy is at work on it; without it, the calling thread does.

        Raises:
            TierIOError: the copy failed, and what it was to save may be here alone.
        """
        for event in self.uses:
            if wait is None:
                event.wait()
            else:
                wait(event)
        self.events = ()

    def give_up(self, wait: Callable[[Event], object] | None = None) -> None:
        """Let its memory go back to the system, even if somebody keeps the slab. As `rest`, and raises what it does."""
        self.rest(wait)
        with runtime_mode():
            self.bytes = torch.empty(0, dtype=torch.uint8)

    def read(self, target: torch.Tensor, at: int = 0) -> None:
        """Fill `target`, 1-D and contiguous in RAM, with bytes of the slab from byte `at` on: of one below memory."""
        raise NotImplementedError

    def write(self, source: torch.Tensor) -> None:
        """Write all bytes of the slab; otherwise as `read`."""
        raise NotImplementedError

    def poison(self) -> None:
        """Fill it with NaN, unless a copy still reads it, or failed to."""
        if not self.uses:
            with runtime_mode():
                self.bytes.fill_(POISON)

    def flat(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the slab as 1-D elements of `dtype`."""
        return self.bytes.view(dtype)


class SlabPool(ABC):
    """Gives out and takes back slabs of one tier; the ledger is charged in the name of the role that asks."""

    def __init__(self, ledger: Ledger) -> None:
        """Give out none yet."""
        self.ledger = ledger
        self.poison = False
        """Fill every slab with NaN when it is freed, so that a use after that shows."""

    @abstractmethod
    def alloc(self, role: str, nbytes: int, *, num: int = 1) -> Slab:
        """Give out a slab of exactly `nbytes`, contents undefined. The caller has made room for it.

        Args:
            role: in whose name.
            nbytes: of the slab.
            num: so many of this size are asked for now, one after the other; this is the first of them.
        """

    @abstractmethod
    def free(self, role: str, slab: Slab) -> None:
        """Take a slab back."""

    def take_again(self, role: str, slab: Slab) -> bool:
        """Give a certain slab out again that is free, with what it holds; False if it is not free, or gone."""
        return False

    def expect(self, nbytes: int) -> None:  # noqa: B027
        """Hear that `nbytes` more are about to be asked for; by default, nothing is taken ahead of need."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back to the system."""


class CutPool(SlabPool):
    """Slabs cut from larger pieces.

    A freed slab stays as it was cut and serves a request of exactly its size, the one freed last first, as plans rely
    on; it is joined to its neighbours when another size finds no room.
    """

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._idle: dict[int, list[Slab]] = defaultdict(list)
        """Freed slabs by size, the last one last."""

    def alloc(self, role: str, nbytes: int, *, num: int = 1) -> Slab:
        slab = self._idle[nbytes].pop() if self._idle[nbytes] else self._cut(nbytes, num)
        self.ledger.charge(role, nbytes)
        return slab

    def free(self, role: str, slab: Slab) -> None:
        if self.poison:
            slab.poison()
        self._idle[slab.nbytes].append(slab)
        self.ledger.release(role, slab.nbytes)

    def take_again(self, role: str, slab: Slab) -> bool:
        if slab not in self._idle[slab.nbytes]:
            return False
        self._idle[slab.nbytes].remove(slab)
        self.ledger.charge(role, slab.nbytes)
        return True

    def _join_idle(self) -> bool:
        """Make room of the freed slabs; tell whether there were any."""
        idle = [slab for slabs in self._idle.values() for slab in slabs]
        for slab in idle:
            slab.rest()
        self._idle.clear()
        for slab in idle:
            self._join(slab)
        return bool(idle)

    @abstractmethod
    def _cut(self, nbytes: int, num: int) -> Slab:
        """Return a new slab; see `alloc`."""

    @abstractmethod
    def _join(self, slab: Slab) -> None:
        """Have the room of a slab be free."""


class DevicePool(SlabPool):
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

    def __init__(
        self,
        ledger: Ledger,
        compute: ComputeDevice,
        *,
        capacity: int,
        maps_slabs: bool = False,
        wait: Callable[[Event], object] | None = None,
    ) -> None:
        """Keep up to `capacity` slabs.

        Args:
            ledger: of DEVICE.
            compute: what that is.
            capacity: slabs that are kept.
            maps_slabs: on a CPU, slabs are mapped by themselves.
            wait: has what is computed from now on come after an event. None: the calling thread waits.
        """
        super().__init__(ledger)
        self.wait = wait
        self._compute = compute
        self._device = compute.device
        self._maps_slabs = maps_slabs
        self._capacity = capacity
        self.room_nbytes: int | None = None
        """While a plan is followed: bytes that slabs may take, given out or kept; [Note: Room for kept slabs]."""
        self._kept: deque[Slab] = deque()
        self.reclaimable: NativeReclaimable | None = None
        """By which torch's allocator takes kept slabs, if the program computes on one stream; see `runtime/kept.py`."""
        self.changing: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
        """Surrounds what may take memory from the allocator or give it back, with the entries in the ledger."""

    def alloc(self, role: str, nbytes: int, *, num: int = 1) -> Slab:
        while (slab := next((each for each in reversed(self._kept) if each.nbytes == nbytes), None)) is not None:
            self._kept.remove(slab)
            self.ledger.release(CACHE, nbytes)
            if self._has_memory(slab):
                self.ledger.charge(role, nbytes)
                return slab
        self._make_way(nbytes)
        with self.changing(), runtime_mode():
            slab = Slab(nbytes, self._allocate(nbytes))
            self.ledger.charge(role, nbytes)
        return slab

    def free(self, role: str, slab: Slab) -> None:
        if self.poison:
            slab.poison()
        if self.room_nbytes is None and self._capacity == 0:
            with self.changing():
                self.ledger.release(role, slab.nbytes)
                self._give_up(slab)
            return
        self.ledger.release(role, slab.nbytes)
        self.ledger.charge(CACHE, slab.nbytes)
        self._kept.append(slab)
        if self.reclaimable is not None and len(streams := self._compute.computing_streams()) == 1:
            self.reclaimable.offer(slab.bytes, slab.uses, streams[0])
        if self.room_nbytes is None:
            self.trim()

    def admit(self, role: str, nbytes: int, fill: Callable[[], T]) -> tuple[Slab, T]:
        """Count memory that is not the pool's, and that `fill` takes from the allocator, or has been taken before.

        Kept slabs make way for it. Its own bytes are not in the slab, which stands for it where copies are awaited.
        """
        self._make_way(nbytes)
        with self.changing(), runtime_mode():
            memory = fill()
            self.ledger.charge(role, nbytes)
            return Slab(nbytes, torch.empty(0, dtype=torch.uint8)), memory

    def dismiss(self, role: str, slab: Slab, empty: Callable[[], object]) -> None:
        """Count such memory no more, which `empty` gives back to the allocator. No copy is at work on it."""
        with self.changing(), runtime_mode():
            self.ledger.release(role, slab.nbytes)
            self._compute.free_in_order()
            empty()

    def trim(self, total_nbytes: int | None = None) -> None:
        """Give up kept slabs until there are no more than there may be, and all slabs take `total_nbytes`, if given."""
        num, nbytes = self._capacity, self.ledger.limit_nbytes if total_nbytes is None else total_nbytes
        if self.room_nbytes is not None:
            num, nbytes = len(self._kept), min(nbytes, self.room_nbytes)
        while self._kept and (len(self._kept) > num or self.ledger.total_nbytes > nbytes):
            self._discard(self._kept[0])

    def _make_way(self, nbytes: int) -> None:
        """Give up kept slabs, as many as that much memory needs."""
        room_nbytes = self.ledger.limit_nbytes if self.room_nbytes is None else self.room_nbytes
        self.trim(min(self.ledger.cap_nbytes, room_nbytes) - nbytes)

    def close(self) -> None:
        for slab in tuple(self._kept):
            with contextlib.suppress(TierIOError):
                slab.rest()
            slab.events = ()
            self._discard(slab)

    def _allocate(self, nbytes: int) -> torch.Tensor:
        if self._device.type != "cpu" or not self._maps_slabs or nbytes < _MAPPED_NBYTES:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        # Private, as the C library's memory is: a forked child has its own copy of what it writes.
        mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        prefer_large_pages(mapped)
        return torch.frombuffer(mapped, dtype=torch.uint8)

    def _discard(self, slab: Slab) -> None:
        with self.changing():
            if self._has_memory(slab):
                self._give_up(slab)
            self._kept.remove(slab)
            self.ledger.release(CACHE, slab.nbytes)

    def _has_memory(self, slab: Slab) -> bool:
        """Have a kept slab back from torch's allocator, unless it has its memory."""
        return self.reclaimable is None or self.reclaimable.take(slab.bytes)

    def _give_up(self, slab: Slab) -> None:
        self._compute.free_in_order()
        slab.give_up(self.wait)
