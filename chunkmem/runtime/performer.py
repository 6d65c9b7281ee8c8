"""Interpreter 2 of plans: follow one with real copies, as the events of a step arrive.

While every event is the one expected, only what the plan says is done, and its waits are all that orders the lanes.
An event that was not foreseen is a departure: all copies are waited for, and what comes is served on demand. As soon as
an event fits the trace again, what is where is put as the plan has it at that moment, and the plan is followed on.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from chunkmem.errors import PlanError
from chunkmem.plan.ahead import UNDO_LOG, updates_ahead
from chunkmem.plan.director import Director
from chunkmem.plan.model import Action, Alloc, Copy, Free, Lane, Plan, Update, Wait
from chunkmem.plan.semantics import residency_before
from chunkmem.plan.simulate import peak_nbytes
from chunkmem.runtime.events import DoneEvent, Event, Lanes
from chunkmem.runtime.executor import DemandExecutor
from chunkmem.runtime.garbage import no_collections
from chunkmem.runtime.journal import Journal
from chunkmem.runtime.store import NO_CONTENT, Chunk
from chunkmem.runtime.tiers import Tiers
from chunkmem.runtime.way import go, way_to
from chunkmem.trace.model import Kind, Mode, Moment, Trace
from chunkmem.types import ChunkId, Role, Tier

Step = Callable[[], object]


def label_of(kind: Kind, chunk: ChunkId, reader: object) -> str:
    """Return the label of the moment that an event begins."""
    if kind is Kind.UPDATE:
        return f"update of group {chunk.group}"
    return "" if reader is None else str(reader)


@dataclass(slots=True)
class _Cue:
    """A moment of the plan, ready to be performed."""

    kind: Kind | None
    chunk: Chunk | None
    label: str
    steps: tuple[Step, ...]


class Performer:
    """Follows one plan, lap after lap."""

    @no_collections()
    def __init__(self, plan: Plan, trace: Trace, executor: DemandExecutor, lanes: Lanes, tiers: Tiers) -> None:
        """Prepare to follow `plan`; nothing is moved yet.

        Args:
            plan, trace: one made from the other.
            executor: serves accesses; its store is what is moved in.
            lanes: what copies.
            tiers: of the store.
        """
        self.plan = plan
        self.trace = trace
        self._peak_nbytes = peak_nbytes(plan, trace)
        """Of a lap that follows the plan."""
        self.journal = Journal()
        self.obstacle = ""
        """Why the last try to go on with the plan failed."""
        self._executor = executor
        self._store = executor.store
        self._device = tiers.device
        self._ledgers = (tiers.device, tiers.host)
        self._lanes = lanes
        self._tiers = tiers
        self._is_host = not tiers.compute.is_accelerator
        """What was computed is over when a copy is issued, as both are done by the host."""
        self._director = Director(trace)
        self._update_moments = {m.chunk.group: at for at, m in enumerate(trace.moments) if m.kind is Kind.UPDATE}
        self._cursor = 0
        self._on_plan = False
        self._unfit = 0
        """Events since the last try to go on with the plan."""
        self._patience = 1
        """How many of them make another try worth while: a try looks at every chunk."""
        self._events: dict[Lane, list[Event | None]] = {}
        self._previous: dict[Lane, list[Event | None]] = {}
        self._pending: dict[Lane, list[Event]] = {lane: [] for lane in (Lane.H2D, Lane.D2H)}
        """What the next copy on a lane comes after."""
        self._update_after: list[tuple[Lane, Event]] = []
        """What the next update that the host makes itself comes after, and on which lane that is."""
        self._ahead_after: list[Event] = []
        """Those of them that no update ahead has waited for: one may be left to the step."""
        self._log = Counter(
            trace.chunk_nbytes[chunk]
            for group in updates_ahead(trace, plan.actions)
            for chunk in trace.update_chunks(group)
            if chunk.role is not Role.GRAD
        )
        """How many slabs of which sizes the undo log needs."""
        self._copies_before: list[dict[Lane, int]] = []
        """By moment: copies issued on each lane before it."""
        self._cues = self._compile()
        self._profiling: torch.profiler.record_function | None = None

    @property
    def is_on_plan(self) -> bool:
        return self._on_plan

    @property
    def is_at_end(self) -> bool:
        """Every moment of the lap has come."""
        return self._on_plan and self._cursor == len(self.trace.moments)

    @property
    def was_followed(self) -> bool:
        """Some moment of the step was on plan; else `obstacle` says why not."""
        return bool(self.journal.began) or self.is_at_end

    def update_tier(self, group: int) -> Tier | None:
        """Where the plan has the group updated, while it is followed."""
        return self.plan.update_tiers.get(group) if self._on_plan else None

    def begin_lap(self) -> None:
        """The first moment comes next. What is where is put right if it is not as the plan has it there."""
        was_complete = self.is_at_end
        self.journal = Journal()
        self._previous, self._events = self._events, {Lane.H2D: [], Lane.D2H: []}
        self._cursor = 0
        if not was_complete:
            self._on_plan = False
            self._resume(0)
            for ledger in self._ledgers:  # what led here is not part of the lap
                ledger.restart_peak()

    def event(self, kind: Kind, chunk: Chunk, reader: object) -> None:
        """Something happens; do what the plan says for it."""
        cue = self._cues[self._cursor]
        if not (self._on_plan and cue.chunk is chunk and cue.kind is kind):
            found = self._unforeseen(kind, chunk, reader)
            if found is None:
                return
            cue = found
        self._cursor += 1
        journal = self.journal
        journal.begin(self._cursor - 1, kind, chunk)
        if torch.autograd.profiler._is_profiler_enabled or self._profiling is not None:
            self._show(cue.label)
        for step in cue.steps:
            step()
        journal.device_nbytes.append(self._device.chunk_nbytes)

    def depart(self) -> None:
        """Leave the plan: every copy is over when this returns, and nothing more is issued before a `_resume`."""
        if self._on_plan:
            self._on_plan = False
            self.journal.departures += 1
            self.drain()
            self._tiers.leave_room_for_activations()

    def drain(self) -> None:
        """Wait for every copy that was issued."""
        self._lanes.drain()

    def close(self) -> None:
        """Stop following; nothing is under way when this returns."""
        self._show(None)
        self._on_plan = False
        self.drain()

    def _show(self, label: str | None) -> None:
        """Name the moment in a profile."""
        if self._profiling is not None:
            self._profiling.__exit__(None, None, None)
            self._profiling = None
        if label is not None and torch.autograd.profiler._is_profiler_enabled:
            self._profiling = torch.profiler.record_function(f"chunkmem {label}")
            self._profiling.__enter__()

    # Departures and the way back.

    def _unforeseen(self, kind: Kind, chunk: Chunk, reader: object) -> _Cue | None:
        was_on_plan = self._on_plan
        self.depart()
        if not was_on_plan and kind is not Kind.RELEASE:
            self.journal.departures += 1
        if kind is Kind.RELEASE:
            return None
        self._unfit += 1
        if self._unfit < self._patience:
            return None
        at = self._director.find(kind, chunk.id, label_of(kind, chunk.id, reader), after=self._cursor)
        if at is None or not self._resume(at):
            self._unfit, self._patience = 0, 2 * self._patience
            return None
        return self._cues[at]

    def _resume(self, moment: int) -> bool:
        """Put what is where as the plan has it before `moment`; False if that is not possible now."""
        self.drain()
        wanted = residency_before(self.plan, self.trace, moment)
        # The plan's peak includes the undo log. What is reserved of it already is no room that a way could take.
        peaks = dict(self._peak_nbytes)
        peaks[Tier.HOST] -= min(peaks[Tier.HOST], self._tiers.host.now.get(UNDO_LOG, 0))
        try:
            actions = way_to(
                wanted,
                self._executor,
                own=self.trace.chunk_nbytes,
                peak_nbytes=peaks,
                keep_duplicates=self.trace.mode is Mode.EVAL,
            )
        except PlanError as error:
            self.obstacle = str(error)
            return False
        self._tiers.plan_decides()
        go(actions, self._store)
        # Only now: on the way, HOST may hold more than the plan has there, and the log would take that room.
        self._executor.reserve_log(self._log)
        for lane, done in self._copies_before[moment].items():
            self._events[lane] = [None] * done
            self._previous[lane] = []
            # What was just moved in the stream that computes comes before anything that is issued now.
            self._pending[lane] = [] if self._is_host else [self._lanes.compute_event()]
        self._update_after, self._ahead_after = [], []
        self._cursor = moment
        self._on_plan = True
        self._unfit, self._patience = 0, 1
        return True

    # What the plan says.

    def _compile(self) -> list[_Cue]:
        issued = {Lane.H2D: 0, Lane.D2H: 0}
        cues = []
        for moment, actions in zip(self.trace.moments, self.plan.actions, strict=True):
            self._copies_before.append(dict(issued))
            steps = [step for action in actions if (step := self._step(action, moment)) is not None]
            if moment.kind is Kind.UPDATE:
                steps.append(self._wait_for_update)
            for action in actions:
                if isinstance(action, Copy):
                    issued[action.lane] += 1
            cues.append(_Cue(moment.kind, self._store.chunks[moment.chunk], str(moment), tuple(steps)))
        self._copies_before.append(issued)
        return [*cues, _Cue(None, None, "", ())]

    def _step(self, action: Action, moment: Moment) -> Step | None:
        if isinstance(action, Wait):
            return self._wait_step(action)
        if isinstance(action, Update):
            if (moment.kind, moment.chunk.group) == (Kind.UPDATE, action.group):
                return None  # whoever updates asks `update_tier`
            return lambda: self._update_ahead(action.group)
        chunk = self._store.chunks[action.chunk]
        if isinstance(action, Alloc):
            return lambda: self._alloc(chunk, action.tier)
        if isinstance(action, Free):
            return lambda: self._free(chunk, action.tier)
        assert isinstance(action, Copy)
        return lambda: self._copy(chunk, action)

    def _wait_step(self, wait: Wait) -> Step | None:
        if wait.on is Lane.HOST_UPDATE:
            return None  # whoever issues copies has done the update, or waited for it at its moment
        if wait.on is Lane.COMPUTE:
            if self._is_host:
                return None
            if wait.lane is Lane.HOST_UPDATE:
                return lambda: self._update_comes_after(Lane.COMPUTE, self._lanes.compute_event())
            return lambda: self._pending[wait.lane].append(self._lanes.compute_event())
        if wait.lane is Lane.COMPUTE:
            return lambda: self._compute_waits(wait)
        if wait.lane is Lane.HOST_UPDATE:
            return lambda: self._update_waits(wait)
        return lambda: self._lane_waits(wait)

    def _event(self, wait: Wait) -> Event | None:
        events, count = self._events[wait.on], wait.count
        if count <= 0:
            events = self._previous[wait.on]
            count += len(events)
        return events[count - 1] if 0 < count <= len(events) else None

    def _compute_waits(self, wait: Wait) -> None:
        event = self._event(wait)
        if event is not None:
            started_s = time.perf_counter()
            stall_s = self._lanes.compute_waits(event)
            self.journal.waited(wait.on, started_s, stall_s)

    def _update_waits(self, wait: Wait) -> None:
        event = self._event(wait)
        if event is not None:
            self._update_comes_after(wait.on, event)

    def _update_comes_after(self, lane: Lane, event: Event) -> None:
        self._update_after.append((lane, event))
        self._ahead_after.append(event)

    def _wait_for_update(self) -> None:
        """The host is about to update a group itself."""
        after, self._update_after, self._ahead_after = self._update_after, [], []
        for lane, event in after:
            started_s = time.perf_counter()
            event.wait()
            self.journal.waited(lane, started_s, time.perf_counter() - started_s)

    def _update_ahead(self, group: int) -> None:
        if self._on_plan:
            event = self._executor.begin_update(group, self._ahead_after)
            if event is not None:
                self._ahead_after = []
                self.journal.updated(self._update_moments[group], self._store.chunks[ChunkId(Role.PARAM, group)], event)

    def _lane_waits(self, wait: Wait) -> None:
        event = self._event(wait)
        if event is not None:
            self._pending[wait.lane].append(event)

    def _alloc(self, chunk: Chunk, tier: Tier) -> None:
        if not self._on_plan or tier in chunk.replicas:
            return
        ledger = self._store.pools[tier].ledger
        if ledger.cap_nbytes - ledger.chunk_nbytes < chunk.nbytes:
            self.depart()  # what the plan does not know has come since: make room on demand
            return
        replica = self._store.take_slab(chunk, tier)
        if tier is Tier.DEVICE and not self._is_host and replica.slab.busy is None:
            # New memory comes from torch's allocator, which orders its reuse on the stream that computes, and no other.
            self._pending[Lane.H2D].append(self._lanes.compute_event())

    def _free(self, chunk: Chunk, tier: Tier) -> None:
        if not self._on_plan or tier not in chunk.replicas:
            return
        self._executor.notice_writes(chunk)  # what a user wrote makes this the only newest replica
        replica = chunk.replicas.get(tier)
        is_last = chunk.ready(tier) and chunk.newest_besides(tier) is None and not chunk.can_be_rounded
        if replica is None or replica.pins > 0 or is_last:
            self.depart()
            return
        self._store.drop(chunk, tier)

    def _copy(self, chunk: Chunk, copy: Copy) -> None:
        if not self._on_plan:
            return
        lane = copy.lane
        if chunk.version == NO_CONTENT or chunk.ready(copy.target):
            self._events[lane].append(None)
            return
        if copy.target not in chunk.replicas or not chunk.ready(copy.source):
            self.depart()
            return
        target, source = chunk.replicas[copy.target], chunk.replicas[copy.source]
        after, self._pending[lane] = self._pending[lane], []
        event = self._lanes.copy(lane, target.flat, source.flat, after=after, label=chunk.label)
        target.slab.busy = source.slab.busy = event
        self._store.note_copy(chunk, copy.source, copy.target)
        self._events[lane].append(event)
        self.journal.copied(lane, chunk, event)
        if isinstance(event, DoneEvent):  # lanes that block
            self.journal.waited(lane, event.started_s, event.ended_s - event.started_s)
