"""The instruction set of plans.

[Note: What a plan means] A plan holds one list of actions a moment. When the moment's event comes, its actions are
issued in order, and then the moment runs; a RELEASE releases before its actions, so they may free the chunk. `Alloc`
and `Free` take effect as they are issued: they are book-keeping, and the sum over replicas never passes the cap at any
point of that order. Everything that touches memory is an operation on a lane: a moment on COMPUTE, a `Copy` on H2D or
D2H, an update on COMPUTE or HOST_UPDATE. The operations of one lane run in the order they are issued; between lanes
nothing is ordered but by `Wait`.

What is exchanged between ranks is no action: all ranks have to exchange alike, so no plan of one of them may move it.
An EXCHANGE moment issues it on COLLECTIVE, behind what was computed; its ARRIVE is waited for by COMPUTE.

A freed slab can be taken at once, but its memory may still be read or written by operations issued before. So what is
first done to a slab has to wait for all of those. Which slab an `Alloc` takes is part of the meaning: the one of
exactly its size that was freed last on that tier, or new memory if there is none.

An access that writes a chunk on one tier makes every other replica of it stale; the plan has freed those before. A
CONSUME frees replicas that are not on DEVICE, and empties one that is.
"""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from chunkmem.errors import PlanError
from chunkmem.plan.machine import Machine
from chunkmem.schema import BOOL, Check, integer, one_of
from chunkmem.trace.reader import COUNT, LIST, TEXT, Fields, Format, item_of, member_of
from chunkmem.types import ChunkId, Role, Tier


class Lane(enum.Enum):
    """A queue that works in order, and overlaps with the others."""

    COMPUTE = "compute"
    H2D = "h2d"
    D2H = "d2h"
    HOST_UPDATE = "host-update"
    COLLECTIVE = "collective"
    DISK = "disk"

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Alloc:
    """Give a chunk a slab on a tier, contents undefined."""

    chunk: ChunkId
    tier: Tier


@dataclass(frozen=True, slots=True)
class Free:
    """Give a replica's slab back. Never a held one, never the only one of the newest version."""

    chunk: ChunkId
    tier: Tier


@dataclass(frozen=True, slots=True)
class Copy:
    """Bring the newest version to a tier where the chunk has a slab."""

    chunk: ChunkId
    source: Tier
    target: Tier

    @property
    def lane(self) -> Lane:
        if Tier.DISK in (self.source, self.target):
            return Lane.DISK
        return Lane.H2D if self.target is Tier.DEVICE else Lane.D2H


@dataclass(frozen=True, slots=True)
class Update:
    """Update a group on a tier. On DEVICE it is the moment's operation on COMPUTE."""

    group: int
    tier: Tier

    @property
    def lane(self) -> Lane:
        return Lane.COMPUTE if self.tier is Tier.DEVICE else Lane.HOST_UPDATE


@dataclass(frozen=True, slots=True)
class Wait:
    """Hold back what is issued on `lane` from now on until `on` has done its first `count` operations of this
    iteration.

    Every moment is one operation on COMPUTE. Counts of 0 and below reach into the iteration before: 0 is its last
    operation, -1 the one before that.
    """

    lane: Lane
    on: Lane
    count: int


Action = Alloc | Free | Copy | Update | Wait


@dataclass(frozen=True, slots=True)
class Placed:
    """A replica at the start of an iteration."""

    chunk: ChunkId
    tier: Tier
    newest: bool
    """It holds the newest version; else it is a slab without content."""


