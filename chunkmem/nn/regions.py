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

[Note: Versions] torch does not check whether a tensor was written to after it was saved where there are hooks, so that
is done here, and says what torch would.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import _StopRecomputationError

from chunkmem.errors import TraceError
from chunkmem.layout.spec import ALIGN_NBYTES, Group, Slot
from chunkmem.nn.recompute import Recomputation
from chunkmem.nn.saved_tensors import ChunkHooks, OwnHooks, SavedReference
from chunkmem.nn.turn import Turn
from chunkmem.nn.values import storage_id
from chunkmem.runtime.device import runtime_mode
from chunkmem.runtime.pager import Pager
from chunkmem.runtime.store import Chunk
from chunkmem.trace.activations import Content, Contents, activation_contents
from chunkmem.trace.model import Region, Trace
from chunkmem.types import ChunkId, Role, Tier

_NO_TASK = -1
"""What torch says where no backward runs."""
_KEPT = -2
"""In place of a backward: pinned from the end of forward on."""
_STALE = -1
"""The version of a tensor that was written to after it was saved."""
_CONTENTS = {
    "keep": {Content.ACTIVATIONS},
    "offload": {Content.ACTIVATIONS},
    "recompute": {Content.INPUTS, Content.RECOMPUTED},
}
"""By policy: what chunks may hold."""
FIRST_GROUP = 1 << 20
"""Groups of activations are numbered from here on, those of parameters from 0."""


class SavedTensor:
    """What autograd has in place of a tensor that it saved in a region."""

    __slots__ = ("__weakref__", "call", "is_moved", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, call: RegionCall) -> None:
        self.tensor = tensor
        self.version = tensor._version
        self.call = call
        self.is_moved = False
        """Its storage is part of the call's chunk."""

    def move(self, storage: torch.UntypedStorage) -> None:
        """Be another tensor over the same storage, which nobody but autograd knows."""
        tensor = self.tensor
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self.tensor = alias.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        self.version = alias._version if tensor._version == self.version else _STALE

    def check(self) -> None:
        """Raise what torch does for a tensor that was written to after it was saved."""
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {list(self.tensor.shape)} that was saved in {self.call.name}; clone it before it is "
                "written to"
            )


@dataclass(slots=True)
class _SavedStorage:
    """A storage, and the tensors over it that autograd has saved."""

    storage: torch.UntypedStorage
    saved: list[weakref.ref[SavedTensor]] = field(default_factory=list)

    def take(self, *, is_rehearsal: bool) -> bool:
        """Make it ours if nobody but autograd holds it: then no tensor of others can see that it is emptied."""
        tensors = self._live()
        plain = FakeTensor if is_rehearsal else torch.Tensor
        is_shared = self.storage.device.type == "cpu" and not is_rehearsal and self.storage.is_shared()
        if not tensors or is_shared or not self.storage.resizable():
            return False
        if not all(_is_plain(kept.tensor, plain) for kept in tensors):
            return False
        if not self._has_only([kept.tensor for kept in tensors]):
            return False
        for kept in tensors:
            kept.is_moved = True
            if not is_rehearsal:  # else it is never emptied
                kept.move(self.storage)
        return True

    def is_escaped(self) -> bool:
        """Tell whether somebody has got hold of it since: a backward has handed on a tensor that was saved.

        A user may have kept it, it may be a gradient, or saved again in a backward with `create_graph`.
        """
        return not self._has_only([kept.tensor for kept in self._live()])

    def _live(self) -> list[SavedTensor]:
        return [kept for each in self.saved if (kept := each()) is not None]

    def _has_only(self, saved: list[torch.Tensor]) -> bool:
        """Tell whether there are no tensors over the storage but these, with the bases of views, and nobody has them.

        Of a tensor without a history, autograd saves the object itself, which others may have, too.
        """
        objects = {id(tensor): tensor for tensor in saved}
        bases = [tensor._base for tensor in saved]
        objects |= {id(base): base for base in bases if base is not None}
        # A view of a fake tensor keeps, in C++, all that it was made of: then only what Python refers to is looked at.
        counts_cpp = all(base is None for base in bases) or not isinstance(saved[0], FakeTensor)
        bases.clear()
        # What refers, in this very place, to a storage that nobody else has in Python; this object does, too.
        alone = torch.empty(0) if objects else None
        storage = torch.UntypedStorage(0) if alone is None else alone.untyped_storage()
        if counts_cpp and torch._C._storage_Use_Count(self.storage._cdata) != len(objects) + 1:
            return False
        if sys.getrefcount(self.storage) != sys.getrefcount(storage):
            return False
        num_saved = Counter(map(id, saved))
        num_views = Counter(id(tensor._base) for tensor in objects.values() if tensor._base is not None)
        # What refers, in this very place, to a tensor that nobody else has, and to one that a view is of.
        view = torch.empty(1)[:]  # below autograd, it is a view of nothing; then none of ours has a base either
        listed = [torch.empty(0), torch.empty(1) if view._base is None else view._base, *objects.values()]
        objects.clear()
        in_python, in_cpp = [sys.getrefcount(tensor) for tensor in listed], [_use_count(tensor) for tensor in listed]
        return all(
            python == in_python[num_views[key] > 0] + 2 * num_saved[key]
            and (cpp == in_cpp[0] + num_views[key] or not counts_cpp)
            for key, python, cpp in zip(map(id, listed[2:]), in_python[2:], in_cpp[2:], strict=True)
        )


