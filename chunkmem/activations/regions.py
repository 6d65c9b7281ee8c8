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
let go of the last and backward has left the region. A call that autograd has not let go of when the step is over gives
its memory up to autograd: then it is no chunk any more.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import _StopRecomputationError

from chunkmem.activations.live_chunks import LiveChunks
from chunkmem.activations.random_sources import global_sources
from chunkmem.activations.recompute import recomputed
from chunkmem.activations.region_calls import CallRecord, RecomputedInputs, RegionCall
from chunkmem.activations.region_chunks import RegionChunks
from chunkmem.activations.region_policies import RegionPolicies
from chunkmem.activations.saved_storages import LeftStorages, SavedStorage, SavedStorages, SavedTensor, aligned
from chunkmem.activations.saved_tensors import ChunkHooks, OwnHooks, Pack, SavedReference
from chunkmem.data.errors import CapacityError, TierIOError
from chunkmem.data.trace import Region, Trace
from chunkmem.data.types import ACTIVATION_POLICIES
from chunkmem.runtime.device import runtime_mode
from chunkmem.runtime.pager import Pager
from chunkmem.runtime.step_lock import StepLock
from chunkmem.runtime.values import storage_id

_autograd = torch._C._autograd


class RegionActivations(OwnHooks):
    """What regions save: chunks from the end of their forward to the end of their backward."""

    def __init__(
        self,
        pager: Pager,
        step_lock: StepLock,
        saved: ChunkHooks,
        *,
        policies: RegionPolicies,
        chunks: RegionChunks,
        device: torch.device,
        is_rehearsal: bool,
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
        pager.events.has_inner_hooks.append(lambda: bool(policies.by_name))
        self._is_rehearsal = is_rehearsal
        self._device = device
        self._step_lock = step_lock
        self._saved = saved
        self._hooks = (self._pack, self._unpack)
        self._rng = global_sources()
        self._open: RegionCall | None = None
        """Runs now."""
        self._depth = 0
        """Calls of regions that run; those inside of another one are parts of it."""
        self._recomputing: list[Recomputing] = []
        """Runs of calls whose forward is made again, the last one inside of the others."""
        self._pending: RegionCall | None = None
        """Has been left, and is not looked over yet."""
        self._live = LiveChunks(pager, step_lock, chunks, before_end=self.pack_last)
        self._chunks = chunks
        self.policies = policies
        self._kept: Collection[int] = ()
        """Calls of the iteration, by their numbers, that are not recomputed although they may be."""
        self.records: list[CallRecord] = []
        """Of the calls of the iteration."""
        self.left = LeftStorages()
        self.inputs = RecomputedInputs()
        """Of calls that are recomputed."""

    @property
    def is_auto(self) -> bool:
        """Which regions are recomputed is decided for each kind of step."""
        return any(record.policy.is_auto for record in self.records)

    def begin_iteration(self, kept: Collection[int] | None, now: Callable[[], int]) -> None:
        """A training step begins.

        Args:
            kept: where that is decided for each kind of step, the numbers of the calls that are not recomputed; None:
                there are none.
            now: tells the number of moments so far.
        """
        self._live.now = now
        self.records = []
        self.inputs.begin_iteration()
        self._kept = () if kept is None else kept

    def now(self) -> int:
        """Return the number of moments so far."""
        return self._live.now()

    def recorded(self) -> tuple[Region, ...]:
        """Return the regions of the iteration that may be recomputed or not, in the order of their forward."""
        found = (record.region() for record in self.records if record.policy.is_auto)
        return tuple(region for region in found if region is not None)

    def adopt(self, trace: Trace) -> None:
        """Have the chunks of a training step of an earlier run; raise a TraceError if other regions are managed."""
        self._chunks.adopt(trace, self.policies)

    def recomputes(self, policy: str, number: int) -> bool:
        """Tell whether a call of a step is recomputed in backward."""
        return torch.is_grad_enabled() and ACTIVATION_POLICIES[policy].recomputes_call(number, self._kept)

    # Forward.

    def enter(
        self,
        name: str,
        policy: str,
        module: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        start: int,
        number: int | None = None,
        come_to: Callable[[], None] | None = None,
    ) -> bool:
        """A call of a region begins; return whether it is recomputed in backward.

        Args:
            name: of the region.
            policy: for what the call saves.
            module: that is called.
            args, kwargs: with these.
            start: how many moments came before its weights.
            number: among the calls of all steps of this kind; None: that of calls so far.
            come_to: called before it is recomputed: backward has come to its unit, as if the call had been kept.
        """
        self._depth += 1
        if self._depth > 1 or not torch.is_grad_enabled():
            return False
        self.pack_last()
        if not _autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
            return False  # as in transforms of torch.func
        if _autograd._top_saved_tensors_default_hooks(False) is not None:
            return False  # the user's own decide what is saved
        if any(isinstance(value, Iterator) for value in (*args, *kwargs.values())):
            return False  # the call uses it up, and could not be made again
        number = len(self.records) if number is None else number
        record = CallRecord(name, ACTIVATION_POLICIES[policy], number, self.recomputes(policy, number), [start])
        self.records.append(record)
        self._open = RegionCall(name, record, weakref.ref(module), come_to, handled=sys.exception())
        _autograd._push_saved_tensors_default_hooks(*self._hooks)
        if record.is_recomputed:
            again = partial(self._recompute, self._open)
            around = self._open.around = recomputed(
                module,
                args,
                kwargs,
                name=name,
                rng=self._rng,
                contexts=lambda: (nullcontext(), again),
                on_copies=self._give,
                has_copy=self.inputs.has_copy,
            )
            next(around)
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
            top = _autograd._top_saved_tensors_default_hooks(False)
            if top is not None and top[0] is self._hooks[0]:
                _autograd._pop_saved_tensors_default_hooks()
            if not is_interrupted:
                call.record.forward.append(self.now())
                self._pending = call

    @property
    def current(self) -> CallRecord | None:
        """The call that runs, or runs again; None: what runs is part of none."""
        if self._recomputing:
            return self._recomputing[-1].call.record
        return None if self._open is None else self._open.record

    def pack_last(self, *, inside: CallRecord | None = None) -> None:
        """Make a chunk of what the last region has saved, if that is not done yet.

        Args:
            inside: the call that backward is in: its chunk stays until backward has left it, whatever autograd keeps of
                it until then. So the end of a chunk does not depend on what is trained in the region.

        Raises:
            CapacityError: it fits no tier.
        """
        call, self._pending = self._pending, None
        self._live.look_after_gone(inside=inside)
        if call is None:
            return
        storages, call.storages = call.storages, {}
        call.given = frozenset(storages)
        with runtime_mode():
            taken = [each for each in storages.values() if each.take(is_rehearsal=self._is_rehearsal)]
        del storages
        if taken:
            for each in taken:
                self.taken(each.storage)
            saved = SavedStorages(self._leave)
            what = "inputs" if call.record.is_recomputed else "activations"
            call.chunk = self._live.begin(call, saved, saved.hold(taken), reader=f"{call.name} forward", what=what)
            if call.record.is_recomputed:
                call.record.inputs = call.chunk
            else:
                call.record.chunk = call.chunk
            if call.record.policy.stays:
                self._live.keep(call.chunk, call)

    # What autograd asks.

    def _pack(self, tensor: torch.Tensor) -> object:
        call = self._open
        assert call is not None
        reference = self._saved.reference(tensor)
        if reference is not None:
            return reference
        kept = SavedTensor(tensor, call)
        key = storage_id(tensor)
        if key and (self._is_rehearsal or tensor.device.type == self._device.type):
            entry = call.storages.get(key)
            if entry is None:
                entry = call.storages[key] = SavedStorage(tensor.untyped_storage())
            entry.saved.append(weakref.ref(kept))
        module = call.module()
        if call.record.is_recomputed and module is not None:
            self.inputs.add(kept, module)
        return kept

    def _unpack(self, kept: object) -> torch.Tensor:
        if isinstance(kept, SavedReference):
            return self._saved.read(kept)
        assert isinstance(kept, SavedTensor)
        call = kept.call
        assert isinstance(call, RegionCall)
        if kept.copy is not None:
            with runtime_mode():
                return kept.copy.clone()  # the call may be repeated again
        if kept.is_moved:
            with self._step_lock.taken(in_hook=True):
                self._bring(call)
        kept.check(call.name)
        return kept.tensor

    # Backward.

    def _bring(self, call: RegionCall) -> None:
        """Have the content of a call's chunk on DEVICE until the running backward is over, or done with it."""
        if call.chunk is None:
            return
        self.pack_last()
        self._begin_backward(call)
        self._live.use(call.chunk, call)

    def _begin_backward(self, call: RegionCall) -> None:
        """Backward comes to a call, or to its recomputation."""
        if not call.record.backward:
            call.record.backward.append(self.now())

    @contextmanager
    def _recompute(self, call: RegionCall) -> Iterator[None]:
        """Surround one run of a call that is recomputed: what it has saved is there until its backward is over.

        Raises:
            CapacityError: that does not fit DEVICE.
        """
        if call.come_to is not None:
            with self._step_lock.taken(in_hook=True):
                call.come_to()
        self._begin_backward(call)
        call.record.again.append(self.now())
        hooks = _autograd._top_saved_tensors_default_hooks(False)
        assert hooks is not None, "torch's checkpoint takes what is saved"
        run = Recomputing(call, self._saved, hooks[0])
        self._recomputing.append(run)
        _autograd._push_saved_tensors_default_hooks(run.pack, hooks[1])
        has_saved_all = False
        try:
            yield
            has_saved_all = True
        except _StopRecomputationError:
            has_saved_all = True
            raise
        finally:
            _autograd._pop_saved_tensors_default_hooks()
            self._recomputing.pop()
            if has_saved_all and any(run.nbytes.values()):
                self._recomputed(run)

    def _give(self, copies: Iterable[torch.Tensor]) -> None:
        """Small arguments without gradient are copied for the run that has begun: it does not make them.

        So what a call saves when it is recomputed does not depend on whether blocks before it are trained.
        """
        self._recomputing[-1].given.update(map(storage_id, copies))

    def _recomputed(self, run: Recomputing) -> None:
        call = run.call
        for storage in run.storages:
            if (alive := storage()) is not None:
                self.taken(alive)
        with self._step_lock.taken(in_hook=True):
            self._live.look_after_gone()
            call.record.again.append(self.now())
            saved, what, nbytes = SavedStorages(), "recomputed activations", sum(run.nbytes.values())
            chunk = call.record.chunk = self._live.begin(call, saved, nbytes, reader=str(call), what=what)
            self._live.use(chunk, call)

    def _leave(self, storage: torch.UntypedStorage) -> None:
        self.left.add(storage)
        for tell in self._pager.events.activation_left:
            tell(storage)

    def taken(self, storage: torch.UntypedStorage) -> None:
        """A storage is about to become part of a chunk, or was part of what has been recomputed."""
        for tell in self._pager.events.activation_taken:
            tell(storage)

    # Interruptions, and the end of a step.

    def reset(self, *, step: bool) -> None:
        """Drop what an interrupted call left; at a step, give up to autograd what it has not let go of."""
        if self._open is not None:
            self._close_open(is_interrupted=True)
        self._depth = 0
        with suppress(CapacityError, TierIOError):  # then it is left to autograd
            self.pack_last()
        self._live.unpin_interrupted()
        if step:
            self.give_up()

    def give_up(self) -> None:
        """The step is over: leave to autograd what it has not let go of."""
        self._live.give_up()


class Recomputing(OwnHooks):
    """One run of a call that is recomputed: counts what is saved, on its way to what torch's checkpoint does."""

    hides = True

    def __init__(self, call: RegionCall, saved: ChunkHooks, pack: Pack) -> None:
        """Stand before `pack`, which is the checkpoint's."""
        self.call = call
        self._saved = saved
        self._pack = pack
        self.nbytes: dict[int, int] = {}
        """By the identity of a storage."""
        self.storages: list[weakref.ref[torch.UntypedStorage]] = []
        self.given: set[int] = set()
        """Storages that it does not make, by identity, besides those that the call was given."""

    def pack(self, tensor: torch.Tensor) -> object:
        key = storage_id(tensor)
        is_given = key in self.given or key in self.call.given
        if key and key not in self.nbytes and not is_given and not self._saved.is_chunk(key):
            storage = tensor.untyped_storage()
            self.nbytes[key] = aligned(storage.nbytes())
            self.storages.append(weakref.ref(storage))
        return self._pack(tensor)
