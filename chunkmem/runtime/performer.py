"""Interpreter 2 of plans: follow one with real copies, as the events of a step arrive.

While every event is the one expected, only what the plan says is done, and its waits are all that orders the lanes.
An event of a later moment means that the step leaves out those between: see [Note: Left out]. Any other one is a
departure: all copies are waited for, and what comes is served on demand. As soon as an event fits the trace again, what
is where is put as the plan has it at that moment, and the plan is followed on.

[Note: Left out] Layers that are dropped at random, experts without tokens: a step that leaves out some of what was
recorded still has the rest in the order of the plan. So the plan's actions for what is left out are carried out, in
order. That is sound. Fewer reads make no copy wrong; where a write is left out, the newest version is an older one, and
a copy that finds it at its target is not made; slabs are freed only if that loses nothing. What it costs are copies
that nobody needs, so a step may leave out three quarters of its moments at most.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from chunkmem.errors import PlanError
from chunkmem.plan.ahead import UNDO_LOG, updates_ahead
from chunkmem.plan.director import Director, Said
from chunkmem.plan.model import Action, Alloc, Copy, Free, Lane, Plan, Update, Wait
from chunkmem.plan.resync import residency_before
from chunkmem.plan.simulate import simulate
from chunkmem.runtime.events import DoneEvent, Event, Lanes
from chunkmem.runtime.executor import DemandExecutor
from chunkmem.runtime.journal import Journal
from chunkmem.runtime.store import NO_CONTENT, Chunk
from chunkmem.runtime.tiers import Tiers
from chunkmem.runtime.way import go, way_to
from chunkmem.trace.model import Kind, Mode, Moment, Trace
from chunkmem.types import ChunkId, Role, Tier

Step = Callable[[], object]
_MAX_LEFT_OUT = 0.75
"""Moments that a step may leave out, as a share of all."""


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
        self.predicted = simulate(plan, trace)
        """What a lap will be like."""
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
        self.director = Director(trace)
        self.elsewhere: Callable[[Kind, Chunk, object, int | None], bool] = lambda kind, chunk, reader, left_out: False
        """Called with an event that does not come next, and with how many moments would be left out if it came later,
        None: it does not. Tells whether another performer has taken the step over."""
        self.left_out: list[tuple[int, int]] = []
        """What this step has left out so far: from which moment up to which."""
        self.first_departure = ""
        """Of this step: what came in place of what."""
        self._may_leave_out = not trace.remote_groups and all(m.kind is not Kind.EXCHANGE for m in trace.moments)
        self._update_moments: dict[int, list[int]] = {}
        for at, moment in enumerate(trace.moments):
            if moment.kind is Kind.UPDATE:
                self._update_moments.setdefault(moment.chunk.group, []).append(at)
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
        self._untouched = self._find_untouched() if self._may_leave_out and self._is_host else frozenset()
        """Chunks that the plan leaves where they are. On an accelerator it counts on that, for activations."""
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

    def update_order(self, groups: Sequence[int]) -> Sequence[int]:
        """Return the groups in the order in which the plan updates them; none, if it does not update all of them."""
        if not (self._on_plan and self._may_leave_out):
            return ()
        moments = {group: self._update_moment(group) for group in groups}
        known = {group: at for group, at in moments.items() if at is not None}
        return sorted(known, key=known.__getitem__) if len(known) == len(moments) else ()

    def _update_moment(self, group: int) -> int | None:
        return next((at for at in self._update_moments.get(group, ()) if at >= self._cursor), None)

    def came(self) -> list[Said]:
        """Return the events of this step so far, as the moments they began. It has not departed."""
        begun = set(range(self._cursor)).difference(*(range(start, stop) for start, stop in self.left_out))
        moments = [self.trace.moments[at] for at in sorted(begun)]
        return [(moment.kind, moment.chunk, moment.label) for moment in moments]

    def end_lap(self) -> None:
        """The step is over: what it had yet to come is left out, if it is little."""
        if self._can_leave_out_up_to(len(self.trace.moments)):
            self._leave_out_up_to(len(self.trace.moments))

    def take_over(self, journal: Journal, came: Sequence[Said]) -> None:
        """Go on with a step that another performer has followed so far; the last of its events is about to begin."""
        self.journal = Journal()
        self.journal.goes_on_from(journal)
        self.left_out, self.first_departure = [], ""
        self._on_plan, self._cursor = False, 0
        at = 0
        for event in came:
            found = self.director.find_next(event, after=at)
            assert found is not None
            if found > at:
                self.left_out.append((at, found))
            at = found + 1
        self._resume(at - 1)

    def begin_lap(self) -> None:
        """The first moment comes next. What is where is put right if it is not as the plan has it there."""
        was_complete = self.is_at_end
        self.journal = Journal()
        self.left_out, self.first_departure = [], ""
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
        self._perform(cue)

    def _perform(self, cue: _Cue) -> None:
        """Do what the plan has for the moment that comes next, which is `cue`."""
        assert cue.kind is not None
        assert cue.chunk is not None
        self._cursor += 1
        journal = self.journal
        journal.begin(self._cursor - 1, cue.kind, cue.chunk)
        if torch.autograd.profiler._is_profiler_enabled or self._profiling is not None:
            self._show(cue.label)
        for step in cue.steps:
            step()
        journal.device_nbytes.append(self._device.chunk_nbytes)

    def depart(self) -> None:
        """Leave the plan: every copy is over when this returns, and nothing more is issued before a `_resume`."""
        if self._on_plan:
            self._note_departure("an access on demand")
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

    def _later(self, kind: Kind, chunk: Chunk, reader: object) -> tuple[bool, _Cue | None]:
        """Tell whether an event is no departure, and return the moment of this plan it begins, if it is one."""
        label = label_of(kind, chunk.id, reader)
        at = self.director.find_next((kind, chunk.id, label), after=self._cursor) if self._may_leave_out else None
        if not self.journal.departures:
            num_left_out = None if at is None else at - self._cursor + self.num_left_out
            if self.elsewhere(kind, chunk, reader, num_left_out):
                return True, None
        if at is None or not self._can_leave_out_up_to(at):
            self._note_departure(label or f"{kind.value} {chunk.id}")
            return False, None
        self._leave_out_up_to(at)
        return self._on_plan, self._cues[at] if self._on_plan else None

    def _note_departure(self, came: str) -> None:
        if not self.first_departure:
            expected = self._cues[self._cursor].label or "the end of the step"
            self.first_departure = f"{came} came where the plan has {expected}"

    @property
    def num_left_out(self) -> int:
        """Moments that this step has left out so far."""
        return sum(stop - start for start, stop in self.left_out)

    def _can_leave_out_up_to(self, moment: int) -> bool:
        num_left_out = self.num_left_out + moment - self._cursor
        return self._on_plan and self._may_leave_out and num_left_out <= _MAX_LEFT_OUT * len(self.trace.moments)

    def _leave_out_up_to(self, moment: int) -> None:
        """Do what the plan has for the moments before this one, without their events; see [Note: Left out]."""
        if moment > self._cursor:
            self.left_out.append((self._cursor, moment))
        while self._on_plan and self._cursor < moment:
            cue = self._cues[self._cursor]
            self._perform(cue)
            chunk = cue.chunk
            assert chunk is not None
            if cue.kind is Kind.CONSUME and chunk.version == NO_CONTENT:
                self._store.consume(chunk)  # frees what the plan has given it on HOST
            elif cue.kind is Kind.UPDATE and chunk.can_be_rounded and chunk.newest_tier() is None:
                tier = self.plan.update_tiers[chunk.id.group]
                if tier in chunk.replicas:
                    self.drain()
                    self._store.round(chunk, tier)
                else:
                    self.depart()

    def _unforeseen(self, kind: Kind, chunk: Chunk, reader: object) -> _Cue | None:
        was_on_plan = self._on_plan
        if was_on_plan:
            is_foreseen, cue = self._later(kind, chunk, reader)
            if is_foreseen:
                return cue
        self.depart()
        if not was_on_plan and kind is not Kind.RELEASE:
            self.journal.departures += 1
        if kind is Kind.RELEASE:
            return None
        self._unfit += 1
        if self._unfit < self._patience:
            return None
        at = self.director.find(kind, chunk.id, label_of(kind, chunk.id, reader), after=self._cursor)
        if at is None or not self._resume(at):
            self._unfit, self._patience = 0, 2 * self._patience
            return None
        return self._cues[at]

    def _resume(self, moment: int) -> bool:
        """Put what is where as the plan has it before `moment`; False if that is not possible now."""
        self.drain()
        wanted = residency_before(self.plan, self.trace, moment)
        # The plan's peak includes the undo log. What is reserved of it already is no room that a way could take.
        peaks = dict(self.predicted.peak_nbytes)
        for chunk, tier in [key for key in wanted.newest if key[0] in self._untouched]:
            # Where another kind of step has them on DEVICE, they stay if there is room.
            del wanted.newest[chunk, tier]
            peaks[tier] -= self.trace.chunk_nbytes[chunk]
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

    def _find_untouched(self) -> frozenset[ChunkId]:
        touched = {moment.chunk for moment in self.trace.moments}
        touched |= {
            action.chunk for actions in self.plan.actions for action in actions if not isinstance(action, Wait | Update)
        }
        for moment in self.trace.moments:
            if moment.kind is Kind.UPDATE:
                touched.update(self.trace.update_chunks(moment.chunk.group))
        return frozenset(self.trace.chunk_nbytes) - touched

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
                moment = self._update_moment(group)
                assert moment is not None
                self.journal.updated(moment, self._store.chunks[ChunkId(Role.PARAM, group)], event)

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
