"""What autograd saves in a region becomes a chunk of the role ACTIVATION: kept, or moved to HOST and back.

[Note: Regions] A region is a module whose calls are managed as a whole: a block. While one runs, torch's saved-tensor
hooks tell what autograd saves. Nothing is copied then. When the next region begins, or the model returns, what the call
has saved is looked over: storages that nobody but autograd holds are the content of its chunk from then on, in the
memory where they are. All others (outputs that are used on, a mask of the caller's) stay as they are.

    forward    | region 0 |  | region 1 |  |              the memory of a storage is emptied and filled again,
    CREATE                ...0          ...1              as that of weights is: tensors and views stay as they are
    backward                                   | region 1 |  | region 0 |
    HOLD                                       1             0
    CONSUME                                               1             0

The chunk is brought back when autograd asks for the first of its tensors, and its content is used up when autograd has
let go of the last. A call that autograd has not let go of when the step is over gives its memory up to autograd: then
it is no chunk any more.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from chunkmem.errors import CapacityError, TierIOError
from chunkmem.nn.recompute import Recomputation
from chunkmem.nn.region_calls import CallRecord, Recomputing, RegionCall
from chunkmem.nn.region_chunks import RegionChunks
from chunkmem.nn.region_policies import RegionPolicies
from chunkmem.nn.saved_storages import LeftStorages, SavedStorage, SavedStorages, SavedTensor
from chunkmem.nn.saved_tensors import ChunkHooks, OwnHooks, SavedReference
from chunkmem.nn.turn import Turn
from chunkmem.nn.values import storage_id
from chunkmem.runtime.chunk import Chunk
from chunkmem.runtime.device import runtime_mode
from chunkmem.runtime.pager import Pager
from chunkmem.trace.model import Region, Trace
from chunkmem.types import ChunkId, Tier

_NO_TASK = -1
"""What torch says where no backward runs."""
_KEPT = -2
"""In place of a backward: pinned from the end of forward on."""


class _Sight(weakref.ref[RegionCall]):
    """A call that is a chunk. When autograd lets go of it, only C code runs: the chunk is looked after later."""

    __slots__ = ("chunk", "record", "thread")
    chunk: Chunk
    record: CallRecord
    thread: int | None
    """That called the backward which uses the chunk; None: nobody knows."""

    @property
    def is_recomputed(self) -> bool:
        """The chunk has what was saved in a recomputation."""
        return self.record.is_recomputed and self.chunk is self.record.chunk


class RegionActivations(OwnHooks):
    """What regions save: chunks from the end of their forward to the end of their backward."""

    def __init__(
        self,
        pager: Pager,
        turn: Turn,
        saved: ChunkHooks,
        *,
        policies: RegionPolicies,
        chunks: RegionChunks,
        device: torch.device,
        is_rehearsal: bool = False,
    ) -> None:
        """Begin with none.

        Args:
            pager: of chunks.
            turn: of this thread.
            saved: keeps tensors in the memory of parameters' chunks.
            policies: of modules.
            chunks: of activations.
            device: that is DEVICE; what is saved elsewhere stays there.
            is_rehearsal: under fake tensors.
        """
        self._pager = pager
        self._is_rehearsal = is_rehearsal
        self._device = device
        self._turn = turn
        self._saved = saved
        self._hooks = (self._pack, self._unpack)
        self._open: RegionCall | None = None
        """Runs now."""
        self._depth = 0
        """Calls of regions that run; those inside of another one are parts of it."""
        self._pending: RegionCall | None = None
        """Has been left, and is not looked over yet."""
        self._live: dict[ChunkId, _Sight] = {}
        """By chunk that has content: its call."""
        self._gone: deque[weakref.ref[RegionCall]] = deque()
        """Calls that autograd has let go of."""
        self._pinned: dict[ChunkId, int] = {}
        """Chunks that a backward uses, with its number, or that are kept."""
        self._chunks = chunks
        self.policies = policies
        self._kept: Collection[int] = ()
        """Calls of the iteration, by their numbers, that are not recomputed although they may be."""
        self.now: Callable[[], int] = lambda: 0
        """Tells the number of moments so far."""
        self.records: list[CallRecord] = []
        """Of the calls of the iteration."""
        self.on_taken: Callable[[torch.UntypedStorage], None] = lambda storage: None
        """Called with each storage that is about to become part of a chunk."""
        self.on_left: Callable[[torch.UntypedStorage], None] = lambda storage: None
        """Called with each that was part of one, and is others' now."""
        self.left = LeftStorages()

    @property
    def is_auto(self) -> bool:
        """Which regions are recomputed is decided for each kind of step."""
        return any(record.is_auto for record in self.records)

    def begin_iteration(self, kept: Collection[int] | None, now: Callable[[], int]) -> None:
        """A training step begins; see `chunkmem.steps.controller.Regions`."""
        self.now = now
        self.records = []
        self._kept = () if kept is None else kept

    def recorded(self) -> tuple[Region, ...]:
        """Return the regions of the iteration that may be recomputed or not, in the order of their forward."""
        found = (record.region() for record in self.records if record.is_auto)
        return tuple(region for region in found if region is not None)

    def adopt(self, trace: Trace) -> None:
        """Have the chunks of a training step of an earlier run; see `RegionChunks.adopt`."""
        self._chunks.adopt(trace, self.policies)

    # Forward.

    def enter(
        self,
        name: str,
        policy: str,
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        start: int,
        number: int | None = None,
    ) -> bool:
        """A call of a region begins; return whether it is recomputed in backward.

        Args:
            name: of the region.
            policy: for what the call saves.
            module: that is called.
            args, kwargs: with these.
            start: how many moments came before its weights.
            number: among the calls of all steps of this kind; None: that of calls so far.
        """
        self._depth += 1
        if self._depth > 1 or not torch.is_grad_enabled():
            return False
        self.settle()
        if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
            return False  # as in transforms of torch.func
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            return False  # the user's own decide what is saved
        number = len(self.records) if number is None else number
        record = CallRecord(name, policy, number, policy == "recompute", [start])
        if record.is_auto:
            record.is_recomputed = number not in self._kept
        self.records.append(record)
        self._open = RegionCall(name, record)
        self._open.handled = sys.exception()
        torch._C._autograd._push_saved_tensors_default_hooks(*self._hooks)
        if record.is_recomputed:
            again = Recomputing(self, self._open)
            contexts = contextlib.nullcontext(), again
            recomputation = Recomputation(rng=("python", "numpy"), context_fn=lambda: contexts)
            around = recomputation.around(module, args, kwargs, name=name)
            next(around)
            self._open.around = around
        return record.is_recomputed

    def leave(self) -> None:
        """It is over, or has raised something."""
        self._depth -= 1
        if self._depth == 0 and self._open is not None:
            self._close_open()

    def _close_open(self, *, is_interrupted: bool = False) -> None:
        call, self._open = self._open, None
        assert call is not None
        around, call.around = call.around, None
        handled, call.handled = call.handled, None
        try:
            if around is not None and not is_interrupted and sys.exception() in (None, handled):
                next(around, None)
            elif around is not None:
                around.close()
        finally:
            top = torch._C._autograd._top_saved_tensors_default_hooks(False)
            if top is not None and top[0] is self._hooks[0]:
                torch._C._autograd._pop_saved_tensors_default_hooks()
            if not is_interrupted:
                call.record.forward.append(self.now())
                self._pending = call

    def settle(self) -> None:
        """Make a chunk of what the last region has saved, if that is not done yet.

        Raises:
            CapacityError: it fits no tier.
        """
        call, self._pending = self._pending, None
        self._look_after_gone()
        if call is None:
            return
        storages, call.storages = call.storages, {}
        call.given = frozenset(storages)
        with runtime_mode():
            taken = [each for each in storages.values() if each.take(is_rehearsal=self._is_rehearsal)]
        del storages
        if taken:
            for each in taken:
                self.on_taken(each.storage)
            saved = SavedStorages(self._leave)
            what = "inputs" if call.record.is_recomputed else "activations"
            call.chunk = self._begin(call, saved, saved.hold(taken), reader=f"{call.name} forward", what=what)
            if call.record.is_recomputed:
                call.record.inputs = call.chunk
            else:
                call.record.chunk = call.chunk
            if call.record.policy == "keep":
                self._pinned[call.chunk.id] = _KEPT
                self._pager.pin(call.chunk, Tier.DEVICE, reader=call)

    def _begin(self, call: RegionCall, saved: SavedStorages, nbytes: int, *, reader: str, what: str) -> Chunk:
        """Return a chunk whose content is what a call has saved, or its inputs, or what was recomputed."""
        num_made = self._chunks.num_made
        chunk = self._chunks.get(f"{what} of {call.name}", nbytes, live=self._live)
        if Tier.DEVICE in chunk.replicas and not self._pager.policy.is_planned:  # of a call that is over
            self._pager.store.drop(chunk, Tier.DEVICE)
        chunk.saved = saved
        sight = self._live[chunk.id] = _Sight(call, self._gone.append)
        sight.chunk, sight.record, sight.thread = chunk, call.record, None
        try:
            self._pager.create(chunk, Tier.DEVICE, reader=reader, zero=False)
        except BaseException:
            del self._live[chunk.id]
            saved.let_go()
            if num_made < self._chunks.num_made:
                self._chunks.forget(chunk)  # it is too large: what fits takes another one
            raise
        return chunk

    # What autograd asks.

    def _pack(self, tensor: torch.Tensor) -> object:
        call = self._open
        assert call is not None
        reference = self._saved.reference(tensor)
        if reference is not None:
            return reference
        kept = SavedTensor(tensor, call)
        key = storage_id(tensor)
        if key is not None and (self._is_rehearsal or tensor.device.type == self._device.type):
            entry = call.storages.get(key)
            if entry is None:
                entry = call.storages[key] = SavedStorage(tensor.untyped_storage())
            entry.saved.append(weakref.ref(kept))
        return kept

    def _unpack(self, kept: object) -> torch.Tensor:
        if isinstance(kept, SavedReference):
            return self._saved.read(kept)
        assert isinstance(kept, SavedTensor)
        if kept.is_moved:
            took_turn = self._turn.take_in_hook()
            try:
                assert isinstance(kept.call, RegionCall)
                self._bring(kept.call)
            finally:
                if took_turn:
                    self._turn.give_back()
        kept.check()
        return kept.tensor

    # Backward.

    def _bring(self, call: RegionCall) -> None:
        """Have the content of a call's chunk on DEVICE until the running backward is over, or done with it."""
        if call.chunk is None:
            return
        self.settle()
        self.begin_backward(call)
        if call.chunk.id in self._pinned:
            return
        self._pin(call.chunk, call)

    def begin_backward(self, call: RegionCall) -> None:
        """Backward comes to a call, or to its recomputation."""
        if not call.record.backward:
            call.record.backward.append(self.now())

    def _pin(self, chunk: Chunk, call: RegionCall) -> None:
        self._pager.pin(chunk, Tier.DEVICE, reader=call)
        task = self._pinned[chunk.id] = torch._C._current_graph_task_id()
        self._live[chunk.id].thread = self._turn.hook_thread()
        if task != _NO_TASK and list(self._pinned.values()).count(task) == 1:
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end(task))

    def begin_recomputation(self, call: RegionCall) -> None:
        """A call is about to be recomputed."""
        self.begin_backward(call)
        call.record.again.append(self.now())

    def recomputed(self, call: RegionCall, nbytes: int) -> None:
        """A call has been recomputed: that many bytes are saved until its backward is over.

        Raises:
            CapacityError: they do not fit DEVICE.
        """
        took_turn = self._turn.take_in_hook()
        try:
            self._look_after_gone()
            call.record.again.append(self.now())
            saved, what = SavedStorages(), "recomputed activations"
            chunk = call.record.chunk = self._begin(call, saved, nbytes, reader=str(call), what=what)
            self._pin(chunk, call)
        finally:
            if took_turn:
                self._turn.give_back()

    def counts(self, call: RegionCall, storage: int) -> bool:
        """Tell whether a storage that is saved when a call is recomputed is one that it makes."""
        return storage not in call.given and not self._saved.is_chunk(storage)

    def _end(self, task: int) -> None:
        """A backward is over."""
        took_turn = self._turn.take_in_hook()
        try:
            self.settle()
            for key in [key for key, user in self._pinned.items() if user == task]:
                self._unpin(key)
                sight = self._live.get(key)
                if sight is not None and sight.is_recomputed:  # nobody needs it any more
                    self._use_up(sight.chunk)
        finally:
            if took_turn:
                self._turn.give_back()

    def _look_after_gone(self) -> None:
        """Free the chunks of calls that autograd has let go of."""
        while self._gone:
            sight = self._gone.popleft()
            assert isinstance(sight, _Sight)
            if self._live.get(sight.chunk.id) is sight:
                if len(sight.record.backward) == 1:
                    sight.record.backward.append(self.now())
                self._unpin(sight.chunk.id)
                self._use_up(sight.chunk)

    def _unpin(self, key: ChunkId) -> None:
        if self._pinned.pop(key, None) is not None:
            self._pager.unpin(self._pager.store.chunks[key], Tier.DEVICE)

    def _use_up(self, chunk: Chunk) -> None:
        del self._live[chunk.id]
        self._pager.consume(chunk)
        if Tier.DEVICE in chunk.replicas and not self._pager.policy.is_planned:
            self._pager.store.drop(chunk, Tier.DEVICE)

    def _leave(self, storage: torch.UntypedStorage) -> None:
        self.left.add(storage)
        self.on_left(storage)

    # Interruptions, and the end of a step.

    @property
    def pinning(self) -> Iterator[str]:
        """Who pins something now."""
        return (self._pager.store.chunks[key].label for key in self._pinned)

    def reset(self, *, step: bool) -> None:
        """Drop what an interrupted call left; at a step, give up to autograd what it has not let go of."""
        if self._open is not None:
            self._close_open(is_interrupted=True)
        self._depth = 0
        with contextlib.suppress(CapacityError, TierIOError):  # then it is left to autograd
            self.settle()
        for key in [key for key in self._pinned if not self._is_used_elsewhere(key)]:
            self._unpin(key)
        if step:
            self.give_up()

    def _is_used_elsewhere(self, key: ChunkId) -> bool:
        """Tell whether the backward of another thread uses a chunk."""
        return key in self._pinned and key in self._live and self._turn.runs_elsewhere(self._live[key].thread)

    def give_up(self) -> None:
        """The step is over: leave to autograd what it has not let go of."""
        self._look_after_gone()
        for sight in list(self._live.values()):
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
