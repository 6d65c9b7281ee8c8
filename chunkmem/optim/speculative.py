"""Groups updated on HOST overlapped with backward, exactly; see [Note: Speculative updates] in plan/ahead.py.

A speculative update guesses what the step will do: that nobody changes the gradients or the options, that they are not
clipped and have not overflowed. It writes to shadow buffers. If the update is still valid at the step, the new values
take the old ones' place; if not, they are forgotten, and the group is updated as if there had been none. So the bits
are those of a step that waits, and until then everyone sees the old values.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from chunkmem.data.errors import TierIOError
from chunkmem.data.types import Role, Tier
from chunkmem.modules.binding import ManagedParameter
from chunkmem.optim.native import NativeUpdate
from chunkmem.optim.rule import ChunkMemory, UpdateItem, UpdateRule
from chunkmem.runtime.chunk import Chunk, Replica, slot_views
from chunkmem.runtime.device import runtime_mode
from chunkmem.runtime.events import Event
from chunkmem.runtime.pool import Slab
from chunkmem.runtime.queues import Lanes
from chunkmem.runtime.shadow import ShadowBuffers
from chunkmem.runtime.store import ChunkStore

WINDOW = 10
"""Steps that are looked back on."""
MAX_WRONG = 3
"""Wrong guesses among them from which on none is made."""


class Speculation:
    """What became of the guesses of the last steps. Steps without one count as they would have."""

    def __init__(self, max_wrong: int = MAX_WRONG) -> None:
        self._max_wrong = max_wrong
        self._wrong: deque[bool] = deque(maxlen=WINDOW)
        self._is_wrong = False
        self.num_wrong = 0
        """Steps whose guess was wrong, of all there were."""

    @property
    def are_worthwhile(self) -> bool:
        """Fewer than `max_wrong` of the last ten steps were guessed wrongly."""
        return sum(self._wrong) < self._max_wrong

    def roll_back(self) -> None:
        """The guess of the step that runs is wrong."""
        self._is_wrong = True

    def end_step(self) -> None:
        """The step is over."""
        self._wrong.append(self._is_wrong)
        self.num_wrong += self._is_wrong
        self._is_wrong = False


@dataclass(frozen=True)
class Intent:
    """What an optimizer does with a group, or would do if it stepped now."""

    rule: UpdateRule[Any]
    items: Sequence[UpdateItem]
    multiplier: float | None
    """Of the gradients."""
    needs_norm: bool = False
    """Of the gradients."""

    def is_right(self, now: Intent) -> bool:
        """Tell whether what a step does depends on the same, in addition to the contents of chunks."""
        return now.multiplier == self.multiplier and _inputs(now.items) == _inputs(self.items)


def _inputs(items: Sequence[UpdateItem]) -> set[tuple[ManagedParameter, int, int, Hashable]]:
    """Return (parameter, number of its update, its own in the optimizer, its hyper-parameters)."""
    found: set[tuple[ManagedParameter, int, int, Hashable]] = set()
    for item in items:
        rows = zip(item.params, map(int, item.steps), item.numbers, strict=True)
        found.update((managed, step, number, item.hyper) for managed, step, number in rows)
    return found


@dataclass
class NormParts:
    """What a group's gradients contribute to the global norm: one or the other."""

    norms: dict[ManagedParameter, torch.Tensor] = field(default_factory=dict)
    """In float32 training: the 2-norm of each, 0-dim."""
    squares: torch.Tensor | None = None
    """In less: see `NativeUpdate.squares`."""


@dataclass(eq=False)
class _Job:
    """One group's update under way, or done and not yet taken over."""

    intent: Intent
    read: list[tuple[Chunk, int, Replica]]
    """What it reads, in which version, and where on HOST."""
    slabs: list[tuple[Chunk, Slab]]
    """Where it writes: of the shadow buffers."""
    norm: NormParts = field(default_factory=NormParts)
    """There once it is done, if it was asked for."""
    event: Event | None = None
    failure: Exception | None = None

    def finish(self) -> None:
        """Wait until it is over, whether it could be done or not: a copy that it came after may have failed."""
        if self.event is not None:
            with contextlib.suppress(TierIOError):
                self.event.wait()

    @property
    def is_sound(self) -> bool:
        """It has not failed, and nothing it has read was changed since."""
        came_in_time = self.event is None or self.event.failure is None
        return (
            came_in_time
            and self.failure is None
            and all(
                chunk.version == version and chunk.replicas.get(Tier.HOST) is replica
                for chunk, version, replica in self.read
            )
        )


