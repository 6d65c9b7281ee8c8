"""Vector clocks, and memory that remembers who used it last: numbers alone, without tensors or lanes."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

CELL_NBYTES = 64
"""Accesses to the same piece of memory of this size conflict. Parameters begin at multiples of it in their chunks."""

Clock = NDArray[np.int64]
"""By actor, how many of its operations are known to be over."""


class Actor(IntEnum):
    """What works in program order by itself, and is ordered with the others by events alone."""

    HOST = 0
    """The thread that launches everything."""
    COMPUTE = 1
    H2D = 2
    D2H = 3
    HOST_UPDATE = 4
    COLLECTIVE = 5
    """What a library does between ranks, on a stream of its own."""
    DISK_READ = 6
    DISK_WRITE = 7
    COMPUTE_2 = 8
    """Another stream of the program's."""


THREADS = (Actor.HOST_UPDATE, Actor.DISK_READ, Actor.DISK_WRITE)
"""They wait for events themselves. For one of theirs the queues of an accelerator cannot: who issues waits."""


@dataclass(frozen=True)
class Operation:
    """One operation of an actor."""

    actor: Actor
    number: int
    """Among all of its actor, from 1."""
    label: str

    def __str__(self) -> str:
        return f"{self.label} on {self.actor.name}"


class VectorClocks:
    """How far each actor knows every actor to be."""

    def __init__(self) -> None:
        self._clocks = np.zeros((len(Actor), len(Actor)), np.int64)
        self._labels: dict[Actor, list[str]] = {actor: [] for actor in Actor}

    def begin(self, actor: Actor, label: str) -> Operation:
        """Return the next operation of an actor; it comes after all the actor knows of."""
        self._clocks[actor, actor] += 1
        self._labels[actor].append(label)
        return Operation(actor, len(self._labels[actor]), label)

    def now(self, actor: Actor) -> Clock:
        """Return a copy of an actor's clock: what an event that is recorded now stands for."""
        return self._clocks[actor].copy()

    def wait(self, actor: Actor, clock: Clock) -> None:
        """Have what an actor does from now on come after all that `clock` has."""
        np.maximum(self._clocks[actor], clock, out=self._clocks[actor])

    def knows(self, actor: Actor, clock: Clock) -> bool:
        """Tell whether an actor comes after all that `clock` has."""
        return bool((self._clocks[actor] >= clock).all())

    def of(self, actor: Actor) -> Clock:
        """Return an actor's clock, which is not to be changed."""
        clock: Clock = self._clocks[actor]
        return clock

    def operation(self, actor: int, number: int) -> Operation:
        """Return what an actor has done."""
        return Operation(Actor(actor), number, self._labels[Actor(actor)][number - 1])


@dataclass(frozen=True)
class Access:
    """What an operation does with a cell."""

    operation: Operation
    writes: bool

    def __str__(self) -> str:
        return f"{self.operation} {'writes' if self.writes else 'reads'}"


@dataclass(frozen=True)
class Race:
    """Two accesses to the same cell, one of them a write, that nothing orders."""

    region: str
    first: Access
    """As they were issued."""
    second: Access
    address: int
    """Of a cell of both."""

    @property
    def kind(self) -> tuple[str, str, str]:
        """What it is about: many races of a run differ in the numbers of their operations alone."""
        return self.region, str(self.first), str(self.second)


class _Region:
    """A piece of memory, and of each of its cells the last write and every actor's last read since."""

    def __init__(self, start: int, nbytes: int, name: str) -> None:
        self.start, self.end, self.name = start, start + nbytes, name
        num_cells = -(-nbytes // CELL_NBYTES)
        self.writers = np.zeros(num_cells, np.int8)
        self.written = np.zeros(num_cells, np.int64)
        """By cell, the number of the write among the writer's operations; 0: there was none."""
        self.read = np.zeros((len(Actor), num_cells), np.int64)

    def cells(self, address: int, nbytes: int) -> slice:
        return slice((address - self.start) // CELL_NBYTES, -(-(address + nbytes - self.start) // CELL_NBYTES))


class ShadowMemory:
    """Finds races among accesses to registered memory, from the clocks of who makes them.

    Source: Flanagan and Freund, "FastTrack: Efficient and Precise Dynamic Race Detection", PLDI 2009.
    """

    def __init__(self, clocks: VectorClocks) -> None:
        self.races: list[Race] = []
        self.num_accesses = 0
        self._clocks = clocks
        self._regions: list[_Region] = []
        """In order of their addresses, disjoint."""

    def add(self, start: int, nbytes: int, name: str) -> None:
        """Register memory nobody has used; what was registered there before is gone."""
        self._regions = [region for region in self._regions if region.end <= start or start + nbytes <= region.start]
        bisect.insort(self._regions, _Region(start, nbytes, name), key=lambda region: region.start)

    def remove(self, start: int) -> None:
        """Forget the memory that begins at an address."""
        self._regions = [region for region in self._regions if region.start != start]

    def name(self, address: int) -> str | None:
        """Return the name of the memory that an address is in; None: it is not registered."""
        region = self._find(address)
        return None if region is None else region.name

    def _find(self, address: int) -> _Region | None:
        at = bisect.bisect(self._regions, address, key=lambda region: region.start) - 1
        return self._regions[at] if at >= 0 and address < self._regions[at].end else None

    def access(self, operation: Operation, spans: Iterable[tuple[int, int]], *, writes: bool) -> None:
        """Let an operation read or write bytes, each span an address and a number of bytes."""
        for address, nbytes in spans:
            region = self._find(address)
            if region is not None and nbytes:
                self._access(operation, region, address, nbytes, writes=writes)

    def _access(self, operation: Operation, region: _Region, address: int, nbytes: int, *, writes: bool) -> None:
        self.num_accesses += 1
        cells, known = region.cells(address, nbytes), self._clocks.of(operation.actor)
        writers, written, read = region.writers[cells], region.written[cells], region.read[:, cells]
        unordered = written > known[writers]
        if unordered.any():
            at = int(unordered.argmax())
            first = self._clocks.operation(int(writers[at]), int(written[at]))
            self._found(region, cells.start + at, Access(first, writes=True), Access(operation, writes=writes))
        if not writes:
            read[operation.actor] = operation.number
            return
        unread = read > known[:, None]
        if unread.any():
            actor, at = (int(each) for each in np.argwhere(unread)[0])
            first = self._clocks.operation(actor, int(read[actor, at]))
            self._found(region, cells.start + at, Access(first, writes=False), Access(operation, writes=True))
        writers[:], written[:], read[:] = operation.actor, operation.number, 0

    def _found(self, region: _Region, cell: int, first: Access, second: Access) -> None:
        self.races.append(Race(region.name, first, second, region.start + cell * CELL_NBYTES))
