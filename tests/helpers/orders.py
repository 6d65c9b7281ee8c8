"""What a plan orders, read without planner or simulator: which operations touch a slab, and which come first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from chunkmem.data.trace import Kind, Moment, Trace
from chunkmem.data.types import ChunkId, Role, Tier
from chunkmem.plan.model import Alloc, Copy, Free, Lane, Plan, Update, Wait

LANES = (Lane.COMPUTE, Lane.H2D, Lane.D2H, Lane.HOST_UPDATE)
SlabNumber = int
"""Slabs in the order in which they are first taken."""
Seen = dict[Lane, int]
"""By lane, how many of its operations are over."""


@dataclass(frozen=True, eq=False)
class Operation:
    """Something that takes time on a lane, in one of several iterations."""

    lane: Lane
    number: int
    """On its lane, from 1, through all iterations."""
    order: int
    """Among all operations, as they are issued."""
    iteration: int
    moment: int
    reads: frozenset[SlabNumber]
    writes: frozenset[SlabNumber]
    seen: Seen
    """What is over when it begins."""
    chunk: ChunkId
    tenants: Mapping[SlabNumber, ChunkId]
    """Whose slabs it touches."""

    def comes_after(self, other: Operation) -> bool:
        """Whether the plan says so, at any speed."""
        limit = self.number - 1 if other.lane is self.lane else self.seen[other.lane]
        return other.number <= limit

    def __str__(self) -> str:
        return f"{self.lane.value} of {self.chunk}, moment {self.moment} of iteration {self.iteration}"


@dataclass(frozen=True)
class Race:
    """Two operations on one slab, one of which writes, that nothing orders."""

    first: Operation
    """As they are issued."""
    second: Operation


class Reading:
    """What a plan orders, and which slab each replica has, from its start through some iterations."""

    def __init__(self, plan: Plan, trace: Trace, *, iterations: int) -> None:
        self.operations: list[Operation] = []
        self.races: list[Race] = []
        self.copies: dict[tuple[int, Lane, int], Operation] = {}
        """By iteration, lane, and how many came before it on that lane in that iteration."""
        self.taken: dict[tuple[int, int, ChunkId, Tier], SlabNumber] = {}
        """The slab that an Alloc takes, by iteration and moment."""
        self._trace = trace
        self._num_slabs = 0
        self._idle: dict[tuple[Tier, int], list[SlabNumber]] = defaultdict(list)
        self._held: set[ChunkId] = set()
        self._lanes: dict[Lane, list[Operation]] = {lane: [] for lane in LANES}
        self._seen: dict[Lane, Seen] = {lane: dict.fromkeys(LANES, 0) for lane in LANES}
        self._touched: dict[tuple[SlabNumber, Lane, bool], list[Operation]] = defaultdict(list)
        """By slab, lane, and whether it was written."""
        self._tenants: dict[SlabNumber, ChunkId] = {}
        self.slabs: dict[tuple[ChunkId, Tier], SlabNumber] = {}
        for placed in sorted(plan.start, key=lambda placed: (str(placed.chunk), placed.tier.value)):
            self._give_to(placed.chunk, placed.tier, self._new_slab())
        self.start = dict(self.slabs)
        for iteration in range(iterations):
            self._read_iteration(plan, iteration)

    def _new_slab(self) -> SlabNumber:
        self._num_slabs += 1
        return self._num_slabs

    def _read_iteration(self, plan: Plan, iteration: int) -> None:
        base = {lane: len(operations) for lane, operations in self._lanes.items()}
        for at, (moment, actions) in enumerate(zip(self._trace.moments, plan.actions, strict=True)):
            if moment.kind is Kind.RELEASE:
                self._held.remove(moment.chunk)
            for action in actions:
                if isinstance(action, Wait):
                    self._wait(action, base[action.on] + action.count)
                elif isinstance(action, Alloc):
                    self._take(action, iteration, at)
                elif isinstance(action, Free):
                    self._take_back(action.chunk, action.tier)
                elif isinstance(action, Copy):
                    index = len(self._lanes[action.lane]) - base[action.lane]
                    reads = {self.slabs[action.chunk, action.source]}
                    writes = {self.slabs[action.chunk, action.target]}
                    copy = self._operate(action.lane, iteration, at, reads, writes, action.chunk)
                    self.copies[iteration, action.lane, index] = copy
                elif isinstance(action, Update) and action.tier is Tier.HOST:
                    reads, writes = self._updated(action.group, Tier.HOST)
                    self._operate(Lane.HOST_UPDATE, iteration, at, reads, writes, moment.chunk)
            self._compute(moment, iteration, at, plan)

    def _take(self, action: Alloc, iteration: int, moment: int) -> None:
        idle = self._idle[action.tier, self._trace.chunk_nbytes[action.chunk]]
        is_own = (action.chunk.role, action.tier) == (Role.ACTIVATION, Tier.DEVICE)  # memory of a tensor, not a slab
        slab = idle.pop() if idle and not is_own else self._new_slab()
        self._give_to(action.chunk, action.tier, slab)
        self.taken[iteration, moment, action.chunk, action.tier] = slab

    def _give_to(self, chunk: ChunkId, tier: Tier, slab: SlabNumber) -> None:
        self.slabs[chunk, tier] = slab
        self._tenants[slab] = chunk

    def _take_back(self, chunk: ChunkId, tier: Tier) -> None:
        slab = self.slabs.pop((chunk, tier))
        if (chunk.role, tier) != (Role.ACTIVATION, Tier.DEVICE):
            self._idle[tier, self._trace.chunk_nbytes[chunk]].append(slab)

    def _updated(self, group: int, tier: Tier) -> tuple[set[SlabNumber], set[SlabNumber]]:
        chunks = self._trace.update(group).chunks
        writes = {self.slabs[chunk, tier] for chunk in chunks if chunk.role is not Role.GRAD}
        return {self.slabs[chunk, tier] for chunk in chunks}, writes

    def _compute(self, moment: Moment, iteration: int, at: int, plan: Plan) -> None:
        kind, chunk = moment.kind, moment.chunk
        writes: set[SlabNumber] = set()
        if kind is Kind.HOLD:
            self._held.add(chunk)
        # A chunk that is held may be read at any time until it is let go.
        reads = {self.slabs[held, Tier.DEVICE] for held in self._held}
        if kind in (Kind.CREATE, Kind.WRITE):
            writes = {self.slabs[chunk, Tier.DEVICE]}
        elif kind is Kind.UPDATE and plan.update_tiers[chunk.group] is Tier.DEVICE:
            more, writes = self._updated(chunk.group, Tier.DEVICE)
            reads |= more
        self._operate(Lane.COMPUTE, iteration, at, reads, writes, chunk)
        if kind is Kind.CONSUME and (chunk, Tier.HOST) in self.slabs:
            self._take_back(chunk, Tier.HOST)

    def _wait(self, wait: Wait, number: int) -> None:
        if number <= 0:
            return
        seen = self._seen[wait.lane]
        for lane, count in self._lanes[wait.on][number - 1].seen.items():
            seen[lane] = max(seen[lane], count)
        seen[wait.on] = max(seen[wait.on], number)

    def _operate(
        self, lane: Lane, iteration: int, moment: int, reads: set[SlabNumber], writes: set[SlabNumber], chunk: ChunkId
    ) -> Operation:
        number, order = len(self._lanes[lane]) + 1, len(self.operations)
        operation = Operation(
            lane,
            number,
            order,
            iteration,
            moment,
            frozenset(reads),
            frozenset(writes),
            dict(self._seen[lane]),
            chunk,
            {slab: self._tenants[slab] for slab in reads | writes},
        )
        self.races += (Race(before, operation) for before in self._unordered(operation))
        self.operations.append(operation)
        self._lanes[lane].append(operation)
        for slab in reads:
            self._touched[slab, lane, False].append(operation)
        for slab in writes:
            self._touched[slab, lane, True].append(operation)
        return operation

    def _unordered(self, operation: Operation) -> list[Operation]:
        """Earlier operations in conflict with it, if nothing has it come after them."""
        found = set()
        for lane in LANES:
            if lane is operation.lane:
                continue
            touched = [(slab, True) for slab in operation.reads | operation.writes]
            touched += [(slab, False) for slab in operation.writes]
            for slab, written in touched:
                for before in reversed(self._touched[slab, lane, written]):
                    if operation.comes_after(before):
                        break
                    found.add(before)
        return sorted(found, key=lambda before: before.order)
