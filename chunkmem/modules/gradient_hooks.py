"""Where autograd's gradients become final: one hook on each trainable parameter."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Protocol

import torch

from chunkmem.modules.access import AccessTracker
from chunkmem.modules.backward import BackwardTracker
from chunkmem.modules.binding import ManagedParameter
from chunkmem.modules.gradients import GradientBook
from chunkmem.runtime.step_events import StepEvents
from chunkmem.runtime.step_lock import StepLock


class UpdatesInBackward(Protocol):
    """What may update parameters once their gradients are there."""

    def before_landing(self, managed: ManagedParameter) -> None:
        """A gradient is about to land."""
        ...

    def landed(self, managed: ManagedParameter, graph_references: Mapping[int, int]) -> None:
        """It has landed, and what has read the parameter for it is over.

        `graph_references`: by group, how often graphs whose backward is to come have saved memory of its weights.
        """
        ...

    def complete(self, group: int, graph_references: Mapping[int, int]) -> None:
        """A group's gradients have been reduced over ranks."""
        ...

    def landed_for_now(self, managed: ManagedParameter) -> None:
        """It has landed, in a backward that keeps its graph: another one may add to it."""
        ...


class GradientHooks:
    """Hands each gradient to the book, tells the backward that waits for it, and then who updates inside backward."""

    def __init__(
        self,
        book: GradientBook,
        backward: BackwardTracker,
        step_lock: StepLock,
        events: StepEvents,
        *,
        access: AccessTracker,
        updates: UpdatesInBackward,
    ) -> None:
        """Catch none yet; `events` tell when none need be caught, and `access` which ones land with others."""
        self._access = access
        events.resident.append(self._pause)
        events.reduced.append(lambda group: updates.complete(group, access.graph_references))
        self._book = book
        self._updates = updates
        self._backward = backward
        self._step_lock = step_lock
        self._handles: dict[ManagedParameter, torch.utils.hooks.RemovableHandle] = {}
        """Of the parameters whose gradients are caught."""
        self._waiting: dict[int, list[ManagedParameter]] = {}
        """By group, of one block: their gradients wait in `.grad` for the others, and at most until the step."""
        self._waiting_for: object = None
        """The block."""
        self._task = -1
        """Autograd's graph task that they are of."""

    def watch(self, params: Iterable[ManagedParameter]) -> None:
        """Catch the gradients of those that are trainable from now on."""
        for managed in params:
            if managed not in self._handles and managed.requires_grad:
                self._watch(managed)

    def _pause(self, is_resident: bool) -> None:
        """Catch none until the next `watch`, if models are resident."""
        if is_resident:
            self.unwatch(list(self._handles))

    def unwatch(self, params: Iterable[ManagedParameter]) -> None:
        """Catch their gradients no more."""
        for managed in params:
            if (handle := self._handles.pop(managed, None)) is not None:
                handle.remove()

    def _watch(self, managed: ManagedParameter) -> None:
        # Python does not see through a parameter's hooks: one that referred to the parameter would keep it for ever.
        ref, group, position = weakref.ref(self), managed.group, managed.position

        def on_gradient(_param: torch.Tensor) -> None:
            hooks = ref()
            if hooks is not None:
                landed = hooks._book.slots.groups[group].members[position]
                if landed in hooks._access.together:
                    hooks._wait(landed)
                    return
                took_lock = hooks._step_lock.take_in_hook()
                try:
                    hooks._updates.before_landing(landed)
                    hooks._book.take_final((landed,))
                    hooks._backward.landed(landed)
                    if torch._C._autograd._get_current_graph_task_keep_graph():
                        hooks._updates.landed_for_now(landed)
                    else:
                        hooks._updates.landed(landed, hooks._access.graph_references)
                finally:
                    if took_lock:
                        hooks._step_lock.give_back()

        self._handles[managed] = managed.param.register_post_accumulate_grad_hook(on_gradient)

    def _wait(self, managed: ManagedParameter) -> None:
        """Have a gradient wait for others of its block; see [Note: Blocks as a whole] in `chunkmem.modules.blocks`."""
        block, num_together = self._access.together[managed]
        task = torch._C._current_graph_task_id()
        if task != self._task:  # what an earlier backward has left waits for the step alone
            self._waiting.clear()
        elif block is not self._waiting_for:
            for group in list(self._waiting):  # of one block at a time there is room for gradients twice
                self._land_together(group)
        self._task, self._waiting_for = task, block
        waiting = self._waiting.setdefault(managed.group, [])
        waiting.append(managed)
        if len(waiting) >= num_together:
            self._land_together(managed.group)

    def _land_together(self, group: int) -> None:
        waiting = self._waiting.pop(group)
        with self._step_lock.taken(in_hook=True):
            self._book.take_final(waiting, reader="gradients of a block")
            self._backward.landed(*waiting)
