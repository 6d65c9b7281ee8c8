"""What copies, computing and updates come after: as the plan's waits say, or as the slabs do.

[Note: Two ways to order copies] A plan's waits order the lanes as long as everything is exactly where the plan has it:
they were derived for the slabs that its Allocs take, and count its copies. Where something else happened, they prove
nothing: a copy that is not needed is not made, and who counts on it would wait for none of those before it; a slab that
was not freed is not taken, and another one is, which somebody may still be reading. So from the first deviation on the
order comes from the slabs. Each knows the last copy that reads or writes it; every copy comes after those of both of
its slabs, and whatever is computed after those of the slabs that it touches. That is right for any actions in any
order, and waits for more than a plan would. It ends where a step begins with everything in its place and nothing under
way. And a use of chunks that no moment tells of begins with `drain`: the next copies come after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from chunkmem.data.types import TIERS, Tier, neighbor
from chunkmem.plan.model import FETCH, LINK_LANES, Lane, Wait
from chunkmem.runtime.chunk import Chunk
from chunkmem.runtime.events import COPY_LANES, Event, host_waits
from chunkmem.runtime.failed import drain
from chunkmem.runtime.pool import Slab
from chunkmem.runtime.queues import Lanes
from chunkmem.runtime.step_log import StepLog
from chunkmem.runtime.store import ChunkStore

Step = Callable[[], object]
ORDERED_LANES = (*COPY_LANES, Lane.HOST_UPDATE)
"""Lanes whose operations a plan's waits count, in addition to moments."""


