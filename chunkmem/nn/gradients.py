"""Gradients go to their chunks as they become final for a backward; `.grad` is None afterwards."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

import torch

from chunkmem.errors import StateError
from chunkmem.nn.binding import ManagedParameter
from chunkmem.runtime.device import runtime_mode
from chunkmem.runtime.executor import DemandExecutor
from chunkmem.runtime.store import NO_CONTENT, Chunk
from chunkmem.types import ChunkId, Role, Tier


class GradientBook:
    """Which gradients have landed since the last step, and where."""

    def __init__(
        self,
        executor: DemandExecutor,
        *,
        settles: Callable[[int], bool],
        then: Callable[[ManagedParameter], None],
    ) -> None:
        """Make an empty book.

        Args:
            executor: serves the accesses.
            settles: tells whether a group is updated on HOST.
            then: called after each gradient.
        """
        self._executor = executor
        self._settles = settles
        self._then = then
        self.chunks: dict[int, Chunk] = {}
        """GRAD chunk by group."""
        self.members: dict[int, tuple[ManagedParameter, ...]] = {}
        """All parameters of each group, in slot order."""
        self._landed: dict[int, set[ManagedParameter]] = {}
        self._reduced: set[int] = set()
        """Groups whose gradient is a mean over ranks."""
        self.given: set[ManagedParameter] = set()
        """Parameters whose gradient went into a mean over ranks since the last step."""
        self.anywhere: set[ManagedParameter] = set()
        """Parameters of which a rank has a gradient, as of the last mean over ranks; the same on all of them."""
        self._carried: dict[int, torch.Tensor] = {}
        """By group: such a mean, while further gradients land beside it."""
        self.before_touching: Callable[[int], None] = lambda group: None
        """Called before a gradient of a group lands or is completed: whoever reduces it finishes that."""
        self.exposed: set[ManagedParameter] = set()
        """Parameters whose `.grad` is the user's for a while, inside `manager.gather(grads=True)`."""
        self._expected: dict[int, int] = {}
        """Trainable parameters of each group that has begun."""

    @property
    def landed(self) -> dict[int, set[ManagedParameter]]:
        """Parameters with a gradient, by group; the group whose gradient landed last comes last."""
        return self._landed

    @property
    def fresh(self) -> dict[int, set[ManagedParameter]]:
        """What has landed and is not part of a mean over ranks."""
        return {group: landed for group, landed in self._landed.items() if group not in self._reduced}

    def add(self, parameters: Iterable[ManagedParameter]) -> None:
        """Take in the parameters of a model that was packed."""
        for managed in sorted(parameters, key=lambda m: (m.group, m.position)):
            self.chunks[managed.group] = self._executor.store.chunks[ChunkId(Role.GRAD, managed.group)]
            self.members[managed.group] = (*self.members.get(managed.group, ()), managed)

    def watch(self, params: Iterable[ManagedParameter]) -> None:
        """Catch the gradients of those that are trainable from now on."""
        for managed in params:
            if managed.gradient_hook is None and managed.requires_grad:
                self._watch(managed)

    def _watch(self, managed: ManagedParameter) -> None:
        # Python does not see through a parameter's hooks: one that referred to the parameter would keep it for ever.
        ref, group, position = weakref.ref(self), managed.group, managed.position

        def on_gradient(_param: torch.Tensor) -> None:
            book = ref()
            if book is not None:
                book._on_gradient(book.members[group][position])

        managed.gradient_hook = managed.param.register_post_accumulate_grad_hook(on_gradient)

    def land(self, managed: ManagedParameter, grad: torch.Tensor) -> None:
        """Put a gradient into its slot, adding to what landed there since the last step.

        Raises:
            CapacityError: no room for the GRAD chunk on DEVICE.
            StateError: the gradient is sparse.
        """
        if grad.layout is not torch.strided:
            raise StateError(
                f"parameter {managed.name} got a {grad.layout} gradient; fused AdamW takes dense ones (sparse=False)"
            )
        chunk = self.chunks[managed.group]
        reader = f"{managed.name} gradient"
        self.before_touching(managed.group)
        if managed.group in self._reduced:
            self._carry(managed.group, reader)
        if chunk.version == NO_CONTENT:
            self._executor.create(chunk, Tier.DEVICE, reader=reader, zero=False)
            self._landed[managed.group] = set()
            self._expected[managed.group] = sum(m.requires_grad for m in self.members[managed.group])
        else:
            self._executor.use(chunk, Tier.DEVICE, reader=reader)
        landed = self._landed[managed.group] = self._landed.pop(managed.group)
        slot = self._slot(managed)
        with runtime_mode():
            if managed in landed:
                slot.add_(grad)
            else:
                slot.copy_(grad)
                landed.add(managed)
        if len(chunk.replicas) > 1:
            self._executor.store.mark_written(chunk, Tier.DEVICE)
        chunk.settled = len(landed) >= self._expected[managed.group] and self._settles(managed.group)

    def complete(self, group: int, wanted: Collection[ManagedParameter], *, reader: str) -> None:
        """Have a gradient, of zeros where none has landed, for parameters of a group on DEVICE: to be reduced."""
        chunk = self.chunks[group]
        self.before_touching(group)
        if group in self._reduced:
            self._carry(group, reader)
        if chunk.version == NO_CONTENT:
            self._executor.create(chunk, Tier.DEVICE, reader=reader, zero=True)
            self._landed[group] = set()
        else:
            self._executor.use(chunk, Tier.DEVICE, reader=reader)
        missing = set(wanted) - self._landed[group]
        with runtime_mode():
            for managed in missing:
                self._slot(managed).zero_()
        if len(chunk.replicas) > 1:
            self._executor.store.mark_written(chunk, Tier.DEVICE)

    def reduced(self, group: int) -> None:
        """A group's gradient, on DEVICE, is the mean over ranks now."""
        self.given |= self._landed[group]
        chunk = self.chunks[group]
        carried = self._carried.pop(group, None)
        if carried is not None:
            with runtime_mode():
                chunk.replicas[Tier.DEVICE].flat.add_(carried.to(chunk.replicas[Tier.DEVICE].flat.device))
        self._reduced.add(group)
        self._executor.store.mark_written(chunk, Tier.DEVICE)
        chunk.settled = self._settles(group)

    def give_up(self, group: int) -> None:
        """Another rank has a group's gradient now."""
        self.given |= self._landed.pop(group, set())
        chunk = self.chunks[group]
        self._executor.consume(chunk)
        self._executor.discard_remote(chunk)  # unlike the owner's, it is not wanted before the next backward

    def _carry(self, group: int, reader: str) -> None:
        """More comes after a mean was formed: keep that beside, and begin anew."""
        chunk = self.chunks[group]
        replica = self._executor.use(chunk, Tier.DEVICE, reader=reader)
        with runtime_mode():
            self._carried[group] = replica.flat.to("cpu", copy=True)
            replica.flat.zero_()
        self._executor.store.mark_written(chunk, Tier.DEVICE)
        self._reduced.discard(group)

    def _on_gradient(self, managed: ManagedParameter) -> None:
        if managed not in self.exposed:
            self._take(managed)
        self._then(managed)

    @contextmanager
    def exposing(self, exposed: Iterable[ManagedParameter], landed: Collection[ManagedParameter]) -> Iterator[None]:
        """Let `.grad` be the gradient, pinned on DEVICE by the caller, of those that `landed`; keep what becomes of it.

        That is what was written to it in place, put in its stead, or set where there was none.
        """
        exposed = list(exposed)
        for managed in landed:
            managed.param.grad = self._slot(managed)
        self.exposed.update(exposed)
        try:
            yield
        finally:
            self.exposed.difference_update(exposed)
            if self._executor.closed is None:
                self.take_assigned(exposed)

    @contextmanager
    def borrowing(self, lent: Collection[ManagedParameter], *, reader: str) -> Iterator[None]:
        """Let `.grad` be the gradient that another rank has, in memory on DEVICE that is filled inside the block.

        Nothing of it is kept. Raises what `land` does.
        """
        made: list[int] = []
        try:
            for group in dict.fromkeys(managed.group for managed in lent):
                self._executor.create(self.chunks[group], Tier.DEVICE, reader=reader, zero=True, elastic=True)
                self._executor.pin(self.chunks[group], Tier.DEVICE, reader=reader, elastic=True)
                made.append(group)
            for managed in lent:
                managed.param.grad = self._slot(managed)
            self.exposed.update(lent)
            yield
        finally:
            self.exposed.difference_update(lent)
            for managed in lent:
                managed.param.grad = None
            for group in made if self._executor.closed is None else ():
                self._executor.unpin(self.chunks[group], Tier.DEVICE)
                self.give_up(group)

    def take_assigned(self, params: Iterable[ManagedParameter]) -> None:
        """Let `.grad`, which a user may have set, take the place of what has landed.

        Raises: what `land` does.
        """
        for managed in params:
            self._take_assigned(managed)

    def _take_assigned(self, managed: ManagedParameter) -> None:
        grad = managed.param.grad
        chunk = self.chunks[managed.group]
        landed = managed in self._landed.get(managed.group, ())
        if landed and grad is not None and chunk.ready(Tier.DEVICE):
            slot = self._slot(managed)
            is_slot = grad.is_set_to(slot)
            if not is_slot and managed.group in self._reduced:  # what takes the place of a mean is one
                with runtime_mode():
                    slot.copy_(grad)
                is_slot = True
            if is_slot:
                managed.param.grad = None
                self._executor.store.mark_written(chunk, Tier.DEVICE)
                return
        self.discard({managed})
        self._take(managed)

    def _take(self, managed: ManagedParameter) -> None:
        grad, managed.param.grad = managed.param.grad, None
        if grad is not None:
            self.land(managed, grad)

    def _slot(self, managed: ManagedParameter) -> torch.Tensor:
        return self._executor.store.views(self.chunks[managed.group], Tier.DEVICE)[managed.position]

    def discard(self, params: Collection[ManagedParameter]) -> None:
        """Forget the gradients of `params`, as after their update."""
        self.given.difference_update(params)
        self.anywhere.difference_update(params)
        for group in {managed.group for managed in params}:
            landed = self._landed.get(group)
            if landed is None:
                continue
            landed.difference_update(params)
            if not landed:
                del self._landed[group]
                self._reduced.discard(group)
                self._carried.pop(group, None)
                self._executor.consume(self.chunks[group])

    def any_landed(self, params: Iterable[ManagedParameter]) -> bool:
        """Tell whether one of `params` has a gradient."""
        return any(managed in self._landed.get(managed.group, ()) for managed in params)
