"""Interpreter 2 of plans: follow one with real copies, as the events of a step arrive.

While every event is the one expected, only what the plan says is done. An event of a later moment means that the step
leaves out those between: see [Note: Left out]. Any other one is a plan miss: all copies are waited for, and what comes
is served on demand. As soon as an event fits the trace again, the residency that the plan has at that moment is
restored, and the plan is followed on.

[Note: Left out] Layers that are dropped at random, experts without tokens: a step that leaves out some of what was
recorded still has the rest in the order of the plan. So the plan's actions for what is left out are carried out, in
order, and without their events. What makes that sound:

1. No action takes for granted that the events before it came. Each looks at what it is about to do, as
   [Note: Two ways to order copies] in `runtime.copy_order` says: at pins, versions and caps. What would free a chunk
   that is held, or lose what was written last, is a plan miss.
2. No copy relies on the plan's waits once something is not as the plan has it. An update on HOST that is left out is
   such: it was to come after some copies, and others after it.
3. What was left out has not happened: no event is made up. If it comes after all, it begins a later moment, or is a
   plan miss. Nothing is taken to have the content that it would have made: a chunk that nobody has written to has no
   version, and its slab is never copied.

Holders release chunks when the last reference is gone, which is sooner or later than it was when the step was
recorded. So a RELEASE that is not expected is none of the plan's business: the chunk stays until the plan lets it go,
or for as long as it is pinned.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.autograd import profiler

from chunkmem.data.errors import PlanError, TierIOError
from chunkmem.data.trace import Kind, Trace
from chunkmem.data.types import Tier
from chunkmem.plan.cursor import Said, TraceCursor, label_of
from chunkmem.plan.garbage import no_collections
from chunkmem.plan.model import Plan
from chunkmem.plan.semantics import Residency, residency_before
from chunkmem.runtime.actions import PlanActions
from chunkmem.runtime.chunk import NO_CONTENT, Chunk, residency
from chunkmem.runtime.copy_order import Step
from chunkmem.runtime.off_plan import LeftOut, go, reserve_shadow_buffers, way_to
from chunkmem.runtime.pager import Pager
from chunkmem.runtime.step_log import StepLog
from chunkmem.runtime.tiers import Tiers

_ELSEWHERE = -1
"""No moment of this plan."""


@dataclass(slots=True)
class _ReadyMoment:
    """A moment of the plan, ready to be performed."""

    kind: Kind | None
    chunk: Chunk | None
    label: str
    steps: tuple[Step, ...]


class PlanExecutor(PlanActions):
    """Follows one plan, iteration after iteration: a `StepPolicy`."""

    @no_collections()
    def __init__(self, plan: Plan, trace: Trace, pager: Pager, tiers: Tiers) -> None:
        """Prepare to follow `plan`; nothing is moved yet.

        Args:
            plan, trace: one made from the other.
            pager: serves accesses; its store is what is moved in.
            tiers: of the store; on their lanes it copies.
        """
        super().__init__(plan, trace, pager, tiers)
        self.director = TraceCursor(trace)
        self.elsewhere: Callable[[Kind, Chunk, object, int | None], bool] = lambda kind, chunk, reader, left_out: False
        """Called with an event that does not come next, and with how many moments would be left out if it came later,
        None: it does not. Tells whether another plan_executor has taken the step over."""
        self.left_out = LeftOut(trace)
        """Moments that this step has left out so far."""
        self.first_plan_miss = ""
        """First plan miss of this step, as text: the event that came and the one that was expected; empty: none."""
        self._cursor = 0
        self._is_over = False
        """Every moment has come, and the plan was left for what is read between two steps."""
        self._num_outdated = 0
        """The store's count of outdated replicas, as far as the plan accounts for it."""
        self.obstacle = ""
        """Why the last try to resume the plan failed."""
        self._patience, self._num_unfit = 1, 0
        """Events before resuming is tried again, which looks at every chunk; and those since the last try."""
        self._untouched = self._facts.untouched if self.left_out.is_possible and self._order.is_host else frozenset()
        """Chunks that the plan leaves where they are. On an accelerator it counts on that, for activations."""
        chunks = pager.store.chunks
        self._ready = [
            *(
                _ReadyMoment(m.kind, chunks[m.chunk], str(m), do)
                for m, do in zip(trace.moments, self._compile(), strict=True)
            ),
            _ReadyMoment(None, None, "", ()),
        ]
        self._shown: torch.profiler.record_function | None = None
        """The moment that runs as a range of torch's profile, while there is one."""

    @property
    def is_planned(self) -> bool:
        """The plan is followed."""
        return self._on_plan

    @property
    def is_at_end(self) -> bool:
        """Every moment of the iteration has come."""
        return self._is_over or (self._on_plan and self._cursor == len(self.trace.moments))

    @property
    def was_followed(self) -> bool:
        """Some moment of the step was on plan; else `obstacle` says why not."""
        return bool(self.step_log.began) or self.is_at_end

    def update_tier(self, group: int) -> Tier | None:
        """Where the plan has the group updated, while it is followed."""
        return self.plan.update_tiers.get(group) if self._on_plan else None

    def update_order(self, groups: Sequence[int]) -> Sequence[int]:
        """Return the groups in the order in which the plan updates them; none, if it does not update all of them."""
        if not self._on_plan:
            return ()
        moments = {group: self._update_moment(group) for group in groups}
        known = {group: at for group, at in moments.items() if at is not None}
        return sorted(known, key=known.__getitem__) if len(known) == len(moments) else ()

    def _update_moment(self, group: int) -> int | None:
        return next((at for at in self.trace.update_moments.get(group, ()) if at >= self._cursor), None)

    # Iterations.

    def begin_iteration(self, *, times_moments: bool = True) -> None:
        """The first moment comes next. Residency is corrected if it is not what the plan has there.

        Args:
            times_moments: see `StepLog`.
        """
        was_complete, was_exact = self._on_plan and self.is_at_end, self._order.is_exact
        self._begin_step_log(times_moments=times_moments)
        self._order.begin_iteration()
        self._ahead_numbers.clear()
        if not (was_complete and was_exact):
            self._on_plan = False
            self._resume(0, is_next=was_complete)
            for ledger in self._tiers.ledgers:  # what led here is not part of the iteration
                ledger.restart_peak()

    def go_to_start(self) -> None:
        """Have chunks where the first moment has them, if that is possible now; the plan is not followed yet."""
        self._resume(0)
        self.close()

    def end_iteration(self) -> None:
        """The step is over: what it had yet to come is left out, if it is little."""
        if self._on_plan and self.left_out.may_go(self._cursor, len(self.trace.moments)):
            self._leave_out_up_to(len(self.trace.moments))

    def take_over(self, step_log: StepLog, came: Sequence[Said], *, times_moments: bool = True) -> None:
        """Take over a step that another plan pager has followed so far; the last of its events is about to begin.

        Args:
            step_log: of that one.
            came: all events of the step.
            times_moments: see `StepLog`.
        """
        self._begin_step_log(times_moments=times_moments)
        self.step_log.goes_on_from(step_log)
        self._on_plan = False
        at = 0
        for event in came:
            found = self.director.find_next(event, after=at)
            assert found is not None
            self.left_out.go(at, found)
            at = found + 1
        self._resume(at - 1)

    def _begin_step_log(self, *, times_moments: bool) -> None:
        self.step_log = self._order.step_log = StepLog(self._store.clock, times_moments=times_moments)
        self.left_out.spans, self.first_plan_miss = [], ""
        self._cursor, self._is_over = 0, False

    def came(self) -> list[Said]:
        """Return the events of this step so far, as the moments they began. It has not departed."""
        moments = [self.trace.moments[at] for at in self.left_out.come(self._cursor)]
        return [(moment.kind, moment.chunk, moment.label) for moment in moments]

    def close(self) -> None:
        """Stop following; nothing is under way when this returns."""
        self._show("")
        self._on_plan = False
        self.drain()

    # Events.

    def event(self, kind: Kind, chunk: Chunk, reader: object) -> None:
        """Something happens; do what the plan says for it.

        Raises:
            TierIOError: a copy has failed that this, or what comes next, has to wait for. The plan is left.
        """
        try:
            ready = self._ready[self._cursor]
            if not (self._on_plan and ready.chunk is chunk and ready.kind is kind):
                found = self._unforeseen(kind, chunk, reader)
                if found is None:
                    return
                ready = found
            if self._passed_over and kind is Kind.HOLD:
                self._passed_over.discard(chunk.id.group)
            self._perform(ready)
            if self._on_plan and not self._order.is_exact:
                self._wait_for_copies(kind, chunk)
        except TierIOError:
            with contextlib.suppress(TierIOError):
                self.depart()
            raise

    def _perform(self, ready: _ReadyMoment) -> None:
        """Do what the plan has for the moment that comes next, which is `ready`."""
        assert ready.kind is not None
        assert ready.chunk is not None
        self._cursor += 1
        step_log = self.step_log
        step_log.begin(self._cursor - 1, ready.kind, ready.chunk)
        if profiler._is_profiler_enabled or self._shown is not None:
            self._show(ready.label)
        if self._store.num_outdated != self._num_outdated:
            self._num_outdated = self._store.num_outdated
            self._order.is_exact = False
        for step in ready.steps:
            if self._on_plan:  # what is on its way may have failed meanwhile, or a chunk be held that was to go
                step()
        step_log.device_nbytes.append(self._tiers.device.chunk_nbytes)

    def _show(self, label: str) -> None:
        """Show a moment that begins in torch's profile, while there is one; empty: none begins."""
        if self._shown is not None:
            self._shown.__exit__(None, None, None)
            self._shown = None
        if label and profiler._is_profiler_enabled:
            self._shown = torch.profiler.record_function(f"chunkmem {label}")
            self._shown.__enter__()

    def _unforeseen(self, kind: Kind, chunk: Chunk, reader: object) -> _ReadyMoment | None:
        """Return the moment that an event begins which does not come next; None if there is nothing to do for it."""
        if self._on_plan and self.left_out.is_possible:
            if kind is Kind.RELEASE:
                return None
            at = self._later(kind, chunk, reader)
            if at is not None:
                return self._ready[at] if at >= 0 else None
        elif not self._on_plan and kind is not Kind.RELEASE:
            self.step_log.plan_misses += 1
        self.depart()
        if kind is Kind.RELEASE:
            return None
        self._num_unfit += 1
        if self._num_unfit < self._patience:
            return None
        at = self.director.find(kind, chunk.id, label_of(kind, chunk.id, reader), after=self._cursor)
        if at is None or not self._resume(at):
            self._patience, self._num_unfit = 2 * self._patience, 0
            return None
        return self._ready[at]

    # Left out.

    def _later(self, kind: Kind, chunk: Chunk, reader: object) -> int | None:
        """Return the moment that an event begins if those before it are left out; None: it is a plan miss.

        _ELSEWHERE if another plan_executor has taken the step over.
        """
        label = label_of(kind, chunk.id, reader)
        at = self.director.find_next((kind, chunk.id, label), after=self._cursor)
        number = None if at is None else self.left_out.number(self._cursor, at)
        if not self.step_log.plan_misses and self.elsewhere(kind, chunk, reader, number):
            return _ELSEWHERE
        if at is None or not self.left_out.may_go(self._cursor, at):
            self._note_departure(label or f"{kind.value} {chunk.id}")
            return None
        self._leave_out_up_to(at)
        return at if self._on_plan else None

    def _leave_out_up_to(self, moment: int) -> None:
        """Do what the plan has for the moments before this one, without their events; see [Note: Left out]."""
        self.left_out.go(self._cursor, moment)
        while self._on_plan and self._cursor < moment:
            ready = self._ready[self._cursor]
            self._perform(ready)
            chunk = ready.chunk
            assert chunk is not None
            if self._cursor - 1 in self._first_holds:
                self._passed_over.add(chunk.id.group)
            elif ready.kind is Kind.CONSUME:
                if chunk.version == NO_CONTENT:
                    self._store.consume(chunk)  # frees what the plan has given it on HOST
                else:
                    self._order.is_exact = False  # the gradient stays
            elif ready.kind is Kind.UPDATE:
                self._order.is_exact = False  # what was to come after it comes after nothing
                self._round_again(chunk)

    def _round_again(self, chunk: Chunk) -> None:
        """Make weights, which the plan has dropped everywhere for an update that is left out, again."""
        if not chunk.can_be_rounded or chunk.newest_tier() is not None:
            return
        tier = self.plan.update_tiers[chunk.id.group]
        if tier in chunk.replicas:
            self.drain()
            self._store.round(chunk, tier)
        else:
            self.depart()

    # Plan misses and the way back.

    def before_demand(self) -> None:
        """Leave the plan; see `depart`. At its end that is no plan miss: what is read then is no part of a step."""
        self._is_over = self.is_at_end
        self.depart()

    def depart(self) -> None:
        """Leave the plan: every copy is over when this returns, and nothing more is issued before a `_resume`."""
        if self._on_plan:
            self._on_plan = False
            if not self._is_over:
                self._note_departure("an access on demand")
                self.step_log.plan_misses += 1
            try:
                self.drain()
            finally:
                self._tiers.leave_room_for_activations(self.trace.non_model_peak_nbytes)

    def _note_departure(self, came: str) -> None:
        if not self.first_plan_miss:
            expected = self._ready[self._cursor].label or "the end of the step"
            self.first_plan_miss = f"{came} came where the plan has {expected}"

    def _resume(self, moment: int, *, is_next: bool = False) -> bool:
        """Restore the residency that the plan has before `moment`; False if that is not possible now.

        Nothing is looked for if `is_next`, the step before was this plan's, and all is in its place.
        """
        self.drain()
        wanted = residency_before(self.plan, self.trace, moment)
        peaks = dict(self._facts.peak_nbytes)
        on_host = [chunk for chunk, tier in wanted.newest if tier is Tier.HOST]
        for chunk, tier in [key for key in wanted.newest if key[0] in self._untouched]:
            # Where another kind of step has them on DEVICE, they stay if there is room.
            del wanted.newest[chunk, tier]
            peaks[tier] -= self.trace.chunk_nbytes[chunk]
        if not (is_next and self._has(wanted)):
            try:
                actions = way_to(wanted, peaks, self._facts, self.trace, self._pager)
            except PlanError as error:
                self.obstacle = str(error)
                self._tiers.plan_is_left()
                return False
            if self.trace.moments:  # else it is a step of modules on HOST alone
                self._leave_room(self.trace.moments[moment])
            go(actions, self._store)
        # Only now: on the way, HOST may hold more than the plan has there, and the log would take that room.
        reserve_shadow_buffers(self._facts, self._pager, own=on_host)
        self._order.resume(self._facts.copies_before[moment])
        self._ahead_numbers.clear()
        self._cursor, self._is_over = moment, False
        self._on_plan = True
        self._order.is_exact = self._has(wanted)
        self._num_outdated = self._store.num_outdated
        self._patience, self._num_unfit = 1, 0
        return True

    def _has(self, wanted: Residency) -> bool:
        """Tell whether the chunks of the plan are exactly where they should be."""
        chunks = (self._store.chunks[key] for key in self.trace.chunk_nbytes if key not in self._untouched)
        return residency(chunks) == wanted