@dataclass(eq=False)
class CopyOrder:
    """The events that the next operation on each lane comes after."""

    lanes: Lanes
    step_log: StepLog
    """Is told of what was waited for."""
    is_host: bool
    """What was computed is over when a copy is issued, as both are done by the host."""
    defers_updates: bool
    """`step()` leaves updates on HOST to their lane."""
    rounds: bool
    """Weights are rounded there."""

    def __post_init__(self) -> None:
        self.is_exact = False
        """Everything is as the plan has it, so that its waits are enough; see [Note: Two ways to order copies]."""
        self.events: dict[Lane, list[Event | None]] = {lane: [] for lane in ORDERED_LANES}
        """Copies of this iteration; by number of an update on HOST, the last one so far that was left to its lane."""
        self._previous: dict[Lane, list[Event | None]] = {lane: [] for lane in ORDERED_LANES}
        self._pending: dict[Lane, list[Event]] = {lane: [] for lane in COPY_LANES}
        """By lane: events that the next copy on the lane comes after."""
        self._behind_compute: set[Lane] = set()
        """Lanes whose next copy comes after all that is computed by then: see `drain`."""
        self._update_after: list[tuple[Lane, Event]] = []
        """What the next update that the host makes itself comes after, and on which lane that is."""
        self._ahead_after: list[Event] = []
        """Those of them that no speculative update has waited for: one may be left to the step."""

    def begin_iteration(self) -> None:
        """The copies so far are those of the iteration before."""
        self._previous, self.events = self.events, {lane: [] for lane in ORDERED_LANES}

    def resume(self, num_issued: Mapping[Lane, int]) -> None:
        """The plan is followed from a moment on, before which it has issued so many copies: all of them are over."""
        for lane, done in num_issued.items():
            self.events[lane] = [None] * done
            self._previous[lane] = []
        for lane in COPY_LANES:
            self._pending[lane] = []  # what was just moved by COMPUTE comes before: see `drain`
        self._update_after, self._ahead_after = [], []

    def drain(self, store: ChunkStore) -> None:
        """Wait for everything that was issued: chunks are about to be used outside of the plan's moments.

        Gradients that are clipped, or read by a user, between backward and step are such. The plan's waits count the
        computing that it knows of, so the next copy on each lane waits for this use, too.

        Raises:
            TierIOError: some of it has failed; see [Note: After a failed copy].
        """
        self._behind_compute.update(() if self.is_host else COPY_LANES)
        try:
            drain(self.lanes, store)
        finally:  # what had failed was made again or is lost: nobody waits for it
            lane = Lane.HOST_UPDATE
            self.events[lane], self._previous[lane] = [None] * len(self.events[lane]), []
            self._update_after, self._ahead_after = [], []

    # As a plan has it.

    def wait_step(self, wait: Wait) -> Step | None:
        """Return what carries out a wait of a plan; None if there is nothing to do for it."""
        # What the host computes is over when it issues copies, and so is the update, or it has waited for it.
        if (wait.on is Lane.HOST_UPDATE and not (self.defers_updates or self.rounds)) or (
            wait.on is Lane.COMPUTE and self.is_host
        ):
            return None
        waits = {Lane.COMPUTE: self._compute_waits, Lane.HOST_UPDATE: self._update_comes_after}.get(wait.lane)
        comes_after = waits or partial(self._lane_waits, wait.lane)

        def step() -> None:
            event = self._event(wait)
            if event is not None:
                comes_after(wait.on, event)

        return step

    def _event(self, wait: Wait) -> Event | None:
        if wait.on is Lane.COMPUTE:
            return self._computed()
        events, count = self.events[wait.on], wait.count
        if count <= 0:
            events = self._previous[wait.on]
            count += len(events)
        return events[count - 1] if 0 < count <= len(events) else None

    def _computed(self) -> Event:
        """Return the end of all that is computed by now, in the moment whose actions are carried out."""
        event = self.lanes.compute_event()
        self.step_log.comes_after(event)
        return event

    def _compute_waits(self, lane: Lane, event: Event) -> None:
        self.step_log.waited(lane, self.lanes.compute_waits(event))

    def _update_comes_after(self, lane: Lane, event: Event) -> None:
        self._update_after.append((lane, event))
        self._ahead_after.append(event)

    def _lane_waits(self, lane: Lane, on: Lane, event: Event) -> None:
        self._pending[lane].append(event)

    def wait_for_update(self) -> None:
        """The host is about to update a group itself, or to take a speculative update over."""
        after, self._update_after, self._ahead_after = self._update_after, [], []
        for lane, event in after:
            self._wait_for(lane, event)

    def before_update(self, *slabs: Slab) -> list[Event]:
        """Return what the update that is about to be left to its lane, or what touches `slabs` there, comes after."""
        after, self._update_after, self._ahead_after = self._update_after, [], []
        uses = (event for slab in slabs for event in slab.uses if not self.is_exact)
        return [*(event for _, event in after), *uses]

    def _wait_for(self, lane: Lane, event: Event) -> None:
        self.step_log.waited(lane, host_waits(event, self.step_log.clock))

    def update_passed(self) -> int:
        """Number an update on HOST: who waits for it waits for those before it that were left to their lane.

        The host does the others itself, or waits for them, before it issues what comes after them.
        """
        known = self.events[Lane.HOST_UPDATE] or self._previous[Lane.HOST_UPDATE]
        self.events[Lane.HOST_UPDATE].append(known[-1] if known else None)
        return len(self.events[Lane.HOST_UPDATE]) - 1

    def update_left(self, event: Event, *, instead_of: int | None = None) -> None:
        """The update that was numbered last is left to its lane.

        Args:
            event: its end.
            instead_of: the number of a speculative update of the group that was declined, or undone: who waits until
                that has read the gradients waits for this one.
        """
        self.events[Lane.HOST_UPDATE][-1] = event
        if instead_of is not None:
            self.events[Lane.HOST_UPDATE][instead_of] = event

    def wait_for_lane(self) -> None:
        """The host makes an update itself, after those that were left to their lane."""
        events = self.events[Lane.HOST_UPDATE]
        if events and events[-1] is not None:
            self._wait_for(Lane.HOST_UPDATE, events[-1])

    def before_speculative(self, chunks: Iterable[Chunk]) -> list[Event]:
        """Return what a speculative update of a group comes after, whose `chunks` these are."""
        if self.is_exact:
            return self._ahead_after
        return [*self._ahead_after, *(event for _, event in self._busy(*chunks, tiers=(Tier.HOST,)))]

    def speculative_began(self) -> None:
        """A speculative update waits for that."""
        self._ahead_after = []

    def allocated(self) -> None:
        """DEVICE has new memory from torch's allocator, which orders its reuse on the stream that computes alone."""
        self._pending[FETCH].append(self._computed())

    def before_copy(self, lane: Lane, chunk: Chunk) -> list[Event]:
        """Return what a copy of a chunk on `lane` comes after, which is about to be issued."""
        after, self._pending[lane] = self._pending[lane], []
        if not self.is_exact:
            after += [event for _, event in self._busy(chunk, tiers=TIERS)]
        if lane in self._behind_compute or not (self.is_exact or self.is_host):
            self._behind_compute.discard(lane)
            after.append(self._computed())
        return after

    # As the slabs have it.

    def _busy(self, *chunks: Chunk, tiers: Iterable[Tier]) -> list[tuple[Lane, Event]]:
        """Return the copies that touch the slabs of chunks on these tiers, if not over, and their lanes."""
        found: list[tuple[Lane, Event]] = []
        for chunk in chunks:
            for tier in tiers:
                replica = chunk.replicas.get(tier)
                lane = LINK_LANES[neighbor(tier), tier]
                found += [(lane, event) for event in (() if replica is None else replica.slab.uses)]
        return found

    def after_copies(self, *chunks: Chunk, tiers: Iterable[Tier], is_on_host: bool = False) -> None:
        """Have what is about to be computed come after all copies that touch chunks on these tiers."""
        for lane, event in self._busy(*chunks, tiers=tiers):
            self._compute_waits(lane, event)
            if is_on_host:
                event.wait()  # the host updates, and runs ahead of an accelerator