@dataclass(eq=False)
class SpeculativeUpdater:
    """Begins updates where a plan says so, and hands their results over at the step."""

    store: ChunkStore
    """Whose chunks are updated."""
    lanes: Lanes
    """On whose HOST_UPDATE it is done."""
    log: ShadowBuffers
    """Where new values are written."""
    native: NativeUpdate
    """The kernels, for norms."""
    intent_of: Callable[[int], Intent | None]
    """Returns what to update a group with; None: that cannot be known before the step."""
    chunks_of: Callable[[int], Sequence[Chunk]]
    """Returns the chunks that an update of a group touches."""
    num_threads: int
    """Of each update."""
    guesses: Speculation = field(default_factory=Speculation)
    _jobs: dict[int, _Job] = field(default_factory=dict)
    _has_warned: bool = False

    def reserve(self, counts: Mapping[int, int]) -> None:
        """Have so many slabs of each size in the shadow buffers, as far as HOST has room. Copies have to be over."""
        if counts != self.log.counts:
            self.forget()
            self.log.reserve(counts)

    def begin(self, group: int, after: Sequence[Event]) -> Event | None:
        """Begin a group's update once `after` is done; None if it is better, or has to be, left to the step."""
        if (left_over := self._jobs.get(group)) is not None:
            if left_over.is_sound:
                return None
            self._drop(self._jobs.pop(group))
        if not self.guesses.are_worthwhile:
            return None
        intent = self.intent_of(group)
        job = None if intent is None else self._make_job(self.chunks_of(group), intent)
        if job is None:
            return None
        job.event = self.lanes.work(self._work(job), after=after, label=f"update of group {group}")
        self._jobs[group] = job
        return job.event

    def _make_job(self, of_group: Sequence[Chunk], intent: Intent) -> _Job | None:
        chunks = {chunk.id.role: chunk for chunk in of_group}
        read = [chunk for role, chunk in chunks.items() if role is not Role.PARAM or Role.MASTER not in chunks]
        weights = chunks.get(Role.MASTER, chunks[Role.PARAM])
        is_possible = intent.rule.can_update_into(weights.dtype, is_master=Role.MASTER in chunks)
        if not is_possible or not all(chunk.ready(Tier.HOST) for chunk in read):
            return None
        job = _Job(intent, [(chunk, chunk.version, chunk.replicas[Tier.HOST]) for chunk in read], [])
        for chunk in (chunk for chunk in of_group if not chunk.id.role.kind.is_of_step):
            if (slab := self.log.take(chunk.nbytes)) is None:
                self._give_back(job)
                return None
            job.slabs.append((chunk, slab))
        return job

    def _work(self, job: _Job) -> Callable[[], object]:
        """Return what a thread does; all tensors are looked up now."""
        intent = job.intent
        old = {
            chunk.id.role: ChunkMemory(replica.flat, self.store.views(chunk, Tier.HOST), chunk.group)
            for chunk, _, replica in job.read
        }
        new = {chunk.id.role: _memory_of(chunk, slab) for chunk, slab in job.slabs}
        params = sorted((p for item in intent.items for p in item.params), key=lambda managed: managed.position)
        gradients = {managed: old[Role.GRAD].views[managed.position] for managed in params}
        native, num_threads = self.native, self.num_threads

        def work() -> None:
            try:
                if intent.needs_norm and Role.MASTER in old:
                    job.norm.squares = native.squares(list(gradients.values()), num_threads=num_threads)
                elif intent.needs_norm:
                    job.norm.norms = {managed: torch.linalg.vector_norm(grad) for managed, grad in gradients.items()}
                intent.rule.update_into(old, new, intent.items, multiplier=intent.multiplier, num_threads=num_threads)
            except Exception as error:  # the step says so, and does it itself
                job.failure = error

        return work

    def norm_parts(self, group: int) -> NormParts:
        """Return what a group's gradients contribute to the global norm, as far as a speculative update has found
        out."""
        job = self._jobs.get(group)
        if job is None or job.event is None:
            return NormParts()
        job.finish()
        return job.norm if job.is_sound else NormParts()

    def take_over(self, group: int, tier: Tier, now: Intent) -> bool:
        """Let the results of a group's speculative update be its contents; False if there is none, or a wrong one.

        The step does `now` with the group, on `tier`, where all chunks it writes have a replica; what those held
        becomes part of the shadow buffers.
        """
        job = self._jobs.pop(group, None)
        if job is None or job.event is None:
            return False
        job.finish()
        if job.failure is not None:
            warnings.warn(
                f"the update of group {group} overlapped with backward failed and is made now: {job.failure!r}",
                stacklevel=2,
            )
        if tier is not Tier.HOST or not job.is_sound or not job.intent.is_right(now):
            self.guesses.roll_back()
            self._give_back(job)
            return False
        for chunk, slab in job.slabs:
            self.log.give(self.store.exchange(chunk, Tier.HOST, slab))
        job.intent.rule.take_over(job.intent.items)
        return True

    def roll_back(self) -> None:
        """The gradients are clipped or have overflowed: forget all updates that guessed they are not."""
        self.guesses.roll_back()
        self.forget()

    def forget(self) -> None:
        """Wait for what is under way, and drop it: what it reads is about to change."""
        jobs, self._jobs = self._jobs, {}
        for job in jobs.values():
            self._drop(job)

    def _drop(self, job: _Job) -> None:
        job.finish()
        self._give_back(job)

    def end_step(self) -> None:
        """The optimizer has stepped. Say so, once, if guesses are wrong so often that no more are made."""
        if not self.log.reserved_nbytes:
            return
        was_worthwhile = self.guesses.are_worthwhile
        self.guesses.end_step()
        if was_worthwhile and not self.guesses.are_worthwhile and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"updates wait for step() again: {MAX_WRONG} of the last {WINDOW} steps clipped their gradients, "
                "overflowed, or changed the optimizer's options after backward, which a speculative update cannot "
                f"know. They overlap with backward again while fewer than {MAX_WRONG} of {WINDOW} do; raise the norm "
                "to clip at, or set client.opts.overlap_optimizer to false",
                stacklevel=2,
            )

    def _give_back(self, job: _Job) -> None:
        for _, slab in job.slabs:
            self.log.give(slab)


def _memory_of(chunk: Chunk, slab: Slab) -> ChunkMemory:
    """Return a slab that is not the chunk's as memory of it."""
    with runtime_mode():
        flat = slab.flat(chunk.dtype)
        return ChunkMemory(flat, slot_views(chunk, flat), chunk.group)
