"""The instruction set of plans.

[Note: What a plan means] A plan holds one list of actions a moment. When the moment's event comes, its actions are
issued in order, and then the moment runs; a RELEASE releases before its actions, so they may free the chunk. `Alloc`
and `Free` take effect as they are issued: they are book-keeping, and the sum over replicas never passes the cap at any
point of that order. Everything that touches memory is an operation on a lane: a moment on COMPUTE, a `Copy` on the lane
of its link, an update on COMPUTE or HOST_UPDATE. The operations of one lane run in the order they are issued; between
lanes nothing is ordered but by `Wait`.

What is exchanged between ranks is no action: all ranks have to exchange alike, so no plan of one of them may move it.
An EXCHANGE moment issues it on COLLECTIVE, behind what was computed; its ARRIVE is waited for by COMPUTE.

A freed slab can be taken at once, but its memory may still be read or written by operations issued before. So what is
first done to a slab has to wait for all of those. Which slab an `Alloc` takes is part of the meaning: the one of
exactly its size that was freed last on that tier, or new memory if there is none. Activations on DEVICE are tensors of
autograd rather than slabs: their memory is always new, and no other chunk gets it (`is_reused`).

An access that writes a chunk on one tier makes every other replica of it stale; the plan has freed those before. A
CONSUME frees replicas that are not on DEVICE, and empties one that is.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Annotated

from chunkmem.data.codec import Integer, Mark
from chunkmem.data.errors import PlanError
from chunkmem.data.json_files import Saved
from chunkmem.data.types import LINKS, MEMORY, PLACE, ChunkId, Link, Tier, neighbor
from chunkmem.plan.machine import Machine


class Lane(enum.Enum):
    """A queue that works in order, and overlaps with the others."""

    COMPUTE = "compute"
    H2D = "h2d"
    D2H = "d2h"
    HOST_UPDATE = "host-update"
    COLLECTIVE = "collective"
    DISK_READ = "disk-read"
    DISK_WRITE = "disk-write"

    __hash__ = object.__hash__


LANES: Mapping[Tier, tuple[Lane, Lane]] = MappingProxyType(
    {Tier.HOST: (Lane.H2D, Lane.D2H), Tier.DISK: (Lane.DISK_READ, Lane.DISK_WRITE)}
)
"""From a tier to the one above it, and back."""
LINK_LANES: Mapping[Link, Lane] = MappingProxyType(
    {link: LANES[max(link, key=PLACE.__getitem__)][PLACE[link[0]] < PLACE[link[1]]] for link in LINKS}
)
"""The lane of each link: copies over it run one after the other."""
LANE_LINKS: Mapping[Lane, Link] = MappingProxyType(
    {lane: link for link, lane in LINK_LANES.items() if not {*MEMORY}.isdisjoint(link)}
)
"""The link of each lane, if no tier is between."""
DIRECTIONS: Mapping[Lane, str] = MappingProxyType(
    {
        lane: f"from {source.name}" if source not in MEMORY else f"to {target.name}"
        for lane, (source, target) in LANE_LINKS.items()
    }
)
"""By lane: its direction in messages, such as ``"to DEVICE"`` or ``"from DISK"``."""
FETCH = LINK_LANES[neighbor(Tier.DEVICE), Tier.DEVICE]
"""The lane that brings chunks to DEVICE."""


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
        return LINK_LANES[self.source, self.target]


@dataclass(frozen=True, slots=True)
class Update:
    """Update a group on a tier. On DEVICE it is the moment's operation on COMPUTE."""

    group: int
    tier: Tier

    @property
    def lane(self) -> Lane:
        return Lane.COMPUTE if self.tier is Tier.DEVICE else Lane.HOST_UPDATE


@dataclass(frozen=True, slots=True)
class Round:
    """Make the weights of a PARAM chunk again on HOST, where it has a slab, from their master weights there."""

    chunk: ChunkId

    @property
    def lane(self) -> Lane:
        return Lane.HOST_UPDATE


@dataclass(frozen=True, slots=True)
class Wait:
    """Hold back what is issued on `lane` from now on until `on` has done its first `count` operations of this
    iteration.

    Every moment is one operation on COMPUTE. Counts of 0 and below reach into the iteration before: 0 is its last
    operation, -1 the one before that.
    """

    lane: Lane
    on: Lane
    count: Integer


Action = Alloc | Free | Copy | Round | Update | Wait


def rounding_of(chunk: ChunkId) -> str:
    """Say how timelines call the rounding of a group, to which `chunk` belongs."""
    return f"rounding of group {chunk.group}"


def is_reused(chunk: ChunkId, tier: Tier) -> bool:
    """Tell whether a slab that is freed waits for the next `Alloc` of its size: all do but activations on DEVICE."""
    return tier is not Tier.DEVICE or not chunk.role.kind.is_of_call


@dataclass(frozen=True, slots=True)
class Placed:
    """A replica at the start of an iteration."""

    chunk: ChunkId
    tier: Tier
    newest: bool
    """It holds the newest version; else it is a slab without content."""


@dataclass(frozen=True)
class Plan(
    Saved, name="chunkmem plan", error=PlanError, again="make it again with `chunkmem plan`", tables=("chunks",)
):
    """A loop body: the residency at its start, and the actions at each moment."""

    trace_digest: str
    """`Trace.digest` of the trace it was made from."""
    machine: Machine
    start: frozenset[Placed]
    """The residency before the first moment, and after the last."""
    actions: tuple[tuple[Action, ...], ...]
    """One list a moment of the trace."""
    update_tiers: Annotated[Mapping[int, Tier], Mark.SORTED]
    """By group that the trace updates: the tier of its update."""
    name: str = ""
    """Name of the rule that chose the plan, for reports."""

    @cached_property
    def moves_nothing(self) -> bool:
        """All that a step touches is on DEVICE when it begins, and stays there."""
        is_moving = any(isinstance(action, Copy | Round) for actions in self.actions for action in actions)
        return not is_moving and all(placed.tier is Tier.DEVICE for placed in self.start)

    def __repr__(self) -> str:
        copies = sum(isinstance(action, Copy) for actions in self.actions for action in actions)
        places = Counter(self.update_tiers.values())
        on = " and ".join(
            f"{count} on {tier.name}" for tier, count in sorted(places.items(), key=lambda row: row[0].value)
        )
        return f"Plan({self.name!r}, {len(self.actions)} moments, {copies} copies, groups updated: {on or 'none'})"

    def require_sound(self) -> None:
        """Refuse a replica that is at the start twice."""
        twice = Counter((placed.chunk, placed.tier) for placed in self.start).most_common(1)
        if twice and twice[0][1] > 1:
            chunk, tier = twice[0][0]
            raise PlanError(f"start has {chunk} on {tier.name} twice, with the newest version and without")
