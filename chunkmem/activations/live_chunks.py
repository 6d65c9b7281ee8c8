"""Chunks of activations that have content: on DEVICE while a backward uses them, gone when autograd lets go of them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable

import torch

from chunkmem.activations.region_calls import CallRecord, RegionCall
from chunkmem.activations.region_chunks import RegionChunks, use_up
from chunkmem.activations.saved_storages import SavedStorages
from chunkmem.activations.saved_tensors import in_backward
from chunkmem.data.errors import CapacityError, TierIOError
from chunkmem.data.types import ChunkId, Tier
from chunkmem.runtime.chunk import Chunk
from chunkmem.runtime.pager import Pager
from chunkmem.runtime.step_lock import StepLock

_KEPT = -2
"""In place of a backward: pinned from the end of forward on."""


class _Sight(weakref.ref[RegionCall]):
    """A call that is a chunk. When autograd lets go of it, only C code runs: the chunk is looked after later."""

    chunk: Chunk
    record: CallRecord
    thread: int | None
    """That called the backward which uses the chunk; None: nobody knows."""

    @property
    def is_recomputed(self) -> bool:
        """The chunk has what was saved in a recomputation."""
        return self.record.is_recomputed and self.chunk is self.record.chunk


class LiveChunks:
    """What calls of regions have saved, by chunk."""

    def __init__(
        self, pager: Pager, step_lock: StepLock, chunks: RegionChunks, *, before_end: Callable[[], None]
    ) -> None:
        """Begin with none.

        Args:
            pager: of chunks.
            turn: of this thread.
            chunks: that may hold content.
            before_end: called when a backward is over, before its chunks are unpinned.
        """
        self._pager = pager
        self._step_lock = step_lock
        self._chunks = chunks
        self._before_end = before_end
        self._sights: dict[ChunkId, _Sight] = {}
        """By chunk that has content: its call."""
        self._gone: deque[weakref.ref[RegionCall]] = deque()
        """Calls that autograd has let go of."""
        self._pinned: dict[ChunkId, int] = {}
        """Chunks that a backward uses, with its number, or that are kept."""
        self.now: Callable[[], int] = lambda: 0
        """Tells the number of moments so far."""

    def begin(self, call: RegionCall, saved: SavedStorages, nbytes: int, *, reader: str, what: str) -> Chunk:
        """Return a chunk whose content is what a call has saved, or its inputs, or what was recomputed.

        Args:
            call: which it is of.
            saved: the content.
            nbytes: of it.
            reader: who makes it.
            what: it is.

        Raises:
            CapacityError: it fits no tier; the content is left to autograd.
        """
        num_made = self._chunks.num_made
        chunk = self._chunks.get(f"{what} of {call.name}", nbytes, live=self._sights)
        if Tier.DEVICE in chunk.replicas and not self._pager.policy.is_planned:  # of a call that is over
            self._pager.store.drop(chunk, Tier.DEVICE)
        sight = self._sights[chunk.id] = _Sight(call, self._gone.append)
        sight.chunk, sight.record, sight.thread = chunk, call.record, None
        try:
            self._pager.create(chunk, Tier.DEVICE, reader=reader, zero=False, saved=saved)
        except BaseException:
            del self._sights[chunk.id]
            saved.let_go()
            if num_made < self._chunks.num_made:
                self._chunks.forget(chunk)  # it is too large: what fits takes another one
            raise
        return chunk

    def keep(self, chunk: Chunk, call: RegionCall) -> None:
        """Have a chunk stay on DEVICE until autograd lets go of its call."""
        self._pinned[chunk.id] = _KEPT
        self._pager.pin(chunk, Tier.DEVICE, reader=call)

    def use(self, chunk: Chunk, call: RegionCall) -> None:
        """Have a chunk on DEVICE until the running backward is over, or done with it. Idempotent.

        Raises:
            CapacityError: it does not fit.
        """
        if chunk.id in self._pinned:
            return
        self._pager.pin(chunk, Tier.DEVICE, reader=call)
        task = self._pinned[chunk.id] = torch._C._current_graph_task_id()
        self._sights[chunk.id].thread = self._step_lock.hook_thread()
        if in_backward() and list(self._pinned.values()).count(task) == 1:
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end(task))

    def _end(self, task: int) -> None:
        """A backward is over."""
        with self._step_lock.taken(in_hook=True):
            self._before_end()
            for key in [key for key, user in self._pinned.items() if user == task]:
                self._unpin(key)
                sight = self._sights.get(key)
                if sight is not None and sight.is_recomputed:  # nobody needs it any more
                    self._use_up(sight.chunk)

    def look_after_gone(self, *, inside: CallRecord | None = None) -> None:
        """Free the chunks of calls that autograd has let go of, but for those of the call that backward is `inside`."""
        for _ in range(len(self._gone)):
            sight = self._gone.popleft()
            assert isinstance(sight, _Sight)
            if inside is not None and sight.record is inside:
                self._gone.append(sight)
                continue
            if self._sights.get(sight.chunk.id) is sight:
                if len(sight.record.backward) == 1:
                    sight.record.backward.append(self.now())
                self._unpin(sight.chunk.id)
                self._use_up(sight.chunk)

    def _unpin(self, key: ChunkId) -> None:
        if self._pinned.pop(key, None) is not None:
            self._pager.unpin(self._pager.store.chunks[key], Tier.DEVICE)

    def _use_up(self, chunk: Chunk) -> None:
        del self._sights[chunk.id]
        use_up(chunk, self._pager)

    # Interruptions, and the end of a step.

    def unpin_interrupted(self) -> None:
        """Unpin what no running backward uses."""
        for key in [key for key in self._pinned if not self._is_used_elsewhere(key)]:
            self._unpin(key)

    def _is_used_elsewhere(self, key: ChunkId) -> bool:
        """Tell whether the backward of another thread uses a chunk."""
        return key in self._pinned and key in self._sights and self._step_lock.runs_elsewhere(self._sights[key].thread)

    def give_up(self) -> None:
        """The step is over: leave to autograd what it has not let go of."""
        self.look_after_gone()
        for sight in list(self._sights.values()):
            call = sight()
            if call is not None and not self._is_used_elsewhere(sight.chunk.id):
                self._give_up(sight.chunk, call)

    def _give_up(self, chunk: Chunk, call: RegionCall) -> None:
        """Leave the content of a chunk to autograd, which has not let go of it; it stays if it cannot be brought."""
        try:
            self._pager.pin(chunk, Tier.DEVICE, reader=call)
        except (CapacityError, TierIOError):  # raised again where autograd asks for it
            return
        assert isinstance(chunk.saved, SavedStorages)
        chunk.saved.let_go()
        call.chunk = None
        self._pager.unpin(chunk, Tier.DEVICE)
        self._use_up(chunk)
