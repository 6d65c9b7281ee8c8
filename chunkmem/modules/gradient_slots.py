"""Gradients in the slots of GRAD chunks: which have landed, and what of them is a mean over ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import torch

from chunkmem.data.errors import StateError
from chunkmem.data.types import ChunkId, Role
from chunkmem.modules.binding import ManagedParameter, trained
from chunkmem.runtime.chunk import NO_CONTENT, Chunk
from chunkmem.runtime.device import runtime_mode
from chunkmem.runtime.pager import Pager


@dataclass(eq=False, slots=True)
class SlotGroup:
    """The gradients of one chunk group."""

    chunk: Chunk
    """Of role GRAD."""
    members: tuple[ManagedParameter, ...]
    """All parameters of the group, in slot order."""
    num_expected: int | None = None
    """Parameters that were trainable when gradients had landed, and it was first asked; None: it was not since."""
    is_mean: bool = False
    """What has landed is a mean over ranks."""
    earlier_mean: torch.Tensor | None = None
    """Such a mean, while further gradients accumulate in the slots."""
    finish: Callable[[], None] | None = None
    """Waits until the reduction under way is over; called before the gradients are touched. None: there is none."""

    @property
    def trained(self) -> set[ManagedParameter]:
        """Members that require gradients."""
        return trained(self.members)


class GradientSlots:
    """Which gradients have landed since the last step, and where."""

    def __init__(
        self, pager: Pager, *, updates_on_host: Callable[[int], bool], landed: dict[int, set[ManagedParameter]]
    ) -> None:
        """Begin with none.

        Args:
            pager: serves the accesses.
            updates_on_host: tells whether a group is updated on HOST.
            landed: empty, and will have what `landed` returns: for those that look at it.
        """
        self._pager = pager
        self._updates_on_host = updates_on_host
        self.groups: dict[int, SlotGroup] = {}
        """By number."""
        self.landed = landed
        """Parameters with a gradient, by group; the group whose gradient landed last comes last."""
        self.num_changes = 0
        """How often a gradient has landed or was forgotten: what is derived from gradients lasts until it rises."""
        self.given: set[ManagedParameter] = set()
        """Parameters whose gradient from this rank is part of a mean over ranks that waits for its step."""
        self.withdrawn: set[ManagedParameter] = set()
        """Parameters whose gradient was, and a user has discarded or replaced it; the other ranks do not know yet."""
        self.anywhere: set[ManagedParameter] = set()
        """Parameters of which a rank has a gradient, as of the last mean over ranks; the same on all of them."""

    @property
    def fresh(self) -> dict[int, set[ManagedParameter]]:
        """What has landed and is not part of a mean over ranks."""
        return {group: landed for group, landed in self.landed.items() if not self.groups[group].is_mean}

    def add(self, parameters: Iterable[ManagedParameter]) -> None:
        """Take in the parameters of a model that was packed."""
        for managed in sorted(parameters, key=lambda m: (m.group, m.position)):
            if managed.group not in self.groups:
                chunk = self._pager.store.chunks[ChunkId(Role.GRAD, managed.group)]
                self.groups[managed.group] = SlotGroup(chunk, ())
            self.groups[managed.group].members += (managed,)

    def land(self, grads: Mapping[ManagedParameter, torch.Tensor], *, reader: str = "", adding: bool = False) -> None:
        """Put gradients into their slots.

        Args:
            grads: of parameters of one group, at least one.
            reader: who does; "": the first of them.
            adding: add them to what has landed there since the last step; else they replace that.

        Raises:
            CapacityError: no room for the GRAD chunk on DEVICE.
            StateError: a gradient is sparse.
        """
        _require_dense(grads)
        self.num_changes += 1
        first, *_ = grads
        number = first.group
        group = self._writable(number, reader or f"{first.name} gradient", zero=False)
        if self.given and not adding:
            self.withdraw(grads)
        views = self._pager.store.views(group.chunk, group.chunk.compute_tier)
        landed = self.landed[number] = self.landed.pop(number)
        put = torch._foreach_add_ if adding and landed.issuperset(grads) else torch._foreach_copy_
        with runtime_mode():
            put([views[managed.position] for managed in grads], list(grads.values()))
        landed.update(grads)
        self._has_landed(group, number)

    def _has_landed(self, group: SlotGroup, number: int) -> None:
        chunk, expected = group.chunk, group.num_expected
        if len(chunk.replicas) > 1:
            self._pager.store.mark_written(chunk)
        may_be_complete = expected is None or len(self.landed[number]) >= expected
        awaits_update = may_be_complete and self._updates_on_host(number) and self.is_complete(number)
        if awaits_update or chunk.awaits_update:
            self._pager.store.mark_for_update(chunk, awaits_update=awaits_update)

    def is_complete(self, group: int) -> bool:
        """Tell whether each parameter of a group that was trainable when gradients first had landed has one."""
        landed, slots = self.landed.get(group), self.groups[group]
        if not landed:
            return False
        if slots.num_expected is None:
            slots.num_expected = len(slots.trained)
        return len(landed) >= slots.num_expected

    def complete(self, number: int, *, reader: str) -> None:
        """Have a gradient, of zeros where none has landed, for all trained parameters of a group: to be reduced."""
        group = self._writable(number, reader, zero=True)
        chunk = group.chunk
        missing = group.trained - self.landed[number]
        with runtime_mode():
            for managed in missing:
                self.slot(managed).zero_()
        if len(chunk.replicas) > 1:
            self._pager.store.mark_written(chunk)

    def reduced(self, number: int) -> None:
        """A group's gradient, where it has landed, is the mean over ranks now."""
        self.given |= self.landed[number]
        group = self.groups[number]
        chunk, earlier = group.chunk, group.earlier_mean
        if earlier is not None:
            with runtime_mode():
                flat = chunk.replicas[chunk.compute_tier].flat
                flat.add_(earlier.to(flat.device))
        group.is_mean, group.earlier_mean = True, None
        self._pager.store.mark_written(chunk)
        self._pager.store.mark_for_update(chunk, awaits_update=self._updates_on_host(number))

    def count_mean(self, managed: ManagedParameter) -> None:
        """Count a mean, of gradients that other ranks had, as this one's."""
        self.landed.setdefault(managed.group, set()).add(managed)

    def give_up(self, group: int) -> None:
        """Another rank has a group's gradient now."""
        self.given |= self.landed.pop(group, set())
        chunk = self.groups[group].chunk
        self._pager.consume(chunk)
        self._pager.discard_remote(chunk)  # unlike the owner's, it is not wanted before the next backward

    def _writable(self, number: int, reader: str, *, zero: bool) -> SlotGroup:
        """Return a group that gradients may be added to, once no reduction is under way; new content is `zero` or not.

        More may come after a mean was formed: that is set aside, and what comes accumulates from zero.
        """
        group = self.groups[number]
        chunk = group.chunk
        if group.finish is not None:
            group.finish()
        if group.is_mean:
            replica = self._pager.use(chunk, chunk.compute_tier, reader=reader)
            with runtime_mode():
                group.earlier_mean = replica.flat.to("cpu", copy=True)
                replica.flat.zero_()
            self._pager.store.mark_written(chunk)
            group.is_mean = False
        if chunk.version == NO_CONTENT:
            self._pager.create(chunk, chunk.compute_tier, reader=reader, zero=zero)
            self.landed[number] = set()
            group.num_expected = None
        else:
            self._pager.use(chunk, chunk.compute_tier, reader=reader)
        return group

    def withdraw(self, params: Iterable[ManagedParameter]) -> None:
        """What this rank has of gradients is no part of a mean any more, once the others have been told."""
        for managed in self.given.intersection(params):
            self.given.discard(managed)
            self.withdrawn.add(managed)

    def take_out(self, params: Iterable[ManagedParameter]) -> None:
        """The ranks that had a part in the mean of these have all withdrawn it: nothing is left of it."""
        for managed in params:
            group = self.groups[managed.group]
            if group.earlier_mean is not None:
                self._clear_earlier_mean(managed)
            elif group.is_mean:
                self.zero_landed(managed)

    def hand_over(self) -> None:
        """The step has come: what an optimizer does not use now waits as its owner's alone."""
        self.given = {
            managed for group, landed in self.landed.items() if self.groups[group].is_mean for managed in landed
        }

    def _clear_earlier_mean(self, managed: ManagedParameter) -> None:
        earlier = self.groups[managed.group].earlier_mean
        if earlier is not None:
            with runtime_mode():
                earlier[managed.slot.offset : managed.slot.end].zero_()

    def zero_landed(self, managed: ManagedParameter) -> None:
        """Set to zero what has landed, on all tiers, and the mean that was set aside."""
        group = self.groups[managed.group]
        if group.finish is not None:
            group.finish()
        self._pager.policy.drain()
        self._clear_earlier_mean(managed)
        chunk = group.chunk
        tiers = self._pager.to_write(chunk, reader="zeroing a gradient")
        with runtime_mode():
            for tier in tiers:
                self._pager.store.views(chunk, tier)[managed.position].zero_()

    def value(self, managed: ManagedParameter) -> torch.Tensor:
        """Return the slot of a gradient that has landed, on the tier with the newest values; not a copy."""
        self._pager.policy.drain()
        chunk = self.groups[managed.group].chunk
        tier = self._pager.in_memory(chunk, reader="a gradient")
        assert tier is not None
        return self._pager.store.views(chunk, tier)[managed.position]

    def slot(self, managed: ManagedParameter) -> torch.Tensor:
        """Return the slot of a gradient on the tier that modules compute on, which has it."""
        chunk = self.groups[managed.group].chunk
        return self._pager.store.views(chunk, chunk.compute_tier)[managed.position]

    def forget(self, params: Collection[ManagedParameter], *, of_all_ranks: bool = True) -> None:
        """Give up what has landed of `params`; a group without any gradient has no content any more.

        Without `of_all_ranks`, what other ranks may have in a mean of the group is not meant.
        """
        self.num_changes += 1
        self.given.difference_update(params)
        self.anywhere.difference_update(params)
        for group in {managed.group for managed in params} if self.landed else ():
            landed = self.landed.get(group)
            if landed is None:
                continue
            landed.difference_update(params)
            if not landed and (of_all_ranks or not self._may_wait(group, besides=params)):
                self._drop(group)

    def _may_wait(self, number: int, *, besides: Collection[ManagedParameter]) -> bool:
        """Tell whether a mean of this group may have something in it that others have put there."""
        group = self.groups[number]
        return (group.is_mean or group.earlier_mean is not None) and bool(group.trained.difference(besides))

    def drop_empty(self) -> None:
        """Of a group without any gradient, on whichever rank, no content is left."""
        for group in [group for group, landed in self.landed.items() if not landed]:
            self._drop(group)

    def _drop(self, number: int) -> None:
        del self.landed[number]
        group = self.groups[number]
        group.is_mean, group.earlier_mean = False, None
        self._pager.consume(group.chunk)

    def has_values(self, managed: ManagedParameter) -> bool:
        """Tell whether a parameter has a gradient that has not been lost."""
        return self.any_landed((managed,)) and self.groups[managed.group].chunk.newest_tier() is not None

    def any_landed(self, params: Iterable[ManagedParameter]) -> bool:
        """Tell whether one of `params` has a gradient."""
        return any(managed in self.landed.get(managed.group, ()) for managed in params)

    def any_given(self, params: Iterable[ManagedParameter]) -> bool:
        """Tell whether one of `params` has a gradient, here or, after a mean over ranks, with its owner."""
        params = list(params)
        return self.any_landed(params) or not (self.given | self.anywhere).isdisjoint(params)


def _require_dense(grads: Mapping[ManagedParameter, torch.Tensor]) -> None:
    """Raise a `StateError` if a gradient is sparse."""
    for managed, grad in grads.items():
        if grad.layout is not torch.strided:
            raise StateError(
                f"parameter {managed.name} got a {grad.layout} gradient; chunks hold dense ones (sparse=False)"
            )
