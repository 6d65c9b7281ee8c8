"""How much of a step has to be heard of.

Of a model that fits nothing, see [Note: Resident models] in `chunkmem.modules.hooks`; of one that nearly fits its
blocks, see [Note: Blocks as a whole] in `chunkmem.modules.blocks`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from torch import nn

from chunkmem.data.errors import CapacityError
from chunkmem.data.trace import Kind, Trace
from chunkmem.data.types import Role
from chunkmem.plan.machine import Machine
from chunkmem.runtime.pager import Pager
from chunkmem.runtime.step_events import StepEvents
from chunkmem.steps.cached_plan import CachedPlan
from chunkmem.steps.plan_cache import Key, PlanCache

WORTH = 64
"""Modules in blocks: for fewer, another recorded step costs more than it saves soon."""
_SPARE_CHUNKS = 8
"""Of the largest size: a block of two in its backward, its gradients twice, and what comes next."""


class Residence:
    """Decides whether all chunks stay on DEVICE in the step that begins, and tells who has to know."""

    def __init__(self, pager: Pager, *, is_model: Callable[[int], bool]) -> None:
        """Begin with chunks that may leave; `is_model` tells whether what is called is a whole model, packed."""
        self._pager = pager
        self._is_model = is_model
        self.is_on = False
        """All chunks stay, and calls inside of models are not heard of."""
        self.pipeline: nn.Module | None = None
        """What a pipeline is about to call as a model, of which nobody need hear."""
        self._kinds: set[CachedPlan] = set()
        """Kinds of steps that were found to move nothing since `leave`."""

    def of(self, key: Key, kinds: PlanCache, entry: CachedPlan | None) -> CachedPlan | None:
        """Return what a step is like that begins now, if it need not be heard of; `entry` is what it would follow."""
        found = entry if entry is not None and entry.is_timed else kinds.needless(key)
        snapshot = self._pager.store.snapshot
        if found is None or (snapshot is not None and not snapshot.is_over):
            return None
        if key.root != id(self.pipeline) and not self._is_model(key.root):
            return None
        if any(has_hooks() for has_hooks in self._pager.events.has_inner_hooks):
            return None
        return found if found in self._kinds or found.fits(self._pager.store.chunks) else None

    def enter(self, entry: CachedPlan) -> None:
        """A step like `entry` begins: chunks stay from now on."""
        self._kinds.add(entry)
        if self.is_on:
            return
        self.is_on = True
        try:
            for tell in self._pager.events.resident:
                tell(True)
        except CapacityError:
            self.leave()
            entry.has_moved = True

    def leave(self) -> None:
        """Chunks may leave DEVICE from now on. Raises what `AccessTracker.stay` does; everybody knows then, too."""
        self._kinds.clear()
        if self.is_on:
            self.is_on = False
            with ExitStack() as stack:
                for tell in self._pager.events.resident:
                    stack.callback(tell, False)


class BlockSteps:
    """Decides whether the step that begins hears of blocks as a whole, and tells who has to know."""

    def __init__(self, events: StepEvents, *, machine: Callable[[], Machine], is_model: Callable[[int], bool]) -> None:
        """Begin with steps that hear of each module; `machine` returns what plans are made for."""
        self._is_model = is_model
        self._events = events
        self._machine = machine
        self._hooked: Key | None = None
        """Key of the steps whose blocks are heard of as a whole; None: there are none."""
        self._is_used = False
        """Steps of some kind have been heard of so."""
        self._running: list[tuple[Key, PlanCache]] = []
        """The kind of the step that runs, or ran last, if there was one."""
        self._failed: list[tuple[Key, PlanCache]] = []
        """Key and plans of the step whose blocks should not have been heard of as a whole; empty: none."""
        events.failed.append(self.fail)
        events.read_in_part.append(self.fail)

    def fail(self) -> None:
        """In the step that runs an access has failed, or modules of a block were called by others."""
        if self.is_on:
            self._failed = self._running

    @property
    def is_on(self) -> bool:
        """Blocks are heard of as a whole."""
        return self._hooked is not None

    @property
    def _may(self) -> bool:
        return not any(has_hooks() for has_hooks in self._events.has_inner_hooks)

    def decide(self, key: Key, kinds: PlanCache, trace: Trace) -> None:
        """Steps with this key were recorded: have the next one recorded by blocks, if that is worth it.

        It is not where all chunks stay on DEVICE from step to step: nothing is heard of those steps in the end.
        """
        if key in kinds.by_block or trace.by_block or not self._may or not self._is_model(key.root):
            return
        machine = self._machine()
        is_needed = self._is_used or not stays(trace, machine)
        if is_needed and has_room(trace, machine) and sum(tell() for tell in self._events.num_in_blocks) >= WORTH:
            self._is_used = True
            kinds.hook_by_block(key, True)

    def begin(self, key: Key, kinds: PlanCache) -> None:
        """A step begins: go back to module by module where blocks as a whole have failed, or others hear inside."""
        begun = [(key, kinds)]
        for failed, of in self._failed if self._may else self._failed + begun:
            if of.is_by_block(failed):
                of.hook_by_block(failed, False)
        self._running, self._failed = begun, []

    def hear(self, key: Key, *, by_block: bool) -> None:
        """Have the step that begins heard of by blocks, or module by module."""
        if by_block and self.is_on and not key.trainable:
            return  # an evaluation: which parameters are trained does not matter
        heard = key if by_block else None
        if heard != self._hooked:
            self._hooked = heard
            for tell in self._events.by_block:
                tell(by_block)


def has_room(trace: Trace, machine: Machine) -> bool:
    """Tell whether a step that was recorded module by module has room on DEVICE for blocks as a whole."""
    held_nbytes = most_nbytes = 0
    for moment in trace.moments:
        if moment.kind in (Kind.HOLD, Kind.RELEASE):
            nbytes = trace.chunk_nbytes[moment.chunk]
            held_nbytes += nbytes if moment.kind is Kind.HOLD else -nbytes
        others_nbytes = moment.non_model_peak_nbytes if machine.charges_non_model else 0
        most_nbytes = max(most_nbytes, held_nbytes + others_nbytes)
    return most_nbytes + _SPARE_CHUNKS * max(trace.chunk_nbytes.values()) <= machine.device_nbytes


def stays(trace: Trace, machine: Machine) -> bool:
    """Tell whether all chunks of a step fit DEVICE, and gradients twice."""
    grads_nbytes = trace.nbytes(chunk for chunk in trace.chunk_nbytes if chunk.role is Role.GRAD)
    others_nbytes = trace.non_model_peak_nbytes if machine.charges_non_model else 0
    return sum(trace.chunk_nbytes.values()) + grads_nbytes + others_nbytes <= machine.device_nbytes