def _use_count(tensor: torch.Tensor) -> int:
    count: int = tensor._use_count()  # type: ignore[attr-defined]
    return count


def _is_plain(tensor: torch.Tensor, plain: type[torch.Tensor]) -> bool:
    is_odd = tensor.is_conj() or tensor.is_neg() or tensor.is_nested or tensor.is_quantized
    return type(tensor) is plain and not is_odd


class SavedStorages:
    """The memory of an ACTIVATION chunk on DEVICE; see `SavedMemory`."""

    def __init__(self) -> None:
        self._storages: list[tuple[int, int, _SavedStorage]] = []
        """Offset and bytes of each."""

    def hold(self, taken: Sequence[_SavedStorage]) -> int:
        """Be these storages from now on; return how many bytes they take, each at its offset."""
        at = 0
        for each in taken:
            nbytes = each.storage.nbytes()
            self._storages.append((at, nbytes, each))
            at += aligned(nbytes)
        return at

    def let_go(self) -> None:
        """Leave the storages as they are; there is nothing here any more."""
        self._storages = []

    def fill(self) -> Sequence[tuple[int, torch.Tensor]]:
        pieces = []
        for at, nbytes, each in self._storages:
            if each.storage.nbytes() == 0:
                each.storage.resize_(nbytes)
            pieces.append((at, torch.empty(0, dtype=torch.uint8, device=each.storage.device).set_(each.storage)))
        return pieces

    def empty(self) -> None:
        # What somebody else has got hold of stays as it is from now on: its content is not ours to take away.
        self._storages = [item for item in self._storages if not item[2].is_escaped()]
        for _, _, each in self._storages:
            each.storage.resize_(0)


@dataclass(slots=True)
class CallRecord:
    """When a call of a region did what, in moments of the step; None: it has not yet, or nobody records."""

    name: str
    policy: str
    is_recomputed: bool
    forward: list[int] = field(default_factory=list)
    again: list[int] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)
    chunk: Chunk | None = None
    inputs: Chunk | None = None

    @property
    def is_auto(self) -> bool:
        """Whether it is recomputed is decided for each kind of step."""
        return self.policy == "auto"

    def region(self, number: int) -> Region | None:
        """Return it for a trace, as the call of that number; None if its backward has not run, or it saved nothing."""
        if self.chunk is None or not (len(self.forward) == len(self.backward) == 2):
            return None
        return Region(
            self.name,
            self.chunk.id,
            self.chunk.nbytes,
            (self.forward[0], self.forward[1]),
            (self.backward[0], self.backward[1]),
            (self.again[0], self.again[-1]) if self.is_recomputed else None,
            None if self.inputs is None else self.inputs.id,
            number,
        )


