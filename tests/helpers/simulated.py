"""An accelerator played by RAM, its lanes and its pools, which tell in what order everything would have to be done."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from chunkmem.data.types import Link, Tier
from chunkmem.plan.model import LINK_LANES, Lane
from chunkmem.runtime.arena import HostArena
from chunkmem.runtime.device import ComputeDevice
from chunkmem.runtime.disk_pool import DiskSlab, DiskTransfers
from chunkmem.runtime.events import COPY_LANES, Event, Piece
from chunkmem.runtime.free_room import Extent
from chunkmem.runtime.lanes import BlockingLanes
from chunkmem.runtime.pool import DevicePool, Slab
from chunkmem.runtime.timestamps import HostClock, Interval
from tests.helpers.access_order import AccessOrder
from tests.helpers.vector_clocks import THREADS, Actor, Clock

_ACTORS = {lane: Actor[lane.name] for lane in (*COPY_LANES, Lane.HOST_UPDATE)}
_FILE = 1 << 60
"""Where the bytes of DISK are taken to be, past all memory."""


@dataclass(frozen=True)
class SimulatedStream:
    """What of a stream its order needs."""

    order: AccessOrder
    actor: Actor

    def wait_stream(self, other: SimulatedStream) -> None:
        self.order.clocks.wait(self.actor, self.order.clocks.of(other.actor))


class SimulatedAccelerator(ComputeDevice):
    """RAM that plays an accelerator, with a stream that computes. Only chunks count of its memory."""

    def __init__(self, order: AccessOrder | None = None) -> None:
        super().__init__(torch.device("cpu"))
        self.is_accelerator = True
        self._order = AccessOrder() if order is None else order

    def _current_stream(self) -> Any:
        return SimulatedStream(self._order, self._order.computing)

    @cached_property
    def clock(self) -> HostClock:
        return HostClock()

    def name(self) -> str:
        return "simulated in RAM"

    def overlap(self, work: Callable[[], None]) -> Callable[[], None]:
        order = self._order
        stream, before = Actor.COMPUTE_2, order.computing
        order.clocks.wait(stream, order.clocks.of(before))
        order.computing = stream
        try:
            work()
        finally:
            order.computing = before
        over = order.clocks.now(stream)
        return lambda: order.clocks.wait(order.computing, over)

    def time_s(self, work: Callable[[], object]) -> float:
        begin_s = time.perf_counter()
        work()
        return time.perf_counter() - begin_s

    def num_update_threads(self) -> int:
        return 1

    def capacity_nbytes(self) -> int:
        return 1 << 40

    def used_nbytes(self) -> int:
        return 0

    def take_peak_nbytes(self) -> int:
        return 0

    def give_back_freed(self) -> None:
        """RAM keeps none."""

    def pin(self, region: object, address: int) -> bool:
        return False


@dataclass(eq=False, slots=True)
class ClockedEvent:
    """What an actor had done at a time, and knew to be done."""

    order: AccessOrder
    actor: Actor
    clock: Clock
    started_s: float = 0.0
    ended_s: float = 0.0
    failure: None = None

    def done(self) -> bool:
        return self.order.clocks.knows(self.order.caller, self.clock)

    def wait(self) -> None:
        self.order.clocks.wait(self.order.caller, self.clock)


class ClockedLanes(BlockingLanes):
    """Lanes that do everything at once, and tell in what order it would have to be done."""

    def __init__(self, order: AccessOrder, compute: SimulatedAccelerator) -> None:
        super().__init__(ComputeDevice(torch.device("cpu")))
        self._order = order
        self._compute = compute
        self._last: dict[Lane, ClockedEvent] = {}

    def copy(self, lane: Lane, pieces: Sequence[Piece], *, after: Sequence[Event], label: str) -> Event:
        self._hold_back(_ACTORS[lane], after)
        with self._order.copying(_ACTORS[lane]):
            return self._issued(lane, label, super().copy(lane, pieces, after=(), label=label))

    def work(
        self,
        work: Callable[[], object],
        *,
        after: Sequence[Event],
        label: str,
        link: Link | None = None,
        target: torch.Tensor | None = None,
    ) -> Event:
        lane = Lane.HOST_UPDATE if link is None else LINK_LANES[link]
        actor = _ACTORS[lane]
        self._order.launch(actor, label)
        self._hold_back(actor, after)
        with self._order.calling(actor):
            done = super().work(work, after=(), label=label)
        return self._issued(lane, label, done)

    def _issued(self, lane: Lane, label: str, done: Event) -> Event:
        event = self._last[lane] = self._event(_ACTORS[lane], label)
        event.started_s, event.ended_s = done.started_s, done.ended_s
        return event

    def _event(self, actor: Actor, label: str) -> ClockedEvent:
        """Return the end of all that an actor has been given so far."""
        self._order.launch(actor, label)
        return ClockedEvent(self._order, actor, self._order.clocks.now(actor))

    def _hold_back(self, actor: Actor, after: Sequence[Event]) -> None:
        """Have what an actor does next come after events."""
        for event in after:
            if isinstance(event, ClockedEvent):
                if event.actor in THREADS and actor not in THREADS:
                    event.wait()
                self._order.clocks.wait(actor, event.clock)

    def compute_event(self) -> Event:
        self._compute.current_stream()
        event = self._event(self._order.computing, "the end of what is computed")
        event.started_s = event.ended_s = time.perf_counter()
        return event

    def compute_waits(self, event: Event) -> Interval | None:
        for stream in self._compute.computing_streams():
            self._hold_back(stream.actor, [event])
        return None

    def drain(self) -> None:
        for event in self._last.values():
            event.wait()
        self._last.clear()


class DeviceSlabs(DevicePool):
    """Slabs of DEVICE whose memory is followed."""

    def __init__(self, order: AccessOrder, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._order = order
        self._admitted: dict[Slab, list[tuple[int, int]]] = {}
        """Addresses and bytes of memory that is not the pool's."""

    def _allocate(self, nbytes: int) -> torch.Tensor:
        memory = super()._allocate(nbytes)
        self._order.took(Tier.DEVICE, memory)
        return memory

    def free(self, role: str, slab: Slab) -> None:
        address = slab.bytes.data_ptr()
        super().free(role, slab)
        if self.room_nbytes is None and self._capacity == 0:
            self._order.gave_up(address, slab.nbytes)

    def _discard(self, slab: Slab) -> None:
        address = slab.bytes.data_ptr()
        super()._discard(slab)
        self._order.gave_up(address, slab.nbytes)

    def admit(self, role: str, nbytes: int, fill: Callable[[], Any]) -> tuple[Slab, Any]:
        slab, pieces = super().admit(role, nbytes, fill)
        self._admitted[slab] = [(piece.data_ptr(), piece.nbytes) for _, piece in pieces if piece.nbytes]
        for _, piece in pieces:
            self._order.took(Tier.DEVICE, piece)
        return slab, pieces

    def dismiss(self, role: str, slab: Slab, empty: Callable[[], object]) -> None:
        super().dismiss(role, slab, empty)
        for address, nbytes in self._admitted.pop(slab):
            self._order.gave_up(address, nbytes)


class HostSlabs(HostArena):
    """Slabs of HOST whose memory is followed."""

    def __init__(self, order: AccessOrder, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._order = order

    def _reserve(self, nbytes: int, *, slab_nbytes: int) -> None:
        super()._reserve(nbytes, slab_nbytes=slab_nbytes)
        self._order.took(Tier.HOST, self._segments[-1].bytes)


class FollowedSlab(DiskSlab):
    """A slab of DISK, whose places in the file stand for addresses: of one pool at a time."""

    order: AccessOrder
    """A subclass has it."""

    def __init__(self, transfers: DiskTransfers, nbytes: int, extents: Sequence[Extent]) -> None:
        super().__init__(transfers, nbytes, extents)
        for start, length in self._spans:
            self.order.memory.add(start, length, Tier.DISK.name)

    def read(self, target: torch.Tensor, at: int = 0) -> None:
        super().read(target, at)
        self.order.transferred("a read of DISK", self._spans, target, fills=True)

    def write(self, source: torch.Tensor) -> None:
        super().write(source)
        self.order.transferred("a write to DISK", self._spans, source, fills=False)

    @property
    def _spans(self) -> list[tuple[int, int]]:
        return [(_FILE + extent.start, extent.nbytes) for extent in self.extents]