@dataclass(frozen=True)
class Plan:
    """A loop body: the residency at its start, and the actions at each moment."""

    trace_digest: str
    """`Trace.digest` of the trace it was made from."""
    machine: Machine
    start: frozenset[Placed]
    """The residency before the first moment, and after the last."""
    actions: tuple[tuple[Action, ...], ...]
    """One list a moment of the trace."""
    update_tiers: Mapping[int, Tier]
    """Where each group that the trace updates is updated."""
    name: str = ""
    """How it was chosen, for reports."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file. A file that is there is replaced as a whole; no directory is created.

        Raises:
            PlanError: the file cannot be written, or it has a value, such as NaN, that none should have.
        """
        _FORMAT.save(self.to_dict(), path, self.from_dict)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Return what `save` wrote. Whether it can be followed is the simulator's to say.

        Raises:
            PlanError: it cannot be read, or is something else, of a newer version, or damaged; names the file.
        """
        return _FORMAT.load(path, cls.from_dict)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-serialisable data; equal plans give equal data.

        Chunks are ``[role, group]``, and elsewhere an index of this table; the start is ``[chunk, tier, newest]``;
        actions are a name and the action's own fields: ``["copy", chunk, "host", "device"]``.
        """
        chunks: dict[ChunkId, int] = {}
        # A set has no order of its own.
        placed = sorted(self.start, key=lambda p: (p.chunk.role.value, p.chunk.group, p.tier.value, p.newest))
        start = [[_plain(p.chunk, chunks), p.tier.value, p.newest] for p in placed]
        tiers = [[group, tier.value] for group, tier in sorted(self.update_tiers.items())]
        actions = [[_action_to_list(action, chunks) for action in moment] for moment in self.actions]
        machine = self.machine.to_dict()
        return _FORMAT.document(self.name, self.trace_digest, machine, _chunk_table(chunks), start, tiers, actions)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        """Make one from what `to_dict` gave.

        Raises:
            PlanError: a key is missing or unknown, or a value is not allowed; says where it is.
        """
        fields = _FORMAT.fields(values)
        chunk = item_of("chunks", [ChunkId(*row) for row in fields.rows("chunks", _ROLE, COUNT)])
        start = fields.table("start", chunk, _TIER, BOOL)
        read_action = _action_reader(fields, chunk)
        return cls(
            trace_digest=fields.one("trace_digest", TEXT),
            machine=Machine.from_dict(fields.values["machine"], at="machine"),
            start=frozenset(Placed(where, tier, newest) for (where, tier), newest in start.items()),
            actions=tuple(
                tuple(read_action(f"actions[{index}][{n}]", row) for n, row in enumerate(moment))
                for index, moment in enumerate(fields.column("actions", LIST))
            ),
            update_tiers={group: tier for (group,), tier in fields.table("update_tiers", COUNT, _TIER).items()},
            name=fields.one("name", TEXT),
        )


_FORMAT = Format(
    name="chunkmem plan",
    version=1,
    keys=("name", "trace_digest", "machine", "chunks", "start", "update_tiers", "actions"),
    error=PlanError,
)
_ROLE = member_of(Role)
_TIER = member_of(Tier)
_LANE = member_of(Lane)
_INTEGER = integer(-(2**63))


def _action_reader(fields: Fields, chunk: Check) -> Callable[[str, object], Action]:
    columns: Mapping[str, tuple[Callable[..., Action], tuple[Check, ...]]] = {
        "alloc": (Alloc, (chunk, _TIER)),
        "free": (Free, (chunk, _TIER)),
        "copy": (Copy, (chunk, _TIER, _TIER)),
        "update": (Update, (COUNT, _TIER)),
        "wait": (Wait, (_LANE, _LANE, _INTEGER)),
    }
    name = one_of(*columns)

    def read(path: str, row: object) -> Action:
        values = fields.checked(path, row, LIST)
        make, checks = columns[fields.checked(f"{path}[0]", values[0] if values else None, name)]
        return make(*fields.row(path, values, (name, *checks))[1:])

    return read


def _action_to_list(action: Action, chunks: dict[ChunkId, int]) -> list[object]:
    # Fields are in the order in which the constructor takes them.
    values = (getattr(action, field.name) for field in dataclasses.fields(action))
    return [type(action).__name__.lower(), *(_plain(value, chunks) for value in values)]


def _plain(value: object, chunks: dict[ChunkId, int]) -> object:
    if isinstance(value, ChunkId):
        return chunks.setdefault(value, len(chunks))
    return value.value if isinstance(value, enum.Enum) else value


def _chunk_table(chunks: Mapping[ChunkId, int]) -> list[list[object]]:
    return [[chunk.role.value, chunk.group] for chunk in chunks]
