"""Keep on DEVICE what a backward reads, for as long as it may be read.

[Note: Backward is not nested by module] Gradients of another branch arrive in between, so a module's chunks are pinned
from the first gradient of one of its outputs until the gradients of the parameters it read have been accumulated:

    forward    | read W, b |
    backward                      | grad of output |  ...  | grad of W | grad of b |
    pinned     |<- frame ->|      |<---------------- call ---------------------->|

A frozen parameter gets no gradient; it stays until the inputs of its module have theirs, where that is certain to come
last (the module has no children), or else until the backward ends.
"""

from __future__ import annotations

import torch

from chunkmem.nn.access import AccessTracker, Frame
from chunkmem.nn.binding import ManagedParameter
from chunkmem.nn.units import Unit, Units
from chunkmem.nn.values import kept_tensors, tensors_in
from chunkmem.runtime.executor import DemandExecutor
from chunkmem.runtime.store import Chunk
from chunkmem.types import Tier


class BackwardCall:
    """One module call whose backward may come: what it read, and what of that is still waited for."""

    __slots__ = ("frozen", "inputs", "inputs_left", "name", "open", "reads", "unit")

    def __init__(self, name: str, reads: tuple[ManagedParameter, ...], unit: Unit | None = None) -> None:
        self.name = name
        self.reads = reads
        self.unit = unit
        self.inputs = 0
        """Inputs whose gradients tell that frozen reads are over; 0 if those have to wait for the backward's end."""
        self.inputs_left: set[int] = set()
        self.frozen: set[int] = set()
        """Groups of which a frozen parameter was read."""
        self.open: dict[int, set[ManagedParameter]] = {}
        """Pinned groups, each with the trainable reads that wait for a gradient. Not empty while announced."""

    def __str__(self) -> str:
        return f"{self.name} backward"


class BackwardTracker:
    """Pins of running backwards."""

    def __init__(self, executor: DemandExecutor, access: AccessTracker, units: Units) -> None:
        self._executor = executor
        self._access = access
        self._units = units
        self._chunks: dict[int, Chunk] = access.chunks
        self._waiting: dict[ManagedParameter, list[BackwardCall]] = {}
        self._running: dict[int, list[BackwardCall]] = {}
        """Announced calls by the id of autograd's graph task."""
        self._held: list[Chunk] = []
        """Read by a backward that builds a graph itself (`create_graph`): needed again until the step."""

    @property
    def pinning(self) -> tuple[str, ...]:
        """Who pins something now."""
        calls = [call for calls in self._running.values() for call in calls if call.open]
        return (*map(str, calls), *(f"create_graph backward: {chunk.label}" for chunk in self._held))

    def watch(self, frame: Frame, result: object) -> None:
        """A module that read parameters returns: announce its backward when a gradient of what it made arrives.

        That is its result, what it left on itself for the loss to pick up (`self.aux_loss`), and what it put into a
        list or dict it was given. The forwards of a recomputation are watched too: their outputs are part of the
        running graph if the checkpoint is a reentrant one.
        """
        assert frame.module is not None
        added = [t for t in tensors_in(frame.containers) if id(t) not in frame.given]
        made = (*tensors_in(result), *kept_tensors(frame.module), *added)
        # An in-place operator on a view gives it another grad_fn, without our hook; its gradient still passes the base.
        bases = [t._base for t in made if t._base is not None]
        outputs = {id(t): t for t in (*made, *bases) if t.grad_fn is not None}
        if not outputs:
            return
        call = BackwardCall(frame.name, tuple(frame.reads), frame.unit)

        def announce(_grad: torch.Tensor) -> None:
            self._announce(call)

        for tensor in outputs.values():
            tensor.register_hook(announce)
        self._watch_inputs(call, frame)

    def landed(self, managed: ManagedParameter) -> None:
        """The gradient of a parameter is complete for this backward."""
        for call in self._waiting.pop(managed, ()):
            waiting = call.open.get(managed.group)
            if waiting is not None:
                waiting.discard(managed)
                self._settle(call, managed.group)

    def reset(self, *, step: bool) -> None:
        """Drop what an interrupted backward left; at a step, also what was held for a second backward."""
        for task in list(self._running):
            self._unpin(task)
        self._access.end_backward()
        self._waiting.clear()
        if step:
            for chunk in self._held:
                self._executor.unpin(chunk, Tier.DEVICE)
            self._held.clear()

    def _announce(self, call: BackwardCall) -> None:
        """A gradient of the call's output is there: its backward comes next. Idempotent while it is announced."""
        self._units.announce(call.unit)  # also if it is announced: another unit may have come in between
        if call.open:
            return
        task = torch._C._current_graph_task_id()
        if task not in self._running:
            self._running[task] = []
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end(task))
        self._running[task].append(call)
        holding = torch.is_grad_enabled()  # in a gradient hook, exactly under create_graph
        call.inputs_left = set(range(call.inputs))
        for managed in call.reads:
            group = managed.group
            if group not in call.open:
                self._executor.pin(self._chunks[group], Tier.DEVICE, reader=call)
                call.open[group] = set()
                if holding:
                    self._executor.pin(self._chunks[group], Tier.DEVICE, reader=call)
                    self._held.append(self._chunks[group])
            if managed.param.requires_grad:
                call.open[group].add(managed)
                self._waiting.setdefault(managed, []).append(call)
            else:
                call.frozen.add(group)

    def _settle(self, call: BackwardCall, group: int) -> None:
        """Unpin a group of the call if nothing is waited for any more."""
        frozen_done = group not in call.frozen or (call.inputs > 0 and not call.inputs_left)
        if frozen_done and not call.open[group]:
            del call.open[group]
            self._executor.unpin(self._chunks[group], Tier.DEVICE)

    def _watch_inputs(self, call: BackwardCall, frame: Frame) -> None:
        if any(tensor._version != version for tensor, version in frame.inputs):
            return  # the module wrote to its input: that tensor is an output of the module now
        call.inputs = len(frame.inputs)

        def on_gradient(index: int) -> None:
            call.inputs_left.discard(index)
            if not call.inputs_left:
                for group in list(call.open):
                    self._settle(call, group)

        for index, (tensor, _) in enumerate(frame.inputs):
            tensor.register_hook(lambda _grad, index=index: on_gradient(index))

    def _end(self, task: int) -> None:
        self._unpin(task)
        if not self._running:
            self._access.end_backward()
            self._units.end_backward()

    def _unpin(self, task: int) -> None:
        for call in self._running.pop(task, ()):
            for group in call.open:
                self._executor.unpin(self._chunks[group], Tier.DEVICE)
            call.open.clear()