class RegionCall:
    """One call of a region. Lives as long as autograd keeps something that it saved in it."""

    __slots__ = ("__weakref__", "chunk", "given", "name", "record", "storages")

    def __init__(self, name: str, record: CallRecord) -> None:
        self.name = name
        self.record = record
        self.storages: dict[int, _SavedStorage] = {}
        """What was saved in it, by identity, until it is looked over."""
        self.given: frozenset[int] = frozenset()
        """The same afterwards: of a call that is recomputed, its inputs."""
        self.chunk: Chunk | None = None
        """That has its content; None if there is none, or not yet."""

    def __str__(self) -> str:
        return f"{self.name} backward"


class _Count(OwnHooks):
    """Counts bytes of storages on their way to what torch's checkpoint does with them."""

    hides = True

    def __init__(self, counts: Callable[[int], bool], pack: Callable[[torch.Tensor], object]) -> None:
        self.nbytes: dict[int, int] = {}
        self.storages: list[weakref.ref[torch.UntypedStorage]] = []
        self._counts = counts
        self._pack = pack

    def pack(self, tensor: torch.Tensor) -> object:
        key = storage_id(tensor)
        if key is not None and key not in self.nbytes and self._counts(key):
            storage = tensor.untyped_storage()
            self.nbytes[key] = aligned(storage.nbytes())
            self.storages.append(weakref.ref(storage))
        return self._pack(tensor)


class _Recomputing(contextlib.AbstractContextManager[None]):
    """Counts what is saved while a call is recomputed; there may be several such runs of one call."""

    def __init__(self, regions: RegionActivations, call: RegionCall) -> None:
        self._regions = regions
        self._call = call
        self._runs: list[_Count] = []
        """Those under way."""

    def __enter__(self) -> None:
        self._regions.begin_recomputation(self._call)
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        assert hooks is not None, "torch's checkpoint takes what is saved"
        count = _Count(partial(self._regions.counts, self._call), hooks[0])
        self._runs.append(count)
        torch._C._autograd._push_saved_tensors_default_hooks(count.pack, hooks[1])

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        count = self._runs.pop()
        nbytes = sum(count.nbytes.values())
        if nbytes and (kind is None or kind is _StopRecomputationError):
            for storage in count.storages:
                if (alive := storage()) is not None:
                    self._regions.on_taken(alive)
            self._regions.recomputed(self._call, nbytes)


def _of_all(contents: Mapping[ChunkId, Contents]) -> set[Content]:
    return {held.content for held in contents.values()}


def activation_chunk(group: int, label: str, nbytes: int) -> Chunk:
    """Return a chunk of activations, without content."""
    spec = Group(group, "uint8", 1, 1, nbytes, (Slot(0, group, 0, nbytes),))
    return Chunk(ChunkId(Role.ACTIVATION, group), spec, torch.uint8, label, ())


