"""Gradients in the slots of GRAD chunks: which have landed, and what of them is a mean over ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import torch

from chunkmem.errors import StateError
from chunkmem.nn.binding import ManagedParameter
from chunkmem.runtime.chunk import NO_CONTENT, Chunk
from chunkmem.runtime.device import runtime_mode
from chunkmem.runtime.pager import Pager
from chunkmem.types import ChunkId, Role


class GradientSlots:
    """Which gradients have landed since the last step, and where."""

    def __init__(
        self, pager: Pager, *, settles: Callable[[int], bool], landed: dict[int, set[ManagedParameter]] | None = None
    ) -> None:
        """Begin with none.

        Args:
            pager: serves the accesses.
            settles: tells whether a group is updated on HOST.
            landed: empty, and will have what `landed` returns: for those that look at it.
        """
        self._pager = pager
        self._settles = settles
        self.chunks: dict[int, Chunk] = {}
        """GRAD chunk by group."""
        self.members: dict[int, tuple[ManagedParameter, ...]] = {}
        """All parameters of each group, in slot order."""
        self._landed = {} if landed is None else landed
        self._reduced: set[int] = set()
        """Groups whose gradient is a mean over ranks."""
        self.given: set[ManagedParameter] = set()
        """Parameters whose gradient from this rank is part of a mean over ranks that waits for its step."""
        self.withdrawn: set[ManagedParameter] = set()
        """Parameters whose gradient was, and a user has discarded or replaced it; the other ranks do not know yet."""
        self.anywhere: set[ManagedParameter] = set()
        """Parameters of which a rank has a gradient, as of the last mean over ranks; the same on all of them."""
        self._carried: dict[int, torch.Tensor] = {}
        """By group: such a mean, while further gradients accumulate in the slot."""
        self.under_way: dict[int, Callable[[], None]] = {}
        """By group that is being reduced: waits until that is over. Done before its gradient is touched."""
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
            self.chunks[managed.group] = self._pager.store.chunks[ChunkId(Role.GRAD, managed.group)]
            self.members[managed.group] = (*self.members.get(managed.group, ()), managed)

    def land(self, managed: ManagedParameter, grad: torch.Tensor, *, replacing: bool = False) -> None:
        """Put a gradient into its slot, adding to what landed there since the last step, or replacing it.

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
        if managed.group in self.under_way:
            self.under_way[managed.group]()
        if managed.group in self._reduced:
            self._carry(managed.group, reader)
        if replacing:
            self.withdraw((managed,))
        if chunk.version == NO_CONTENT:
            self._pager.create(chunk, chunk.compute_tier, reader=reader, zero=False)
            self._landed[managed.group] = set()
            self._expected[managed.group] = sum(m.requires_grad for m in self.members[managed.group])
        else:
            self._pager.use(chunk, chunk.compute_tier, reader=reader)
        landed = self._landed[managed.group] = self._landed.pop(managed.group)
        slot = self._slot(managed)
        with runtime_mode():
            if managed in landed and not replacing:
                slot.add_(grad)
            else:
                slot.copy_(grad)
                landed.add(managed)
        if len(chunk.replicas) > 1:
            self._pager.store.mark_written(chunk, chunk.compute_tier)
        is_settled = self.is_complete(managed.group) and self._settles(managed.group)
        self._pager.store.settle(chunk, is_settled=is_settled)

    def is_complete(self, group: int) -> bool:
        """Tell whether each parameter of a group that was trainable when the first gradient landed has one."""
        return len(self._landed.get(group, ())) >= self._expected.get(group, 1)

    def is_touched(self, group: int) -> bool:
        """Tell whether a user has replaced or discarded a gradient of a group that has landed."""
        return False

    def complete(self, group: int, wanted: Collection[ManagedParameter], *, reader: str) -> None:
        """Have a gradient, of zeros where none has landed, for parameters of a group on DEVICE: to be reduced."""
        chunk = self.chunks[group]
        if group in self.under_way:
            self.under_way[group]()
        if group in self._reduced:
            self._carry(group, reader)
        if chunk.version == NO_CONTENT:
            self._pager.create(chunk, chunk.compute_tier, reader=reader, zero=True)
            self._landed[group] = set()
        else:
            self._pager.use(chunk, chunk.compute_tier, reader=reader)
        missing = set(wanted) - self._landed[group]
        with runtime_mode():
            for managed in missing:
                self._slot(managed).zero_()
        if len(chunk.replicas) > 1:
            self._pager.store.mark_written(chunk, chunk.compute_tier)

    def reduced(self, group: int) -> None:
        """A group's gradient, where it has landed, is the mean over ranks now."""
        self.given |= self._landed[group]
        chunk = self.chunks[group]
        carried = self._carried.pop(group, None)
        if carried is not None:
            with runtime_mode():
                flat = chunk.replicas[chunk.compute_tier].flat
                flat.add_(carried.to(flat.device))
        self._reduced.add(group)
        self._pager.store.mark_written(chunk, chunk.compute_tier)
        self._pager.store.settle(chunk, is_settled=self._settles(group))

    def show_reduced(self, managed: ManagedParameter) -> None:
        """Count a mean, of gradients that other ranks had, as this one's."""
        self._landed.setdefault(managed.group, set()).add(managed)

    def give_up(self, group: int) -> None:
        """Another rank has a group's gradient now."""
        self.given |= self._landed.pop(group, set())
        chunk = self.chunks[group]
        self._pager.consume(chunk)
        self._pager.discard_remote(chunk)  # unlike the owner's, it is not wanted before the next backward

    def _carry(self, group: int, reader: str) -> None:
        """More comes after a mean was formed: set that aside, and accumulate from zero."""
        chunk = self.chunks[group]
        replica = self._pager.use(chunk, chunk.compute_tier, reader=reader)
        with runtime_mode():
            self._carried[group] = replica.flat.to("cpu", copy=True)
            replica.flat.zero_()
        self._pager.store.mark_written(chunk, chunk.compute_tier)
        self._reduced.discard(group)

    def withdraw(self, params: Iterable[ManagedParameter]) -> None:
        """What this rank has of gradients is no part of a mean any more, once the others have been told."""
        for managed in self.given.intersection(params) if self.given else ():
            self.given.discard(managed)
            self.withdrawn.add(managed)

    def take_out(self, params: Iterable[ManagedParameter]) -> None:
        """The ranks that had a part in the mean of these have all withdrawn it: nothing is left of it."""
        for managed in params:
            if managed.group in self._carried:
                self._clear_carried(managed)
            elif managed.group in self._reduced:
                self.zero_landed(managed)

    def hand_over(self) -> None:
        """The step has come: what an optimizer does not use now waits as its owner's alone."""
        self.given = {managed for group in self._reduced for managed in self._landed[group]}

    def _clear_carried(self, managed: ManagedParameter) -> None:
        carried = self._carried.get(managed.group)
        if carried is not None:
            with runtime_mode():
                carried[managed.slot.offset : managed.slot.end].zero_()

    def zero_landed(self, managed: ManagedParameter) -> None:
        """Set to zero what has landed, on all tiers, and the mean that was set aside."""
        if managed.group in self.under_way:
            self.under_way[managed.group]()
        self._pager.policy.drain()
        self._clear_carried(managed)
        chunk = self.chunks[managed.group]
        tiers = self._pager.to_write(chunk, reader="zeroing a gradient")
        with runtime_mode():
            for tier in tiers:
                self._pager.store.views(chunk, tier)[managed.position].zero_()

    def value(self, managed: ManagedParameter) -> torch.Tensor:
        """Return the slot of a gradient that has landed, on the tier with the newest values; not a copy."""
        self._pager.policy.drain()
        chunk = self.chunks[managed.group]
        tier = self._pager.in_memory(chunk, reader="a gradient")
        assert tier is not None
        return self._pager.store.views(chunk, tier)[managed.position]

    def _slot(self, managed: ManagedParameter) -> torch.Tensor:
        chunk = self.chunks[managed.group]
        return self._pager.store.views(chunk, chunk.compute_tier)[managed.position]

    def forget(self, params: Collection[ManagedParameter], *, of_all_ranks: bool = True) -> None:
        """Give up what has landed of `params`; a group without any gradient has no content any more.

        Without `of_all_ranks`, what other ranks may have in a mean of the group is not meant.
        """
        self.given.difference_update(params)
        self.anywhere.difference_update(params)
        for group in {managed.group for managed in params}:
            landed = self._landed.get(group)
            if landed is None:
                continue
            landed.difference_update(params)
            if not landed and (of_all_ranks or not self._may_wait(group, besides=params)):
                self._drop(group)

    def _may_wait(self, group: int, *, besides: Collection[ManagedParameter]) -> bool:
        """Tell whether a mean of this group may have something in it that others have put there."""
        is_mean = group in self._reduced or group in self._carried
        return is_mean and any(m.requires_grad and m not in besides for m in self.members[group])

    def drop_empty(self) -> None:
        """Of a group without any gradient, on whichever rank, no content is left."""
        for group in [group for group, landed in self._landed.items() if not landed]:
            self._drop(group)

    def _drop(self, group: int) -> None:
        del self._landed[group]
        self._reduced.discard(group)
        self._carried.pop(group, None)
        self._pager.consume(self.chunks[group])

    def has_values(self, managed: ManagedParameter) -> bool:
        """Tell whether a parameter has a gradient that has not been lost."""
        return self.any_landed((managed,)) and self.chunks[managed.group].newest_tier() is not None

    def any_landed(self, params: Iterable[ManagedParameter]) -> bool:
        """Tell whether one of `params` has a gradient."""
        return any(managed in self._landed.get(managed.group, ()) for managed in params)

    def any_given(self, params: Iterable[ManagedParameter]) -> bool:
        """Tell whether one of `params` has a gradient, here or, after a mean over ranks, with its owner."""
        params = list(params)
        return self.any_landed(params) or not (self.given | self.anywhere).isdisjoint(params)
