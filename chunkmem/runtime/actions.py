"""The actions of a plan, carried out on real slabs and lanes.

[Note: Two ways to order copies] A plan's waits order the lanes as long as everything is exactly where the plan has it:
they were derived for the slabs that its Allocs take, and count its copies. Where something else happened, they prove
nothing: a copy that is not needed is not made, and who counts on it would wait for none of those before it; a slab that
was not freed is not taken, and another one is, which somebody may still be reading. So from the first deviation on the
order comes from the slabs. Each knows the last copy that reads or writes it; every copy comes after those of both of
its slabs, and whatever is computed after those of the slabs that it touches. That is right for any actions in any
order, and waits for more than a plan would. It ends where a step begins with everything in its place and nothing under
way. And a use of chunks that no moment tells of begins with `drain`: the next copies come after it.

[Note: After a failed copy] Whatever waits for a copy that failed raises its `TierIOError`, and so does all that was
issued behind it: nothing has touched its slabs since. The plan is left then, and when all lanes are still, no target of
a failed copy is valid. Their sources are, if they have their slab yet; else the bytes are still in the slab that was
given back, and are brought from there with a blocking copy. What that cannot bring is lost: its next use says so. An
update that was under way is not finished: groups that came before have their new values.

What is moved is checked in both ways, action by action: nothing is freed that is pinned, or the only replica of the
newest version; nothing is copied from a replica that is not; nothing is allocated past a cap. Where an action would do
that, the plan is left.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable

from chunkmem.plan.ahead import updates_ahead
from chunkmem.plan.model import FETCH, LINK_LANES, Action, Alloc, Copy, Free, Lane, Plan, Update, Wait
from chunkmem.plan.semantics import ABSENT, NEWEST
from chunkmem.runtime.events import COPY_LANES, DoneEvent, Event, Lanes
from chunkmem.runtime.failed import drain
from chunkmem.runtime.pager import Pager
from chunkmem.runtime.step_log import StepLog
from chunkmem.runtime.store import NO_CONTENT, Chunk, IssuedCopy
from chunkmem.runtime.tiers import Tiers
from chunkmem.trace.model import Kind, Moment, Trace
from chunkmem.types import TIERS, ChunkId, Role, Tier, neighbor

Step = Callable[[], object]


class PlanActions(ABC):
    """Does what a plan says for a moment; which moment that is, is decided elsewhere."""

    def __init__(self, plan: Plan, trace: Trace, pager: Pager, lanes: Lanes, tiers: Tiers) -> None:
        """Prepare to carry out the actions of `plan`; nothing is moved yet. The arguments are those of
        `PlanExecutor`."""
        self.plan = plan
        self.trace = trace
        self.step_log = StepLog()
        self._pager = pager
        self._store = pager.store
        self._lanes = lanes
        self._tiers = tiers
        self._is_host = not tiers.compute.is_accelerator
        """What was computed is over when a copy is issued, as both are done by the host."""
        self._on_plan = False
        self._is_exact = False
        """Everything is as the plan has it, so that its waits are enough; see [Note: Two ways to order copies]."""
        self._events: dict[Lane, list[Event | None]] = {lane: [] for lane in COPY_LANES}
        self._previous: dict[Lane, list[Event | None]] = {lane: [] for lane in COPY_LANES}
        self._pending: dict[Lane, list[Event]] = {lane: [] for lane in COPY_LANES}
        """What the next copy on a lane comes after."""
        self._behind_compute: set[Lane] = set()
        """Lanes whose next copy comes after all that is computed by then: see `drain`."""
        self._update_after: list[tuple[Lane, Event]] = []
        """What the next update that the host makes itself comes after, and on which lane that is."""
        self._ahead_after: list[Event] = []
        """Those of them that no speculative update has waited for: one may be left to the step."""
        self._log = Counter(
            trace.chunk_nbytes[chunk]
            for group in updates_ahead(trace, plan.actions)
            for chunk in trace.update(group).writes
        )
        """How many slabs of which sizes the shadow buffers needs."""
        self._copies_before: list[dict[Lane, int]] = []
        """By moment: copies issued on each lane before it."""
        self._steps = self._compile()
        """By moment."""

    @abstractmethod
    def depart(self) -> None:
        """Leave the plan: every copy is over when this returns, and nothing more is issued."""

    @abstractmethod
    def _update_moment(self, group: int) -> int | None:
        """Return the next moment in which a group is updated."""

    def drain(self) -> None:
        """Wait for every copy that was issued: chunks are about to be used outside of the plan's moments.

        Gradients that are clipped, or read by a user, between backward and step are such. The plan's waits count the
        computing that it knows of, so the next copy on each lane waits for this use, too.

        Raises:
            TierIOError: a copy has failed; see [Note: After a failed copy].
        """
        self._behind_compute.update(() if self._is_host else COPY_LANES)
        drain(self._lanes, self._store)

    def _compile(self) -> list[tuple[Step, ...]]:
        issued = dict.fromkeys(COPY_LANES, 0)
        compiled = []
        for moment, actions in zip(self.trace.moments, self.plan.actions, strict=True):
            self._copies_before.append(dict(issued))
            steps = [step for action in actions if (step := self._step(action, moment)) is not None]
            if moment.kind is Kind.UPDATE:
                steps.append(self._wait_for_update)
            for action in actions:
                if isinstance(action, Copy):
                    issued[action.lane] += 1
            compiled.append(tuple(steps))
        self._copies_before.append(issued)
        return compiled

    def _step(self, action: Action, moment: Moment) -> Step | None:
        if isinstance(action, Wait):
            return self._wait_step(action)
        if isinstance(action, Update):
            if (moment.kind, moment.chunk.group) == (Kind.UPDATE, action.group):
                return None  # the update asks `StepPolicy.update_tier`
            return lambda: self._update_ahead(action.group)
        chunk = self._store.chunks[action.chunk]
        if isinstance(action, Alloc):
            return lambda: self._alloc(chunk, action.tier)
        if isinstance(action, Free):
            return lambda: self._free(chunk, action.tier)
        assert isinstance(action, Copy)
        return lambda: self._copy(chunk, action)

    # The order, as a plan has it.

    def _wait_step(self, wait: Wait) -> Step | None:
        if wait.on is Lane.HOST_UPDATE:
            return None  # the host that issues copies has done the update, or waited for it at its moment
        if wait.on is Lane.COMPUTE:
            if self._is_host:
                return None
            if wait.lane is Lane.HOST_UPDATE:
                return lambda: self._update_comes_after(Lane.COMPUTE, self._lanes.compute_event())
            return lambda: self._pending[wait.lane].append(self._lanes.compute_event())
        if wait.lane is Lane.COMPUTE:
            return lambda: self._compute_waits(wait.on, self._event(wait))
        if wait.lane is Lane.HOST_UPDATE:
            return lambda: self._update_comes_after(wait.on, self._event(wait))
        return lambda: self._lane_waits(wait)

    def _event(self, wait: Wait) -> Event | None:
        events, count = self._events[wait.on], wait.count
        if count <= 0:
            events = self._previous[wait.on]
            count += len(events)
        return events[count - 1] if 0 < count <= len(events) else None

    def _compute_waits(self, lane: Lane, event: Event | None) -> None:
        if event is not None:
            started_s = time.perf_counter()
            stall_s = self._lanes.compute_waits(event)
            self.step_log.waited(lane, started_s, stall_s)

    def _update_comes_after(self, lane: Lane, event: Event | None) -> None:
        if event is not None:
            self._update_after.append((lane, event))
            self._ahead_after.append(event)

    def _wait_for_update(self) -> None:
        """The host is about to update a group itself."""
        after, self._update_after, self._ahead_after = self._update_after, [], []
        for lane, event in after:
            started_s = time.perf_counter()
            event.wait()
            self.step_log.waited(lane, started_s, time.perf_counter() - started_s)

    def _lane_waits(self, wait: Wait) -> None:
        event = self._event(wait)
        if event is not None:
            self._pending[wait.lane].append(event)

    # The order, as the slabs have it.

    def _busy(self, *chunks: Chunk, tiers: Iterable[Tier]) -> list[tuple[Lane, Event]]:
        """Return the last copies that touch the slabs of chunks on these tiers, if not over, and their lanes."""
        found = []
        for chunk in chunks:
            for tier in tiers:
                replica = chunk.replicas.get(tier)
                if replica is not None and replica.slab.busy is not None and not replica.slab.busy.done():
                    found.append((LINK_LANES[neighbor(tier), tier], replica.slab.busy))
        return found

    def _settle(self, kind: Kind, chunk: Chunk) -> None:
        """Have what is about to be computed with a chunk, or its group, come after all copies that touch it."""
        if kind in (Kind.RELEASE, Kind.CONSUME):
            return
        if kind is not Kind.UPDATE:
            for lane, event in self._busy(chunk, tiers=(Tier.DEVICE,)):
                self._compute_waits(lane, event)
            return
        for lane, event in self._busy(*self._group(chunk.id.group), tiers=TIERS):
            self._compute_waits(lane, event)
            if self.plan.update_tiers.get(chunk.id.group) is not Tier.DEVICE:
                event.wait()  # the host updates, and runs ahead of an accelerator

    def _group(self, group: int) -> list[Chunk]:
        return [self._store.chunks[each] for each in self.trace.update(group).chunks]

    # What is done.

    def _update_ahead(self, group: int) -> None:
        if not self._on_plan:
            return
        after = self._ahead_after
        if not self._is_exact:
            after = [*after, *(event for _, event in self._busy(*self._group(group), tiers=(Tier.HOST,)))]
        event = self._pager.speculative.begin(group, after)
        if event is not None:
            self._ahead_after = []
            moment = self._update_moment(group)
            assert moment is not None
            self.step_log.updated(moment, self._store.chunks[ChunkId(Role.PARAM, group)], event)

    def _alloc(self, chunk: Chunk, tier: Tier) -> None:
        if not self._on_plan:
            return
        if tier in chunk.replicas:
            self._is_exact = False
            return
        ledger = self._store.pools[tier].ledger
        if ledger.cap_nbytes - ledger.chunk_nbytes < chunk.nbytes:
            self.depart()  # what the plan does not know has come since: make room on demand
            return
        replica = self._store.take_slab(chunk, tier)
        if tier is Tier.DEVICE and not self._is_host and replica.slab.busy is None:
            # New memory comes from torch's allocator, which orders its reuse on the stream that computes, and no other.
            self._pending[FETCH].append(self._lanes.compute_event())

    def _free(self, chunk: Chunk, tier: Tier) -> None:
        if not self._on_plan:
            return
        if tier not in chunk.replicas:
            self._is_exact = False
            return
        self._pager.notice_writes(chunk)  # what a user wrote makes this the only newest replica
        replica = chunk.replicas.get(tier)
        if replica is None or replica.pins > 0 or chunk.is_last(tier):
            self.depart()
            return
        self._store.drop(chunk, tier)

    def _copy(self, chunk: Chunk, copy: Copy) -> None:
        if not self._on_plan:
            return
        lane = copy.lane
        if chunk.version == NO_CONTENT or chunk.on(copy.target) is NEWEST:
            self._is_exact = False
            self._events[lane].append(None)
            return
        if chunk.on(copy.target) is ABSENT or chunk.on(copy.source) is not NEWEST:
            self.depart()
            return
        target, source = chunk.replicas[copy.target], chunk.replicas[copy.source]
        after, self._pending[lane] = self._pending[lane], []
        if not self._is_exact:
            after += [event for _, event in self._busy(chunk, tiers=TIERS)]
        if lane in self._behind_compute or not (self._is_exact or self._is_host):
            self._behind_compute.discard(lane)
            after.append(self._lanes.compute_event())
        event = self._lanes.copy(lane, target.flat, source.flat, after=after, label=chunk.label)
        target.slab.busy = source.slab.busy = event
        self._store.note_copy(chunk, copy.source, copy.target)
        self._store.forget_done_copies()
        self._store.issued.append(IssuedCopy(chunk, chunk.version, source.slab, copy.target, target.slab, event))
        self._events[lane].append(event)
        self.step_log.copied(lane, chunk, event)
        if isinstance(event, DoneEvent):  # lanes that block
            self.step_log.waited(lane, event.started_s, event.ended_s - event.started_s)
