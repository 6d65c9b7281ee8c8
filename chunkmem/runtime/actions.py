"""The actions of a plan, carried out on real slabs and lanes.

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

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from chunkmem.data.trace import Kind, Moment, Trace
from chunkmem.data.types import TIERS, ChunkId, Tier
from chunkmem.plan.ahead import updates_ahead
from chunkmem.plan.facts import PlanFacts
from chunkmem.plan.merge import phase_of
from chunkmem.plan.model import FETCH, Action, Alloc, Copy, Free, Plan, Round, Update, Wait, rounding_of
from chunkmem.plan.semantics import ABSENT, NEWEST
from chunkmem.runtime.chunk import NO_CONTENT, Chunk, Replica
from chunkmem.runtime.copy_order import CopyOrder, Step
from chunkmem.runtime.events import COPY_LANES, DoneEvent, Event
from chunkmem.runtime.issued import IssuedCopy, LeftUpdate
from chunkmem.runtime.pager import Pager
from chunkmem.runtime.policy import StepPolicy
from chunkmem.runtime.step_log import NO_MOMENT, StepLog
from chunkmem.runtime.store import transfer_of
from chunkmem.runtime.tiers import Tiers


class PlanActions(StepPolicy, ABC):
    """Does what a plan says for a moment; which moment that is, is decided elsewhere."""

    def __init__(self, plan: Plan, trace: Trace, pager: Pager, tiers: Tiers) -> None:
        """Prepare to carry out the actions of `plan`; nothing is moved yet. The arguments are those of
        `PlanExecutor`."""
        self.plan = plan
        self.trace = trace
        self.step_log = StepLog(pager.store.clock)
        self._pager = pager
        self._store = pager.store
        self._tiers = tiers
        rounds = any(isinstance(action, Round) for actions in plan.actions for action in actions)
        is_host = not tiers.compute.is_accelerator
        self._order = CopyOrder(tiers.lanes, self.step_log, is_host, plan.machine.defers_updates, rounds)
        self._facts = PlanFacts.of(plan, trace, COPY_LANES)
        self._updated: Chunk | None = None
        """The PARAM chunk of the group whose update on HOST is this moment's, and may be left to its lane."""
        self._ahead_numbers: dict[int, int] = {}
        """By group: the number that its speculative update has among the updates on HOST of this iteration."""
        self._on_plan = False
        self._passed_over: set[int] = set()
        """Groups whose weights all of the last forward left out, as of experts without tokens: they are not fetched
        for its backward."""
        self._first_holds = set(_first_holds(trace))

    def log(self) -> StepLog:
        return self.step_log

    @abstractmethod
    def depart(self) -> None:
        """Leave the plan: every copy is over when this returns, and nothing more is issued."""

    @abstractmethod
    def _update_moment(self, group: int) -> int | None:
        """Return the next moment in which a group is updated."""

    def drain(self) -> None:
        """Wait for every copy that was issued: chunks are about to be used outside of the plan's moments.

        Raises:
            TierIOError: a copy has failed; see [Note: After a failed copy].
        """
        self._order.drain(self._store)

    def _compile(self) -> list[tuple[Step, ...]]:
        """Return what to do at each moment."""
        compiled = []
        ahead, phases = updates_ahead(self.trace, self.plan.actions), dict[ChunkId, str]()
        for moment, actions in zip(reversed(self.trace.moments), reversed(self.plan.actions), strict=True):
            if moment.kind is Kind.HOLD:
                phases[moment.chunk] = phase_of(moment.label)
            steps = [step for action in actions if (step := self._step(action, moment, phases)) is not None]
            if not self._order.is_host:
                steps = [partial(self._leave_room, moment), *steps, self._tiers.device_pool.trim]
            if moment.kind is Kind.UPDATE:
                is_left = self.plan.update_tiers[moment.chunk.group] is Tier.HOST and moment.chunk.group not in ahead
                if not (is_left and self._order.defers_updates):
                    steps.append(self._order.wait_for_update)
                if self.plan.update_tiers[moment.chunk.group] is Tier.HOST:
                    steps.append(partial(self._begin_update, self._store.chunks[moment.chunk]))
            compiled.append(tuple(steps))
        return compiled[::-1]

    def _leave_room(self, moment: Moment) -> None:
        """Let slabs take what the non-model data of a moment leaves of the cap; [Note: Room for kept slabs]."""
        is_charged = self.plan.machine.charges_non_model and not self._order.is_host
        self._tiers.plan_decides(moment.non_model_peak_nbytes if is_charged else 0)

    def _step(self, action: Action, moment: Moment, phases: Mapping[ChunkId, str]) -> Step | None:
        """Return what carries out an action of a moment; `phases` tell in which one each chunk is held next."""
        if isinstance(action, Wait):
            return self._order.wait_step(action)
        if isinstance(action, Update):
            if (moment.kind, moment.chunk.group) == (Kind.UPDATE, action.group):
                return None  # the update asks `StepPolicy.update_tier`
            return lambda: self._update_ahead(action.group)
        chunk = self._store.chunks[action.chunk]
        if isinstance(action, Alloc):
            return lambda: self._alloc(chunk, action.tier)
        if isinstance(action, Free):
            return lambda: self._free(chunk, action.tier)
        if isinstance(action, Round):
            return lambda: self._round(chunk)
        assert isinstance(action, Copy)
        may_be_vain = action.lane is FETCH and phases.get(action.chunk) == "backward"
        return lambda: self._copy(chunk, action, is_vain=may_be_vain and chunk.id.group in self._passed_over)

    def _wait_for_copies(self, kind: Kind, chunk: Chunk) -> None:
        """Have what is about to be computed with a chunk, or its group, come after all copies that touch it."""
        if kind is Kind.UPDATE:
            is_on_host = self.plan.update_tiers.get(chunk.id.group) is not Tier.DEVICE
            self._order.after_copies(*self._group(chunk.id.group), tiers=TIERS, is_on_host=is_on_host)
        elif kind not in (Kind.RELEASE, Kind.CONSUME):
            self._order.after_copies(chunk, tiers=(Tier.DEVICE,))

    def _group(self, group: int) -> list[Chunk]:
        return [self._store.chunks[each] for each in self.trace.update(group).chunks]

    # What is done.

    def _update_ahead(self, group: int) -> None:
        event = self._pager.speculative.begin(group, self._order.before_speculative(self._group(group)))
        self._ahead_numbers[group] = self._order.update_passed()
        if event is not None:
            self._order.speculative_began()
            label, moment = f"update of group {group}", self._update_moment(group)
            self.step_log.updating(label, self._store.weights(group), event, moment=moment)

    def _begin_update(self, chunk: Chunk) -> None:
        self._order.update_passed()
        self._updated = chunk

    def await_update(self) -> None:
        """See `StepPolicy.await_update`."""
        self._updated = None
        self._order.wait_for_update()
        self._order.wait_for_lane()

    def defer(self, work: Callable[[], object], chunks: Sequence[Chunk]) -> bool:
        """Leave this moment's update to HOST_UPDATE if that may be; see `StepPolicy.defer`."""
        param, self._updated = self._updated, None
        is_next = self._on_plan and param is not None and chunks[0] is param
        if not (is_next and self._order.defers_updates and self._order.is_exact):
            return False
        slabs = {chunk: chunk.replicas[Tier.HOST].slab for chunk in chunks}
        written = (slab for chunk, slab in slabs.items() if not chunk.id.role.kind.is_of_step)
        update = LeftUpdate(work, chunks[0], tuple(slabs.values()), tuple(written))
        group = chunks[0].id.group
        self._leave_to_lane(update, f"update of group {group}", instead_of=self._ahead_numbers.get(group))
        return True

    def _leave_to_lane(
        self, update: LeftUpdate, label: str, *, moment: int | None = None, instead_of: int | None = None
    ) -> None:
        after = self._order.before_update(*update.slabs)
        event = update.event = self._order.lanes.work(update.run, after=after, label=label)
        self.step_log.updating(label, update.chunk, event, moment=moment)
        self._order.update_left(event, instead_of=instead_of)
        for slab in update.slabs:
            slab.used_by(event)
        self._store.note_issued(update)

    def _alloc(self, chunk: Chunk, tier: Tier) -> None:
        if tier in chunk.replicas:
            self._order.is_exact = False
            return
        ledger = self._store.pools[tier].ledger
        if ledger.cap_nbytes - ledger.chunk_nbytes < chunk.nbytes:
            self.depart()  # what the plan does not know has come since: make room on demand
            return
        replica = self._store.take_slab(chunk, tier)
        if tier is Tier.DEVICE and not (self._order.is_host or replica.slab.events):
            self._order.allocated()

    def _free(self, chunk: Chunk, tier: Tier) -> None:
        if tier not in chunk.replicas:
            self._order.is_exact = False
            return
        self._pager.notice_writes(chunk)  # what a user wrote makes this the only newest replica
        replica = chunk.replicas.get(tier)
        if replica is None or replica.pins > 0 or chunk.is_last(tier):
            self.depart()
            return
        self._store.drop(chunk, tier)

    def _copy(self, chunk: Chunk, copy: Copy, *, is_vain: bool) -> None:
        lane = copy.lane
        if is_vain or chunk.version == NO_CONTENT or chunk.on(copy.target) is NEWEST:
            self._order.is_exact = False
            self._order.events[lane].append(None)
            return
        if chunk.on(copy.target) is ABSENT or chunk.on(copy.source) is not NEWEST:
            self.depart()
            return
        target, source = chunk.replicas[copy.target], chunk.replicas[copy.source]
        after = self._order.before_copy(lane, chunk)
        event = self._issue(copy, target, source, after, chunk.label)
        target.slab.used_by(event)
        source.slab.used_by(event)
        self._store.note_copy(chunk, copy.source, copy.target)
        self._store.note_issued(
            IssuedCopy(chunk, chunk.version, copy.source, source.slab, copy.target, target.slab, event)
        )
        self._order.events[lane].append(event)
        self.step_log.copied(lane, chunk, event)
        if isinstance(event, DoneEvent):  # lanes that block
            self.step_log.waited(lane, event)

    def _round(self, chunk: Chunk) -> None:
        master = chunk.master
        self._order.update_passed()
        if chunk.on(Tier.HOST) is NEWEST:
            self._order.is_exact = False
            return
        self._pager.notice_writes(chunk)
        if master is None or chunk.on(Tier.HOST) is ABSENT or master.on(Tier.HOST) is not NEWEST:
            self.depart()
            return
        source, target = master.replicas[Tier.HOST], chunk.replicas[Tier.HOST]
        target.version = chunk.version
        slabs = source.slab, target.slab
        update = LeftUpdate(partial(target.flat.copy_, source.flat), chunk, slabs, slabs[1:])
        self._leave_to_lane(update, rounding_of(chunk.id), moment=NO_MOMENT)

    def _issue(self, copy: Copy, target: Replica, source: Replica, after: Sequence[Event], label: str) -> Event:
        lanes = self._order.lanes
        transfer = transfer_of(target, source)
        if transfer is not None:
            filled = target.flat if target.slab.is_memory else None
            return lanes.work(transfer, after=after, label=label, link=(copy.source, copy.target), target=filled)
        return lanes.copy(copy.lane, target.copied_from(source), after=after, label=label)


def _first_holds(trace: Trace) -> Iterator[int]:
    """Yield the moments in which a forward is the first to hold a chunk of weights."""
    phases: dict[ChunkId, str] = {}
    for at, moment in enumerate(trace.moments):
        if moment.kind is Kind.HOLD and moment.chunk.role.kind.is_weights:
            phase = phase_of(moment.label)
            if phase == "forward" != phases.get(moment.chunk):
                yield at
            phases[moment.chunk] = phase
