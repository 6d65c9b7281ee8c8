"""What the actions and moments of a plan do to its replicas: the one place that says so. Pure, and nothing is checked.

`verify` checks each change before it makes it, `resync` searches a way through them, and `report` draws them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from chunkmem.data.trace import Kind, Moment, Trace
from chunkmem.data.types import PLACE, TIERS, ChunkId, Tier
from chunkmem.plan.model import Action, Alloc, Copy, Free, Placed, Plan, Round, Update


class ReplicaState(enum.IntEnum):
    """What a chunk has on one tier."""

    ABSENT = 0
    """No memory."""
    EMPTY = 1
    """A slab, whose contents are undefined, stale, or used up."""
    NEWEST = 2
    """A slab with the newest version."""


ABSENT, EMPTY, NEWEST = ReplicaState
_STEPS = tuple(tuple(other - place for other in range(len(TIERS)) if other != place) for place in range(len(TIERS)))
"""By place of a replica: how far the numbers of the others of its chunk are from its own."""


@dataclass
class Residency:
    """A snapshot: replicas by (chunk, tier): do they hold the newest version?"""

    newest: dict[tuple[ChunkId, Tier], bool] = field(default_factory=dict)

    @classmethod
    def of(cls, placed: Iterable[Placed]) -> Residency:
        return cls({(p.chunk, p.tier): p.newest for p in placed})

    def has_content(self, chunk: ChunkId) -> bool:
        """Tell whether some replica holds a version at all."""
        return any(self.newest.get((chunk, tier), False) for tier in TIERS)


class State:
    """All replicas of some chunks, by number: those of one chunk follow each other, in the order of `TIERS`.

    Numbers, and not ids, since a plan is gone through many times while it is searched.
    """

    def __init__(self, chunk_nbytes: Mapping[ChunkId, int]) -> None:
        """Begin with nothing anywhere."""
        self._first = {chunk: len(TIERS) * index for index, chunk in enumerate(chunk_nbytes)}
        self.replicas = [(chunk, tier) for chunk in chunk_nbytes for tier in TIERS]
        self.nbytes = [nbytes for nbytes in chunk_nbytes.values() for _ in TIERS]
        self.states: list[ReplicaState] = [ABSENT] * len(self.replicas)
        self.used_nbytes = [0] * len(TIERS)

    @classmethod
    def of(cls, residency: Residency, chunk_nbytes: Mapping[ChunkId, int]) -> State:
        """Return the state that a snapshot shows."""
        state = cls(chunk_nbytes)
        for (chunk, tier), is_newest in residency.newest.items():
            state.place(state.replica(chunk, tier), is_newest=is_newest)
        return state

    # Looking.

    def replica(self, chunk: ChunkId, tier: Tier) -> int:
        """Return the number of a replica; KeyError if there is no such chunk or tier."""
        return self._first[chunk] + PLACE[tier]

    def on(self, chunk: ChunkId, tier: Tier) -> ReplicaState:
        """Return what there is of a chunk on a tier."""
        return self.states[self.replica(chunk, tier)]

    def present(self) -> Iterator[tuple[ChunkId, Tier]]:
        """Yield the replicas that have a slab."""
        return (key for key, state in zip(self.replicas, self.states, strict=True) if state != ABSENT)

    def elsewhere(self, replica: int) -> list[int]:
        """Return the other replicas of the chunk."""
        return [replica + step for step in _STEPS[replica % len(TIERS)]]

    def is_newest_elsewhere(self, replica: int) -> bool:
        """Tell whether another replica of the chunk holds the newest version."""
        return NEWEST in [self.states[other] for other in self.elsewhere(replica)]

    def has_content(self, chunk: ChunkId) -> bool:
        """Tell whether some replica holds a version at all."""
        first = self._first[chunk]
        return NEWEST in self.states[first : first + len(TIERS)]

    def snapshot(self) -> Residency:
        """Return what there is now."""
        states = zip(self.replicas, self.states, strict=True)
        return Residency({key: state == NEWEST for key, state in states if state != ABSENT})

    # Actions.

    def place(self, replica: int, *, is_newest: bool) -> None:
        """Have a replica there from the start."""
        self.alloc(replica)
        if is_newest:
            self.states[replica] = NEWEST

    def alloc(self, replica: int) -> None:
        """Give a replica a slab, contents undefined."""
        self.states[replica] = EMPTY
        self.count(replica, self.nbytes[replica])

    def free(self, replica: int) -> None:
        """Take a replica's slab."""
        self.states[replica] = ABSENT
        self.count(replica, -self.nbytes[replica])

    def write(self, replica: int) -> None:
        """Let a replica, which has a slab, hold the newest version: it is copied there, created, or brought."""
        self.states[replica] = NEWEST

    def act(self, action: Action) -> None:
        """Follow an action that brings, takes or copies a slab; the others change nothing here."""
        if isinstance(action, Alloc):
            self.alloc(self.replica(action.chunk, action.tier))
        elif isinstance(action, Free):
            self.free(self.replica(action.chunk, action.tier))
        elif isinstance(action, Copy):
            self.write(self.replica(action.chunk, action.target))
        elif isinstance(action, Round):
            self.write(self.replica(action.chunk, Tier.HOST))

    def count(self, replica: int, nbytes: int) -> None:
        """So many bytes of a replica's tier are taken, or given back."""
        self.used_nbytes[replica % len(TIERS)] += nbytes

    # Moments.

    def before(self, moment: Moment, trace: Trace) -> None:
        """A moment is about to come, before its actions: a RELEASE releases the chunk, so that they may free it."""
        if moment.kind is Kind.RELEASE and arrives(moment.chunk, trace):
            self.empty(self.replica(moment.chunk, Tier.DEVICE))

    def update(self, moment: Moment, trace: Trace, tier: Tier) -> None:
        """A group is updated: what is rounded from its master weights is made again."""
        if trace.is_rounded(moment.chunk):
            self.write(self.replica(moment.chunk, tier))

    def begin(self, moment: Moment, trace: Trace) -> None:
        """A moment comes, after its actions, and after its update if it is one."""
        if moment.kind is Kind.CREATE or (moment.kind is Kind.HOLD and arrives(moment.chunk, trace)):
            self.write(self.replica(moment.chunk, Tier.DEVICE))
        elif moment.kind is Kind.CONSUME:
            device = self.replica(moment.chunk, Tier.DEVICE)
            self.empty(device)
            for replica in self.elsewhere(device):
                if self.states[replica] != ABSENT:
                    self.free(replica)

    def empty(self, replica: int) -> None:
        """A replica's content is used up; a slab stays."""
        if self.states[replica] != ABSENT:
            self.states[replica] = EMPTY


def arrives(chunk: ChunkId, trace: Trace) -> bool:
    """Tell whether an exchange brings a chunk's content, each time it is held."""
    return chunk.role.kind.is_weights and trace.is_remote(chunk)


def residency_before(plan: Plan, trace: Trace, moment: int) -> Residency:
    """Return the residency before the actions of `moment`, if the plan was followed from its start."""
    now = State.of(Residency.of(plan.start), trace.chunk_nbytes)
    for event, actions in zip(trace.moments[:moment], plan.actions, strict=False):
        now.before(event, trace)
        awaited = event.chunk.group if event.kind is Kind.UPDATE else None
        for action in actions:
            now.act(action)
            if isinstance(action, Update) and action.group == awaited and action.tier is not Tier.DEVICE:
                now.update(event, trace, action.tier)
                awaited = None
        if awaited is not None:  # by the moment's own operation on DEVICE, or begun ahead of it
            now.update(event, trace, plan.update_tiers[awaited])
        now.begin(event, trace)
    return now.snapshot()