def aligned(nbytes: int) -> int:
    """Return how much of a chunk so many bytes take."""
    return -(-nbytes // ALIGN_NBYTES) * ALIGN_NBYTES


def _regions_in(module: nn.Module, marked: Collection[nn.Module]) -> list[nn.Module]:
    """Return the outermost children of lists, and marked modules."""
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    found: list[nn.Module] = []
    for child in module.children():
        found += [child] if is_list or child in marked else _regions_in(child, marked)
    return found


class _Sight(weakref.ref[RegionCall]):
    """A call that is a chunk. When autograd lets go of it, only C code runs: the chunk is looked after later."""

    __slots__ = ("chunk", "record")
    chunk: Chunk
    record: CallRecord


class RegionActivations(OwnHooks):
    """What regions save: chunks from the end of their forward to the end of their backward."""

    def __init__(
        self,
        pager: Pager,
        turn: Turn,
        saved: ChunkHooks,
        *,
        policy: str | None,
        device: torch.device,
        is_rehearsal: bool = False,
    ) -> None:
        """Begin with none.

        Args:
            pager: of chunks.
            turn: of this thread.
            saved: keeps tensors in the memory of parameters' chunks.
            policy: for regions, of the configuration; None: nothing is managed.
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
        self._recomputed: set[ChunkId] = set()
        """Chunks of what has been recomputed, which nobody needs when that backward is over."""
        self._chunks: dict[str, list[Chunk]] = {}
        """By what they hold; those used last come last."""
        self._next_group = FIRST_GROUP
        self._policy = policy
        self._kept: Collection[int] = ()
        """Calls of the iteration, by their numbers, that are not recomputed although they may be."""
        self.now: Callable[[], int] = lambda: 0
        """Tells the number of moments so far."""
        self.records: list[CallRecord] = []
        """Of the calls of the iteration."""
        self._marked: list[tuple[nn.Module, str]] = []
        self._has_marked = False
        """Some regions have policies of their own."""
        self._around: Generator[None, None, None] | None = None
        """Surrounds the call that runs, if it is going to be recomputed."""
        self.on_taken: Callable[[torch.UntypedStorage], None] = lambda storage: None
        """Called with each storage that is about to become part of a chunk."""

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
        found = (record.region(number) for number, record in enumerate(self.records) if record.is_auto)
        return tuple(region for region in found if region is not None)

    def adopt(self, trace: Trace) -> None:
        """Have the chunks that a training step of an earlier run names, before there are others.

        Raises:
            TraceError: other regions were managed in it, or others have been here.
        """
        contents = activation_contents(trace)
        wanted = _CONTENTS.get(self._policy or "", set(Content))
        if not self._has_marked and (bool(contents) is (self._policy is None) or not _of_all(contents) <= wanted):
            raise TraceError(
                f"the trace is of a run with another activations.policy, and here it is {self._policy or 'null'}: "
                "set it as it was, or leave the trace out"
            )
        chunks = self._pager.store.chunks
        for key, held in contents.items():
            if key in chunks and (chunks[key].label, chunks[key].nbytes) != (str(held), trace.chunk_nbytes[key]):
                raise TraceError(
                    f"{key} has {chunks[key].label} here, and in the trace {held}; set the trace before training"
                )
            if key not in chunks:
                chunk = self._make_chunk(key.group, str(held), trace.chunk_nbytes[key])
                chunk.saved = SavedStorages()

    def mark(self, module: nn.Module, policy: str) -> None:
        """Make a module a region of a policy when it is packed."""
        self._marked.append((module, policy))
        self._has_marked = True

    def of(self, root: nn.Module) -> dict[nn.Module, str]:
        """Return the policies of the regions under `root`, a model that was packed."""
        marked, self._marked = dict(self._marked), []
        if self._policy is None:
            return marked
        return dict.fromkeys(_regions_in(root, marked) or root.children(), self._policy) | marked

    # Forward.

    def enter(
        self, name: str, policy: str, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, start: int
    ) -> None:
        """A call of a region begins, of which torch gives the arguments; `start` moments came before its weights."""
        self._depth += 1
        if self._depth > 1 or not torch.is_grad_enabled():
            return
        self.settle()
        if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
            return  # as in transforms of torch.func
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            return  # the user's own decide what is saved
        record = CallRecord(name, policy, policy == "recompute", [start])
        if record.is_auto:
            record.is_recomputed = len(self.records) not in self._kept
        self.records.append(record)
        self._open = RegionCall(name, record)
        torch._C._autograd._push_saved_tensors_default_hooks(*self._hooks)
        if record.is_recomputed:
            again = _Recomputing(self, self._open)
            recomputation = Recomputation(context_fn=lambda: (contextlib.nullcontext(), again))
            around = recomputation.around(module, args, kwargs, name=name)
            next(around)
            self._around = around

    def leave(self) -> None:
        """It is over, or has raised something."""
        self._depth -= 1
        if self._depth == 0 and self._open is not None:
            self._close_open()

    def _close_open(self, *, is_interrupted: bool = False) -> None:
        around, self._around = self._around, None
        try:
            if around is not None and not is_interrupted and sys.exception() is None:
                next(around, None)
            elif around is not None:
                around.close()
        finally:
            top = torch._C._autograd._top_saved_tensors_default_hooks(False)
            if top is not None and top[0] is self._hooks[0]:
                torch._C._autograd._pop_saved_tensors_default_hooks()
            call, self._open = self._open, None
            if call is not None and not is_interrupted:
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
            saved = SavedStorages()
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
        chunk = self._chunk_for(f"{what} of {call.name}", nbytes)
        if Tier.DEVICE in chunk.replicas:  # of a call that is over; a plan was to free it
            self._pager.store.drop(chunk, Tier.DEVICE)
        chunk.saved = saved
        sight = self._live[chunk.id] = _Sight(call, self._gone.append)
        sight.chunk, sight.record = chunk, call.record
        try:
            self._pager.create(chunk, Tier.DEVICE, reader=reader, zero=False)
        except BaseException:
            del self._live[chunk.id]
            saved.let_go()
            raise
        return chunk

    def _chunk_for(self, label: str, nbytes: int) -> Chunk:
        """Return a chunk that has no content and is large enough: plans know the one that was used last."""
        known = self._chunks.setdefault(label, [])
        for chunk in reversed(known):
            if chunk.id not in self._live and chunk.nbytes >= nbytes:
                known.remove(chunk)
                known.append(chunk)
                return chunk
        return self._make_chunk(self._next_group, label, nbytes)

    def _make_chunk(self, group: int, label: str, nbytes: int) -> Chunk:
        self._next_group = max(self._next_group, group + 1)
        chunk = activation_chunk(group, label, nbytes)
        self._pager.store.add(chunk)
        self._chunks.setdefault(label, []).append(chunk)
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
                entry = call.storages[key] = _SavedStorage(tensor.untyped_storage())
            entry.saved.append(weakref.ref(kept))
        return kept

    def _unpack(self, kept: object) -> torch.Tensor:
        if isinstance(kept, SavedReference):
            return self._saved.read(kept)
        assert isinstance(kept, SavedTensor)
        if kept.is_moved:
            took_turn = self._turn.take_in_hook()
            try:
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
            chunk = call.record.chunk = self._begin(
                call, SavedStorages(), nbytes, reader=str(call), what="recomputed activations"
            )
            self._recomputed.add(chunk.id)
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
                if key in self._recomputed:
                    self._use_up(self._pager.store.chunks[key])
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
        self._recomputed.discard(chunk.id)
        self._pager.consume(chunk)
        if Tier.DEVICE in chunk.replicas and not self._pager.policy.is_planned:
            self._pager.store.drop(chunk, Tier.DEVICE)

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
        self.settle()
        for key in list(self._pinned):
            self._unpin(key)
        if step:
            self.give_up()

    def give_up(self) -> None:
        """The step is over: leave to autograd what it has not let go of."""
        self._look_after_gone()
        for sight in list(self._live.values()):
            call = sight()
            if call is not None:
                self._give_up(sight.chunk, call)

    def _give_up(self, chunk: Chunk, call: RegionCall) -> None:
        """Leave the content of a chunk to autograd, which has not let go of it."""
        self._pager.pin(chunk, Tier.DEVICE, reader=call)
        assert isinstance(chunk.saved, SavedStorages)
        chunk.saved.let_go()
        call.chunk = None
        self._pager.unpin(chunk, Tier.DEVICE)
        self._use_up(chunk)
