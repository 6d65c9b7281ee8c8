"""Pin chunks around the single nodes of autograd's graph that have saved their memory.

[Note: Ends by nodes] A call's chunks are released when the gradients of what it read have landed. That end does not
come in every backward, and not always in time:

    torch.autograd.grad(loss, x), backward(inputs=[x])   no gradient of a weight lands
    a frozen weight of a module with children            nor has it one; its inputs may get theirs too early
    a module that is called several times                the gradient lands when the last of its calls has run
    create_graph                                         the backward makes nodes that save the memory again
    a node that leads to no gradient waited for          it may run after they have landed

In these cases the nodes of the call are looked up when backward comes to it: those that have saved memory of a chunk,
or may use it in ways that nobody sees (a Python function's own, or that of a checkpoint in a compiled module). Each has
the chunk pinned from when it begins until it has run, and nothing is pinned in between:

    forward    | read W |
    backward            | grad of output | ... | node that saved W | ... | grad of W
    pinned     |<-frame>|                      |<----------------->|
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from chunkmem.modules.access import AccessTracker
from chunkmem.modules.backward_calls import BackwardCall
from chunkmem.modules.frames import Frame
from chunkmem.modules.references import GraphSearch, is_inside, nodes_between
from chunkmem.runtime.pager import Pager
from chunkmem.runtime.step_lock import StepLock


@dataclass(eq=False)
class _Run:
    """One node that is going to run in a backward."""

    call: BackwardCall
    groups: tuple[int, ...]
    pinned: list[int] = field(default_factory=list)
    frame: Frame | None = None
    """Under `create_graph`: the node's run is a call itself."""


@dataclass(eq=False)
class _Task:
    """One running backward."""

    runs: dict[Any, _Run] = field(default_factory=dict)
    """By node; they are kept, so that their identities are."""
    handles: list[torch.utils.hooks.RemovableHandle] = field(default_factory=list)
    waiting: dict[BackwardCall, Counter[int]] = field(default_factory=dict)
    """By call and group: nodes that have not run yet."""


class NodePins:
    """Pins around nodes in running backwards."""

    def __init__(
        self,
        pager: Pager,
        access: AccessTracker,
        step_lock: StepLock,
        *,
        graphs: GraphSearch,
        watch: Callable[[Frame, object], set[int]],
        then: Callable[[], None],
    ) -> None:
        """Begin with none. `watch` announces the backward of what a node makes under `create_graph`; `then` is called
        whenever a node has run."""
        self._pager = pager
        self._access = access
        self._step_lock = step_lock
        self._graphs = graphs
        self._watch = watch
        self._then = then
        self._tasks: dict[int, _Task] = {}

    def announce(self, task_id: int, call: BackwardCall) -> bool:
        """Backward comes to a call, by the node that autograd is about to run; tell whether for the first time."""
        task = self._tasks.setdefault(task_id, _Task())
        is_first = call not in task.waiting
        storages = {managed.storage_id: managed.group for managed in call.reads}
        params = {id(managed.param): managed for managed in call.reads}
        waiting = task.waiting.setdefault(call, Counter())
        running = torch._C._current_autograd_node()
        first, stop, inside = call.nodes
        for node in nodes_between((running,), first, stop):
            if node in task.runs or is_inside(node, inside):
                continue
            if isinstance(node, BackwardCFunction) or self._graphs.is_checkpointed(node):
                groups = tuple(dict.fromkeys(storages.values()))
            else:
                groups = tuple(self._graphs.saved_in(node, storages, params))
            if not groups:
                continue
            waiting.update(groups)  # also one that is not going to run: its references stay
            # Autograd does not count the node that a backward begins with, if there is one alone.
            if node is running or torch._C._will_engine_execute_node(node):
                run = task.runs[node] = _Run(call, groups)
                task.handles.append(node.register_prehook(partial(self._begin, task_id, run)))
                task.handles.append(node.register_hook(partial(self._end, task_id, run)))
        return is_first

    def end_task(self, task_id: int) -> None:
        """A backward is over, or was interrupted."""
        task = self._tasks.pop(task_id, None)
        if task is None:
            return
        for handle in task.handles:
            handle.remove()
        for run in task.runs.values():
            self._let_go(run)

    def _begin(self, task_id: int, run: _Run, _grads: object) -> None:
        if task_id != torch._C._current_graph_task_id():
            return
        with self._step_lock.taken(in_hook=True):
            if torch.is_grad_enabled():  # in a hook, exactly under create_graph
                run.frame = Frame(f"{run.call.name} backward")
                for managed in run.call.reads:
                    if managed.group in run.groups:
                        self._access.read(run.frame, managed)
                return
            for group in run.groups:
                self._pager.pin(self._access.chunks[group], reader=run.call)
                run.pinned.append(group)

    def _end(self, task_id: int, run: _Run, made: Sequence[torch.Tensor | None], _grads: object) -> None:
        if task_id != torch._C._current_graph_task_id():
            return
        with self._step_lock.taken(in_hook=True):
            held: Collection[int] = ()
            if run.frame is not None:
                held = self._watch(run.frame, [tensor for tensor in made if tensor is not None])
            self._let_go(run, held=held)
            waiting = self._tasks[task_id].waiting[run.call]
            waiting.subtract(run.groups)
            for group in run.groups if not torch._C._autograd._get_current_graph_task_keep_graph() else ():
                if not waiting[group]:
                    run.call.used_up(group)
            self._then()

    def _let_go(self, run: _Run, *, held: Collection[int] = ()) -> None:
        frame, run.frame = run.frame, None
        if frame is not None:
            self._access.release(frame, held=held)
        pinned, run.pinned = run.pinned, []
        for group in pinned:
            self._pager.unpin(self._access.chunks[group])
