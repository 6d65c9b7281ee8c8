"""Keep on DEVICE what a backward reads, for as long as it may be read.

[Note: Backward is not nested by module] Gradients of another branch arrive in between, so a module's chunks are pinned
from the first gradient of one of its outputs until the gradients of the parameters it read have been accumulated:

    forward    | read W, b |
    backward                      | grad of output |  ...  | grad of W | grad of b |
    pinned     |<- frame ->|      |<---------------- call ---------------------->|

A frozen parameter gets no gradient; it stays until the inputs of its module have theirs, where that is certain to come
last (the module has no children): before what has made these is announced, which their gradients tell, too. Where
neither comes, or comes late, the nodes of the call are pinned one by one ([Note: Ends by nodes] in
`chunkmem.modules.nodes`). Under checkpoints, whose saved tensors nobody else sees, and over ranks, references are
counted: the chunk stays until as many are gone as the calls announced so far had left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, MutableMapping
from functools import partial

import torch
from torch.utils.weak import WeakIdKeyDictionary

from chunkmem.activations.regions import RegionActivations
from chunkmem.activations.saved_tensors import hides_saved_tensors
from chunkmem.modules.access import AccessTracker
from chunkmem.modules.backward_calls import BackwardCall
from chunkmem.modules.binding import ManagedParameter, trained
from chunkmem.modules.frames import Frame
from chunkmem.modules.nodes import NodePins
from chunkmem.modules.reduction import OrdinaryGradients
from chunkmem.modules.references import Findings, GraphSearch, ReferenceCounts
from chunkmem.ranks.units import Unit, Units
from chunkmem.runtime.chunk import Chunk
from chunkmem.runtime.pager import Pager
from chunkmem.runtime.step_lock import StepLock
from chunkmem.runtime.values import kept_tensors, tensors_in

_NOTHING = Findings({}, frozenset())


class BackwardTracker:
    """Pins of running backwards."""

    def __init__(
        self,
        pager: Pager,
        access: AccessTracker,
        units: Units,
        step_lock: StepLock,
        *,
        ordinary: OrdinaryGradients,
        regions: RegionActivations,
        is_rehearsal: bool,
    ) -> None:
        """Begin with nothing announced. In a rehearsal, what modules leave is taken for their graphs': it has views of
        fake tensors, whose references cannot be told apart."""
        self._pager = pager
        self._is_rehearsal = is_rehearsal
        self._step_lock = step_lock
        self._access = access
        self._units = units
        self._ordinary = ordinary
        self._regions = regions
        self._chunks: dict[int, Chunk] = access.chunks
        self.num_ended = 0
        """Backwards that were run to their end."""
        self._waiting: dict[ManagedParameter, list[BackwardCall]] = {}
        self._running: dict[int, list[BackwardCall]] = {}
        """Announced calls by the id of autograd's graph task."""
        self._threads: dict[int, int | None] = {}
        """By such a task: the thread that called it."""
        self._graphs = GraphSearch()
        self._references = ReferenceCounts(self._chunks, is_rehearsal=is_rehearsal)
        self._nodes = NodePins(
            pager, access, step_lock, graphs=self._graphs, watch=self.watch, then=lambda: self._unpin_left()
        )
        self._followed: MutableMapping[torch.Tensor, tuple[int, list[Callable[[], None]]]] = WeakIdKeyDictionary()
        """By output of a call, as it was at that version: what its gradient ends, calls that had it as an input, and
        then what it announces."""
        self._counted: set[int] = set()
        """Groups that some call of a unit is uncertain about."""
        self._left: list[tuple[BackwardCall, int]] = []
        """Calls that wait for nothing but for references to go, each with the group."""
        self._held: list[Chunk] = []
        """Read by a backward that builds a graph itself (`create_graph`): needed again until the step."""

    def watch(self, frame: Frame, result: object) -> set[int]:
        """A module that read parameters returns: announce its backward when a gradient of what it made arrives.

        That is its result, what it left on itself for the loss to pick up (`self.aux_loss`), and what it put into a
        list or dict it was given. The forwards of a recomputation are watched too: their outputs are part of the
        running graph if the checkpoint is a reentrant one.

        Returns:
            The groups that somebody else keeps references to, see [Note: References] in `chunkmem.modules.access`.
        """
        made = list(tensors_in(result))
        handed = self._access.hand_on(frame, made)
        left = self._access.references(frame, handed=handed)
        if frame.module is not None:
            made += kept_tensors(frame.module)
        if frame.containers:
            made += [t for t in tensors_in(frame.containers) if id(t) not in frame.given]
        # An in-place operator on a view gives it another grad_fn, without our hook; its gradient still passes the base.
        bases = [t._base for t in made if t._base is not None]
        outputs = {id(t): t for t in (*made, *bases) if t.grad_fn is not None}
        is_hidden = frame.recomputing or hides_saved_tensors()
        found = _NOTHING
        if self._is_rehearsal and frame.module is not None:
            found = Findings(left, frozenset())
        elif left and outputs and not is_hidden:
            found = self._graphs.find(frame, left, outputs.values())
        if frame.module is None:  # an operator: its parameters' gradients may land much later
            found = Findings(found.saved, frozenset(frame.groups))
        if frame.unit is not None:  # else it ends by nodes, or waits for what is certain to come
            frame.unit.is_read = True
            self._counted |= found.uncertain
        if frame.recomputing:
            self._references.recomputed(frame, left)
        if frame.module is not None and is_hidden:  # who saves tensors for others has them
            found = Findings(left, found.uncertain)
        if outputs:
            call = BackwardCall(frame, found, self._access, region=self._regions.current, is_hidden=is_hidden)
            for tensor in outputs.values():
                self._follow(tensor, partial(self._announce, call))
            self._watch_inputs(call, frame)
        return {group for group, count in left.items() if count > found.saved.get(group, 0)}

    def watch_unit(self, unit: Unit, result: object) -> None:
        """A unit returns that has read none of its weights, as other ranks may have: announce its backward, too."""
        for tensor in tensors_in(result):
            if not tensor.requires_grad:
                continue
            made_at, calls = self._followed.get(tensor, (None, []))
            if made_at == tensor._version:  # it returns what it was given, whose maker comes later in backward
                calls.insert(0, partial(self._units.announce, unit))
            else:
                self._follow(tensor, partial(self._units.announce, unit))

    def _follow(self, tensor: torch.Tensor, announce: Callable[[], None]) -> None:
        """When the gradient of an output arrives, end calls that had it as an input, and announce who has made it."""
        calls = [announce]
        self._followed[tensor] = tensor._version, calls
        self._on_gradient(tensor, calls)

    def _on_gradient(self, tensor: torch.Tensor, calls: Iterable[Callable[[], None]]) -> None:
        def on_gradient(_grad: torch.Tensor) -> None:
            took_lock = self._step_lock.take_in_hook()
            try:
                for call in tuple(calls):
                    call()
            finally:
                if took_lock:
                    self._step_lock.give_back()

        tensor.register_hook(on_gradient)

    def landed(self, *params: ManagedParameter) -> None:
        """The gradients of parameters of one group are complete for this backward."""
        calls = dict[BackwardCall, None]()
        for managed in params:
            for call in self._waiting.pop(managed, ()):
                calls[call] = None
        group = params[0].group
        for call in calls:
            if group in call.open:
                call.open[group].difference_update(params)
                self._unpin_if_over(call, group)
        if self._left:
            self._unpin_left()

    def reset(self, *, step: bool) -> None:
        """Drop what an interrupted backward left; at a step, also what was held for a second backward."""
        for task in [task for task in self._running if not self._step_lock.runs_elsewhere(self._threads.get(task))]:
            self._unpin(task)
            self._access.num_calls = Counter()  # what was interrupted does not come
        self._regions.reset(step=step)
        if not self._running:
            self._references.clear()
            self._waiting.clear()
        if step:
            for chunk in self._held:
                self._pager.unpin(chunk)
            self._held.clear()

    def _announce(self, call: BackwardCall) -> None:
        """A gradient of the call's output is there: its backward comes next. Idempotent while it is announced."""
        if call.unit is not None:
            self._units.announce(call.unit)  # also if it is announced: another unit may have come in between
        if call.open:
            return
        self._regions.pack_last(inside=call.region)
        if self._left:
            self._unpin_left()
        task = torch._C._current_graph_task_id()
        if task not in self._running:
            self._running[task], self._threads[task] = [], self._step_lock.hook_thread()
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end(task))
        holding = torch.is_grad_enabled()  # in a gradient hook, exactly under create_graph
        trains = trained(call.reads)
        if self._ends_by_nodes(call, trains, holding=holding):
            if self._nodes.announce(task, call):
                self._running[task].append(call)
                for group in self._counted.intersection(call.references):
                    self._references.lower(task, group, by=call.references[group])
            return
        self._running[task].append(call)
        call.inputs_left = set(range(call.inputs))
        for managed in call.reads:
            group = managed.group
            if group not in call.open:
                chunk = self._chunks[group]
                self._pager.pin(chunk, reader=call)
                call.open[group] = set()
                if group in self._counted:
                    self._references.lower(task, group, by=call.references.get(group, 0))
                if holding:
                    self._pager.pin(chunk, reader=call)
                    self._held.append(chunk)
            if managed in trains:
                call.open[group].add(managed)
                self._waiting.setdefault(managed, []).append(call)
            else:
                call.frozen.add(group)
        if call.uncertain:
            self._left += [(call, group) for group in call.open if group in call.uncertain]

    def _ends_by_nodes(self, call: BackwardCall, trains: Collection[ManagedParameter], *, holding: bool) -> bool:
        """Tell whether the landing of gradients is no end for the call, or a late one; see `chunkmem.modules.nodes`."""
        if call.is_hidden or call.unit is not None:
            return False
        if holding or call.uncertain:
            return True
        for managed in call.reads:
            if managed not in trains:
                if not call.inputs:
                    return True
            elif self._access.num_calls[managed] > 1 or not _lands(managed):
                return True
        return False

    def _unpin_if_over(self, call: BackwardCall, group: int) -> None:
        """Unpin a group of the call if nothing is waited for any more."""
        frozen_done = group not in call.frozen or (call.inputs > 0 and not call.inputs_left)
        have_landed = frozen_done and not call.open[group]
        if call.is_hidden:
            is_over = have_landed and self._references.has_used_up(call.module, group)
            if have_landed and not is_over and (call, group) not in self._left:
                self._left.append((call, group))
        elif group in call.uncertain:
            is_over = self._references.is_through(group)
        else:
            is_over = have_landed
        if not is_over:
            return
        del call.open[group]
        if call.references and not torch._C._autograd._get_current_graph_task_keep_graph():
            call.used_up(group)
        self._pager.unpin(self._chunks[group])

    def _unpin_left(self) -> None:
        """Look again at calls that wait for references to go."""
        for call, group in self._left:
            if group in call.open:
                self._unpin_if_over(call, group)
        if self._left:
            self._left = [(call, group) for call, group in self._left if group in call.open]

    def _watch_inputs(self, call: BackwardCall, frame: Frame) -> None:
        if any(tensor._version != version for tensor, version in frame.inputs):
            return  # the module wrote to its input: that tensor is an output of the module now
        call.inputs = len(frame.inputs)

        def end(index: int) -> None:
            call.inputs_left.discard(index)
            if not call.inputs_left:
                for group in reversed(call.open.copy()):  # as gradients land
                    self._unpin_if_over(call, group)
            self._unpin_left()

        for index, (tensor, version) in enumerate(frame.inputs):
            # What has made it is announced by the same gradient, and comes after this call.
            made_at, calls = self._followed.get(tensor, (None, []))
            calls.insert(-1, partial(end, index))
            if made_at != version:  # else that announcement comes
                self._on_gradient(tensor, (partial(end, index),))

    def _end(self, task: int) -> None:
        with self._step_lock.taken(in_hook=True):
            self.num_ended += 1
            keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph()
            self._unpin(task, is_through=not keeps_graph)
            if not self._running:
                self._left.clear()
                self._units.end_backward()
                self._ordinary.end_backward()

    def _unpin(self, task: int, *, is_through: bool = False) -> None:
        self._threads.pop(task, None)
        self._references.end_backward(task)
        self._nodes.end_task(task)
        for call in self._running.pop(task, ()):
            if is_through:
                call.end()
            for group in call.open:
                if is_through:
                    call.used_up(group)
                self._pager.unpin(self._chunks[group])
            call.open.clear()


def _lands(managed: ManagedParameter) -> bool:
    """Tell whether a parameter gets a gradient in the running backward."""
    if managed.accumulator is None:
        return True
    try:
        return torch._C._will_engine_execute_node(managed.accumulator)  # type: ignore[arg-type]
    except RuntimeError:  # so torch says that `torch.autograd.grad` returns the gradient, and does not accumulate it
        return False
