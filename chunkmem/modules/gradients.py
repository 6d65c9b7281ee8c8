"""Gradients go to their chunks as they become final for a backward; `.grad` is a lazy gradient afterwards."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

import torch

from chunkmem.modules.binding import ManagedParameter, stands_at
from chunkmem.modules.gradient_slots import GradientSlots
from chunkmem.modules.gradient_values import GradientState, GradientValues
from chunkmem.modules.lazy_gradient import LazyGradient
from chunkmem.runtime.device import runtime_mode
from chunkmem.runtime.pager import Pager
from chunkmem.runtime.values import storage_id

_SYNCED = (GradientState.LIVE, GradientState.CONSUMED, GradientState.OVERDUE)
"""`.grad` shows a gradient that is in its slot, or was."""


class GradientBook:
    """What `.grad` of the parameters shows, and what users have made of it."""

    def __init__(self, pager: Pager, slots: GradientSlots, values: GradientValues) -> None:
        """Make an empty book of gradients in `slots`, whose `values` lazy ones ask for."""
        self._pager = pager
        self.slots = slots
        self.values = values
        self.exposed: set[ManagedParameter] = set()
        """Parameters whose `.grad` is the user's for a while, inside `manager.gather(grads=True)`."""
        self._shown: dict[ManagedParameter, LazyGradient] = {}
        """What `.grad` was last; it is used again when nobody else refers to it."""
        shown, example = {0: torch.zeros(())}, torch.zeros((), requires_grad=True)
        example.grad = torch.zeros(())
        self._unheld = sys.getrefcount(shown[0]), sys.getrefcount(example.grad), _num_memory_references(example)
        """What these say of a gradient that nobody else refers to."""

    def add(self, parameters: Iterable[ManagedParameter]) -> None:
        """Take in the parameters of a model that was packed."""
        parameters = tuple(parameters)
        self.slots.add(parameters)
        self.values.add(parameters)

    @property
    def has_any(self) -> bool:
        """There may be a gradient, or something that stands for one, here or in a mean over ranks."""
        slots = self.slots
        return bool(slots.landed or slots.given or slots.anywhere or self.values.states)

    # What `.grad` says.

    def take_final(self, params: Iterable[ManagedParameter], *, reader: str = "") -> None:
        """Autograd has accumulated gradients of parameters of one group: they are final for this backward.

        Raises what `GradientSlots.land` does.
        """
        final = dict[ManagedParameter, torch.Tensor]()
        for managed in params:
            if managed not in self.exposed and (found := self._ordinary(managed, from_autograd=True)) is not None:
                final[managed] = found[0]
        if final:
            self.slots.land(final, reader=reader)
        for managed in final:
            self._show(managed)

    def _ordinary(self, managed: ManagedParameter, *, from_autograd: bool) -> tuple[torch.Tensor, bool] | None:
        """Return an ordinary tensor in `.grad` that is the gradient, and whether somebody else refers to it.

        Such a one stays there: they may keep writing to it, and plain PyTorch would notice. It is copied at the step,
        and is not returned before.
        """
        with torch._C.DisableTorchFunctionSubclass():
            grad = managed.param.grad
            if grad is None or isinstance(grad, LazyGradient):  # to that one autograd has added: `accumulate`
                return None
            # What autograd has made may be a view of something of its own; it adds in place to what a user assigned.
            may_be_made_by_autograd = from_autograd and grad._version == 0
            del grad
            is_held = self.values.shared is None and (
                sys.getrefcount(managed.param.grad) > self._unheld[1]
                or (not may_be_made_by_autograd and _num_memory_references(managed.param) > self._unheld[2])
            )
            grad = managed.param.grad
        assert grad is not None
        return None if is_held and from_autograd else (grad, is_held)

    def _show(self, managed: ManagedParameter) -> None:
        """Let `.grad` be what has landed."""
        source = self.values.sources[managed]
        source.life += 1
        self.values.states[managed] = GradientState.LIVE
        # A new one in each step would lie where the gradient was, and the C library could not use that again. But what
        # somebody has kept, or a graph has, is to keep saying that its gradient is gone.
        if (
            managed not in self._shown
            or self._shown[managed]._use_count() > 1  # type: ignore[attr-defined]
            or sys.getrefcount(self._shown[managed]) > self._unheld[0]
        ):
            self._shown[managed] = LazyGradient(source, source.life)
        self._shown[managed].life = source.life
        managed.grad = self._shown[managed]

    def show_mean(self, managed: ManagedParameter) -> None:
        """Count a mean over ranks, of gradients that other ranks had, as this one's, and let `.grad` be it."""
        self.slots.count_mean(managed)
        if managed.grad is None and managed not in self.exposed:
            self._show(managed)

    def sync_with_grad(self, params: Iterable[ManagedParameter]) -> None:
        """Make the book agree with `.grad`, before gradients are used. Raises what `land` does.

        Users assign to `.grad` and nobody sees it, so it is what counts: None discards what has landed, another tensor
        takes its place, a lazy gradient means that the slot is right.
        """
        states = self.values.states
        with torch._C.DisableTorchFunctionSubclass():
            shown, state_of = self._shown.get, states.get
            stale = [m for m in params if m.param.grad is not shown(m) or state_of(m) not in _SYNCED]
        for managed in stale:
            grad = managed.grad
            if isinstance(grad, LazyGradient) and not grad.is_all_of(self.values.sources[managed]):
                # Of another parameter, maybe, whose turn comes before this one's: two can be swapped.
                managed.grad = grad.whole()
        for managed in stale:
            grad, state = managed.grad, self.values.state(managed)
            if grad is None:
                if state is not GradientState.NONE or self.slots.any_landed((managed,)):
                    self.discard({managed})
            elif isinstance(grad, LazyGradient):
                if state is GradientState.ZEROED:
                    self.values.land_zeros(managed)
                elif state is GradientState.NONE:
                    raise self.values.sources[managed].lacks_values(state)
            else:
                del grad
                found = self._ordinary(managed, from_autograd=False)
                assert found is not None
                self.slots.land({managed: found[0]})
                if found[1]:
                    states.pop(managed, None)
                else:
                    self._show(managed)

    def sync_left(self) -> None:
        """Make the book agree with `.grad`, where autograd has left gradients since no hook has caught them.

        Those stay in `.grad`, as in plain PyTorch. What users wrote to weights is noticed by the same look at all of
        them. Raises what `land` does.
        """
        states, rest = self.values.states, list[ManagedParameter]()
        for number, group in self.slots.groups.items():
            shown, is_written = group.members[0].bound.look()
            weights = self._pager.store.weights(number)
            if is_written or weights.is_written_past:
                self._pager.notice_writes(weights)
            left = {managed: grad for managed, grad in shown.items() if type(grad) is torch.Tensor}
            if [grad for grad in left.values() if grad.layout is not torch.strided]:
                left = {}
            if left:
                self.slots.land(left, reader="gradients of a step")
            for managed in left if states else ():
                states.pop(managed, None)
            rest += [managed for managed in (*shown, *self.slots.landed.get(number, ())) if managed not in left]
        self.sync_with_grad(dict.fromkeys([*rest, *states]))

    def _shown_state(self, managed: ManagedParameter) -> GradientState | None:
        """Return the state of a gradient that `.grad` shows; None: a user has replaced or discarded it."""
        grad, states = managed.param.grad, self.values.states
        if not isinstance(grad, LazyGradient) or not grad.is_all_of(self.values.sources[managed]):
            return None
        return states.get(managed, GradientState.NONE)

    @contextmanager
    def exposing(self, exposed: Iterable[ManagedParameter], landed: Collection[ManagedParameter]) -> Iterator[None]:
        """Let `.grad` be the gradient, pinned on DEVICE by the caller, of those that `landed`; keep what becomes of it.

        That is what was written to it in place, put in its stead, or set where there was none.
        """
        exposed = list(exposed)
        before = {managed: managed.grad for managed in landed}
        for managed in landed:
            managed.grad = self.slots.slot(managed)
        self.exposed.update(exposed)
        try:
            yield
        finally:
            self.exposed.difference_update(exposed)
            if self._pager.closed is None:
                for managed in exposed:
                    self._take_exposed(managed, before.get(managed))

    @contextmanager
    def borrowing(self, lent: Collection[ManagedParameter]) -> Iterator[None]:
        """Let `.grad` be the gradient that another rank has, in memory on DEVICE that is filled inside the block.

        Nothing of it is kept. Raises what `land` does.
        """
        made: list[int] = []
        reader = "gather"
        before: dict[ManagedParameter, torch.Tensor | None] = {}
        try:
            for group in dict.fromkeys(managed.group for managed in lent):
                chunk = self.slots.groups[group].chunk
                self._pager.create(chunk, chunk.compute_tier, reader=reader, zero=True, elastic=True)
                self._pager.pin(chunk, reader=reader, elastic=True)
                made.append(group)
            for managed in lent:
                before[managed] = managed.grad
                managed.grad = self.slots.slot(managed)
            self.exposed.update(lent)
            yield
        finally:
            self.exposed.difference_update(lent)
            for managed, grad in before.items():
                managed.grad = grad if managed.grad is not None else None  # discarded, as on the rank that has it
            for group in made if self._pager.closed is None else ():
                chunk = self.slots.groups[group].chunk
                self._pager.unpin(chunk)
                self.slots.give_up(group)

    def _take_exposed(self, managed: ManagedParameter, before: torch.Tensor | None) -> None:
        """Keep what has become of a gradient that was exposed; `before` is what `.grad` was until then."""
        grad = managed.grad
        group = self.slots.groups[managed.group]
        chunk = group.chunk
        if self.slots.any_landed((managed,)) and grad is not None and chunk.ready(chunk.compute_tier):
            slot = self.slots.slot(managed)
            is_slot = not isinstance(grad, LazyGradient) and stands_at(grad, slot)
            if not is_slot and group.is_mean:  # what takes the place of a mean is one
                with runtime_mode():
                    slot.copy_(grad.whole() if isinstance(grad, LazyGradient) else grad)
                is_slot = True
            if is_slot:
                self._pager.store.mark_written(chunk)
                if before is None:
                    self._show(managed)
                    return
                if not isinstance(before, LazyGradient):  # a user's own tensor, which plain PyTorch would have changed
                    with runtime_mode():
                        before.copy_(slot)
                managed.grad = before
                return
        self.sync_with_grad((managed,))

    def discard_unset(self) -> None:
        """Forget the gradients that no optimizer has taken, and that a `zero_grad()` has set to None since."""
        for landed in [*self.slots.landed.values(), self.slots.given]:
            if unset := self._unset(landed):
                self.discard(unset)

    def _unset(self, landed: Iterable[ManagedParameter]) -> set[ManagedParameter]:
        return {managed for managed in landed if managed.grad is None} - self.exposed

    def is_touched(self, group: int) -> bool:
        """Tell whether a user has replaced or discarded a gradient of a group that has landed."""
        landed = self.slots.landed.get(group, ())
        return any(self._shown_state(managed) is not GradientState.LIVE for managed in landed)

    def is_consumed(self, managed: ManagedParameter) -> bool:
        """Tell whether `.grad` is a gradient that an update has used, and nobody has touched it since."""
        return self._shown_state(managed) is GradientState.CONSUMED

    def discard(self, params: Collection[ManagedParameter]) -> None:
        """Forget the gradients of `params`, whose `.grad` a user has set to None."""
        self.slots.withdraw(params)
        for managed in params:
            self.values.states.pop(managed, None)
        self.slots.forget(params, of_all_ranks=False)

    def use_up(self, params: Collection[ManagedParameter]) -> None:
        """Forget the gradients of `params`, as after their update."""
        states = self.values.states
        with torch._C.DisableTorchFunctionSubclass():
            for managed in [managed for managed in params if managed in states] if states else ():
                if managed.param.grad is not self._shown.get(managed) and self._shown_state(managed) is None:
                    del states[managed]
                else:
                    states[managed] = GradientState.CONSUMED
        self.slots.forget(params)


def _num_memory_references(param: torch.Tensor) -> int:
    """Return how many references there are to the memory of the tensor in `.grad`; 0 for one that has none."""
    grad = param.grad
    assert grad is not None
    memory = storage_id(grad)
    return int(torch._C._storage_Use_Count(memory)) if memory else 0
