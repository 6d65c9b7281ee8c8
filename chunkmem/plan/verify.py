"""Read a plan in program order: refuse what that alone shows to be wrong, and spell it out for the lanes."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite

from chunkmem.data.trace import Kind, Moment, Trace
from chunkmem.data.types import MEMORY, ChunkId, Role, Tier, UpdateForm
from chunkmem.plan.ahead import log_nbytes, update_s, updates_ahead
from chunkmem.plan.hazards import (
    COLLECTIVE,
    COMPUTE,
    HOST_UPDATE,
    INDEX,
    LANES,
    Await,
    Entry,
    Give,
    LaneOperation,
    LaneProgram,
    Take,
    Unhold,
)
from chunkmem.plan.machine import Machine
from chunkmem.plan.model import Action, Alloc, Copy, Free, Lane, Plan, Round, Update, Wait
from chunkmem.plan.residency import CheckedState, Position
from chunkmem.plan.semantics import ABSENT, NEWEST, arrives


class Reader:
    """Reads a plan once, in program order, as the lanes' program; refuses what the order alone shows to be wrong."""

    def __init__(self, plan: Plan, trace: Trace, machine: Machine) -> None:
        self._plan, self._trace, self.machine = plan, trace, machine
        self._position = Position(trace)
        self.state = CheckedState(plan, trace, machine, self._position)
        self.num_issued = [0] * len(LANES)
        self.device_nbytes: list[int] = []
        self._entries: list[Entry] = []
        self.places: list[tuple[int, int]] = []
        """By entry: the moment in whose list it stands, and the index of the action there, or the list's length."""
        self._held: set[int] = set()
        self._far_waits: list[tuple[int, Wait]] = []
        self._is_updated = False
        self._ahead: dict[int, tuple[int, ...]] = {}
        """By group with a speculative update under way: the replicas that the update reads."""
        self._log_nbytes = 0
        self._exchanges: dict[int, tuple[int, tuple[int, ...]]] = {}
        """By replica that is being exchanged: the number of the exchange, and the replicas it writes."""

    def read(self, *, watch: Callable[[int], None] | None = None) -> LaneProgram:
        """Go through one iteration. It ends as it begins, so this holds for all of them.

        Args:
            watch: called with each moment's index while the moment runs: what it begins with is there, and what it uses
                up is, too. It may look at `state`.
        """
        state, position = self.state, self._position
        limit_nbytes = self.machine.shadow_nbytes
        if limit_nbytes and (ahead := updates_ahead(self._trace, self._plan.actions)):
            wanted_nbytes = sum(log_nbytes(self._trace, group) for group in ahead)
            state.set_aside(min(wanted_nbytes, limit_nbytes))
        charges_non_model = self.machine.charges_non_model
        for actions, moment in zip(self._plan.actions, self._trace.moments, strict=True):
            position.index += 1
            state.charge_nbytes = moment.non_model_peak_nbytes if charges_non_model else 0
            self._is_updated = False
            if moment.kind is Kind.RELEASE:
                # Before the actions, so that they may free the chunk.
                released = state.replica(moment.chunk, Tier.DEVICE)
                self._held.remove(released)
                self._entries.append(Unhold(released))
                state.before(moment, self._trace)
            for number, action in enumerate(actions):
                position.action = action
                self._act(action)
                self._note_places(number)
            position.action = None
            state.check_cap(0)
            self.device_nbytes.append(state.used_nbytes[0])
            if watch is not None and moment.kind is Kind.CONSUME:
                watch(position.index)
            self._begin(moment)
            self._note_places(len(actions))
            if watch is not None and moment.kind is not Kind.CONSUME:
                watch(position.index)
        self._check_far_waits()
        state.check_end()
        return LaneProgram(self._entries, state.replicas, state.nbytes, state.start, self._trace.moments)

    def _note_places(self, number: int) -> None:
        self.places += [(self._position.index, number)] * (len(self._entries) - len(self.places))

    def _act(self, action: Action) -> None:
        if isinstance(action, Wait):
            self._wait(action)
        elif isinstance(action, Alloc):
            replica = self.state.replica(action.chunk, action.tier)
            self.state.alloc(replica)
            self._entries.append(Take(replica))
        elif isinstance(action, Free):
            self._free(action)
        elif isinstance(action, Copy):
            self._copy(action)
        elif isinstance(action, Round):
            self._round(action)
        else:
            self._update(action)

    def _wait(self, wait: Wait) -> None:
        for lane in (wait.lane, wait.on):
            if lane is Lane.COLLECTIVE:
                self._position.fail(f"no plan issues anything on {lane.name}")
        if wait.lane is wait.on:
            self._position.fail("a lane is in order by itself")
        on = INDEX[wait.on]
        if wait.count > self.num_issued[on]:
            self._position.fail(
                f"{wait.on.name} has only been issued {self.num_issued[on]} operations in this iteration"
            )
        if wait.count <= 0:
            self._far_waits.append((self._position.index, wait))
        self._entries.append(Await(INDEX[wait.lane], on, wait.count))

    def _free(self, free: Free) -> None:
        state = self.state
        replica = state.replica(free.chunk, free.tier)
        if state.states[replica] == ABSENT:
            self._position.fail("the chunk has no slab there")
        if replica in self._held:
            self._position.fail("the chunk is held")
        self._need_quiet(replica)
        is_last = state.states[replica] == NEWEST and not state.is_newest_elsewhere(replica)
        if is_last and not self._can_be_rounded(free.chunk):
            self._position.fail("it is the only replica of the newest version")
        self._drop(replica)

    def _can_be_rounded(self, chunk: ChunkId) -> bool:
        return self._trace.is_rounded(chunk) and self.state.has_content(ChunkId(Role.MASTER, chunk.group))

    def _need_quiet(self, replica: int) -> None:
        """Refuse to change what a speculative update reads."""
        group = self.state.replicas[replica][0].group
        if replica in self._ahead.get(group, ()):
            self._position.fail(f"group {group} is being updated speculatively, from what is there")

    def _drop(self, replica: int) -> None:
        self.state.free(replica)
        self._entries.append(Give(replica))

    def _copy(self, copy: Copy) -> None:
        state, link = self.state, self.machine.links.get((copy.source, copy.target))
        if link is None:
            self._position.fail(f"no link leads from {copy.source.name} to {copy.target.name}")
        source, target = state.replica(copy.chunk, copy.source), state.replica(copy.chunk, copy.target)
        state.need_newest(source)
        if state.states[target] == NEWEST:
            self._position.fail(f"{copy.target.name} holds the newest version already")
        state.need_slab(target)
        state.write(target)
        nbytes = state.nbytes[source]
        self._issue(INDEX[copy.lane], (source,), (target,), link.copy_s(nbytes), copy.chunk, nbytes, host_nbytes=nbytes)

    def _round(self, action: Round) -> None:
        state, machine, master = self.state, self.machine, ChunkId(Role.MASTER, action.chunk.group)
        if not self._trace.is_rounded(action.chunk):
            self._position.fail("it has no master weights")
        source, target = state.replica(master, Tier.HOST), state.replica(action.chunk, Tier.HOST)
        state.need_newest(source)
        if state.states[target] == NEWEST:
            self._position.fail("HOST holds the newest version already")
        state.need_slab(target)
        self._need_quiet(target)
        state.write(target)
        nbytes = state.nbytes[source] + state.nbytes[target]
        self._issue(
            HOST_UPDATE,
            (source,),
            (target,),
            machine.host_update_s(nbytes, UpdateForm.MASTER) or 0.0,
            master,
            is_ahead=True,
            host_nbytes=nbytes,
        )

    def _update(self, update: Update) -> None:
        moment = self._trace.moments[self._position.index]
        is_ahead = moment.kind is not Kind.UPDATE or update.group != moment.chunk.group
        if (self._is_updated and not is_ahead) or update.group in self._ahead:
            self._position.fail("the group is updated twice")
        tier = self._plan.update_tiers.get(update.group)
        if update.tier is not tier:
            self._position.fail(f"update_tiers says {tier.name if tier else 'nothing of this group'}")
        if update.tier not in MEMORY:
            self._position.fail(f"nothing is updated on {update.tier.name}")
        if is_ahead:
            self._update_ahead(update)
            return
        self._is_updated = True
        if update.tier is not Tier.DEVICE:
            self._issue_update(moment, update.tier)

    def _update_ahead(self, update: Update) -> None:
        """Begin a group's update before its moment; see [Note: Speculative updates]."""
        moments, here = self._trace.moments, self._position.index
        at = self._trace.update_moments.get(update.group, ())
        if update.tier is not Tier.HOST or len(at) != 1 or at[0] < here:
            moment = moments[here]
            updates = f"group {moment.chunk.group}" if moment.kind is Kind.UPDATE else "nothing"
            self._position.fail(f"this moment updates {updates}, and ahead goes only what HOST updates once, and later")
        self._log_nbytes += log_nbytes(self._trace, update.group)
        if self._log_nbytes > self.machine.shadow_nbytes:
            self._position.fail(f"{self._log_nbytes} bytes pass the shadow buffers of {self.machine.shadow_nbytes}")
        reads = tuple(self.state.replica(chunk, Tier.HOST) for chunk in self._trace.update(update.group).reads)
        for replica in reads:
            self.state.need_newest(replica)
        self._ahead[update.group] = reads
        moment = moments[at[0]]
        self._issue(
            HOST_UPDATE,
            reads,
            (),
            update_s(self._trace, moment, self.machine),
            moment.chunk,
            is_ahead=True,
            host_nbytes=self._trace.touched_nbytes(update.group),
        )

    def _commit_ahead(self, moment: Moment) -> None:
        """The moment of a group that was updated speculatively: what was written to shadow buffers becomes theirs."""
        del self._ahead[moment.chunk.group]
        self._issue_update(moment, Tier.HOST, commits=True)

    def _issue_update(self, moment: Moment, tier: Tier, *, commits: bool = False) -> None:
        state, machine = self.state, self.machine
        update = self._trace.update(moment.chunk.group)
        reads: list[int] = []
        writes: list[int] = []
        for chunk in update.chunks:
            replica = state.replica(chunk, tier)
            if chunk.role is Role.PARAM:
                if self._trace.is_rounded(chunk):
                    state.need_slab(replica)
                state.update(moment, self._trace, tier)
            state.need_newest(replica)
            is_written = chunk in update.writes
            if is_written:
                state.need_alone(replica)
            (writes if is_written else reads).append(replica)
        if tier is Tier.HOST:
            if commits:
                self._issue(HOST_UPDATE, (), tuple(writes), 0.0, moment.chunk, commits=True)
                return
            self._issue(
                HOST_UPDATE,
                tuple(reads),
                tuple(writes),
                update_s(self._trace, moment, machine),
                moment.chunk,
                is_ahead=machine.defers_updates,
                host_nbytes=self._trace.touched_nbytes(moment.chunk.group),
            )
            return
        nbytes, Bps = self._trace.nbytes(update.chunks), machine.device_update_Bps
        duration_s = nbytes / Bps if isfinite(Bps) else moment.duration_s
        self._issue(COMPUTE, tuple(reads), tuple(writes), duration_s, moment.chunk)

    def _begin(self, moment: Moment) -> None:
        """Run the moment itself."""
        state, kind = self.state, moment.kind
        if kind is Kind.RELEASE:  # its state has changed before the actions
            self._issue(COMPUTE, (), (), moment.duration_s, moment.chunk)
            return
        device = state.replica(moment.chunk, Tier.DEVICE)
        reads: tuple[int, ...] = ()
        writes: tuple[int, ...] = ()
        duration_s = moment.duration_s
        if kind is Kind.HOLD and arrives(moment.chunk, self._trace):
            state.need_slab(device)
            state.begin(moment, self._trace)
            self._held.add(device)
            writes = (device,)
        elif kind is Kind.HOLD:
            state.need_newest(device)
            self._held.add(device)
            reads = (device,)
        elif kind is Kind.ARRIVE:
            # What comes after it here comes after the exchange: no other lane need wait for COLLECTIVE.
            number, writes = self._exchanges.pop(device)
            self._entries.append(Await(COMPUTE, COLLECTIVE, number))
        elif kind is Kind.CREATE:
            for other in state.elsewhere(device):
                self._need_quiet(other)
            state.need_slab(device)
            state.need_alone(device)
            state.begin(moment, self._trace)
            writes = (device,)
        elif kind is Kind.WRITE:
            state.need_newest(device)
            state.need_alone(device)
            writes = (device,)
        elif kind is Kind.CONSUME:
            for other in state.elsewhere(device):
                self._need_quiet(other)
                if state.states[other] != ABSENT:
                    self._entries.append(Give(other))
            state.begin(moment, self._trace)
        elif kind is Kind.UPDATE:
            if moment.chunk.group in self._ahead:
                self._commit_ahead(moment)
            elif not self._is_updated:
                self._position.fail(f"an Update of group {moment.chunk.group} is missing")
            if self._plan.update_tiers[moment.chunk.group] is Tier.DEVICE:
                self._issue_update(moment, Tier.DEVICE)
                return
            # The update was issued among the actions; COMPUTE only passes the moment.
            duration_s = 0.0
        self._issue(COMPUTE, reads, writes, duration_s, moment.chunk)
        if kind is Kind.EXCHANGE:
            self._exchange(moment.chunk, device)

    def _exchange(self, chunk: ChunkId, device: int) -> None:
        """Issue an exchange behind all that was computed; the ARRIVE waits for it."""
        is_written = self._trace.is_remote(chunk) is chunk.role.kind.is_weights
        reads, writes = ((), (device,)) if is_written else ((device,), ())
        nbytes = self._trace.chunk_nbytes[chunk]
        self._entries.append(Await(COLLECTIVE, COMPUTE, self.num_issued[COMPUTE]))
        Bps = self.machine.exchange_Bps
        duration_s = nbytes / (Bps if chunk.role.kind.is_weights else min(Bps, self.machine.reduce_Bps))
        self._issue(COLLECTIVE, reads, writes, duration_s, chunk, nbytes)
        self._exchanges[device] = self.num_issued[COLLECTIVE], writes

    def _issue(
        self,
        lane: int,
        reads: tuple[int, ...],
        writes: tuple[int, ...],
        duration_s: float,
        chunk: ChunkId,
        nbytes: int = 0,
        *,
        is_ahead: bool = False,
        commits: bool = False,
        host_nbytes: int = 0,
    ) -> None:
        self.num_issued[lane] += 1
        at = self._position.index
        self._entries.append(
            LaneOperation(lane, reads, writes, duration_s, at, chunk, nbytes, is_ahead, commits, host_nbytes)
        )

    def _check_far_waits(self) -> None:
        for index, wait in self._far_waits:
            num = self.num_issued[INDEX[wait.on]]
            if wait.count <= -num:
                self._position.index, self._position.action = index, wait
                self._position.fail(f"counts reach one iteration back, in which {wait.on.name} has {num} operations")
